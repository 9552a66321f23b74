"""Traps that other implementations of sparse attention fell into."""

import math
import warnings

import pytest
import torch
from each_backend import attend, each_call, reference
from oracles.attention_oracle import (
    Case,
    assert_close,
    assert_same_attention,
    attend_by_rows,
    dense_counts,
    gradients,
    inputs,
)

import sparsering as sr


@pytest.mark.parametrize("score", [1e4, -1e4])
def test_scores_of_1e4_neither_overflow_nor_look_masked(score):
    query, key, value = inputs(Case(1, 1, 1, 40, 40, 4, 4), requires_grad=False)
    query, key = torch.ones_like(query), key * 0.1 + score / 4
    args = tuple(x.requires_grad_() for x in (query, key, value))
    pattern = sr.LongNet((16, 32), (2, 3)) & sr.Causal()
    expected = attend_by_rows(*args, dense_counts(pattern, Case(1, 1, 1, 40, 40)), 1.0)
    got = attend(*args, pattern, scale=1.0)
    # scores of 1e4 are known to 1e4 units in the last place
    assert_same_attention(got, expected, args, None, 2e-11, 1e-9)


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize(
    ("each_backend", "dtype"),
    each_call([torch.float64, torch.float32, torch.bfloat16], fast=lambda *call: True),
    indirect=["each_backend"],
)
def test_an_lse_of_exactly_0_is_not_an_empty_row(dtype):
    query, key, value = inputs(Case(1, 1, 1, 33, 33, 4, 4), dtype, requires_grad=False)
    query[:, :, 32] = 0  # alone in its segment of 16 with one key: score 0, lse 0
    one, one_lse = attend(query, key, value, sr.Dilated(16, 1))
    assert one_lse[0, 0, 32] == 0
    assert torch.equal(one[:, :, 32], value[:, :, 32])
    pattern = sr.LongNet((16, 64), (1, 4))
    for order in (pattern, sr.Dilated(64, 4) + sr.Dilated(16, 1)):
        out, lse = attend(query, key, value, order)
        expected = (value[0, 0, 32].double() + value[0, 0, 0::4].double().sum(0)) / 10
        assert_close(out[0, 0, 32].double(), expected, torch.finfo(dtype).eps, "out")
        assert lse[0, 0, 32].item() == pytest.approx(math.log(10), abs=1e-6)


def test_an_lse_of_exactly_0_of_a_whole_row():
    args = inputs(Case(1, 1, 1, 20, 20, 4, 4))
    with torch.no_grad():
        args[0].zero_()
    got = attend(*args, sr.SlidingWindow(0))
    assert got[1].eq(0).all()
    assert_same_attention(got, reference(*args, sr.SlidingWindow(0)), args)


@pytest.mark.parametrize("length", [1, 5, 15, 16])
def test_a_segment_longer_than_the_sequence_is_one_short_segment(length):
    case = Case(1, 2, 2, length, length, 4, 4)
    args = inputs(case)
    pattern = sr.LongNet((16, 1000), (1, 5))
    positions = torch.arange(length)
    counts = torch.ones(2, length, length, dtype=torch.int64)
    for head in (0, 1):  # offset = head
        on_grid = positions % 5 == head
        counts[head] += on_grid[:, None] & on_grid
    assert_same_attention(attend(*args, pattern), attend_by_rows(*args, counts[None]), args)


def test_a_rate_that_does_not_divide_the_segment_restarts_at_each_segment():
    case = Case(1, 2, 2, 40, 40, 4, 4)
    args = inputs(case)
    counts = torch.zeros(2, 40, 40, dtype=torch.int64)
    for head in range(2):
        for p in range(40):
            for k in range(40):
                same = p // 7 == k // 7
                counts[head, p, k] = same and p % 7 % 3 == head and k % 7 % 3 == head
    assert_same_attention(
        attend(*args, sr.Dilated(7, 3)), attend_by_rows(*args, counts[None]), args
    )


def test_a_branch_twice_adds_log_2_to_lse_and_nothing_to_out():
    args = inputs(Case(1, 2, 2))
    out, lse = attend(*args, sr.LongNet((16,), (2,)))
    twice, twice_lse = attend(*args, sr.LongNet((16, 16), (2, 2)))
    assert_close(twice, out, 1e-15)
    assert_close(twice_lse, lse + math.log(2), 1e-14)
    expected = reference(*args, sr.LongNet((16, 16), (2, 2)))
    assert_same_attention((twice, twice_lse), expected, args)


def test_a_key_of_two_branches_counts_twice_and_a_key_of_a_union_once():
    args = inputs(Case(1, 1, 1, 48, 48))
    mixture, mixture_lse = attend(*args, sr.Causal() + sr.SlidingWindow(4))
    union, union_lse = attend(*args, sr.Causal() | sr.SlidingWindow(4))
    causal = attend(*args, sr.Causal())
    assert torch.equal(union, causal[0]) and torch.equal(union_lse, causal[1])
    bias = math.log(2) * sr.SlidingWindow(4).to_dense(48).double()
    expected = attend_by_rows(*args, torch.ones(48, 48).tril(), bias=bias)
    assert_same_attention((mixture, mixture_lse), expected, args)
    assert (mixture_lse - union_lse).min() > 1e-2


def test_offsets_go_by_head_and_are_the_same_in_every_branch():
    args = inputs(Case(1, 4, 4, 64, 64))
    out, lse = attend(*args, sr.LongNet((32, 64), (2, 4)))
    for head in range(4):
        own = [x[:, head : head + 1] for x in args]
        branches = sr.Dilated(32, 2, head % 2) + sr.Dilated(64, 4, head)
        got = attend(*own, branches)
        assert_close(out[:, head : head + 1], got[0], 1e-14)
        assert_close(lse[:, head : head + 1], got[1], 1e-14)
        empty = dense_counts(branches, Case(1, 1, 1, 64, 64)).sum(-1)[0, 0] == 0
        assert torch.equal(lse[0, head] == -torch.inf, empty)
        assert torch.equal(~empty, torch.arange(64) % 2 == head % 2)


def test_query_heads_of_a_group_share_the_offset_of_their_kv_head():
    query, key, value = inputs(Case(1, 6, 2, 64, 64))
    out, lse = attend(query, key, value, sr.Dilated(32, 4))
    for head in range(6):
        kv = head // 3
        own = (query[:, head : head + 1], key[:, kv : kv + 1], value[:, kv : kv + 1])
        got = attend(*own, sr.Dilated(32, 4, kv))
        assert_close(out[:, head : head + 1], got[0], 1e-14)
        assert torch.equal(lse[0, head].isfinite(), torch.arange(64) % 4 == kv)


RAGGED = [
    sr.Full(),
    sr.LongNet((16, 48), (1, 2)),
    sr.LongNet((7, 1000), (1, 3)),
    sr.SlidingWindow(20, 20),
    sr.BlockWindow(1, 32),
    sr.Hierarchical(((16, 48), (32, None)), 16),
]


def is_fast(backend: str, dtype: torch.dtype, pattern: sr.Pattern, length: int) -> bool:
    if backend == "triton":
        return length == 33 and pattern in RAGGED[1:4:2]
    return length == {8: 131, 4: 100, 2: 33}[dtype.itemsize] or (backend == "cpu" and length == 131)


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize(
    ("each_backend", "dtype", "pattern", "length"),
    each_call([torch.float64, torch.float32, torch.bfloat16], RAGGED, [33, 100, 131], fast=is_fast),
    indirect=["each_backend"],
)
def test_a_ragged_end_sees_no_padding(pattern, dtype, length):
    query, key, value = inputs(Case(1, 2, 2, length, length, 8, 8), dtype, requires_grad=False)
    out, lse = attend(query * 0 - 9, key * 0 + 9, torch.ones_like(value), pattern)
    reached = lse.isfinite()
    expected = reached[..., None].to(dtype).expand_as(out)
    assert_close(out, expected, 16 * torch.finfo(dtype).eps)  # a zero key would weigh all
    number = dense_counts(pattern, Case(1, 2, 2, length, length)).sum(-1)
    score = -9 * 9 * 8**0.5
    assert_close(lse.double(), number.double().log() + score, 1e-5)


def test_the_gradient_is_not_that_of_detached_branch_weights():
    case = Case(1, 2, 2, 64, 64)
    args = inputs(case)
    branches = (sr.Dilated(16, 1) & sr.Causal(), sr.Dilated(64, 2) & sr.Causal())
    counts = [dense_counts(branch, case) for branch in branches]
    parts = [attend_by_rows(*args, c) for c in counts]
    lse = torch.stack([part[1] for part in parts])
    weights = lse.softmax(0)[..., None]  # no row is empty in the first branch
    detached = sum(w.detach() * part[0] for w, part in zip(weights, parts, strict=True))
    out, _ = attend(*args, branches[0] + branches[1])
    expected, _ = attend_by_rows(*args, counts[0] + counts[1])
    assert_close(out, detached, 1e-12, "forward is the same")
    ours, true, wrong = (gradients([x], args) for x in (out, expected, detached))
    for name, a, b, c in zip(("dquery", "dkey", "dvalue"), ours, true, wrong, strict=True):
        assert_close(a, b, 1e-12, name)
        difference = ((b - c).norm() / b.norm()).item()
        assert difference > 0.05 if name != "dvalue" else difference < 1e-12


def test_tokens_before_heads_are_warned_of():
    query = torch.randn(1, 512, 4, 8)  # [B, N, H, D]
    with pytest.warns(UserWarning, match=r"512 heads of 4 tokens.*transpose\(1, 2\)") as told:
        sr.attention(query, query, query, sr.Causal())
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sr.attention(*[query.transpose(1, 2)] * 3, sr.Causal())
        one = torch.randn(1, 256, 1, 8)  # a token of many heads
        sr.attention(one, one, one, sr.Causal())
