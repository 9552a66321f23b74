"""The gather and cpu backends against the reference: forward, gradients, and what goes wrong.

float64 agrees to 1e-12 forward and 1e-10 in each gradient. Lower precisions may be off by at most
twice what dense attention written out in the same dtype is off by, in out, lse and each gradient:
in the root mean square, which is steady. The one largest error of some thousands is not (of two
such, one is three times the other now and then), so it may be four times that of dense attention.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from attention_oracle import (
    PATTERNS,
    Case,
    arranged,
    assert_close,
    assert_same_attention,
    attend_by_rows,
    dense_counts,
    eager_attention,
    errors,
    gradients,
    inputs,
    random_table,
    workspace,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from patterns_oracle import Spec, build
from strategies import Scene, cases
from torch import Tensor

import sparsering as sr

_backend = {torch.float64: "gather"}  # of each dtype; those that are not here run on gather too


@contextmanager
def below_float64(backend: str) -> Iterator[None]:
    """Lower precisions run on this backend, where it can have them."""
    lower = [torch.float32, torch.bfloat16, torch.float16]
    if backend == "triton":  # its interpreter gets bfloat16 products wrong
        lower.remove(torch.bfloat16)
    _backend.update(dict.fromkeys(lower, backend))
    yield
    for dtype in lower:
        del _backend[dtype]


@pytest.fixture(params=["gather", "cpu"])
def each_cpu_backend(request) -> Iterator[str]:
    """Below float64, `attend` runs on this backend."""
    with below_float64(request.param):
        yield request.param


@pytest.fixture(params=["gather", "cpu", "triton"])
def each_backend(request) -> Iterator[str]:
    """Below float64, `attend` runs on this backend. Triton's kernels are interpreted: slow."""
    dtype = request.getfixturevalue("dtype") if "dtype" in request.fixturenames else torch.float32
    if request.param == "triton" and dtype not in (torch.float32, torch.float16):
        pytest.skip("the backend does not run in this dtype here")
    with below_float64(request.param):
        yield request.param


def attend(query: Tensor, key: Tensor, value: Tensor, pattern: sr.Pattern, **options):
    backend = _backend.get(query.dtype, "gather")
    return sr.attention(
        query, key, value, pattern, **{"backend": backend, "return_lse": True, **options}
    )


def reference(query: Tensor, key: Tensor, value: Tensor, pattern: sr.Pattern, **options):
    return attend(query, key, value, pattern, **options, backend="reference")


def assert_is_the_reference(pattern: sr.Pattern, case: Case, **options) -> None:
    args = inputs(case)
    options = {"q_start": case.q_start, "block_size": case.block_size, **options}
    got = attend(*args, pattern, **options)
    assert_same_attention(got, reference(*args, pattern, **options), args)


# The whole forward and backward, over patterns, shapes, strides and block sizes

SHAPES = {
    "square": Case(),
    "grouped heads": Case(1, 4, 2, 75, 75, 17, 5, 32, arrange="tokens before heads"),
    "one kv head, width 1": Case(2, 3, 1, 50, 70, 1, 3, 16, arrange="width before tokens"),
    "one query": Case(2, 4, 2, 1, 77, 48, 48, None, arrange="one head expanded"),
    "more queries than keys": Case(1, 2, 1, 60, 33, 8, 12, 48),
    "keys from 0": Case(2, 2, 2, 40, 90, 4, 4, 128, 0, "every other of a larger tensor"),
    "queries after the keys": Case(1, 6, 3, 20, 40, 3, 2, 64, 31),
    "one token": Case(1, 2, 2, 1, 1, 4, 4, None),
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=() if (j - i) % 8 in (0, 3, 6) else pytest.mark.slow)
        for i, name in enumerate(PATTERNS)
        for j, shape in enumerate(SHAPES)
    ],
)
def test_is_the_reference_forward_and_backward(name, shape):
    case = SHAPES[shape]
    assert_is_the_reference(PATTERNS[name](case), case)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(
    cases(with_random=True),
    st.sampled_from((1, 3, 16, 17)),
    st.sampled_from((1, 2, 16)),
    st.sampled_from((16, 32, 64, None)),
    st.sampled_from((1, 3000, 64 << 20)),
)
def test_is_the_reference_for_any_expression(
    case: tuple[Spec, Scene], width: int, value_width: int, block_size: int | None, limit: int
):
    spec, scene = case
    assume(scene.kv_len)  # no keys: the reference's own test
    shapes = Case.of(scene, width, value_width, block_size)
    with workspace(limit):
        assert_is_the_reference(build(spec), shapes)


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(cases(max_length=400, min_length=150, max_heads=3, with_random=True))
def test_is_the_reference_for_any_expression_at_several_blocks(case: tuple[Spec, Scene]):
    spec, scene = case
    assume(scene.kv_len)
    shapes = Case.of(scene, 5, 4, 16)
    assert_is_the_reference(build(spec), shapes)


@pytest.mark.parametrize("block_size", [16, 48, 80, 128, 256, None])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 127, 129, 257])
def test_ragged_lengths_at_every_block_size(length, block_size):
    case = Case(1, 2, 2, length, length, 8, 8, block_size)
    assert_is_the_reference(sr.LongNet((20, 50, 400), (1, 3, 4)) & sr.Causal(), case)
    assert_is_the_reference(sr.SlidingWindow(30, 30) | sr.GlobalTokens(3), case)


@pytest.mark.parametrize(
    "arrange",
    [
        "tokens before heads",
        "one head expanded",
        pytest.param("every other of a larger tensor", marks=pytest.mark.slow),
        pytest.param("width before tokens", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        *(pytest.param(x, marks=pytest.mark.slow) for x in (torch.float64, torch.bfloat16)),
    ],
)
def test_strides_change_no_bit(arrange, dtype, each_backend):
    case = Case(1, 2, 2, 70, 70, 8, 8, 16, arrange=arrange)
    if each_backend == "triton":
        case = replace(case, q_len=40, kv_len=40)
    args = inputs(case, dtype)
    assert not args[1].is_contiguous()
    copies = [x.detach().contiguous().requires_grad_() for x in args]
    pattern = sr.LongNet((16, 64), (1, 2)) & sr.Causal()
    got, expected = attend(*args, pattern), attend(*copies, pattern)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(gradients(got, args), gradients(expected, copies), strict=True):
        assert torch.equal(a, b)


def test_gradients_may_arrive_with_any_strides():
    case = Case(2, 2, 1, 40, 40, 8, 6)
    args = inputs(case)
    out, lse = attend(*args, sr.Causal())
    expected = gradients((out, lse), args, seed=3)
    generator = torch.Generator().manual_seed(3)
    grads = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (out, lse)]
    strided = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in grads]
    assert not any(x.is_contiguous() for x in strided)
    got = torch.autograd.grad((out, lse), args, strided)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, 1e-14)
    out, _ = attend(*args, sr.Causal())
    ones = torch.autograd.grad(out.sum(), args)  # an expanded scalar
    exact = torch.autograd.grad(reference(*args, sr.Causal())[0].sum(), args)
    for a, b in zip(ones, exact, strict=True):
        assert_close(a, b, 1e-12)


def test_gradient_through_lse_alone_and_through_out_alone():
    args = inputs(Case(1, 2, 1))
    pattern = sr.LongNet((16, 75), (1, 3))
    for index in (0, 1):
        got = gradients([attend(*args, pattern)[index]], args)
        expected = gradients([reference(*args, pattern)[index]], args)
        for a, b in zip(got, expected, strict=True):
            assert_close(a, b, 1e-10)
        assert got[0].abs().max() > 0.01


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_inputs_that_need_no_gradient_get_none(wanted):
    args = [x.detach() for x in inputs(Case(1, 2, 1))]
    for i in wanted:
        args[i].requires_grad_()
    out, _ = attend(*args, sr.Causal())
    out.sum().backward(retain_graph=True)
    assert [x.grad is not None for x in args] == [i in wanted for i in range(3)]
    wrt = [args[i] for i in wanted]
    expected = gradients([reference(*args, sr.Causal())[0]], wrt)
    for a, b in zip(gradients([out], wrt), expected, strict=True):
        assert_close(a, b, 1e-10)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.5, 3])
def test_scale_is_that_of_the_scores(scale):
    assert_is_the_reference(sr.LongNet((16, 64), (1, 2)), Case(1, 2, 1), scale=scale)


@pytest.mark.parametrize(
    ("dtype", "pattern", "backend"),
    [
        (torch.float64, sr.Causal(), "gather"),
        (torch.float64, sr.SlidingWindow(20) + sr.Causal(), "gather"),
        (torch.float32, sr.Causal(), "cpu"),
    ],
    ids=str,
)
def test_what_no_backend_name_means(dtype, pattern, backend):
    args = inputs(Case(1, 2, 2, 90, 90), dtype, requires_grad=False)
    named = attend(*args, pattern, backend=backend)[0]
    assert torch.equal(sr.attention(*args, pattern), named)


def test_inputs_are_left_as_they_were():
    args = inputs(Case())
    copies = [x.detach().clone() for x in args]
    gradients(attend(*args, PATTERNS["longnet"](Case())), args)
    assert all(torch.equal(a, b) for a, b in zip(args, copies, strict=True))


# Lower precisions, by the error of dense attention in the same dtype

PRECISION_PATTERNS = (
    "full",
    "causal",
    "dilated window",
    "longnet",
    "longnet, every rate above 1",
    "random blocks",
    "mixture with overlap",
    "mixture under masks",
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
    exact = eager_attention(*exact_args, counts, scale, pairs)
    eager = eager_attention(*args, counts, scale, pairs)
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
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("name", PRECISION_PATTERNS)
def test_error_is_at_most_twice_that_of_dense_attention_in_the_dtype(name, dtype, each_backend):
    case = Case(2, 4, 2, 150, 150, 48, 40, 32)
    if each_backend == "triton":
        case = Case(1, 2, 1, 70, 70, 48, 40, 32)
    assert_at_most_twice_the_eager_error(PATTERNS[name](case), case, dtype)


@pytest.mark.usefixtures("each_cpu_backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_of_long_rows_is_at_most_twice_that_of_dense_attention(dtype):
    case = Case(1, 1, 1, 1500, 1500, 32, 32, 64)
    for pattern in (sr.LongNet((64, 256, 2000), (1, 2, 4)) & sr.Causal(), sr.Full()):
        assert_at_most_twice_the_eager_error(pattern, case, dtype)


@pytest.mark.usefixtures("each_cpu_backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_with_many_merges_is_at_most_twice_that_of_dense_attention(dtype):
    with workspace(1):
        case = Case(1, 2, 1, 400, 400, 16, 16, 16)
        assert_at_most_twice_the_eager_error(sr.Causal() + sr.SlidingWindow(90), case, dtype)


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_with_a_large_block_bias_is_at_most_twice_that_of_dense_attention(dtype):
    case = Case(1, 1, 1, 128, 128, 16, 16, 16)
    bias = 8 * torch.randn(1, 1, 64)
    pairs = bias.view(1, 1, 8, 8).repeat_interleave(16, 2).repeat_interleave(16, 3)
    assert_at_most_twice_the_eager_error(sr.Full(), case, dtype, bias=(bias, pairs))


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("score", [1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scores_of_1e4_cost_no_more_than_the_rounding_of_such_a_score(dtype, score):
    """The gradients rest on exp(score - lse), in which both are known to eps(float32) * 1e4."""
    case = Case(1, 2, 1, 60, 60, 4, 4, 16)
    query, key, value = inputs(case, dtype, requires_grad=False)
    query, key = torch.full_like(query, 50.0), key / 8 + score / 200
    args = [x.requires_grad_() for x in (query, key, value)]
    pattern = sr.LongNet((16, 32), (1, 2)) & sr.Causal()
    counts = dense_counts(pattern, case)
    exact_args = [x.detach().double().requires_grad_() for x in args]
    exact, eager = (eager_attention(*x, counts, 1.0) for x in (exact_args, args))
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


# Rows, columns and dims that are empty


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "pattern",
    [
        sr.LongNet((16, 48), (2, 3)),  # residues 0 (2) and 0 (3): rows 1, 5, 7, .. see nothing
        sr.Causal() & sr.GlobalTokens(3, rows=False) & sr.Documents((30, 33)),
        sr.GlobalTokens(0),
        sr.KeyPadding((0, 9)),
        sr.SlidingWindow(2) & sr.KeyPadding((20, 0)),
        sr.Blocks(random_table(5, 5), 16),
    ],
    ids=repr,
)
def test_an_empty_row_has_out_0_lse_minus_inf_and_zero_gradients(pattern, dtype):
    case = Case(2, 2, 2, 63, 63, 8, 8)
    args = inputs(case, dtype)
    counts = dense_counts(pattern, case)
    empty, unseen = counts.sum(-1) == 0, counts.sum(-2) == 0
    assert empty.any()
    for limit in (1, 64 << 20):
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


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize(
    "pattern", [sr.Full(), sr.Causal() & sr.LongNet((4, 8), (1, 2)), sr.GlobalTokens(0)], ids=str
)
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 0},
        {"num_heads": 0, "num_kv_heads": 0},
        {"num_heads": 0},
        {"q_len": 0},
        {"kv_len": 0},
        {"q_len": 0, "kv_len": 0},
        {"head_dim": 0},
        {"value_dim": 0},
        {"head_dim": 0, "value_dim": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
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


# Traps that other implementations fell into


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
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
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


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("length", [33, 100, 131])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "pattern",
    [
        sr.Full(),
        sr.LongNet((16, 48), (1, 2)),
        sr.LongNet((7, 1000), (1, 3)),
        sr.SlidingWindow(20, 20),
        sr.BlockWindow(1, 32),
        sr.Hierarchical(((16, 48), (32, None)), 16),
    ],
    ids=repr,
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


# What is not a number stays where it is


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


@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize(
    "pattern",
    [
        sr.Causal(),
        pytest.param(sr.SlidingWindow(20, 20), marks=pytest.mark.slow),
        sr.LongNet((16, 32), (1, 2)),
        pytest.param(sr.BlockDilated((2,), 16), marks=pytest.mark.slow),
        sr.Causal() + sr.SlidingWindow(5),
    ],
    ids=repr,
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


@pytest.mark.usefixtures("each_backend")
def test_nan_in_the_first_key_reaches_out_and_lse_of_all_that_see_it():
    """A maximum over NaN and what is masked out must not look like a row without keys."""
    case = Case(1, 2, 1, 64, 64, 8, 8, 16)
    for pattern in (sr.Causal(), sr.SlidingWindow(0) | sr.Dilated(64, 2, 0), sr.Full()):
        for q_len in (64, 2):
            query, key, value = inputs(case, torch.float32, requires_grad=False)
            for position in (0, 15, 63):
                spoilt = key.clone()
                spoilt[:, :, position] = math.nan
                out, lse = attend(query[:, :, -q_len:], spoilt, value, pattern, block_size=16)
                seen = dense_counts(pattern, case)[..., -q_len:, position] > 0
                assert out[seen].isnan().all() and lse[seen].isnan().all()


@pytest.mark.usefixtures("each_backend")
def test_nan_and_inf_reach_only_the_gradients_of_rows_that_visit_their_tile():
    case = Case(1, 2, 1, 100, 100, 8, 8, 16)
    pattern = sr.Causal() & sr.SlidingWindow(30)
    rows = visiting_rows(pattern, case, 0, 50)
    for where in (1, 2):
        args = inputs(case, torch.float32)
        spoilt = [x.detach().clone() for x in args]
        spoilt[where][:, :, 50] = math.nan
        spoilt = [x.requires_grad_() for x in spoilt]
        dq = gradients(attend(*args, pattern, block_size=16), args)[0]
        got = gradients(attend(*spoilt, pattern, block_size=16), spoilt)[0]
        assert torch.equal(got[:, :, ~rows], dq[:, :, ~rows])


# Determinism and the workspace


@pytest.mark.usefixtures("each_cpu_backend")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("length", "block_size", "limit", "repetitions"),
    [
        (200, 32, 20_000, 2),
        pytest.param(600, 128, 64 << 20, 2, marks=pytest.mark.slow),
        pytest.param(900, 32, 64 << 20, 20, marks=pytest.mark.slow),
    ],
)
def test_same_bits_at_every_repetition(
    num_threads, dtype, length, block_size, limit, repetitions, threads
):
    torch.set_num_threads(num_threads)
    case = Case(1, 4, 2, length, length, 32, 32)
    pattern = sr.LongNet((64, 256, 512), (1, 2, 4)) + (sr.Causal() & sr.SlidingWindow(100))
    args = inputs(case, dtype)
    with workspace(limit):
        first = attend(*args, pattern, block_size=block_size)
        grads = gradients(first, args)
        for _ in range(repetitions):
            sr.layout_cache.clear()
            again = attend(*args, pattern, block_size=block_size)
            for a, b in zip((*again, *gradients(again, args)), (*first, *grads), strict=True):
                assert torch.equal(a, b)


@pytest.mark.usefixtures("each_backend")
def test_bits_do_not_depend_on_what_memory_held_before():
    args = inputs(Case(1, 2, 1, 130, 130), torch.float32)
    pattern = sr.LongNet((16, 64), (1, 2)) & sr.Causal()
    first = attend(*args, pattern)
    grads = gradients(first, args)
    for fill in (math.nan, math.inf, 1e30):
        blocks = [torch.full((size,), fill) for size in (1 << 8, 1 << 12, 1 << 16) * 20]
        del blocks
        again = attend(*args, pattern)
        for a, b in zip((*again, *gradients(again, args)), (*first, *grads), strict=True):
            assert torch.equal(a, b)


@pytest.mark.usefixtures("each_cpu_backend")
def test_threads_of_one_process_do_not_disturb_each_other():
    args = inputs(Case(1, 2, 2, 200, 200), torch.float32, requires_grad=False)
    patterns = [PATTERNS[name](Case(1, 2, 2)) for name in ("causal", "longnet", "dilated window")]
    expected = [attend(*args, pattern)[0] for pattern in patterns]
    sr.layout_cache.clear()

    def work(worker: int) -> list[bool]:
        same = []
        for turn in range(12):
            number = (worker + turn) % 3
            same.append(torch.equal(attend(*args, patterns[number])[0], expected[number]))
            if turn % 5 == worker:
                sr.layout_cache.clear()
        return same

    with ThreadPoolExecutor(4) as pool:
        assert all(all(same) for same in pool.map(work, range(4)))


@pytest.mark.parametrize("limit", [1, 1000, 10_000, 100_000, 1 << 30])
@pytest.mark.parametrize(
    "name", ["full", "longnet", "mixture under masks", "blocks of each batch entry"]
)
def test_any_workspace_gives_the_same_result_within_rounding(name, limit):
    case = Case(2, 4, 2, 140, 140, 8, 6)
    with workspace(limit):
        assert_is_the_reference(PATTERNS[name](case), case)


@pytest.mark.usefixtures("each_cpu_backend")
@pytest.mark.parametrize("limit", [1, 64 << 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_list_of_keys_longer_than_one_piece_is_merged(dtype, limit):
    case = Case(1, 2, 1, 20, 5000, 8, 8, 128)
    args = inputs(case, dtype)
    pattern = sr.Causal() + sr.Dilated(5000, 2)
    with workspace(limit):
        got = attend(*args, pattern, block_size=128)
        bounds = (1e-12, 1e-10) if dtype == torch.float64 else (2e-6, 1e-5)
        assert_same_attention(got, reference(*args, pattern), args, None, *bounds)


def test_set_workspace_returns_the_old_limit_and_refuses_none():
    old = sr.set_workspace(12345)
    assert sr.set_workspace(old) == 12345
    for limit in (0, -1):
        with pytest.raises(ValueError, match=rf"limit must be at least 1, got {limit}"):
            sr.set_workspace(limit)
    assert sr.set_workspace(old) == old


# The bias of each visited block


def spread(bias: Tensor, entries: Tensor, case: Case, first_position: int = 0) -> Tensor:
    """[Nq, Nk] what an entry of unit step adds to each of its pairs; entries must not overlap."""
    pairs = bias.new_zeros(case.q_len, case.kv_len)
    for number, (q, k, num_queries, num_keys) in enumerate(entries.tolist()):
        q -= first_position
        pairs[q : q + num_queries, k : k + num_keys] += bias[number]
    return pairs


BIASED = {
    "causal": Case(2, 2, 2, 75, 75),
    "blocks of each head": Case(2, 4, 2, 75, 75, 8, 5, 32),
    "blocks of each batch entry": Case(2, 2, 1, 75, 75, 8, 8, 16),
    "random blocks": Case(1, 4, 4, 90, 90, 4, 4, 16),
    "key padding": Case(3, 2, 1, 40, 75, 4, 4, 16),
    "documents": Case(1, 1, 1, 75, 75, 4, 4, 32),
}


@pytest.mark.parametrize("outer", ["full", "one batch entry", "one head", "one of both"])
@pytest.mark.parametrize("name", BIASED)
def test_block_bias_adds_to_the_scores_of_each_entry_in_the_order_of_entries(name, outer):
    case = BIASED[name]
    pattern = PATTERNS[name](case)
    layout = pattern.layout(**case.heads, block_size=case.block_size)
    batch = 1 if outer in ("one batch entry", "one of both") else case.batch
    heads = 1 if outer in ("one head", "one of both") else case.num_heads
    bias = 2 * torch.randn(batch, heads, layout.num_blocks, dtype=torch.float64)
    bias.requires_grad_()
    args = inputs(case)
    wide = bias.expand(case.batch, case.num_heads, -1)
    pairs = torch.stack(
        [
            spread(wide[b, h], layout.entries(b, h), case, case.kv_len - case.q_len)
            for b in range(case.batch)
            for h in range(case.num_heads)
        ]
    ).view(case.batch, case.num_heads, case.q_len, case.kv_len)
    expected = attend_by_rows(*args, dense_counts(pattern, case), bias=pairs)
    for backend in ("gather", "reference"):
        got = attend(*args, pattern, block_size=case.block_size, block_bias=bias, backend=backend)
        assert_same_attention(got, expected, (*args, bias))


@pytest.mark.parametrize(
    "name",
    [
        "full",
        "longnet",
        "longnet, offset of each head",
        "longnet, every rate above 1",
        "union of steps",
        "mixture with overlap",
        "branch twice",
        "mixture under masks",
        "packed longnet",
        "dilated window",
        "nothing",
    ],
)
@pytest.mark.parametrize("limit", [1, 64 << 20])
def test_block_bias_is_the_reference_s(name, limit):
    case = Case(2, 4, 2, 75, 75, 8, 6, 16)
    pattern = PATTERNS[name](case)
    blocks = pattern.layout(**case.heads, block_size=16).num_blocks
    bias = torch.randn(2, 4, blocks, dtype=torch.float64, requires_grad=True)
    args = inputs(case)
    with workspace(limit):
        got = attend(*args, pattern, block_size=16, block_bias=bias)
        expected = reference(*args, pattern, block_size=16, block_bias=bias)
        assert_same_attention(got, expected, (*args, bias))


def test_block_bias_of_a_pair_in_two_branches_adds_to_each_of_its_two_terms():
    case = Case(1, 1, 1, 16, 16, 4, 4)
    args = inputs(case)
    pattern = sr.Full() + sr.Causal()
    assert pattern.layout(16, block_size=16).entries().tolist() == [[0, 0, 16, 16]] * 2
    bias = torch.tensor([[[0.7, -1.3]]], dtype=torch.float64, requires_grad=True)
    full = torch.ones(16, 16, dtype=torch.float64)
    causal = full.tril()
    pairs = (bias[0, 0, 0].exp() * full + bias[0, 0, 1].exp() * causal).log()
    expected = attend_by_rows(*args, full, bias=pairs)
    got = attend(*args, pattern, block_size=16, block_bias=bias)
    assert_same_attention(got, expected, (*args, bias))


def test_surplus_entries_of_shorter_tables_are_ignored_and_get_no_gradient():
    case = Case(1, 2, 2, 64, 64, 4, 4)
    table = torch.zeros(2, 4, 4, dtype=torch.bool)
    table[0], table[1, 1, 2], table[1, 3, 0] = True, True, True
    pattern = sr.Blocks(table, 16)
    layout = pattern.layout(**case.heads, block_size=16)
    assert (layout.num_blocks, len(layout.entries(head=1))) == (16, 2)
    args = inputs(case)
    bias = torch.randn(1, 2, 16, dtype=torch.float64)
    spoilt = bias.clone()
    spoilt[0, 1, 2:] = math.nan
    for x in (bias, spoilt):
        x.requires_grad_()
    for backend in ("gather", "reference"):
        options = {"block_size": 16, "backend": backend}
        clean = attend(*args, pattern, block_bias=bias, **options)
        got = attend(*args, pattern, block_bias=spoilt, **options)
        assert all(torch.equal(a, b) for a, b in zip(got, clean, strict=True))
        (dbias,) = gradients(got, [spoilt])
        assert dbias[0, 1, 2:].eq(0).all()
        assert dbias[0, 1, :2].ne(0).all() and dbias[0, 0].ne(0).all()


def test_a_block_bias_of_minus_inf_takes_its_block_out():
    case = Case(1, 2, 1, 64, 64, 4, 4)
    table = torch.rand(4, 4) < 0.5
    table[2] = False  # rows that then see nothing
    bias = torch.where(table, 0.0, -torch.inf).double().view(1, 1, 16).requires_grad_()
    args = inputs(case)
    for limit in (1, 64 << 20):
        with workspace(limit):
            got = attend(*args, sr.Full(), block_size=16, block_bias=bias)
            expected = attend(*args, sr.Blocks(table, 16))
            assert_same_attention(got, expected, args)
            assert not gradients(got, [bias])[0].isnan().any()


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("backend", ["gather", "reference"])
@pytest.mark.parametrize("surplus", [-1, 1, 7])
def test_a_block_bias_of_another_number_of_blocks_raises(backend, surplus):
    args = inputs(Case(1, 2, 2, 64, 64))
    blocks = sr.Causal().layout(64, block_size=16).num_blocks
    with pytest.raises(ValueError, match=rf"{blocks}\].*got {blocks + surplus}\b"):
        attend(
            *args,
            sr.Causal(),
            block_size=16,
            block_bias=torch.zeros(1, 1, blocks + surplus),
            backend=backend,
        )


def test_block_bias_keeps_its_own_dtype():
    args = inputs(Case(1, 2, 2, 64, 64), torch.bfloat16)
    bias = torch.randn(1, 1, 10, requires_grad=True)
    out, lse = attend(*args, sr.Causal(), block_size=16, block_bias=bias)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    (dbias,) = gradients([out], [bias])
    assert dbias.dtype == torch.float32
    exact_args = [x.double() for x in args]
    exact, _ = reference(*exact_args, sr.Causal(), block_size=16, block_bias=bias)
    assert_close(out.double(), exact, 2**-7, "out")
    expected = gradients([exact.to(torch.bfloat16)], [bias])[0]
    assert_close(dbias, expected, 2**-6, "dblock_bias")


# The layout that is used


def test_each_query_and_key_head_of_each_batch_entry_is_a_problem_of_its_own():
    case = Case(2, 4, 2, 60, 60, 8, 8, 16)
    args = inputs(case)
    pattern = PATTERNS["blocks of each batch entry"](case)
    out, lse = attend(*args, pattern)
    for b in range(2):
        for h in range(4):
            mask = dense_counts(pattern, case)[b, h] > 0
            own = (args[0][b, h], args[1][b, h // 2], args[2][b, h // 2])
            got = attend(*(x[None, None] for x in own), sr.Dense(mask))
            assert_close(out[b, h], got[0][0, 0], 1e-13)
            assert_close(lse[b, h], got[1][0, 0], 1e-13)


def test_a_later_query_sees_what_a_longer_causal_call_showed_it():
    case = Case(1, 2, 1, 90, 90, 8, 8)
    query, key, value = inputs(case, requires_grad=False)
    pattern = sr.LongNet((16, 64, 128), (1, 2, 4)) & sr.Causal()
    whole, whole_lse = attend(query, key, value, pattern)
    for t in (1, 2, 15, 16, 17, 33, 64, 65, 89):
        step = attend(query[:, :, t : t + 1], key[:, :, : t + 1], value[:, :, : t + 1], pattern)
        assert_close(step[0], whole[:, :, t : t + 1], 1e-13)
        assert_close(step[1], whole_lse[:, :, t : t + 1], 1e-13)


def test_a_changed_tensor_of_a_pattern_is_not_served_from_the_cache():
    args = inputs(Case(1, 1, 1, 32, 32), requires_grad=False)
    table = torch.eye(2, dtype=torch.bool)
    first, _ = attend(*args, sr.Blocks(table, 16))
    table.fill_(True)
    second, _ = attend(*args, sr.Blocks(table, 16))
    assert (first - second).abs().max() > 1e-2
    assert_close(second, reference(*args, sr.Full())[0], 1e-12)


def test_an_expanded_head_gets_the_sum_of_its_copies_gradients():
    case = Case(1, 4, 4, 40, 40)
    query, _, _ = inputs(case)
    key, value = (
        arranged((1, 1, 40, 16), "contiguous", torch.float64).requires_grad_() for _ in range(2)
    )
    wrt = (query, key, value)
    shared = attend(*wrt, sr.Causal())
    expanded = attend(query, key.expand(1, 4, -1, -1), value.expand(1, 4, -1, -1), sr.Causal())
    assert_same_attention(shared, expanded, wrt, None, 1e-13, 1e-12)
