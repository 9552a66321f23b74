"""Adaptive training: schedules, gates and refined tables, resumed with the same bits."""

import dataclasses

import pytest
import torch
from helpers.ring_workers import workers_of
from stranger import about, put, write_about

import sparsering as sr
from sparsering.cli import main
from sparsering.training import Recipe, load_model, train
from sparsering.training.adaptive import Selection
from sparsering.training.checkpoint import load_checkpoint
from sparsering.training.ranks import arrange

RECIPE = Recipe(
    pattern="Causal()", context=64, batch_size=2, width=16, num_layers=2, num_heads=2, steps=8,
    warmup_steps=2, dtype="float32",
)  # fmt: skip
CHOSEN = dataclasses.replace(RECIPE, attention="selected", block_size=8, blocks=3)
two = workers_of(2)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(map(str, range(3000))))
    return str(path)


def weights(run):
    return [p.detach() for p in run.model.parameters()]


def losses(run):
    return [r["loss"] for r in run.metrics if "loss" in r]


@pytest.mark.parametrize(
    ("schedule", "gate", "given", "expected"),
    [
        ("", "", [9.0] * 4, [3, 3, 3, 3]),
        ("0:dense, 2:5, 3:3", "", [9.0] * 5, [8, 8, 5, 3, 3]),
        ("0:99", "", [9.0], [8]),
        ("0:dense,2:3", "loss<=2.5", [float("nan"), 3.0, 2.5, 2.6, 1.0, 9.0], [8, 8, 8, 8, 3, 3]),
        ("0:dense,1:3", "loss <= 2", [2.0, 3.0], [3, 3]),
    ],
)
def test_blocks_of_each_step(schedule, gate, given, expected):
    selection = Selection(dataclasses.replace(CHOSEN, schedule=schedule, gate=gate))
    found = []
    for step, loss in enumerate(given):
        selection.begin(step, loss)
        found.append(selection.k)
    assert found == expected


def test_attention_visits_the_blocks_of_the_step():
    query, key, value = torch.randn(3, 1, 2, 64, 8, dtype=torch.float64)
    selection = Selection(CHOSEN)
    scores = sr.selection.block_scores(query, key, 8)
    for k in (2, 5, 8):
        selection.k = k
        chosen = sr.selection.select_blocks(scores, k, block_size=8)
        pattern = sr.SelectedBlocks(chosen, 8, 1) & sr.Causal() if k < 8 else sr.Causal()
        expected = sr.attention(query, key, value, pattern, backend="reference")
        for attend in selection.attends():
            assert (attend(query, key, value) - expected).abs().max() <= 1e-13


def test_a_dense_schedule_is_dense_attention(data, tmp_path):
    dense = train(dataclasses.replace(RECIPE, data=data), tmp_path / "dense")
    chosen = dataclasses.replace(CHOSEN, data=data, schedule="0:dense")
    assert all(map(torch.equal, weights(train(chosen, tmp_path / "all")), weights(dense)))
    sparse = train(dataclasses.replace(chosen, schedule=""), tmp_path / "sparse")
    assert losses(sparse) != losses(dense)


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "0:dense, 2:5, 5:3"},
        {"schedule": "0:dense, 2:3", "gate": "loss<=5.55"},
        {"schedule": "0:dense, 1:3", "gate": "loss<=9", "refine": 2},
        {"refine": 1, "checkpoint_layers": True},
        {"block_size": 7, "context": 50},
    ],
    ids=str,
)
def test_a_resumed_run_has_the_same_bits(data, tmp_path, changes):
    recipe = dataclasses.replace(CHOSEN, data=data, **changes)
    whole = train(recipe, tmp_path / "whole")
    for stop in (3, 6, None):
        run = train(recipe, tmp_path / "parts", resume=stop != 3, stop_after=stop)
    assert losses(run) == losses(whole)
    assert all(map(torch.equal, weights(run), weights(whole)))
    for name, x in whole.selection.tensors().items():
        assert torch.equal(x, run.selection.tensors()[name]), name
    if recipe.refine:
        fresh = Selection(recipe)
        changed = [
            not torch.equal(a.table, b.table)
            for a, b in zip(fresh.refiners, run.selection.refiners, strict=True)
        ]
        assert any(changed) and run.selection.refiners[0].state_dict()["observed"].any()
    assert next(load_model(tmp_path / "parts").generate(torch.zeros(1, 1).long(), 1)).numel() == 1


def train_rank(rank, recipe, out):
    run = train(recipe, out, ranks=arrange(1))
    return losses(run), run.selection.tensors()


def test_ranks_refine_the_same_tables_as_one_process(two, data, tmp_path):
    recipe = dataclasses.replace(CHOSEN, data=data, refine=2, schedule="0:dense, 4:3")
    alone = train(recipe, tmp_path / "alone")
    for found, tensors in two.run(train_rank, recipe, tmp_path / "ranks"):
        assert found == pytest.approx(losses(alone), rel=2e-6)
        for name, x in alone.selection.tensors().items():
            assert tensors[name].double().allclose(x.double(), atol=1 << 12), name
            if "table" in name:
                assert torch.equal(tensors[name], x)


def test_ranks_along_a_sequence_are_refused(two, data, tmp_path):
    recipe = dataclasses.replace(CHOSEN, data=data)
    with pytest.raises(Exception, match="pass --sequence-parallel 1"):
        two.run(_along_the_sequence, recipe, tmp_path / "ranks")


def _along_the_sequence(rank, recipe, out):
    train(recipe, out, ranks=arrange(2))


def test_a_checkpoint_without_these_settings_goes_on(data, tmp_path):
    recipe = dataclasses.replace(RECIPE, data=data)
    train(recipe, tmp_path, stop_after=2)
    values = about(tmp_path)
    for name in ("attention", "blocks", "block_size", "schedule", "gate", "refine"):
        del values["recipe"][name]
    write_about(tmp_path, values)
    assert train(recipe, tmp_path, resume=True).step == 8


def test_a_foreign_state_is_refused_before_it_is_built(data, tmp_path):
    recipe = dataclasses.replace(CHOSEN, data=data, refine=2)
    train(recipe, tmp_path, stop_after=1)
    values = about(tmp_path)
    for name, value in (("context", 1 << 39), ("blocks", 2), ("refine", 0), ("block_size", 16)):
        write_about(tmp_path, put(values, ("recipe", name), value))
        with pytest.raises(ValueError, match="damaged or foreign"):
            load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "sparse"}, "attention must be pattern or selected"),
        ({"blocks": 1}, "schedule must be steps and blocks, at least 2"),
        ({"schedule": "0:dense; 2:4"}, "schedule must be steps and blocks"),
        ({"schedule": "0:1"}, "schedule must be steps and blocks, at least 2"),
        ({"schedule": "5:3, 2:4"}, "points must be in order of steps"),
        ({"schedule": "0:5", "refine": 2}, "a schedule may say dense or 3"),
        ({"gate": "accuracy>=1"}, "gate must be a bound of the loss"),
        ({"attention": "pattern", "refine": 2}, "pass --attention selected"),
        ({"attention": "pattern", "schedule": "0:4"}, "pass --attention selected"),
        ({"refine": -1}, "refine must be from 0"),
    ],
    ids=str,
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CHOSEN, **changes)


def test_the_command_takes_the_settings(data, tmp_path, capsys):
    options = {
        "data": data, "out": tmp_path / "run", "context": 64, "width": 16, "num-layers": 1,
        "steps": 3, "attention": "selected", "block-size": 8, "blocks": 3, "refine": 1,
        "schedule": "0:dense, 1:3", "gate": "loss<=9",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert main(["train", *words]) == 0
    recipe = load_checkpoint(tmp_path / "run").recipe
    assert (recipe.attention, recipe.refine, recipe.gate) == ("selected", 1, "loss<=9")
    assert main(["train", *words[:-1], "loss"]) == 2
    assert "gate must be" in capsys.readouterr().err
