"""Masks declared as intervals of keys have exactly the pairs of their definition."""

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from oracles.patterns_oracle import Spec, build
from oracles.strategies import Scene, cases, examples, masks, trees
from test_native import named
from test_restarts import documents
from torch import Tensor

import sparsering as sr
from sparsering.layouts import intervals
from sparsering.layouts.intervals import endpoints
from sparsering.patterns.algebra import Frame, parts_of
from sparsering.patterns.varlen_mask import Varlen

MOST = 100  # more than the drawn sequences have


def pairs(found: Tensor, kv_len: int) -> Tensor:
    """Reads endpoints [B, H, odd, Nq] as a mask of pairs [B, H, Nq, Nk]."""
    assert found.dtype == torch.int32 and found.shape[2] % 2 == 1 and found.is_contiguous()
    assert (found.diff(dim=2) >= 0).all() and (found >= 0).all() and (found <= kv_len).all()
    key = torch.arange(kv_len)
    begins = torch.cat((torch.zeros_like(found[:, :, :1]), found[:, :, 1::2]), 2)
    stops = found[:, :, ::2]
    return ((begins[..., None] <= key) & (key < stops[..., None])).any(2)


def check(pattern: sr.Pattern, frame: Frame, dense: Tensor) -> bool:
    """Compares the pairs of a pattern's intervals with `dense`; returns whether it has some."""
    found = endpoints(pattern, frame, MOST)
    if isinstance(found, str):
        return False
    dense = dense.bool() if dense.dim() == 4 else dense.bool()[None]
    wanted = dense.expand(len(found), *dense.shape[1:]) if len(dense) == 1 else dense
    got = pairs(found, frame.kv_len)
    if frame.num_heads:
        assert torch.equal(got.expand_as(wanted) if wanted.shape[1] > 1 else got, wanted)
    most = (torch.nn.functional.pad(wanted, (1, 1)).int().diff(dim=3) == 1).sum(3)
    most = int(most.max()) if most.numel() else 0
    assert isinstance(endpoints(pattern, frame, most), Tensor)
    if most:
        text = f"a query sees {most} intervals of keys, more than {most - 1}"
        told = endpoints(pattern, frame, most - 1)
        assert told == text or (frame.q_len > intervals._QUERIES and isinstance(told, str))
    return True


def is_declared(pattern: sr.Pattern) -> bool:
    """Whether every part of a pattern is one of the masks that list intervals."""
    others = {"Mixture", "SelectedBlocks", "Neighbourhood", "Rearranged", "Dense"}
    return not any(
        type(part).__name__ in others
        or getattr(part, "dilation", 1) > 1
        or getattr(part, "dilation_rate", 1) > 1
        for part in parts_of(pattern)
    )


@examples(120, 6000, cases(with_random=True))
def test_intervals_of_drawn_patterns(case: tuple[Spec, Scene]) -> None:
    spec, scene = case
    pattern, arguments = build(spec), scene.arguments
    frame = Frame.build(*arguments.values())
    dense = pattern.to_dense(**arguments)
    assert check(pattern, frame, dense) or not is_declared(pattern)


@examples(30, 2000, cases(max_length=200, min_length=60))
def test_intervals_of_longer_patterns(case: tuple[Spec, Scene]) -> None:
    spec, scene = case
    pattern = build(spec)
    check(pattern, Frame.build(*scene.arguments.values()), pattern.to_dense(**scene.arguments))


@examples(40, 1000, documents())
def test_intervals_in_documents_where_positions_restart(case: Any) -> None:
    spec, q_lengths, kv_lengths, heads = case
    pattern = Varlen(q_lengths, kv_lengths, build(spec))
    frame = Frame.build(sum(q_lengths), sum(kv_lengths), *heads.values(), 0)
    dense = pattern.to_dense(sum(q_lengths), sum(kv_lengths), **heads, q_start=0)
    assert check(pattern, frame, dense) or not is_declared(pattern)


@examples(40, 1000, st.data())
def test_intervals_of_trees(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 60))
    scene = Scene(length, length, 2, 1, data.draw(st.integers(-9, 9)), 1)
    spec = data.draw(st.one_of(trees(scene), masks(scene, 1)))
    pattern = build(spec)
    dense = pattern.to_dense(**scene.arguments)
    frame = Frame.build(*scene.arguments.values())
    assert check(pattern, frame, dense) or not is_declared(pattern)


@pytest.mark.parametrize("name", named(130))
def test_intervals_of_named_patterns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = named(130)[name]
    heads = {"num_heads": 4, "num_kv_heads": 2}
    for queries in (1 << 12, 7):  # all queries at once, and some at a time
        monkeypatch.setattr(intervals, "_QUERIES", queries)
        found = check(pattern, Frame.build(130, None, 4, 2, None), pattern.to_dense(130, **heads))
        assert found or not is_declared(pattern)


def test_it_says_why_a_pattern_has_no_intervals() -> None:
    frame = Frame.build(6, 6, 2, 2, None)
    for pattern, told in (
        (sr.Causal() + sr.Full(), "a mixture counts some pairs twice"),
        (sr.SlidingWindow(4, 0, 2), "the keys of SlidingWindow have a distance from each other"),
        (sr.Dilated(4, 2) & sr.Causal(), "the keys of Dilated have a distance from each other"),
        (sr.Packed((2, 4), sr.Dilated(4, 2)), "the keys of Dilated have a distance from"),
        (sr.Dense(torch.ones(6, 6, dtype=torch.bool)), "Dense declares no intervals of keys"),
        (
            sr.SelectedBlocks(torch.zeros(1, 1, 6, 1, dtype=torch.int64), 1, query_block=1),
            "SelectedBlocks lists blocks, and others in each call",
        ),
        (sr.KeyMask(torch.tensor([1, 0, 1, 0, 1, 1]).bool()), "sees 3 intervals of keys, more"),
    ):
        found = endpoints(pattern, frame, 2)
        assert isinstance(found, str) and told in found, (pattern, found)


def test_a_key_mask_of_many_runs_is_refused_before_its_intervals_are_listed() -> None:
    frame = Frame.build(2000, 2000, 1, 1, None)
    mask = sr.KeyMask(torch.arange(2000) % 4 == 0)
    text = "KeyMask allows 499 runs of keys or more, 256 is the most"
    assert endpoints(mask & sr.SlidingWindow(3), frame, 4) == text


def test_the_cost_follows_the_intervals() -> None:
    frame = Frame.build(1 << 17, 1 << 17, 8, 8, None)
    pattern = sr.Causal() & (sr.SlidingWindow(4095) | sr.GlobalTokens(4))
    found = endpoints(pattern, frame, 4)
    assert isinstance(found, Tensor) and found.shape == (1, 1, 3, 1 << 17)
    query = torch.arange(1 << 17)
    begin = (query - 4095).clamp(min=0)
    wanted = [torch.where(begin > 4, 4, query + 1), torch.where(begin > 4, begin, query + 1)]
    # a window from key 1 to 4 touches the first 4 tokens
    assert torch.equal(found[0, 0, 2], (query + 1).int())
    assert torch.equal(found[0, 0, :2], torch.stack(wanted).int())
