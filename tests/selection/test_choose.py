"""`select_blocks` against sorting by its definition."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import blocks_oracle

from sparsering.selection import choose, select_blocks


@st.composite
def selections(draw):
    """Scores with ties, NaN and -inf, and options that fit them."""
    outer = draw(st.lists(st.integers(1, 2), max_size=2))
    rows, blocks, row = (
        draw(st.integers(1, 6)),
        draw(st.integers(1, 9)),
        draw(st.sampled_from((1, 2, 8))),
    )
    some = st.sampled_from((0.0, -0.0, 1.0, 1.5, -2.0, 1e30, math.nan, -math.inf, 1e-40))
    each = draw(st.lists(some, min_size=rows * blocks * math.prod(outer), max_size=1 << 10))
    scores = torch.tensor(each[: rows * blocks * math.prod(outer)]).view(*outer, rows, blocks)
    sink, local = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    options = {
        "k": draw(st.integers(sink + local, 12)), "block_size": 8, "query_block": row,
        "sink": sink, "local": local, "causal": draw(st.booleans()),
        "q_start": draw(st.integers(-20, 80)),
        "top_p": draw(st.sampled_from((None, 0.3, 0.9, 1.0))),
    }  # fmt: skip
    return scores, options


@given(selections())
def test_blocks_are_those_that_sorting_gives(drawn):
    scores, options = drawn
    k = options.pop("k")
    expected = blocks_oracle.select_blocks(scores, k, **options)
    assert torch.equal(select_blocks(scores, k, **options), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_many_blocks_in_parts(dtype, monkeypatch):
    monkeypatch.setattr(choose, "_AT_A_TIME", 1000)
    scores = torch.randn(2, 2, 64, 40).to(dtype)
    for options in ({}, {"top_p": 0.7}, {"sink": 0, "local": 3, "causal": False}):
        found = select_blocks(scores, 6, block_size=4, query_block=2, **options)
        expected = blocks_oracle.select_blocks(
            scores.float(), 6, block_size=4, query_block=2, **options
        )
        assert torch.equal(found, expected)


def test_ties_go_to_the_first_block():
    found = select_blocks(torch.full((1, 2000), 2.0), 5, block_size=1, q_start=1999)
    assert found.tolist() == [[0, 1999, 1, 2, 3]]
    found = select_blocks(
        torch.zeros(1, 4) * torch.tensor([1, -1, 1, -1]),
        4,
        block_size=1,
        sink=0,
        local=0,
        q_start=9,
    )
    assert found.tolist() == [[0, 1, 2, 3]]


def test_no_block_of_the_future_whatever_its_score():
    scores = torch.full((8, 8), 1.0).triu(1) * math.inf
    scores = scores.nan_to_num(0.0, math.inf)
    found = select_blocks(scores, 8, block_size=1, sink=0, local=0)
    for r, row in enumerate(found.tolist()):
        assert row == [*range(r + 1), *[-1] * (7 - r)]


def test_infinite_scores_are_the_first():
    scores = torch.tensor([[0.0, math.inf, 3.0, math.inf, -math.inf]])
    options = {"block_size": 1, "q_start": 9, "sink": 0, "local": 0}
    assert select_blocks(scores, 5, **options).tolist() == [[1, 3, 2, 0, -1]]
    assert select_blocks(scores, 5, top_p=0.6, **options).tolist() == [[1, 3, -1, -1, -1]]


def test_forced_blocks_take_slots_and_count_in_top_p():
    scores = torch.tensor([[0.1, 0.2, 0.6, 0.05, 0.05]]).log()
    options = {"block_size": 1, "q_start": 4}
    assert select_blocks(scores, 3, **options).tolist() == [[0, 4, 2]]
    assert select_blocks(scores, 4, top_p=0.7, **options).tolist() == [[0, 4, 2, -1]]
    assert select_blocks(scores, 4, top_p=0.8, **options).tolist() == [[0, 4, 2, 1]]
    assert select_blocks(scores, 4, top_p=0.01, **options).tolist() == [[0, 4, -1, -1]]
    hidden = torch.tensor([[-math.inf, 0.0, math.nan]])
    assert select_blocks(hidden, 3, block_size=1, q_start=2).tolist() == [[0, 2, 1]]
    assert select_blocks(hidden, 3, block_size=1, q_start=2, sink=0, local=0).tolist() == [
        [1, -1, -1]
    ]


def test_equal_shares_are_cut_exactly():
    scores = torch.full((1, 8), 3.3)
    options = {"block_size": 1, "q_start": 8, "sink": 0, "local": 0}
    for kept in range(1, 9):
        found = select_blocks(scores, 8, top_p=kept / 8, **options)
        assert found.tolist() == [[*range(kept), *[-1] * (8 - kept)]]


def test_a_top_p_of_1_is_no_limit():
    """A block whose share is nothing beside that of the first is chosen where there is room."""
    scores = torch.tensor([[100.0, 0.0, -1.0, -math.inf]])
    options = {"block_size": 1, "q_start": 9, "sink": 0, "local": 0}
    for top_p in (None, 1, 1.0):
        assert select_blocks(scores, 4, top_p=top_p, **options).tolist() == [[0, 1, 2, -1]]
    assert select_blocks(scores, 4, top_p=0.999, **options).tolist() == [[0, -1, -1, -1]]


def test_no_gradient_and_no_wait():
    scores = torch.randn(3, 5, requires_grad=True)
    found = select_blocks(scores, 2, block_size=1)
    assert not found.requires_grad and found.dtype == torch.int64
    on_meta = select_blocks(torch.empty(3, 5, device="meta"), 2, block_size=1, top_p=0.5)
    assert on_meta.shape == (3, 2)  # where asking for a number raises


def test_nothing_to_choose():
    assert select_blocks(torch.zeros(2, 0, 5), 3, block_size=1).shape == (2, 0, 3)
    for top_p in (None, 0.5, 1.0):
        none = select_blocks(torch.zeros(2, 4, 0), 3, block_size=1, top_p=top_p)
        assert torch.equal(none, torch.full((2, 4, 3), -1))
    assert select_blocks(torch.zeros(2, 4, 5), 0, block_size=1, sink=0, local=0).shape == (2, 4, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 1}, "at most k=1, got 1 . 1"),
        ({"k": 4, "sink": 3, "local": 2}, "at most k=4"),
        ({"k": -1}, "k must be at least 0"),
        ({"sink": -1}, "sink must be at least 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "top_p must be above 0"),
        ({"top_p": "most"}, "top_p must be above 0 .* got 'most'"),
        ({"top_p": torch.rand(2)}, "top_p must be above 0"),
        ({"top_p": math.nan}, "top_p must be above 0"),
        ({"query_block": 3}, "query_block must divide"),
        ({"scores": torch.zeros(4, 8, dtype=torch.int64)}, "floating point"),
        ({"scores": torch.zeros(4)}, "rows, blocks"),
    ],
)
def test_what_does_not_fit_is_said(options, message):
    given = {"scores": torch.zeros(4, 8), "k": 4, "block_size": 8}
    with pytest.raises(ValueError, match=message):
        select_blocks(**{**given, **options})


def test_one_forced_block_where_there_is_one():
    assert select_blocks(torch.zeros(2, 1), 1, block_size=8).tolist() == [[0], [0]]
