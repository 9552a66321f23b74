"""Layouts against `to_dense` and literal tables of entries.

The main property is that the tiles and bitmaps of a layout hold every pair of the pattern, as often
as the pattern counts it. The rest is what the public numbers say about those tiles.
"""

from time import thread_time
from typing import Any

import pytest
import torch
from helpers.thinned import slow_except
from helpers.torch_tables import evaluations
from hypothesis import strategies as st
from oracles.patterns_oracle import Spec, build, is_mixture, leaves
from oracles.strategies import LAYOUT_BLOCK_SIZES, Scene, cases, examples
from torch import Tensor

import sparsering as sr
from sparsering.layouts import compile as compiler
from sparsering.patterns.algebra import Frame

pytestmark = pytest.mark.usefixtures("empty_cache")


def dense_counts(pattern: Any, scene: Scene) -> Tensor:
    """Counts of `to_dense`, int64 [B or 1, Hq, Nq, Nk]."""
    dense = pattern.to_dense(**scene.arguments).to(torch.int64)
    dense = dense if dense.dim() == 4 else dense[None]
    return dense.expand(-1, scene.num_heads, -1, -1)


def all_entries(layout: Any, batch: int, num_heads: int) -> list[list[list[list[int]]]]:
    """Lists [batch][head] of the rows of `layout.entries`, their type checked."""
    tables = []
    for b in range(batch):
        tables.append([])
        for h in range(num_heads):
            table = layout.entries(batch=b, head=h)
            assert table.dtype is torch.int64
            assert table.shape == (len(table), 4)
            tables[-1].append(table.tolist())
    return tables


def steps_of(spec: Spec) -> set[int]:
    """Steps that the tiles of a spec can have: divisors of its rates and of products of those."""
    rates = {1}
    for name, *arguments in leaves(spec):
        if name == "SlidingWindow" and len(arguments) == 3:
            rates |= {a * arguments[2] for a in rates}
        if name == "Dilated":
            rates |= {a * arguments[1] for a in rates}
        if name == "LongNet":
            for rate in arguments[1]:
                rates |= {a * rate for a in rates}
    return {step for rate in rates for step in range(1, rate + 1) if rate % step == 0}


def assert_layout_is_the_pattern(spec: Spec, scene: Scene, block_size: int) -> None:
    pattern = build(spec)
    layout = pattern.layout(**scene.arguments, block_size=block_size)
    expected = dense_counts(pattern, scene)
    batch, heads, q_len, kv_len = expected.shape

    rebuilt = layout.to_dense()
    assert rebuilt.shape[0] in (1, batch)
    assert rebuilt.shape[1] in (1, scene.num_heads)
    assert rebuilt.shape[2:] == (q_len, kv_len)
    assert torch.equal(rebuilt.to(torch.int64).expand_as(expected), expected)

    assert layout.num_pairs == pytest.approx(expected.sum().item() / (batch * heads), rel=1e-12)
    tables = all_entries(layout, batch, heads)
    lengths = [len(table) for per_head in tables for table in per_head]
    assert layout.num_blocks == max(lengths)
    if q_len and kv_len:
        visited = sum(lengths) / len(lengths) * block_size**2
        assert layout.density == pytest.approx(visited / (q_len * kv_len), rel=1e-12)
        assert layout.nbytes > 0
    for b, per_head in enumerate(tables):
        for h, table in enumerate(per_head):
            assert_entries_hold_the_pairs(table, expected[b, h], spec, scene, block_size)


def assert_entries_hold_the_pairs(
    table: list[list[int]], expected: Tensor, spec: Spec, scene: Scene, block_size: int
) -> None:
    """Every entry is in range and has a pair; the entries have room for every pair."""
    q_len, kv_len = expected.shape
    steps = steps_of(spec)
    covered = torch.zeros_like(expected)
    room = 0
    for query, key, num_queries, num_keys in table:
        row = query - scene.first_position
        assert 1 <= num_queries <= block_size
        assert 1 <= num_keys <= block_size
        assert row >= 0
        assert key >= 0
        assert row + num_queries <= q_len
        assert key + num_keys <= kv_len
        tiles = [
            expected[row : row + num_queries * step : step, key : key + num_keys * step : step]
            for step in sorted(steps)
            if row + (num_queries - 1) * step < q_len and key + (num_keys - 1) * step < kv_len
        ]
        assert any(tile.any() for tile in tiles), "an entry without a pair"
        covered[row : row + num_queries, key : key + num_keys] += 1
        room += num_queries * num_keys
    assert room >= expected.sum().item()
    if steps == {1}:
        assert covered.ge(expected).all(), "a pair outside the entries"
        tiles_restart = {"Documents", "Packed", "Dilated", "LongNet", "ChunkedCausal"}
        restarts = any(name in tiles_restart for name, *_ in leaves(spec))
        if scene.first_position == 0 and not restarts and not is_mixture(spec):
            assert len(table) == occupied_tiles(expected, block_size)


def occupied_tiles(dense: Tensor, block_size: int) -> int:
    """Tiles with a pair, cut from the first query and the first key."""
    return sum(
        bool(tile.any()) for rows in dense.split(block_size) for tile in rows.split(block_size, 1)
    )


block_sizes = st.sampled_from(LAYOUT_BLOCK_SIZES)


@examples(40, 1000, cases(with_random=True), st.sampled_from((16, 16, 32, 64)))
def test_layout_holds_the_pairs_of_the_pattern(case: tuple[Spec, Scene], block_size: int) -> None:
    assert_layout_is_the_pattern(*case, block_size)


@examples(15, 100, cases(max_length=300, min_length=71, max_heads=3, with_random=True), block_sizes)
def test_long_layout_holds_the_pairs_of_the_pattern(
    case: tuple[Spec, Scene], block_size: int
) -> None:
    assert_layout_is_the_pattern(*case, block_size)


@pytest.mark.parametrize("block_size", slow_except([16, 48, 112, 208, 256], range(16, 257, 16)))
def test_every_legal_block_size_holds_the_pairs(block_size: int) -> None:
    long = Scene(300, 530, 2, 2, None, 1)
    spec = ("+", ("LongNet", (64, 300), (1, 3)), ("&", ("Causal",), ("BlockDilated", (2,), 24)))
    assert_layout_is_the_pattern(spec, long, block_size)


@pytest.mark.parametrize("block_size", [8, 24, 512, 0, -16, 1, 272, 100])
def test_illegal_block_size_raises_and_tells_the_legal_ones(block_size: int) -> None:
    with pytest.raises(ValueError) as caught:
        sr.Causal().layout(64, block_size=block_size)
    for word in ("16", "256", str(block_size)):
        assert word in str(caught.value)


def test_default_block_size_is_128() -> None:
    assert sr.Full().layout(256).entries().tolist() == [
        [0, 0, 128, 128],
        [0, 128, 128, 128],
        [128, 0, 128, 128],
        [128, 128, 128, 128],
    ]


# Tables that a reader can check: (first query, first key, queries, keys).


def test_causal_entries_are_the_lower_triangle_of_tiles() -> None:
    layout = sr.Causal().layout(48, block_size=16)
    assert layout.entries().tolist() == [
        *([0, 0, 16, 16], [16, 0, 16, 16], [16, 16, 16, 16], [32, 0, 16, 16], [32, 16, 16, 16]),
        [32, 32, 16, 16],
    ]
    assert layout.num_blocks == 6
    assert layout.num_pairs == 48 * 49 // 2
    assert layout.density == 6 / 9


def test_ragged_entries_count_only_real_tokens() -> None:
    layout = sr.Causal().layout(40, block_size=32)
    assert layout.entries().tolist() == [[0, 0, 32, 32], [32, 0, 8, 32], [32, 32, 8, 8]]
    assert layout.num_pairs == 40 * 41 // 2
    assert layout.density == 3 * 32**2 / 40**2


def test_window_entries_are_a_band_of_tiles() -> None:
    layout = sr.SlidingWindow(16).layout(64, block_size=16)
    assert layout.entries().tolist() == [
        *([0, 0, 16, 16], [16, 0, 16, 16], [16, 16, 16, 16], [32, 16, 16, 16], [32, 32, 16, 16]),
        *([48, 32, 16, 16], [48, 48, 16, 16]),
    ]
    assert layout.num_pairs == 64 * 17 - 16 * 17 // 2


def test_window_one_token_wider_than_the_block_visits_one_more_tile() -> None:
    queries_of_the_last_tile = [
        [entry[1] for entry in sr.SlidingWindow(left).layout(64, block_size=16).entries().tolist()][
            -3:
        ]
        for left in (16, 17)
    ]
    assert queries_of_the_last_tile == [[32, 32, 48], [16, 32, 48]]


def test_one_global_key_more_than_the_block_visits_one_more_tile() -> None:
    layouts = [sr.GlobalTokens(n, rows=False).layout(64, block_size=16) for n in (16, 17)]
    keys_of_the_last_queries = [
        [key for query, key, *_ in layout.entries().tolist() if query == 48] for layout in layouts
    ]
    assert keys_of_the_last_queries == [[0], [0, 16]]


def test_block_window_entries_are_whole_tiles() -> None:
    layout = sr.BlockWindow(1, 16).layout(48, block_size=16)
    assert layout.entries().tolist() == [
        *([0, 0, 16, 16], [0, 16, 16, 16], [16, 0, 16, 16], [16, 16, 16, 16], [16, 32, 16, 16]),
        *([32, 16, 16, 16], [32, 32, 16, 16]),
    ]
    assert layout.num_pairs == 7 * 256


def test_decoding_entries_start_at_the_query_s_position() -> None:
    layout = sr.SlidingWindow(20).layout(1, 50, block_size=16)
    assert [[q, nq] for q, _, nq, _ in layout.entries().tolist()] == [[49, 1]] * 3
    assert layout.num_pairs == 21


def test_negative_positions_are_visited_only_where_they_have_pairs() -> None:
    layout = sr.Causal().layout(64, 32, block_size=32)  # positions -32 .. 31
    assert layout.entries().tolist() == [[0, 0, 32, 32]]
    assert layout.num_pairs == 32 * 33 // 2


def test_dilated_entries_are_strided_tiles_that_stay_in_their_segment() -> None:
    layout = sr.Dilated(256, 4).layout(1001, num_heads=2, block_size=64)
    assert layout.entries(head=0).tolist() == [
        [0, 0, 64, 64],
        [256, 256, 64, 64],
        [512, 512, 64, 64],
        [768, 768, 59, 59],
    ]
    assert layout.entries(head=1).tolist() == [
        [1, 1, 64, 64],
        [257, 257, 64, 64],
        [513, 513, 64, 64],
        [769, 769, 58, 58],
    ]
    assert layout.num_pairs == 3 * 64**2 + (59**2 + 58**2) / 2
    assert layout.density == 4 * 64**2 / 1001**2


def test_causal_longnet_visits_the_dilated_tiles_of_each_branch_in_turn() -> None:
    pattern = sr.LongNet((64, 256), (1, 4), offset=0) & sr.Causal()
    layout = pattern.layout(256, block_size=64)
    assert layout.entries().tolist() == [
        *([0, 0, 64, 64], [64, 64, 64, 64], [128, 128, 64, 64], [192, 192, 64, 64], [0, 0, 64, 64])
    ]
    assert layout.num_pairs == 5 * 64 * 65 // 2


def test_dilated_window_costs_its_pairs_for_each_residue() -> None:
    # 4 residues of 128 tokens each: 8 query tiles, the first of which has no tile to its left
    layout = sr.SlidingWindow(32, 0, 4).layout(512, block_size=16)
    assert layout.num_blocks == 4 * (2 * 8 - 1)


@pytest.mark.parametrize("dilation", [2, 3])
def test_a_dilated_window_beside_a_mask_of_another_grid_skips_keys(dilation: int) -> None:
    window = sr.SlidingWindow(40, 9, dilation)
    for pattern in (window & sr.Dilated(60, 5 - dilation), window | sr.BlockCausal(16)):
        held = pattern.layout(100, block_size=16).to_dense()[0, 0].bool()
        assert torch.equal(held, pattern.to_dense(100, 100).view(100, 100))


def test_blocks_table_of_each_kv_head_and_batch_entry_has_its_own_entries() -> None:
    active = torch.tensor([[[[True, False]], [[True, True]]], [[[False, False]], [[False, True]]]])
    layout = sr.Blocks(active, 16).layout(16, 32, num_heads=4, num_kv_heads=2, q_start=0,
                                          block_size=16)  # fmt: skip
    assert all_entries(layout, 2, 4) == [
        [[[0, 0, 16, 16]]] * 2 + [[[0, 0, 16, 16], [0, 16, 16, 16]]] * 2,
        [[]] * 2 + [[[0, 16, 16, 16]]] * 2,
    ]
    assert layout.num_blocks == 2
    assert layout.num_pairs == (1 + 2 + 0 + 1) / 4 * 256
    assert layout.density == (1 + 2 + 0 + 1) / 4 * 16**2 / (16 * 32)


def test_padding_shortens_the_tables_of_its_batch_entries() -> None:
    layout = sr.KeyPadding((40, 0, 16)).layout(16, 48, block_size=16)
    keys = [[entry[1] for entry in table[0]] for table in all_entries(layout, 3, 1)]
    assert keys == [[0, 16, 32], [], [0]]
    assert layout.num_blocks == 3
    assert layout.num_pairs == pytest.approx(16 * (40 + 0 + 16) / 3)
    assert layout.density == pytest.approx((3 + 0 + 1) / 3 * 16**2 / (16 * 48))


def test_a_tile_of_which_one_key_is_masked_is_not_whole() -> None:
    valid = torch.ones(48, dtype=torch.bool)
    valid[20] = False
    assert sr.KeyMask(valid).layout(48, 48, block_size=16).pairs == 48 * 47


def test_pattern_s_blocks_may_be_smaller_and_larger_than_the_layout_s() -> None:
    table = torch.tensor([[True, False, False], [False, False, True], [False, True, False]])
    small = sr.Blocks(table, 16).layout(48, block_size=32)
    assert small.entries().tolist() == [[0, 0, 32, 32], [0, 32, 32, 16], [32, 0, 16, 32]]
    large = sr.Blocks(table, 32).layout(96, block_size=16)
    assert large.num_blocks == 3 * 4
    assert small.num_pairs == 3 * 16**2
    assert large.num_pairs == 3 * 32**2


def test_mixture_visits_a_tile_once_per_mask() -> None:
    layout = (sr.Causal() + sr.Full()).layout(32, block_size=16)
    assert layout.entries().tolist() == [
        *([0, 0, 16, 16], [16, 0, 16, 16], [16, 16, 16, 16], [0, 0, 16, 16], [0, 16, 16, 16]),
        *([16, 0, 16, 16], [16, 16, 16, 16]),
    ]


@pytest.mark.parametrize(
    "pattern",
    [
        sr.GlobalTokens(0),
        sr.Causal() & sr.SlidingWindow(0, None) & sr.BlockDilated((3,), 16) & sr.Dilated(2, 9, 5),
        sr.KeyPadding((0, 0)),
        sr.Blocks(torch.zeros(3, 3, dtype=torch.bool), 16),
    ],
)
def test_pattern_without_pairs_has_no_entries(pattern: Any) -> None:
    layout = pattern.layout(48, block_size=16)
    assert layout.num_pairs == 0
    assert layout.num_blocks == 0
    assert layout.density == 0
    assert layout.entries().tolist() == []
    assert not layout.to_dense().any()


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("pattern", [sr.Causal(), sr.LongNet((4, 8), (1, 2)), sr.BlockWindow(1, 8)])
def test_zero_lengths_give_an_empty_layout(pattern: Any, q_len: int, kv_len: int) -> None:
    layout = pattern.layout(q_len, kv_len, num_heads=2, block_size=16)
    assert layout.entries(head=1).tolist() == []
    assert layout.num_pairs == 0
    assert layout.num_blocks == 0
    assert layout.to_dense().numel() == 0
    assert isinstance(str(layout), str)


@pytest.mark.parametrize(
    "pattern",
    [
        sr.RandomBlocks(0.5, 16),
        sr.SlidingWindow(0, None, 5) & sr.Packed((15, 0), sr.RandomBlocks(0.5, 20)),
        sr.BlockWindow(0, 16) | sr.Dilated(300, 64),
        sr.RandomBlocks(0.3, 16) | sr.Dilated(300, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(33, 15, 15), (33, 100, 5), (8, 0, 0)])
def test_rows_and_tiles_without_keys(pattern: Any, lengths: tuple[int, int, int]) -> None:
    q_len, kv_len, q_start = lengths
    if isinstance(pattern, sr.Mask) and "Packed" in str(pattern) and kv_len != 15:
        pytest.skip("its documents are of another length")
    layout = pattern.layout(q_len, kv_len, q_start=q_start, block_size=16)
    expected = pattern.to_dense(q_len, kv_len, q_start=q_start)
    assert torch.equal(layout.to_dense()[0].bool(), expected)


def test_a_line_is_what_is_printed_of_a_part() -> None:
    layout = sr.LongNet((16, 64), (1, 4)).layout(64, block_size=16)
    for part in (layout, layout.passes[0], sr.layout_cache):
        assert len(repr(part)) < 200 and "\n" not in repr(part)
    assert repr(layout.passes[1]) == "<Pass of step 4, 1 x 1 tiles>"


def test_long_window_is_built_in_the_memory_and_time_of_its_tiles() -> None:
    length, left = 2**20, 4096
    assert torch.get_num_threads() == 1  # the time of this thread is all the work
    seconds = []
    for _ in range(3):
        sr.layout_cache.clear()
        start = thread_time()
        layout = sr.SlidingWindow(left).layout(length)
        seconds.append(thread_time() - start)
    assert layout.num_pairs == length * (left + 1) - left * (left + 1) // 2
    assert layout.num_blocks == 8192 * 33 - 32 * 33 // 2
    assert layout.nbytes <= 4 * 2**20
    assert min(seconds) < 0.2  # the design says 0.1 s on two cores


def test_documents_that_are_alike_are_evaluated_once() -> None:
    for inner in (sr.Causal(), sr.Causal() & sr.SlidingWindow(20), sr.Dilated(32, 1)):
        sr.layout_cache.clear()
        with evaluations() as pairs:
            layout = sr.Packed((256,) * 200, inner).layout(256 * 200, block_size=64)
        assert layout.num_pairs == 200 * inner.to_dense(256).sum()
        assert 0 < sum(pairs) <= 4, inner


@pytest.mark.parametrize(("q_len", "kv_len"), [(50, 50), (1, 50), (64, 32), (40, 70)])
@pytest.mark.parametrize("huge", [71, 1000, 2**33 + 1, 2**45])
def test_numbers_beyond_the_sequence_cost_nothing(q_len: int, kv_len: int, huge: int) -> None:
    """Tiles past the end are not listed: 2^33 of them would not be built."""
    rate = min(huge, 2**31)
    patterns = [
        sr.SlidingWindow(7, 3, rate),
        sr.SlidingWindow(None, None, rate) | sr.SlidingWindow(5),
        sr.Dilated(huge, 1),
        sr.Dilated(huge, 3),
        sr.Dilated(huge, 3) & sr.Causal(),
        sr.Dilated(8, rate, 2),
        sr.LongNet((huge, 8), (rate, 2)),
        sr.Packed((20, 0, kv_len - 20), sr.SlidingWindow(9, 9, rate)),
        sr.Packed((20, kv_len - 20), sr.Dilated(huge, 2)),
    ]
    for pattern in patterns:
        layout = pattern.layout(q_len, kv_len, block_size=16)
        assert torch.equal(layout.to_dense()[0], pattern.to_dense(q_len, kv_len).long())


def test_a_pattern_that_splits_into_too_many_masks_is_refused() -> None:
    unions = [sr.Dilated(64, 2 + i) | sr.Dilated(64, 3 + i) for i in range(0, 40, 2)]
    pattern = unions[0]
    for union in unions[1:]:
        pattern = pattern & union  # 2 ** 20 masks if written out
    with pytest.raises(ValueError, match="join fewer unions of dilated masks"):
        pattern.layout(64)


def test_pair_counts_do_not_overflow_32_bits() -> None:
    length = 2**17
    assert sr.Full().layout(length, block_size=256).num_pairs == length**2
    assert sr.Causal().layout(length, block_size=256).num_pairs == length * (length + 1) // 2
    branches = sr.LongNet((length, length), (1, 1)).layout(length, block_size=256)
    assert branches.num_pairs == 2 * length**2


def test_pairs_beyond_a_tile_that_a_cut_has_emptied_are_found() -> None:
    """Keys cut at 1: the first segment's tile goes on at 3, past its end and the next tile."""
    frame = Frame.build(3, 3, 1, 1, 0)
    for ranges in ([(0, 3)], [(0, 1), (1, 3)]):
        (found,) = compiler.compile_passes(sr.Dilated(2, 3), frame, 16, ranges, ranges)
        assert found.num_pairs == 2, ranges
