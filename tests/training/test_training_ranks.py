"""Training over ranks, by real processes: the losses of one process, and what a death costs."""

import dataclasses
import errno
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from helpers.ring_workers import workers_of
from rank_runs import (
    TOLERANCE,
    figures,
    has_reached,
    run,
    torchrun,
    train_words,
    watch,
    worker,
)

import sparsering as sr
from sparsering.cli import main
from sparsering.demo.ring import demo_ring
from sparsering.mistakes import SPEAKS_WITHIN_S
from sparsering.training import Recipe, load_model, loop, train
from sparsering.training.checkpoint import load_checkpoint
from sparsering.training.ranks import arrange, spoken_by

two = workers_of(2)
four = workers_of(4)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("world", "sp", "sharding", "changes"),
    [
        pytest.param(2, 2, "contiguous", {}, id="dp 1, sp 2"),
        pytest.param(2, 1, "contiguous", {}, id="dp 2, sp 1", marks=SLOW),
        pytest.param(4, 2, "zigzag", {}, id="dp 2, sp 2"),
        pytest.param(
            4, 2, "auto", {"checkpoint_layers": True}, id="dp 2, sp 2, run twice", marks=SLOW
        ),
        pytest.param(
            4, 4, "zigzag", {"context": 50, "batch_size": 1}, id="uneven shards", marks=SLOW
        ),
        pytest.param(
            4, 4, "contiguous", {"context": 9, "batch_size": 3}, id="an empty shard", marks=SLOW
        ),
        pytest.param(4, 4, "auto", {"pattern": "GlobalTokens(3) | Causal()"}, id="global rows"),
    ],
)
def test_losses_are_those_of_one_process(request, recipe, tmp_path, world, sp, sharding, changes):
    recipe = dataclasses.replace(recipe, steps=4, **changes)
    workers = request.getfixturevalue({2: "two", 4: "four"}[world])
    of_ranks = run(workers, recipe, tmp_path / "ranks", sp, sharding)
    train(recipe, tmp_path / "alone", validate_every=4)
    assert figures(tmp_path / "ranks") == pytest.approx(figures(tmp_path / "alone"), rel=TOLERANCE)
    assert all(metrics == of_ranks[0] for metrics in of_ranks)


def test_a_run_goes_on_over_other_ranks_and_by_itself(two, four, recipe, tmp_path):
    out = tmp_path / "parts"
    run(four, recipe, out, 2, stop_after=2)
    assert load_checkpoint(out).step == 2
    run(two, recipe, out, 2, resume=True, stop_after=3)
    run(two, recipe, out, 1, resume=True, stop_after=4)
    train(recipe, out, resume=True, validate_every=4, stop_after=5)  # one process, one file
    run(four, recipe, out, 2, resume=True, stop_after=6)
    run(four, recipe, out, 4, resume=True)
    train(recipe, tmp_path / "whole", validate_every=4)
    assert figures(out) == pytest.approx(figures(tmp_path / "whole"), rel=TOLERANCE)
    pairs = zip(
        load_model(out).parameters(), load_model(tmp_path / "whole").parameters(), strict=True
    )
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


def test_a_resumed_run_over_the_same_ranks_is_the_same_bit_for_bit(two, recipe, tmp_path):
    recipe = dataclasses.replace(recipe, steps=4)
    run(two, recipe, tmp_path / "whole", 2)
    run(two, recipe, tmp_path / "parts", 2, stop_after=2)
    run(two, recipe, tmp_path / "parts", 2, resume=True)
    assert figures(tmp_path / "parts") == figures(tmp_path / "whole")


def refusal(rank: int, recipe: Recipe, out: Path) -> str:
    """Returns the error of a rank that cannot resume, else "none"."""
    try:
        train(recipe, out, resume=True, ranks=arrange(2))
    except ValueError as error:
        return str(error)
    return "none"


def test_damage_stops_all_ranks(two, recipe, tmp_path, capsys):
    run(two, recipe, tmp_path, 2, stop_after=1)
    path = tmp_path / "checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    said = two.run(refusal, recipe, tmp_path)
    assert all(re.search("the sha256 of [a-z_.0-9]+ is not", line) for line in said)
    capsys.readouterr()
    assert main(["train", "--out", str(tmp_path), "--resume"]) == 2
    assert "damaged or foreign" in capsys.readouterr().err


def train_on_a_full_disk(rank: int, recipe: Recipe, out: Path) -> str:
    """The OSError of a rank, where rank 0 cannot write."""
    ranks = arrange(2)
    fsync = os.fsync
    if rank == 0:

        def full(number: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.fsync = full
    try:
        train(recipe, out, resume=True, save_every=1, ranks=ranks)
    except OSError as error:
        return str(error)
    finally:
        os.fsync = fsync
    return "none"


def test_a_rank_without_space_leaves_the_checkpoint_whole(two, recipe, tmp_path):
    run(two, recipe, tmp_path, 2, stop_after=2)
    assert all("No space" in said for said in two.run(train_on_a_full_disk, recipe, tmp_path))
    assert load_checkpoint(tmp_path).step == 2
    run(two, recipe, tmp_path, 2, resume=True, stop_after=4)
    assert load_checkpoint(tmp_path).step == 4


def train_with_a_signal(rank: int, recipe: Recipe, out: Path) -> tuple[int, int | None]:
    """Steps done and the signal that a rank knows of, where one comes to rank 1 in step 3."""
    step_of = loop.training_step

    def training_step(model, optimizer, recipe, step, *windows, **options):
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step_of(model, optimizer, recipe, step, *windows, **options)

    loop.training_step = training_step
    try:
        ended = train(recipe, out, ranks=arrange(2))
    finally:
        loop.training_step = step_of
    return ended.step, ended.stopped_by


def test_a_signal_to_one_rank_stops_all_at_the_same_step(two, recipe, tmp_path):
    assert two.run(train_with_a_signal, recipe, tmp_path) == [(4, signal.SIGTERM)] * 2
    assert load_checkpoint(tmp_path).step == 4


@pytest.mark.slow
def test_a_killed_rank_costs_the_steps_since_the_checkpoint(recipe, tmp_path):
    recipe, out = dataclasses.replace(recipe, steps=30), tmp_path / "run"
    words = [*train_words(recipe, out), "--sequence-parallel", 2, "--timeout", 30]
    command = torchrun(2, *words, "--save-every", 3, "--validate-every", 30)
    log, environment = tmp_path / "log", {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        while not (out / "metrics.jsonl").exists() or (10, "loss") not in figures(out):
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        os.kill(worker(process.pid, rank=1), signal.SIGKILL)
        assert process.wait(timeout=60) != 0
    finally:
        process.terminate()
        process.wait()
    assert load_checkpoint(out).step % 3 == 0 and load_checkpoint(out).step >= 9
    subprocess.run([*command, "--resume"], check=True, timeout=120, env=environment)
    train(recipe, tmp_path / "alone", validate_every=30)
    assert figures(out) == pytest.approx(figures(tmp_path / "alone"), rel=TOLERANCE)
    assert load_checkpoint(out).step == 30


@pytest.mark.slow
@pytest.mark.parametrize("instants", [(4, 14), (11, 29)])
def test_torchrun_goes_on_by_itself_after_each_kill(recipe, tmp_path, instants):
    """Rank 1 is killed twice; the losses are those of an undisturbed run, bit for bit."""
    recipe, out = dataclasses.replace(recipe, steps=30), tmp_path / "run"
    log, environment = tmp_path / "log", {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}

    def command(folder: Path) -> list[str]:
        words = [*train_words(recipe, folder), "--sequence-parallel", 2, "--timeout", 30]
        return torchrun(2, "--max-restarts", 3, *words, "--save-every", 3, "--validate-every", 30)

    with open(log, "w") as file:
        process = subprocess.Popen(command(out), stdout=file, stderr=file, env=environment)
    try:
        for instant in instants:
            watch(process, log, lambda n=instant: has_reached(out, n))
            os.kill(worker(process.pid, rank=1), signal.SIGKILL)
        assert process.wait(timeout=120) == 0, log.read_text()
    finally:
        process.terminate()
        process.wait()
    subprocess.run(command(tmp_path / "undisturbed"), check=True, timeout=120, env=environment)
    assert figures(out) == figures(tmp_path / "undisturbed")
    assert load_checkpoint(out).step == 30


def test_a_restart_that_comes_after_the_end_is_no_error(recipe, tmp_path, monkeypatch):
    """Where one rank dies after the last checkpoint, torchrun restarts all of them."""
    words = [str(word) for word in train_words(recipe, tmp_path)[2:]]
    assert main(words) == 0
    assert main(words) == 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main(words) == 0


def test_processes_that_torchrun_did_not_start_are_told(tmp_path, capsys):
    for option in (["--sequence-parallel", "4"], ["--sharding", "zigzag"], ["--timeout", "9"]):
        assert main(["train", "--out", str(tmp_path), *option]) == 2
        line = capsys.readouterr().err
        assert "--nproc-per-node" in line and line.count("\n") == 1
    with pytest.raises(ValueError, match="--nproc-per-node 4 -m sparsering demo-ring"):
        demo_ring(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_says_that_a_demo_is_finished(rank, tmp_path, capsys, monkeypatch):
    def refuse(out: Path, recipe: Recipe) -> int:
        raise FileExistsError(f"{out} has a finished demo, which is not overwritten")

    waited: list[float] = []
    monkeypatch.setattr("sparsering.demo.ring.demo_ring", refuse)
    monkeypatch.setattr("sparsering.mistakes.time.sleep", waited.append)
    monkeypatch.setenv("RANK", str(rank))
    assert main(["demo-ring", "--out", str(tmp_path)]) == 2
    assert waited == [SPEAKS_WITHIN_S] * rank
    assert ("which is not overwritten" in capsys.readouterr().err) == (rank == 0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("speaker", [None, 0, 1])
def test_one_rank_prints_an_error_that_all_have(rank, speaker, tmp_path, capsys, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        error = ValueError("the text is missing")
        raise error if speaker is None else spoken_by(speaker, error)

    waited: list[float] = []
    monkeypatch.setattr("sparsering.training.loop.train", refuse)
    monkeypatch.setattr("sparsering.mistakes.time.sleep", waited.append)
    monkeypatch.setenv("RANK", str(rank))
    assert main(["train", "--out", str(tmp_path)]) == 2
    speaks = speaker in (None, rank)
    assert ("the text is missing" in capsys.readouterr().err) == speaks
    assert waited == ([] if speaks else [SPEAKS_WITHIN_S])


def raise_together(rank: int, failing: list[int]) -> tuple[int, str]:
    def fail() -> None:
        if rank in failing:
            raise ValueError(f"no file on {rank}")

    with pytest.raises(ValueError) as raised:
        arrange(2).together(fail)
    return raised.value.speaker, str(raised.value)  # type: ignore[attr-defined]


def test_the_first_rank_that_fails_speaks(two):
    assert two.run(raise_together, [1]) == [(1, "rank 1: no file on 1"), (1, "no file on 1")]
    assert [speaker for speaker, _ in two.run(raise_together, [0, 1])] == [0, 0]


SHORT_OF_MEMORY = """
import os, sys
from sparsering.cli import main
from sparsering.training import micro_batches

def peak(*_):
    raise MemoryError
if os.environ["RANK"] == "1":
    micro_batches.peak_of = peak
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_rank_without_memory_ends_all_at_once(recipe, tmp_path):
    script = tmp_path / "short.py"
    script.write_text(SHORT_OF_MEMORY)
    words = train_words(recipe, tmp_path / "run")[2:]
    words += ["--sequence-parallel", 2, "--micro-batch", "auto", "--timeout", 600]
    root = str(Path(sr.__file__).parent.parent)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": root}
    done = subprocess.run(  # far below the timeout of the ranks
        torchrun(2, script, *words), capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode
    assert "memory ran out on rank 1 with a single window; pass --checkpoint-layers" in done.stderr


def test_processes_and_windows_must_be_shared_out_evenly(two, recipe, tmp_path):
    with pytest.raises(AssertionError, match="multiple of --sequence-parallel 3, got 2"):
        run(two, recipe, tmp_path, 3)
    odd = dataclasses.replace(recipe, batch_size=3)
    with pytest.raises(AssertionError, match=r"a multiple of 2, .* got 3; pass --batch-size 4"):
        run(two, odd, tmp_path, 1)
    assert not list(tmp_path.iterdir())


def differ(rank: int, recipe: Recipe, out: Path) -> None:
    train(dataclasses.replace(recipe, seed=rank), out, ranks=arrange(2))


def test_ranks_must_train_the_same(two, recipe, tmp_path):
    with pytest.raises(AssertionError, match="the same recipe, text and checkpoint on all ranks"):
        two.run(differ, recipe, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_demo_counts_what_the_plan_says(recipe, tmp_path):
    script, out = tmp_path / "demo.py", tmp_path / "demo"
    script.write_text(
        "from pathlib import Path\n"
        "from sparsering.demo.ring import demo_ring\n"
        "from sparsering.training.recipe import Recipe\n"
        'if __name__ == "__main__":\n'
        f"    raise SystemExit(demo_ring(Path({str(out)!r}), recipe={recipe!r}))\n"
    )
    root = str(Path(sr.__file__).parent.parent)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": root}
    done = subprocess.run(
        torchrun(2, script), capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert (out / "traffic.png").read_bytes().startswith(b"\x89PNG")
    for said in ("one process", "full ring", "peak memory", "the busiest rank", "MiB"):
        assert said in done.stdout
