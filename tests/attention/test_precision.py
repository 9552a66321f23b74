"""Lower precisions, by the error of dense attention in the same dtype.

Lower precisions may be off by at most twice what dense attention written out in the same dtype is
off by, in out, lse and each gradient: in the root mean square, which is steady. The one largest
error of some thousands is not (of two such, one is three times the other now and then), so it may
be four times that of dense attention.
"""

import pytest
import torch
from each_backend import attend, each_call
from oracles.attention_oracle import (
    PATTERNS,
    Case,
    dense_attention,
    dense_counts,
    errors,
    gradients,
    inputs,
    workspace,
)
from torch import Tensor

import sparsering as sr

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOWER = (*DTYPES[:2], pytest.param(torch.float16, marks=pytest.mark.slow))
PRECISION_PATTERNS = (
    *("full", "causal", "dilated window", "longnet", "longnet, every rate above 1"),
    *("random blocks", "mixture with overlap", "mixture under masks"),
)


def assert_at_most_twice_the_eager_error(
    pattern: sr.Pattern,
    case: Case,
    dtype: torch.dtype,
    args: tuple[Tensor, ...] | None = None,
    scale: float | None = None,
    bias: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Root mean square and largest error of out, lse and gradients against exact ones.

    `bias` is a block bias, and the same spread over the pairs. A hundredth of a rounding unit of
    the largest number is granted on top: enough for an eager result that happens to be exact.
    """
    args = inputs(case, dtype) if args is None else args
    counts = dense_counts(pattern, case)
    exact_args = [x.detach().double().requires_grad_() for x in args]
    pairs = None if bias is None else bias[1]
    exact = dense_attention(*exact_args, counts, scale=scale, bias=pairs)
    eager = dense_attention(*args, counts, scale=scale, bias=pairs)
    blocks = {} if bias is None else {"block_bias": bias[0]}
    got = attend(*args, pattern, scale=scale, block_size=case.block_size, **blocks)
    assert got[1].dtype == torch.float32
    named = [("out", *(x[0] for x in (got, eager, exact)))]
    named += [("lse", *(x[1] for x in (got, eager, exact)))]
    wrt = zip(
        ("dquery", "dkey", "dvalue"),
        gradients([got[0]], args),
        gradients([eager[0]], args),
        gradients([exact[0].to(dtype)], exact_args),
        strict=True,
    )
    for name, ours, theirs, true in (*named, *wrt):
        true = true.detach().double()
        assert not ours.isnan().any(), name
        finite = true.isfinite()
        largest = true[finite].abs().max().item() if finite.any() else 0.0
        grant = 0.01 * torch.finfo(dtype).eps * max(largest, 1e-6)
        (rms, most), (eager_rms, eager_most) = errors(ours, true), errors(theirs, true)
        assert rms <= 2 * eager_rms + grant, f"{name}: rms {rms:.3g}, eager {eager_rms:.3g}"
        assert most <= 4 * eager_most + grant, f"{name}: most {most:.3g}, eager {eager_most:.3g}"


@pytest.mark.parametrize(
    ("each_backend", "dtype", "name"),
    each_call(
        DTYPES,
        PRECISION_PATTERNS,
        fast=lambda backend, dtype, name: (
            dtype != torch.float16
            and (
                name == "mixture under masks"
                if backend == "triton"
                else PRECISION_PATTERNS.index(name) % 2 == (backend == "cpu")
            )
        ),
    ),
    indirect=["each_backend"],
)
def test_error_is_at_most_twice_that_of_dense_attention_in_the_dtype(name, dtype, each_backend):
    case = Case(2, 4, 2, 150, 150, 48, 40, 32)
    if each_backend == "triton":
        case = Case(1, 2, 1, 70, 70, 48, 40, 32)
    assert_at_most_twice_the_eager_error(PATTERNS[name](case), case, dtype)


@pytest.mark.usefixtures("each_cpu_backend")
@pytest.mark.parametrize("dtype", LOWER, ids=str)
def test_error_of_long_rows_is_at_most_twice_that_of_dense_attention(dtype):
    case = Case(1, 1, 1, 1000, 1000, 32, 32, 64)
    for pattern in (sr.LongNet((64, 256, 2000), (1, 2, 4)) & sr.Causal(), sr.Full()):
        assert_at_most_twice_the_eager_error(pattern, case, dtype)


@pytest.mark.usefixtures("each_cpu_backend")
@pytest.mark.parametrize("dtype", LOWER, ids=str)
def test_error_with_many_merges_is_at_most_twice_that_of_dense_attention(dtype):
    with workspace(1):
        case = Case(1, 2, 1, 400, 400, 16, 16, 16)
        assert_at_most_twice_the_eager_error(sr.Causal() + sr.SlidingWindow(90), case, dtype)


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize(
    ("each_backend", "dtype"),
    each_call(DTYPES, fast=lambda backend, dtype: dtype != torch.float16),
    indirect=["each_backend"],
)
def test_error_with_a_large_block_bias_is_at_most_twice_that_of_dense_attention(dtype):
    case = Case(1, 1, 1, 128, 128, 16, 16, 16)
    bias = 8 * torch.randn(1, 1, 64)
    pairs = bias.view(1, 1, 8, 8).repeat_interleave(16, 2).repeat_interleave(16, 3)
    assert_at_most_twice_the_eager_error(sr.Full(), case, dtype, bias=(bias, pairs))


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize(
    ("each_backend", "dtype", "score"),
    each_call(
        DTYPES,
        [1e4, -1e4],
        fast=lambda backend, dtype, score: (
            dtype != torch.float16
            and (score > 0 or (dtype == torch.float32 and backend != "triton"))
        ),
    ),
    indirect=["each_backend"],
)
def test_scores_of_1e4_cost_no_more_than_the_rounding_of_such_a_score(dtype, score):
    """The gradients rest on exp(score - lse), in which both are known to eps(float32) * 1e4."""
    case = Case(1, 2, 1, 60, 60, 4, 4, 16)
    query, key, value = inputs(case, dtype, requires_grad=False)
    query, key = torch.full_like(query, 50.0), key / 8 + score / 200
    args = [x.requires_grad_() for x in (query, key, value)]
    pattern = sr.LongNet((16, 32), (1, 2)) & sr.Causal()
    counts = dense_counts(pattern, case)
    exact_args = [x.detach().double().requires_grad_() for x in args]
    exact, eager = (dense_attention(*x, counts, scale=1.0) for x in (exact_args, args))
    got = attend(*args, pattern, scale=1.0, block_size=16)
    for ours, theirs, true in zip(got, eager, exact, strict=True):
        grant = torch.finfo(torch.float32).eps * 1e4
        assert errors(ours, true.detach())[1] <= 2 * errors(theirs, true.detach())[1] + grant
    wrt = zip(
        gradients([got[0]], args),
        gradients([eager[0]], args),
        gradients([exact[0].to(dtype)], exact_args),
        (key, query, value),
        strict=True,
    )
    for ours, theirs, true, factor in wrt:
        grant = 4 * torch.finfo(torch.float32).eps * 1e4 * factor.abs().max().item()
        assert errors(ours, true)[1] <= 2 * errors(theirs, true)[1] + grant
