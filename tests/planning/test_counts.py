"""Counts of a pattern's work, beside its layout written out pair by pair."""

from dataclasses import replace

import pytest
import torch
from helpers.torch_tables import evaluations
from oracles.listed import JOINS, TOKENS

import sparsering as sr
from sparsering.layouts.compile import compile_table
from sparsering.layouts.layout import tile_counts
from sparsering.layouts.lists import lists_of, split
from sparsering.patterns.algebra import Frame
from sparsering.planning import counts as counts_module
from sparsering.planning.counts import counted, counts_of, flops
from sparsering.planning.estimate import Scenario, memory_of_call

PATTERNS = [
    sr.Causal(),
    sr.SlidingWindow(40, 7),
    sr.LongNet((32, 96), (1, 3)) & sr.Causal(),
    sr.RandomBlocks(0.3, 16),
    sr.GlobalTokens(5) | sr.SlidingWindow(20),
    sr.Packed((70, 1, 129), sr.Causal()),
    sr.Dilated(64, 4),
]


def frame_of(tokens: int, heads: int = 4, kv_heads: int = 2) -> Frame:
    return Frame.build(tokens, tokens, heads, kv_heads, 0)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_pairs_are_those_of_the_definition(pattern):
    found = counts_of(pattern, frame_of(200), 32)
    dense = pattern.to_dense(200, num_heads=4, num_kv_heads=2)
    assert found.known == "arithmetic"
    assert found.pairs == pytest.approx(float(dense.sum()) / len(dense))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_entries_cells_and_rows_are_those_of_the_visited_tiles(pattern):
    layout = pattern.layout(200, num_heads=4, num_kv_heads=2, block_size=32)
    found = counted(layout)
    cells = entries = rows = 0
    for head in range(4):
        for p in layout.passes:
            row, key, _, axis = layout.table(p, 0, head)
            q = tile_counts(p.query_start, p.query_stop, p.step, 32)[axis]
            k = tile_counts(p.key_start, p.key_stop, p.step, 32)[axis]
            entries += len(row)
            rows += sum(int(q[i]) for i in set(row.tolist()))
            for i, j in zip(row.tolist(), key.tolist(), strict=True):
                cells += -(-int(q[i]) // 16) * 16 * (-(-int(k[j]) // 16) * 16)
    assert found.entries == pytest.approx(entries / 4)
    assert sum(p.cells for p in found.passes) == pytest.approx(cells / 4)
    assert sum(p.rows for p in found.passes) == pytest.approx(rows / 4)
    assert found.density == pytest.approx(layout.density)


LONG = [*PATTERNS[:5], sr.Packed((1400, 20, 2676), sr.Causal()), PATTERNS[6]]


@pytest.mark.parametrize("pattern", LONG, ids=str)
def test_some_query_tiles_stand_for_all(pattern, monkeypatch):
    exact = counts_of(pattern, frame_of(4096), 16)
    monkeypatch.setattr(counts_module, "MOST_ENTRIES", 1)
    sr.layout_cache.invalidate(pattern)
    told = counts_of(pattern, frame_of(4096), 16)
    sr.layout_cache.invalidate(pattern)
    assert told.known != "arithmetic"
    assert told.pairs == pytest.approx(exact.pairs, rel=0.1)
    assert told.entries == pytest.approx(exact.entries, rel=0.1)


WITH_RUNS = [
    sr.Full(),
    sr.Causal(),
    sr.SlidingWindow(1300, 5),
    sr.Dilated(1 << 12, 3) & sr.Causal(),
    sr.Dilated(1501, 1),  # segments end inside tiles
    sr.LongNet((512, 5000), (1, 3)),
    sr.GlobalTokens(1100) | sr.SlidingWindow(20),
    sr.Hierarchical(((1, 64), (64, None)), 16),
    sr.Packed((3000, 1, 1999), sr.Causal()),
    sr.Documents((3000, 2000)),
    sr.RandomBlocks(0.9, 64),
]


@pytest.mark.parametrize("pattern", WITH_RUNS, ids=str)
def test_counts_by_all_query_tiles_are_those_of_the_layout(pattern):
    exact = counted(pattern.layout(5000, num_heads=4, num_kv_heads=2, block_size=16))
    found = counts_module._sampled(pattern, frame_of(5000), 16, 1 << 20, 4, {})
    assert found.pairs == exact.pairs
    for a, b in zip(found.passes, exact.passes, strict=True):
        for name in ("entries", "cells", "rows"):
            assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-12), name


@pytest.mark.parametrize("pattern", [*WITH_RUNS[:2], WITH_RUNS[7]], ids=str)
def test_tiles_that_are_seen_whole_are_counted_without_a_list(pattern, monkeypatch):
    listed = []

    def compiled(*args):
        made = compile_table(*args)
        listed.append(len(made[0].key_tile))
        return made

    monkeypatch.setattr(counts_module, "compile_table", compiled)
    found = counts_module._sampled(pattern, frame_of(1 << 18), 16, 96, 1, {})
    of_row = found.passes[0].entries / found.passes[0].query_tiles
    assert sum(listed) <= 100 * 2 * 64 < 100 * of_row / 5  # at most a run at each end


@pytest.mark.parametrize(
    ("pattern", "same"),
    [
        (sr.BlockWindow(8, 1), sr.SlidingWindow(8, 8)),
        (sr.BlockWindow(5, 3), None),
        (sr.BlockDilated((1, 2, 8), 2), None),
    ],
    ids=str,
)
def test_small_blocks_by_distance_are_evaluated_once_a_kind(pattern, same):
    with evaluations() as pairs:
        layout = pattern.layout(1 << 13, block_size=128)
    assert 0 < sum(pairs) <= 3 * 3 * 3 + 3  # 190 pairs of tiles are visited
    short = pattern.layout(1000, block_size=128)
    dense = pattern.to_dense(1000).view(1000, 1000)
    assert (short.to_dense().view(1000, 1000) == dense).all()
    if same is not None:
        assert layout.num_pairs == same.layout(1 << 13, block_size=128).num_pairs


def test_causal_attention_of_a_million_tokens_is_counted_without_its_layout():
    before = sr.layout_cache.info().bytes
    tokens = 1 << 20
    found = counts_of(sr.Causal(), frame_of(tokens), 128)
    assert found.pairs == pytest.approx(tokens * (tokens + 1) / 2, rel=0.01)
    assert found.layout_bytes > 100 << 20 > sr.layout_cache.info().bytes - before


def test_flops_are_two_products_forward_and_five_backward():
    assert flops(10, 64, False) == 2 * 2 * 10 * 64
    assert flops(10, 64, True) == 2 * 7 * 10 * 64


def test_a_pattern_that_does_not_fit_says_so():
    with pytest.raises(ValueError, match="block_size"):
        counts_of(sr.Causal(), frame_of(64), 100)
    with pytest.raises(ValueError):
        counts_of(sr.Documents((10, 20)), frame_of(64), 16)


@pytest.mark.parametrize("name", ["causal", "beside a window", "inside documents", "valid keys"])
def test_lists_of_keys_count_as_lists(name, monkeypatch):
    pattern = JOINS[name]
    frame = Frame.build(TOKENS, TOKENS, 4, 2, None)
    found = counts_of(pattern, frame, 16, lists=True)
    counts = pattern.to_dense(TOKENS, num_heads=4, num_kv_heads=2).double()
    assert found.pairs == pytest.approx(counts.sum().item() / len(counts))
    tiles = counts_of(split(pattern)[0], frame, 16)
    assert found.passes == tiles.passes and found.listed_pairs == found.pairs - tiles.pairs > 0
    assert found.list_bytes == sum(x.keys.nbytes for x in lists_of(*split(pattern), frame)[1])
    told = sr.estimate(pattern, tokens=TOKENS, num_heads=4, num_kv_heads=2, head_dim=16)
    assert told.pairs == pytest.approx(4 * found.pairs) and told.memory.workspace > found.list_bytes
    monkeypatch.setattr("sparsering.planning.estimate.seconds_of", None)  # bytes need no clock
    assert memory_of_call(replace(scenario_of(pattern), backward=True)).peak > told.peak_bytes.value


def scenario_of(pattern):
    return Scenario(
        pattern=pattern,
        tokens=TOKENS,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        dtype=torch.float32,
        batch_size=1,
        backward=False,
        machine=None,
        ranks=1,
        sharding="auto",
        backend=None,
        block_size=None,
    )
