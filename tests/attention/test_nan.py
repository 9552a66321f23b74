"""NaN and infinities stay in the rows that see them."""

import math

import pytest
import torch
from each_backend import attend
from oracles.attention_oracle import Case, dense_counts, gradients, inputs, workspace
from torch import Tensor

import sparsering as sr


def visiting_rows(pattern: sr.Pattern, case: Case, head: int, key_position: int) -> Tensor:
    """Bool [Nq]: queries of the tiles that visit the tile of one key position."""
    rows = torch.zeros(case.q_len, dtype=torch.bool)
    for branch in pattern.branches:
        step = branch.dilation_rate if isinstance(branch, sr.Dilated) else 1
        layout = branch.layout(**case.heads, block_size=case.block_size)
        for q, k, num_queries, num_keys in layout.entries(head=head).tolist():
            if key_position in range(k, k + num_keys * step, step):
                rows[q : q + num_queries * step : step] = True
    return rows


PATTERNS = [
    sr.Causal() + sr.SlidingWindow(5),
    sr.LongNet((16, 32), (1, 2)),
    sr.Causal(),
    sr.SlidingWindow(20, 20),
    sr.BlockDilated((2,), 16),
]


@pytest.mark.parametrize(
    ("each_backend", "pattern", "where"),
    [
        pytest.param(backend, pattern, where, marks=() if i + j < fast else pytest.mark.slow)
        for backend, fast in (("gather", 2), ("cpu", 3), ("triton", 1))
        for i, pattern in enumerate(PATTERNS)
        for j, where in enumerate(("key", "value"))
    ],
    indirect=["each_backend"],
)
def test_nan_and_inf_reach_only_rows_that_visit_their_tile(pattern, where, each_backend):
    case = Case(2, 4, 2, 100, 100, 8, 8, 16)
    runs = [(torch.float32, 64 << 20), (torch.float32, 1), (torch.bfloat16, 64 << 20)]
    if each_backend == "triton":
        case, runs = Case(2, 2, 2, 52, 52, 8, 8, 32), runs[:1]
    touched = torch.zeros(2, case.num_heads, case.q_len, dtype=torch.bool)
    for head in range(case.num_heads)[case.num_heads // 2 :]:  # of kv head 1
        touched[1, head] = visiting_rows(pattern, case, head, 50)
    assert 0 < touched.sum() < 200
    seen = dense_counts(pattern, case)[..., 50].gt(0) & touched
    for dtype, limit in runs:
        args = inputs(case, dtype, requires_grad=False)
        with workspace(limit):
            clean = attend(*args, pattern, block_size=case.block_size)
            for bad in (math.nan, math.inf, -math.inf):
                spoilt = [x.clone() for x in args]
                spoilt[1 if where == "key" else 2][1, 1, 50] = bad
                got = attend(*spoilt, pattern, block_size=case.block_size)
                for a, b in zip(got, clean, strict=True):
                    assert torch.equal(a[~touched], b[~touched])
                if math.isnan(bad):
                    assert got[0][seen].isnan().any(-1).all()


def test_nan_in_the_first_key_reaches_out_and_lse_of_all_that_see_it(each_backend):
    """A maximum over NaN and what is masked out must not look like a row without keys."""
    length = 32 if each_backend == "triton" else 64
    case = Case(1, 2, 1, length, length, 8, 8, 16)
    for pattern in (sr.Causal(), sr.SlidingWindow(0) | sr.Dilated(64, 2, 0), sr.Full()):
        for q_len in (length, 2):
            query, key, value = inputs(case, torch.float32, requires_grad=False)
            for position in (0, 15, length - 1):
                spoilt = key.clone()
                spoilt[:, :, position] = math.nan
                out, lse = attend(query[:, :, -q_len:], spoilt, value, pattern, block_size=16)
                seen = dense_counts(pattern, case)[..., -q_len:, position] > 0
                assert out[seen].isnan().all() and lse[seen].isnan().all()


def test_nan_and_inf_reach_only_the_gradients_of_rows_that_visit_their_tile(each_backend):
    length = 52 if each_backend == "triton" else 100
    case = Case(1, 2, 1, length, length, 8, 8, 16)
    pattern = sr.Causal() & sr.SlidingWindow(30)
    rows = visiting_rows(pattern, case, 0, 50)
    args = inputs(case, torch.float32)
    dq = gradients(attend(*args, pattern, block_size=16), args)[0]
    for where in (1, 2):
        spoilt = [x.detach().clone() for x in args]
        spoilt[where][:, :, 50] = math.nan
        spoilt = [x.requires_grad_() for x in spoilt]
        got = gradients(attend(*spoilt, pattern, block_size=16), spoilt)[0]
        assert torch.equal(got[:, :, ~rows], dq[:, :, ~rows])
