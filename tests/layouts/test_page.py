"""Pages of keys in any order: the compiled kernel and torch build equal tables for them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.torch_tables import only_torch
from hypothesis import strategies as st
from layouts.test_native import named
from oracles.patterns_oracle import Spec, build
from oracles.strategies import Scene, examples, scenes, specs

import sparsering as sr
from sparsering.kernels.cpu.build import library
from sparsering.layouts import gathered_keys
from sparsering.layouts.bitmaps import unpack
from sparsering.layouts.gathered_keys import page_over
from sparsering.layouts.layout import Pass
from sparsering.patterns.algebra import Frame

torch_page = gathered_keys._page_in_torch
FIELDS = ("key_start", "key_stop", "row_ptr", "key_tile", "bitmap", "bitmaps")


def keys_of(frame: Frame, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of keys [1, Hkv, keys], partly in order, and which of them are live."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    heads, keys = frame.num_kv_heads, max(0, frame.q_start)
    groups = torch.arange(keys) % (1 + seed % 5) + (rand(heads, keys) < 0.02 * (seed % 3))
    order = (groups * keys + torch.arange(keys)).argsort(1)
    order = torch.where(rand(heads, keys) < 0.1, -1, order)
    page = torch.arange(frame.q_start, frame.q_start + frame.q_len).expand(heads, -1)
    positions = torch.cat((order, page), 1)[None]
    return positions, rand(*positions.shape) < (1, 0.95, 0.5)[seed % 3]


def check(pattern: sr.Pattern, frame: Frame, block_size: int, seed: int, entries: int = 1) -> None:
    """Compares a page's passes by the kernel with those by torch, and their pairs with the mask."""
    library()
    drawn = [keys_of(frame, seed + i) for i in range(entries)]
    positions, live = (torch.cat(x) for x in zip(*drawn, strict=True))
    starts = torch.tensor([frame.q_start] * entries)
    rest = positions, live, starts, frame, frame.q_len, block_size
    pairs: Any = 0
    for number, branch in enumerate(pattern.branches):
        native = page_over(number, branch, *rest)
        with only_torch():
            other = page_over(number, branch, *rest)
        for name in FIELDS:
            assert torch.equal(getattr(native, name), getattr(other, name)), name
        assert native.longest == other.longest
        pairs = pairs + dense(native, frame, block_size)
    heads = {"num_heads": frame.num_heads, "num_kv_heads": frame.num_kv_heads}
    counts = pattern.to_dense(frame.q_len, frame.kv_len, **heads, q_start=frame.q_start)
    keys = torch.where(live, positions, -1)[:, :, None]
    keys = keys.repeat_interleave(frame.num_heads // frame.num_kv_heads, 1)
    shape = torch.broadcast_shapes(counts.shape[:-1], (*keys.shape[:2], 1))
    index = keys.clamp(min=0).expand(*shape, -1)
    wanted = counts.expand(*shape, -1).gather(3, index) * (keys >= 0)
    assert torch.equal(pairs.expand_as(wanted), wanted.long())


def dense(p: Pass, frame: Frame, block_size: int) -> torch.Tensor:
    """The pairs of a pass: int64 [B, H, queries, keys]."""
    batch, heads, _ = p.row_ptr.shape
    width = p.key_start.shape[1]
    cells = torch.zeros(batch, heads, width, block_size, block_size, dtype=torch.int64)
    bits = unpack(p.bitmaps, block_size)
    for b in range(batch):
        for h in range(heads):
            for i in range(int(p.row_ptr[b, h, 1])):
                number = int(p.bitmap[b, h, i])
                cells[b, h, int(p.key_tile[b, h, i])] = 1 if number < 0 else bits[number]
    x = cells.permute(0, 1, 3, 2, 4).flatten(3)[:, :, : frame.q_len, : int(p.key_stop.max())]
    return x.repeat_interleave(frame.num_heads // heads, 1)


def of_pages(scene: Scene) -> st.SearchStrategy[tuple[Spec, Scene]]:
    """Cases whose queries, a multiple of 8, are the last tokens."""
    queries, keys = sorted((scene.q_len, scene.kv_len))
    scene = replace(scene, q_len=max(8, queries // 8 * 8), kv_len=max(8, keys), q_start=None)
    return st.tuples(specs(scene), st.just(scene))


@examples(60, 2000, scenes().flatmap(of_pages), st.integers(0, 1 << 20))
def test_pages_of_drawn_patterns(case: tuple[Spec, Scene], seed: int) -> None:
    spec, scene = case
    check(build(spec), Frame.build(*scene.arguments.values()), 80, seed)


@pytest.mark.parametrize("name", named(130))
def test_pages_of_named_patterns(name: str) -> None:
    """Pages of several tiles, of which some are full and some empty."""
    pattern = named(500)[name]
    for seed, queries in enumerate((16, 64, 128)):
        entries = (pattern.num_batches() or 2) if seed else 1
        check(pattern, Frame.build(queries, 500, 4, 2, None), 128, seed, entries)


@pytest.mark.parametrize("name", named(130))
def test_the_kernel_builds_pages_of_each_named_pattern(name: str, monkeypatch: Any) -> None:
    """None of them falls back to torch's operators without being noticed."""
    calls = []
    monkeypatch.setattr(
        gathered_keys, "_page_in_torch", lambda *x: calls.append(x) or torch_page(*x)
    )
    check(named(500)[name], Frame.build(64, 500, 4, 2, None), 128, 0)
    assert len(calls) == len(named(500)[name].branches)  # by `only_torch`


def test_a_mask_that_is_wrong_by_one_is_noticed(monkeypatch: Any) -> None:
    """Planted: the kernel sees a window with one more key."""
    frame, native = Frame.build(64, 500, 2, 2, None), gathered_keys.native_page
    check(sr.SlidingWindow(70), frame, 128, 0)
    wider = [sr.SlidingWindow(71)]
    monkeypatch.setattr(gathered_keys, "native_page", lambda _, *rest: native(wider, *rest))
    with pytest.raises(AssertionError):
        check(sr.SlidingWindow(70), frame, 128, 0)


@pytest.mark.parametrize(
    ("first", "keys", "queries", "block"),
    [
        (torch.zeros(2, dtype=torch.int64), torch.zeros(1, 9, dtype=torch.int64), 8, 16),
        (torch.zeros(1), torch.zeros(1, 9, dtype=torch.int64), 8, 16),
        (torch.zeros(1, dtype=torch.int64), torch.zeros(9, dtype=torch.int64), 8, 16),
        (torch.zeros(1, dtype=torch.int64), torch.zeros(1, 9, dtype=torch.int64), 17, 16),
        (torch.zeros(1, dtype=torch.int64), torch.zeros(1, 9, dtype=torch.int64), 8, 12),
        (torch.zeros(1, dtype=torch.int64), torch.zeros(1, 9, dtype=torch.int64), 8, 264),
    ],
)
def test_a_malformed_page_is_refused(
    first: torch.Tensor, keys: torch.Tensor, queries: int, block: int
) -> None:
    with pytest.raises(RuntimeError, match="malformed page"):
        library().page([0, 0, 0, 0], [], first, keys, queries, block)
