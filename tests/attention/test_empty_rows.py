"""Rows, columns and dims that are empty."""

import math
from dataclasses import replace

import pytest
import torch
from each_backend import attend, each_call
from oracles.attention_oracle import (
    Case,
    assert_close,
    dense_counts,
    gradients,
    inputs,
    workspace,
)
from oracles.kinds import random_table

import sparsering as sr

WITH_EMPTY_ROWS = [
    sr.LongNet((16, 48), (2, 3)),  # residues 0 (2) and 0 (3): rows 1, 5, 7, .. see nothing
    sr.Causal() & sr.GlobalTokens(3, rows=False) & sr.Documents((30, 33)),
    sr.GlobalTokens(0),
    sr.KeyPadding((0, 9)),
    sr.SlidingWindow(2) & sr.KeyPadding((20, 0)),
    sr.Blocks(random_table(5, 5), 16),
]


@pytest.mark.parametrize(
    ("each_backend", "dtype", "pattern"),
    each_call(
        [torch.float64, torch.float32, torch.bfloat16],
        WITH_EMPTY_ROWS,
        fast=lambda backend, dtype, pattern: (
            backend != "triton" or pattern in (WITH_EMPTY_ROWS[0], WITH_EMPTY_ROWS[3])
        ),
    ),
    indirect=["each_backend"],
)
def test_an_empty_row_has_out_0_lse_minus_inf_and_zero_gradients(pattern, dtype, each_backend):
    case = Case(2, 2, 2, 63, 63, 8, 8)
    args = inputs(case, dtype)
    counts = dense_counts(pattern, case)
    empty, unseen = counts.sum(-1) == 0, counts.sum(-2) == 0
    assert empty.any()
    for limit in (1, 64 << 20) if each_backend == "gather" else (64 << 20,):
        with workspace(limit):
            out, lse = attend(*args, pattern)
            dq, dk, dv = gradients((out, lse), args)
        assert out[empty].eq(0).all() and lse[empty].eq(-torch.inf).all()
        assert lse[~empty].isfinite().all()
        assert dq[empty].eq(0).all()
        assert dk[unseen].eq(0).all() and dv[unseen].eq(0).all()
        assert all(x.isfinite().all() for x in (out, dq, dk, dv))


def test_more_queries_than_keys_leaves_the_first_rows_of_a_causal_pattern_empty():
    args = inputs(Case(1, 1, 1, 50, 20))
    out, lse = attend(*args, sr.Causal())
    assert out[:, :, :30].eq(0).all() and lse[:, :, :30].eq(-torch.inf).all()
    assert_close(out[:, :, 30], args[2][:, :, 0], 1e-15)


SIZES_OF_0 = [
    {"batch": 0},
    {"num_heads": 0, "num_kv_heads": 0},
    {"num_heads": 0},
    {"q_len": 0},
    {"kv_len": 0},
    {"q_len": 0, "kv_len": 0},
    {"head_dim": 0},
    {"value_dim": 0},
    {"head_dim": 0, "value_dim": 0},
]
DENSE_MIXED_AND_NONE = [sr.Full(), sr.Causal() & sr.LongNet((4, 8), (1, 2)), sr.GlobalTokens(0)]


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize(
    ("each_backend", "dtype", "sizes", "pattern"),
    each_call(
        [torch.float64, torch.bfloat16],
        SIZES_OF_0,
        DENSE_MIXED_AND_NONE,
        fast=lambda backend, dtype, sizes, pattern: (
            (SIZES_OF_0.index(sizes) + DENSE_MIXED_AND_NONE.index(pattern) + dtype.itemsize) % 3
            == (backend == "cpu")
        ),
    ),
    indirect=["each_backend"],
)
def test_a_dim_of_size_0_gives_an_empty_result_or_empty_rows(sizes, pattern, dtype):
    case = replace(Case(2, 4, 2, 21, 21, 4, 2), **sizes)
    args = inputs(case, dtype)
    out, lse = attend(*args, pattern)
    assert out.shape == (case.batch, case.num_heads, case.q_len, case.value_dim)
    assert lse.shape == out.shape[:3]
    assert out.dtype == dtype
    if case.kv_len == 0:
        assert out.eq(0).all() and lse.eq(-torch.inf).all()
    elif case.head_dim == 0:  # every score is 0
        assert_close(lse, dense_counts(pattern, case).sum(-1).log().to(lse.dtype), 1e-6, "lse")
        mean = dense_counts(pattern, case).double()
        mean = mean / mean.sum(-1, keepdim=True).clamp(min=1)
        expected = mean @ args[2].double().repeat_interleave(2, 1)
        assert_close(out.double(), expected, torch.finfo(dtype).eps, "out")
    elif case.value_dim == 0:
        filled = torch.zeros(*args[1].shape[:3], 1, dtype=dtype)
        assert_close(lse, attend(*args[:2], filled, pattern)[1], 1e-6, "lse")
    for grad, x in zip(gradients((out, lse), args), args, strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype
        assert grad.isfinite().all()


@pytest.mark.parametrize("backend", ["gather", "reference"])
def test_key_padding_of_no_batch_entries(backend):
    args = inputs(Case(batch=0))
    out, lse = attend(*args, sr.KeyPadding(()), backend=backend)
    assert (out.shape, lse.shape) == (args[0].shape, args[0].shape[:3])
    with pytest.raises(ValueError, match="for 0 batch entries, got a query of 2"):
        attend(*inputs(Case()), sr.KeyPadding(()), backend=backend)


def test_one_token_copies_its_value():
    query, key, value = inputs(Case(1, 1, 1, 1, 1))
    for pattern in (sr.Full(), sr.Causal(), sr.LongNet((4, 8), (1, 2)), sr.Full() + sr.Full()):
        out, lse = attend(query, key, value, pattern)
        assert_close(out, value, 1e-15)
        number = pattern.to_dense(1).sum().double()
        score = (query * key).sum() / math.sqrt(16) + number.log()
        assert_close(lse.flatten()[0], score, 1e-14)
