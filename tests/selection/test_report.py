"""`selection_report` against dense softmax, each figure by its formula."""

import math

import pytest
import torch
from helpers.thinned import thinned
from oracles.attention_oracle import dense_weights
from torch import Tensor

import sparsering as sr
from sparsering.selection import block_scores, report, select_blocks, selection_report

SIZE = 8
LISTS = sr.SelectedBlocks(torch.zeros(8, 1, dtype=torch.int64), SIZE)


def inputs(length: int = 61, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    query = 2 * torch.randn(batch, 4, length, 6, dtype=torch.float64)
    key, value = torch.randn(2, batch, 2, length, 6, dtype=torch.float64)
    return query, key, value


def dense(given: tuple[Tensor, ...], causal: bool) -> Tensor:
    query, key, _ = given
    pairs = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    return dense_weights(query, key, pairs.tril() if causal else pairs)


def pairs(chosen: Tensor, length: int, row: int, causal: bool) -> Tensor:
    """Bool [B, Hq, N, N]."""
    chosen = chosen.repeat_interleave(4 // chosen.shape[1], 1)
    listed = torch.zeros(*chosen.shape[:2], length, length, dtype=torch.bool)
    for i in range(length):
        for b, h in torch.cartesian_prod(*map(torch.arange, chosen.shape[:2])).tolist():
            for c in chosen[b, h, i // row].tolist():
                if c >= 0:
                    listed[b, h, i, c * SIZE : (c + 1) * SIZE] = True
    return listed & torch.ones(length, length, dtype=torch.bool).tril() if causal else listed


def figures(given: tuple[Tensor, ...], chosen: Tensor, row: int, causal: bool) -> dict:
    weight, length = dense(given, causal), given[0].shape[2]
    listed = pairs(chosen, length, row, causal)
    values = given[2].repeat_interleave(2, 1)
    kept = torch.where(listed, weight, 0.0)
    captured = kept.sum(-1)
    full, part = weight @ values, kept @ values / captured.clamp(min=1e-300)[..., None]
    by_head = captured.unflatten(1, (2, 2)).transpose(0, 1).flatten(1)
    norm = [(x.unflatten(1, (2, 2)) ** 2).sum((0, 2, 3, 4)) ** 0.5 for x in (part - full, full)]
    visible = weight > 0
    return {
        "density": listed.unflatten(1, (2, 2)).double().sum((0, 2, 3, 4))
        / visible.unflatten(1, (2, 2)).sum((0, 2, 3, 4)),
        "mean": by_head.mean(1),
        "least": by_head.amin(1),
        "p05": by_head.sort(1).values[:, int(0.05 * (by_head.shape[1] - 1))],
        "error": norm[0] / norm[1],
    }


def same(found: report.SelectionReport, expected: dict) -> None:
    captured = found.captured
    told = {"density": found.density, "mean": captured.mean, "least": captured.least}
    for name, x in {**told, "p05": captured.p05, "error": found.error}.items():
        assert ((x - expected[name]).abs() <= 1e-12).all(), name


@pytest.mark.parametrize(
    ("sizes", "causal"), thinned(2, [(1, 2), (4, 1), (8, 4)], [True, False]), ids=str
)
def test_figures_are_those_of_dense_softmax(sizes, causal):
    row, heads = sizes
    given = inputs()
    rows = -(-61 // row)
    chosen = torch.randint(-1, 8, (2, heads, rows, 3))
    chosen[..., 0] = torch.arange(rows) * row // SIZE
    pattern = sr.SelectedBlocks(chosen, SIZE, row)
    found = selection_report(*given, pattern & sr.Causal() if causal else pattern)
    same(found, figures(given, chosen, row, causal))
    assert found.rows == rows and not found.captured.interval.any()
    # recall and the others, by sorting exact masses
    weight = torch.nn.functional.pad(dense(given, causal), (0, 3, 0, -61 % row))
    lists = max(heads, 2)
    mass = weight.unflatten(-1, (8, SIZE)).sum(-1).unflatten(2, (rows, row)).sum(3)
    mass = mass.unflatten(1, (lists, -1)).sum(2)
    tables = {name: torch.full((2, lists, rows, 3), -1) for name in ("oracle", "window")}
    recall = torch.zeros(2, lists, rows, dtype=torch.float64)
    for b, h, r in torch.cartesian_prod(*map(torch.arange, (2, lists, rows))).tolist():
        own, last = r * row // SIZE, 7 if not causal else r * row // SIZE
        mine = set(chosen[b, h * heads // lists, r].tolist()) & set(range(last + 1))
        order = sorted(range(last + 1), key=lambda c: -mass[b, h, r, c])
        tables["oracle"][b, h, r, : len(mine)] = torch.tensor(order[: len(mine)])
        order = [*range(own, -1, -1), *range(own + 1, last + 1)]
        tables["window"][b, h, r, : len(mine)] = torch.tensor(order[: len(mine)])
        recall[b, h, r] = len(mine & set(tables["oracle"][b, h, r].tolist())) / len(mine)
    assert ((found.recall - recall.unflatten(1, (2, -1)).mean((0, 2, 3))).abs() < 1e-12).all()
    for name, table in tables.items():
        same(getattr(found, name), figures(given, table, row, causal))
    assert (found.oracle.recall == 1).all()
    assert (found.oracle.captured.mean >= found.captured.mean).all()
    # as many blocks, the row's own among them
    assert found.random.captured.mean.min() > 0
    if not causal and row == 8:
        assert ((found.random.density - found.density).abs() < 0.02).all()


def test_the_oracle_of_rows_shared_by_a_group_captures_most():
    given = inputs()
    exact = block_scores(*given[:2], SIZE, query_block=4, method="exact")
    chosen = select_blocks(exact, 3, block_size=SIZE, query_block=4, sink=0, local=0)
    found = selection_report(*given, sr.SelectedBlocks(chosen, SIZE, 4) & sr.Causal())
    assert ((found.captured.mean - found.oracle.captured.mean).abs() <= 1e-12).all()
    assert (found.recall == 1).all()
    assert (found.inflation == found.oracle.inflation).all()
    assert (found.captured.mean > found.random.captured.mean).all()


def test_all_blocks_are_dense_attention():
    given = inputs()
    every = sr.SelectedBlocks(torch.arange(8).expand(8, 8), SIZE)
    found = selection_report(*given, every & sr.Causal())
    for one in (found, found.random, found.window, found.oracle):
        assert ((one.captured.mean - 1).abs() < 1e-12).all() and (one.density == 1).all()
        assert (one.error < 1e-12).all() and (one.recall == 1).all()


def test_drawn_rows_and_their_interval(monkeypatch):
    given = inputs(256, 1)
    scores = block_scores(*given[:2], SIZE, query_block=2)
    chosen = select_blocks(scores, 4, block_size=SIZE, query_block=2)
    pattern = sr.SelectedBlocks(chosen, SIZE, 2) & sr.Causal()
    whole = selection_report(*given, pattern)
    missed, seeds = 0, range(3)
    for seed in seeds:
        some = selection_report(*given, pattern, rows=40, seed=seed)
        half = math.sqrt((1 - 39 / 128) * math.log(2000) / 80)
        assert torch.allclose(some.captured.interval, torch.tensor(half, dtype=torch.float64))
        missed += int(((some.captured.mean - whole.captured.mean).abs() > half).any())
    assert missed == 0 and some.rows == 40
    again = selection_report(*given, pattern, rows=40, seed=2)
    assert torch.equal(again.captured.mean, some.captured.mean)
    assert torch.equal(again.random.error, some.random.error)
    other = selection_report(*given, pattern, rows=40, seed=3)
    assert not torch.equal(other.captured.mean, some.captured.mean)
    every = selection_report(*given, pattern, rows=1000)
    assert torch.equal(every.captured.mean, whole.captured.mean)
    assert not every.captured.interval.any()
    monkeypatch.setattr(report, "_AT_A_TIME", 1)
    in_parts = selection_report(*given, pattern)
    assert ((in_parts.error - whole.error).abs() < 1e-12).all()


def test_the_last_queries_alone():
    query, key, value = inputs(64)
    chosen = torch.randint(0, 8, (2, 2, 3, 2))
    chosen[..., 0] = torch.tensor([5, 6, 7])
    pattern = sr.SelectedBlocks(chosen, SIZE, SIZE, first_row=5) & sr.Causal()
    found = selection_report(query[:, :, 43:], key, value, pattern)
    out, lse = sr.attention(query[:, :, 43:], key, value, pattern, return_lse=True)
    full, full_lse = sr.attention(query[:, :, 43:], key, value, sr.Causal(), return_lse=True)
    captured = (lse - full_lse).exp().unflatten(1, (2, 2)).mean((0, 2, 3))
    assert ((found.captured.mean - captured).abs() < 1e-12).all()
    error = ((out - full).unflatten(1, (2, 2)) ** 2).sum((0, 2, 3, 4)) ** 0.5
    error = error / (full.unflatten(1, (2, 2)) ** 2).sum((0, 2, 3, 4)) ** 0.5
    assert ((found.error - error).abs() < 1e-12).all()


def test_it_prints():
    given = inputs()
    chosen = torch.arange(8)[:, None].expand(8, 1)
    text = str(selection_report(*given, sr.SelectedBlocks(chosen, SIZE) & sr.Causal(), rows=5))
    lines = text.splitlines()
    first = [line.split()[0] for line in lines[:5]]
    assert first == ["density", "selected", "random", "window", "oracle"]
    assert "5 rows" in text and "sparse attention from the start" in text


@pytest.mark.parametrize(
    ("pattern", "options", "message"),
    [
        (sr.Causal(), {}, "needs SelectedBlocks"),
        (LISTS | sr.SlidingWindow(3), {}, "needs Selected"),
        (LISTS, {"rows": 0}, "rows must be at least 1"),
        (sr.SelectedBlocks(torch.zeros(2, 1).long(), 8), {}, "must cover"),
    ],
)
def test_what_does_not_fit_is_said(pattern, options, message):
    with pytest.raises(ValueError, match=message):
        selection_report(*inputs(), pattern, **options)
    query, key, value = inputs()
    with pytest.raises(ValueError, match="at most as many queries as keys"):
        selection_report(query, key[:, :, :9], value[:, :, :9], LISTS)
