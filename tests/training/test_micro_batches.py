"""Micro-batches: the same step in parts, and a step that is tried again where memory runs out."""

import dataclasses
import gc
import json
import shutil
import sys

import pytest
import torch
from helpers import forked

from sparsering.cli import main
from sparsering.ground.out_of_memory import ran_out_of_memory
from sparsering.training import Recipe, loop, train
from sparsering.training.micro_batches import (
    largest_part,
    windows_that_fit,
)

RECIPE = Recipe(
    pattern="LongNet((16, 64), (1, 4))", context=64, batch_size=6, width=16, num_layers=1,
    num_heads=2, steps=4, warmup_steps=2, dtype="float32",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def older_objects_are_not_looked_through() -> None:
    """Spares each return of memory a search of what other tests have left; it takes seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(map(str, range(3000))))
    return dataclasses.replace(RECIPE, data=str(tmp_path / "text.txt"))


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return [record["loss"] for record in run.metrics if "loss" in record]


def weights(run):
    return [p.detach() for p in run.model.parameters()]


def test_gradients_of_parts_are_those_of_the_whole(recipe, tmp_path):
    runs = {size: train(recipe, tmp_path / str(size), micro_batch=size) for size in (None, 6, 3, 1)}
    for size in (6, 3, 1):
        for found, expected in zip(weights(runs[size]), weights(runs[None]), strict=True):
            assert (
                torch.equal(found, expected) if size == 6 else found.allclose(expected, atol=1e-6)
            )
    ours, whole = ([r["loss"] for r in run.metrics if "loss" in r] for run in (runs[1], runs[None]))
    assert ours == pytest.approx(whole, rel=1e-6)
    again = train(recipe, tmp_path / "again", micro_batch=1)
    assert all(map(torch.equal, weights(again), weights(runs[1])))


def test_parts_divide_the_batch():
    assert [largest_part(12, most) for most in (0, 1, 4.9, 5, 11, 12, 99)] == [
        1,
        1,
        4,
        4,
        6,
        12,
        12,
    ]
    assert [largest_part(12, most, 3) for most in (0, 1, 2, 3, 9)] == [3, 3, 6, 6, 12]


def failing_above(size, monkeypatch, error):
    """Makes a step fail with more than `size` windows at a time, in its second part."""
    loss_of, sizes = loop.Ranks.loss, []

    def loss(self, model, tokens, targets, attend=None, num_targets=None):
        sizes.append(len(tokens))
        if len(tokens) > size and torch.is_grad_enabled() and sizes.count(len(tokens)) > 1:
            raise error
        return loss_of(self, model, tokens, targets, attend, num_targets)

    monkeypatch.setattr(loop.Ranks, "loss", loss)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        pytest.param(MemoryError(), marks=pytest.mark.slow),
        pytest.param(
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
            marks=pytest.mark.slow,
        ),
        RuntimeError("sparsering cpu: not enough memory for a tensor of 8 bytes"),
    ],
    ids=repr,
)
def test_a_step_is_tried_again_with_half(recipe, tmp_path, monkeypatch, capsys, error):
    expected = train(recipe, tmp_path / "fixed", micro_batch=1)
    failing_above(1, monkeypatch, error)
    run = train(recipe, tmp_path / "auto", micro_batch="auto")
    said = [line for line in capsys.readouterr().out.splitlines() if "memory ran out" in line]
    assert said == [
        "Step 1: memory ran out; from here on 3 windows at a time",
        "Step 1: memory ran out; from here on 1 windows at a time",
    ]
    sizes = [r["micro_batch"] for r in records(tmp_path / "auto") if "micro_batch" in r]
    assert sizes == [6, 3, 1] and run.micro_batch == 1
    assert losses(run) == pytest.approx(losses(expected), rel=1e-5)


def test_a_resumed_run_goes_on_with_the_same_parts(recipe, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        failing_above(3, patch, MemoryError())
        whole = train(recipe, tmp_path / "whole", micro_batch="auto")
    with monkeypatch.context() as patch:
        failing_above(3, patch, MemoryError())
        train(recipe, tmp_path / "stopped", micro_batch="auto", stop_after=2)
    run = train(recipe, tmp_path / "stopped", micro_batch="auto", resume=True)
    assert run.micro_batch == whole.micro_batch == 3
    assert all(map(torch.equal, weights(run), weights(whole)))


def test_a_fixed_part_or_a_single_window_is_an_error(recipe, tmp_path, monkeypatch, capsys):
    failing_above(0, monkeypatch, MemoryError())
    for size, advice in ((3, "pass --resume --micro-batch 1"), ("auto", "--checkpoint-layers")):
        with pytest.raises(MemoryError, match=r"memory ran out at step .*whole; ") as e:
            train(recipe, tmp_path / str(size), micro_batch=size)
        assert advice in str(e.value)
    for size in (4, 12):
        with pytest.raises(ValueError, match=f"must divide the batch size, 6, .*got {size}"):
            train(recipe, tmp_path / f"no{size}", micro_batch=size)
    arguments = ["train", "--out", str(tmp_path / "cli"), "--micro-batch", "half"]
    with pytest.raises(SystemExit):
        main(arguments)
    assert "--micro-batch" in capsys.readouterr().err


def test_other_errors_are_not_taken_for_memory():
    assert not ran_out_of_memory(RuntimeError("the ranks differ"))
    assert not ran_out_of_memory(ValueError("not enough memory"))


def test_windows_that_fit_follow_from_the_peak_of_one(monkeypatch):
    from sparsering.training import micro_batches

    monkeypatch.setattr(micro_batches, "memory_here", lambda free: 1 << 30)
    kept, fits = [], 0
    for _ in range(5):  # the system may take other pages back meanwhile, which hides the peak
        fits = windows_that_fit(lambda: kept.append(torch.ones(1 << 24)), torch.device("cpu"))
        if fits < 100:
            break
    if sys.platform == "linux":
        assert 10 < fits < 0.93 * 16  # a window of 64 MiB in 92% of 1 GiB
    assert windows_that_fit(lambda: None, torch.device("cpu")) > 100


_LIMITED = """
import sys
from pathlib import Path
import torch
from helpers.short_of_memory import ask_the_system_each_time, runs_within
from sparsering.training import Recipe, train

data, out = sys.argv[1:]
recipe = Recipe(
    pattern="SlidingWindow(64)", data=data, context=1024, batch_size=8, width=64, num_layers=2,
    num_heads=2, steps=2, warmup_steps=2, dtype="float32",
)
ask_the_system_each_time()
train(recipe, Path(out, "one"), micro_batch=1)
runs = []
assert runs_within(
    100 << 20, lambda: runs.append(train(recipe, Path(out, "limited"), micro_batch="auto"))
)
run = runs[0]
assert 1 <= run.micro_batch < 8, run.micro_batch
fixed = train(recipe, Path(out, "fixed"), micro_batch=run.micro_batch)
for a, b in zip(run.model.parameters(), fixed.model.parameters(), strict=True):
    assert torch.equal(a, b)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
def test_training_in_a_limited_address_space_has_the_bits_of_the_smaller_parts(tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(map(str, range(9000))))
    result = forked.run(
        f"import sys; sys.argv[1:] = {[str(tmp_path / 'text.txt'), str(tmp_path)]}\n{_LIMITED}"
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "memory ran out; from here on" in result.stdout


def test_memory_that_runs_out_in_the_first_update_leaves_no_half_of_it(
    recipe, tmp_path, monkeypatch
):
    """AdamW makes the moments of the vectors when it has already updated the matrices."""
    expected = train(recipe, tmp_path / "fixed", micro_batch=3)
    zeros_like, failed = torch.zeros_like, []

    def scarce(x, *arguments, **options):
        if not failed and isinstance(x, torch.nn.Parameter) and x.dim() < 2:
            failed.append(x)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")
        return zeros_like(x, *arguments, **options)

    monkeypatch.setattr(torch, "zeros_like", scarce)
    run = train(recipe, tmp_path / "auto", micro_batch="auto")
    assert failed and run.micro_batch == 3
    assert all(map(torch.equal, weights(run), weights(expected)))
    assert all(state["step"] == recipe.steps for state in run.optimizer.state.values())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The recipe of a run that stopped after 2 steps, and its folder; tests change copies."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "text.txt").write_text(" ".join(map(str, range(3000))))
    recipe = dataclasses.replace(RECIPE, data=str(folder / "text.txt"))
    train(recipe, folder / "run", micro_batch="auto", stop_after=2)
    return recipe, folder / "run"


@pytest.mark.parametrize("size", [0, -1, -3, 4, 7, 12, 2.0, 1e3, "3", True])
def test_a_part_that_does_not_divide_the_batch_is_refused(stopped, tmp_path, size):
    recipe, run = stopped
    with pytest.raises(ValueError, match="--micro-batch must divide the batch size, 6"):
        train(recipe, tmp_path / "run", micro_batch=size)
    out = tmp_path / "resumed"
    shutil.copytree(run, out)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    changed = [json.dumps({**json.loads(lines[0]), "micro_batch": size}), *lines[1:]]
    (out / "metrics.jsonl").write_text("\n".join(changed) + "\n")
    with pytest.raises(ValueError, match="metrics"):
        train(recipe, out, micro_batch="auto", resume=True)
