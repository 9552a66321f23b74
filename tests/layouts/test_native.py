"""The compiled kernel's tables equal those of torch's operators, bit for bit."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.forked import run
from helpers.torch_tables import only_torch
from hypothesis import strategies as st
from oracles.patterns_oracle import Spec, build
from oracles.strategies import LAYOUT_BLOCK_SIZES, Scene, cases, examples

import sparsering as sr
from sparsering.kernels.cpu.build import library
from sparsering.layouts import compile as compiler
from sparsering.layouts import lower
from sparsering.layouts.layout import BlockLayout, tile_counts
from sparsering.layouts.leaves import Linear
from sparsering.patterns.algebra import Frame
from sparsering.patterns.varlen_mask import Varlen

CPU = torch.device("cpu")
FIELDS = ("query_start", "query_stop", "key_start", "key_stop", "row_ptr", "key_tile", "bitmap")


def assert_equal(a: BlockLayout, b: BlockLayout) -> None:
    assert (len(a.passes), a.pairs) == (len(b.passes), b.pairs)
    for p, q in zip(a.passes, b.passes, strict=True):
        sides = (p.query_start, p.query_stop), (p.key_start, p.key_stop)
        counts = [tile_counts(*side, p.step, a.block_size) for side in sides]
        most = tuple(max(x.flatten().tolist(), default=0) for x in counts)
        assert p.memo.get("most tokens", most) == q.memo.get("most tokens", most) == most
        for name in (*FIELDS, "bitmaps", "transposed_bitmaps"):
            x, y = getattr(p, name), getattr(q, name)
            assert x.dtype == y.dtype and torch.equal(x, y), (name, x, y)
        facts = [(x.step, x.covers, x.longest, x.branch) for x in (p, q)]
        assert facts[0] == facts[1]


def check(pattern: sr.Pattern, frame: Frame, block_size: int) -> None:
    library()
    native = compiler.build_layout(pattern, frame, block_size, CPU)
    _ = [p.transposed_bitmaps for p in native.passes]  # by the kernel, and stored
    size = compiler.chosen_block_size(pattern, frame, CPU)
    compiler._by_density.cache_clear()
    with only_torch():
        assert_equal(native, compiler.build_layout(pattern, frame, block_size, CPU))
        assert compiler.chosen_block_size(pattern, frame, CPU) == size
    compiler._by_density.cache_clear()


@examples(60, 3000, cases(), st.sampled_from(LAYOUT_BLOCK_SIZES))
def test_tables_of_drawn_patterns(case: tuple[Spec, Scene], block_size: int) -> None:
    spec, scene = case
    frame = Frame.build(*scene.arguments.values())
    check(build(spec), frame, block_size)


@examples(30, 1500, cases(max_length=700, min_length=200), st.sampled_from((16, 48, 128)))
def test_tables_of_drawn_patterns_of_several_tiles(
    case: tuple[Spec, Scene], block_size: int
) -> None:
    spec, scene = case
    frame = Frame.build(*scene.arguments.values())
    check(build(spec), frame, block_size)


def named(length: int) -> dict[str, sr.Pattern]:
    """Patterns of every kind that the compiled kernel knows, over `length` tokens."""
    generator = torch.Generator().manual_seed(length)
    cuts = torch.randperm(length, generator=generator)[: length // 9].sort().values.tolist()
    many = tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True))
    few = (length // 3, 0, length // 4, length - length // 3 - length // 4)
    width = math.gcd(length, 10)
    grid = (length // width, width)
    table = torch.rand(length // 13 + 1, length // 13 + 65, generator=generator) < 0.3
    return {
        "window and sinks": (sr.SlidingWindow(90) | sr.GlobalTokens(4)) & sr.Causal(),
        "strided": sr.SlidingWindow(6, 2) | sr.SlidingWindow(200, 50, 4),
        "many documents": sr.Documents(many) & sr.Causal(),
        "packed": sr.Packed(few, sr.SlidingWindow(100) | sr.GlobalTokens(2)),
        "packed LongNet": sr.Packed(few, sr.LongNet((64, 256), (1, 3)) & sr.Causal()),
        "LongNet": sr.LongNet((100, 512, 700), (1, 3, 4), "block") & sr.Causal(),
        "union of grids": (sr.Dilated(100, 3) | sr.Dilated(64, 2)) & sr.SlidingWindow(400, 9),
        "tree": sr.Tree(few, (-1, 0, 0, 2)),
        "tree of many": sr.Tree(many, (-1, *(i // 2 for i in range(len(many) - 1)))),
        "tree with dilation": sr.Tree(few, (-1, 0, 0, 2), sr.Dilated(64, 2) | sr.SlidingWindow(9)),
        "tree with strides": sr.Tree(few, (-1, 0, 0, 2), sr.SlidingWindow(None, None, 3)),
        "chain with strides": sr.Tree((1, length - 1), (-1, 0), sr.SlidingWindow(None, None, 3)),
        "padding": sr.KeyPadding((length - 70, 3, length)) & sr.SlidingWindow(300),
        "key mask": sr.KeyMask(torch.rand(length, generator=generator) < 0.7) & sr.Causal(),
        "pooled": sr.PooledCausal(32, 16) | sr.GlobalTokens(7, rows=False),
        "random blocks": sr.RandomBlocks(0.2, 32),
        "random small blocks": sr.RandomBlocks(0.4, 13, per_head=False) & sr.SlidingWindow(150),
        "random blocks of strides": sr.RandomBlocks(0.3, 30) & sr.SlidingWindow(None, None, 3),
        "random blocks and near ones": (
            (sr.RandomBlocks(0.05, 16, per_head=False) | sr.BlockWindow(1, 16)) & sr.Causal()
        ),
        "random blocks and a window": sr.RandomBlocks(0.1, 13) | sr.SlidingWindow(40, 9, 2),
        "random blocks and levels": (
            sr.RandomBlocks(0.1, 20) | sr.Hierarchical(((20, 80), (60, 300)), 20)
        ),
        "random blocks of two draws": sr.RandomBlocks(0.1, 16) | sr.RandomBlocks(0.02, 48, seed=1),
        "a large table of blocks": sr.Blocks(torch.rand(300, 400, generator=generator) < 0.2, 16),
        "a table of small blocks": sr.Blocks(table, 13) & sr.SlidingWindow(150, 90),
        "a table of one block": sr.Blocks(torch.ones(1, 1, dtype=torch.bool), 4096) & sr.Causal(),
        "packed tables": sr.Packed(few, sr.Blocks(table, 24) | sr.SlidingWindow(9)),
        "all but a table": sr.Causal() - sr.Blocks(table.flip(0), 40),
        "hierarchical": sr.Hierarchical(((16, 64), (64, None)), 16),
        "hierarchical and more": sr.Hierarchical(((20, 80), (60, 300)), 20) & sr.Causal(),
        "blocks at rates": sr.BlockDilated((1, 3, 5), 24) | sr.GlobalTokens(3),
        "packed blocks": sr.Packed(few, sr.BlockWindow(1, 16) | sr.BlockDilated((4,), 16)),
        "causal blocks of unlike sizes": sr.BlockCausal(few),
        "near causal blocks of many sizes": sr.BlockCausal(many) & sr.SlidingWindow(150, 90),
        "all but causal blocks": sr.Full() - sr.BlockCausal(40),
        "grid": sr.Neighbourhood(grid, (3, 0)) | sr.GlobalTokens(3),
        "grid with dilation": sr.Neighbourhood(grid, (1, 0), (4, 1)) & sr.SlidingWindow(70, 90, 2),
        "grid in tiles": sr.Neighbourhood(grid, window=(4, 1), stride=(3, 1), tile=(3, 4)),
        "film": sr.Neighbourhood(grid, window=(5, 1), causal=(True, False), tile=(8, 5)),
    }


@pytest.mark.parametrize("length", [130, pytest.param(3001, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", named(130))
def test_tables_of_named_patterns(name: str, length: int) -> None:
    pattern = named(length)[name]
    for block_size in (16, 64, 112, 256):
        check(pattern, Frame.build(length, None, 4, 2, None), block_size)
    check(pattern, Frame.build(length - 60, length, 2, 2, None), 64)


SHARED = 14_000  # tokens; in blocks of 16, the query tiles of a pass are shared out among threads


LIMITED = {"a large table of blocks", "a table of one block"}  # these say fewer tokens themselves


@pytest.mark.parametrize("name", sorted(named(130).keys() - LIMITED))
def test_tables_are_the_same_from_any_number_of_threads(name: str) -> None:
    library()
    pattern, frame = named(SHARED)[name], Frame.build(SHARED, None, 4, 2, None)
    before, layouts = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            layouts.append(compiler.build_layout(pattern, frame, 16, CPU))
    finally:
        torch.set_num_threads(before)
    assert_equal(*layouts)


def test_threads_tell_unlike_pairs_of_tiles_apart() -> None:
    """Each tile has two documents of its own: no pair of tiles is like one that another found."""
    library()
    cuts = [1 + 7 * tile % 15 for tile in range(SHARED // 16)]
    lengths = tuple(n for cut in cuts for n in (cut, 16 - cut))
    frame = Frame.build(sum(lengths), None, 1, 1, None)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        (shared,) = compiler.build_layout(sr.Documents(lengths), frame, 16, CPU).passes
    finally:
        torch.set_num_threads(before)
    for tile in range(len(cuts)):
        bits = shared.bitmaps[shared.bitmap[0, 0, tile]].view(16, 2)
        first = int.from_bytes(bytes(bits[0].tolist()), "little")
        assert first == (1 << cuts[tile]) - 1, tile


@pytest.mark.parametrize("period", [5, 128])
def test_tiles_of_listed_keys_with_equal_bits_share_a_bitmap(period: int) -> None:
    """A regular mask of keys has as many bitmaps as it has phases, however many tiles it has."""
    tokens, size = 64 * 160, 64
    pattern = sr.KeyMask(torch.arange(tokens) % period > 0) & sr.SlidingWindow(128, 127)
    frame = Frame.build(tokens, None, 1, 1, None)
    (own,) = compiler.build_layout(pattern, frame, size, CPU).passes
    assert own.key_tile.numel() > 600
    phases = period if period < size else 2
    assert len(own.bitmaps) <= 3 * phases  # at the window's left edge, inside, at its right edge
    check(pattern, frame, size)


def test_listed_keys_are_told_apart_by_all_their_bits() -> None:
    valid = torch.ones(20, 128, dtype=torch.bool)
    valid[torch.arange(20), 64 + torch.arange(20)] = False  # the first 64 keys of all are alike
    pattern = sr.KeyMask(valid.flatten()) & sr.SlidingWindow(256, 255)
    check(pattern, Frame.build(valid.numel(), None, 1, 1, None), 128)


@pytest.mark.parametrize("pattern", [sr.Dilated(1000, 1), sr.Dilated(1536, 3)], ids=str)
def test_tables_of_segments_longer_than_a_thousand_tokens(pattern: sr.Pattern) -> None:
    check(pattern & sr.Causal(), Frame.build(2100, None, 2, 1, None), 128)


def test_tables_of_a_tree_without_tokens() -> None:
    """A query stands before all nodes, and is in no tile."""
    check(sr.Tree((0,), (-1,), sr.Full()), Frame.build(1, 0, 1, 1, None), 64)


@pytest.mark.parametrize(
    "inner",
    [
        sr.Causal(),
        sr.SlidingWindow(20, 3) | sr.GlobalTokens(2),
        sr.LongNet((16, 40), (1, 3)) & sr.Causal(),
        sr.SlidingWindow(30, 0, 4),
        sr.Dilated(32, 2) | sr.PooledCausal(16, 8),
    ],
    ids=str,
)
def test_tables_of_documents_whose_positions_restart(inner: sr.Pattern) -> None:
    q_lengths, kv_lengths = (50, 0, 3, 130, 1), (70, 5, 3, 130, 64)
    branches = [Varlen(q_lengths, kv_lengths, mask) for mask in inner.branches]
    pattern = sum(branches[1:], start=branches[0])
    frame = Frame.build(sum(q_lengths), sum(kv_lengths), 4, 2, 0)
    for block_size in (16, 64, 128):
        check(pattern, frame, block_size)


@pytest.mark.parametrize("name", named(130))
def test_the_kernel_compiles_each_named_pattern(name: str, monkeypatch: Any) -> None:
    """None of them falls back to torch's operators without being noticed."""
    library()
    calls = []
    monkeypatch.setattr(compiler, "_cells", lambda *arguments: calls.append(arguments))
    named(500)[name].layout(500, block_size=32)
    assert not calls


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("window and sinks", 0),
        ("many documents", 5),
        ("LongNet", 3),
        ("packed", 9),
        ("tree of many", 10),
        ("hierarchical", 11),
        ("random blocks", 12),
        ("grid in tiles", 14),
    ],
)
def test_a_program_that_is_wrong_by_one_is_noticed(name: str, kind: int, monkeypatch: Any) -> None:
    """Planted: an end of a window, a document's edge, a residue, a node, a block, a grid."""
    encode = lower._encode

    def wrong(rule: Any, numbers: list[int], tensors: list[torch.Tensor]) -> bool:
        begin, first = len(numbers), len(tensors)
        done = encode(rule, numbers, tensors)
        place = {0: 3, 3: 4, 11: 1, 12: 3, 14: 3}
        if numbers[begin] == kind and kind in place:
            numbers[begin + place[kind]] += 1
        elif numbers[begin] == kind:
            edges = tensors[first].clone()
            edges[1:-1] += 1
            tensors[first] = edges
        return done

    check(named(500)[name], Frame.build(500, None, 1, 1, None), 32)
    monkeypatch.setattr(lower, "_encode", wrong)
    with pytest.raises(AssertionError):
        check(named(500)[name], Frame.build(500, None, 1, 1, None), 32)


@pytest.mark.parametrize(
    ("numbers", "tensors", "message"),
    [
        ([], [], "ends too early"),
        ([99], [], "unknown condition"),
        ([0, 1], [], "ends too early"),
        ([5], [], "lacks a tensor"),
        ([5], [torch.zeros(3)], "int64 vectors"),
        ([6, 2, 4, 8], [], "ends too early"),
        ([11, 16, 0, 4, 8], [], "empty blocks"),
        ([12, 16, 16, 1, 2, 3], [], "malformed random blocks"),
        ([14, 7], [], "malformed grid"),
        ([14, 1, 8, 3, 0, 1, 0, 8], [], "malformed grid"),
    ],
)
def test_a_malformed_program_is_refused(
    numbers: list[int], tensors: list[torch.Tensor], message: str
) -> None:
    axis = [torch.arange(2), torch.arange(2), torch.arange(2)]
    with pytest.raises(RuntimeError, match=message):
        library().table(numbers, tensors, axis, axis, 1, 16, False, 1)


@pytest.mark.parametrize("shape", [(2, 3), (2, 18), (32,), (0, 8, 4)])
def test_malformed_bitmaps_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="malformed bitmaps"):
        library().transposed(torch.zeros(shape, dtype=torch.uint8))


def test_a_row_taken_for_its_shifted_neighbour_is_noticed(monkeypatch: Any) -> None:
    """Planted: tiles at the edge of a window share the bitmap of those on the diagonal."""
    frame, pattern = Frame.build(300, None, 1, 1, None), sr.SlidingWindow(70)
    check(pattern, frame, 32)
    monkeypatch.setattr(Linear, "signature", lambda _, pairs: [pairs.q.start * 0])
    with pytest.raises(AssertionError):
        check(pattern, frame, 32)


def test_without_the_kernel_layouts_do_not_ask_torch_for_it(tmp_path: Path) -> None:
    """To ask for an operator that is not there takes a lock, which a fork may inherit held."""
    code = """
import torch, sparsering as sr
sr.Causal().layout(64)
assert "sparsering_cpu" not in vars(torch.ops)
torch.ops.sparsering_cpu  # somebody asks
assert sr.Causal().layout(80).num_pairs == 3240
assert "table" not in vars(torch.ops.sparsering_cpu)
"""
    done = run(code, SPARSERING_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
