"""The reference backend against torch's own attention, softmax over literal lists, and calculus.

Everything else is judged by this backend, so it is judged here by code that it does not share:
dense SDPA with a mask, `attend_by_rows`, counts from the plain-Python rules of `patterns_oracle`,
and finite differences.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from oracles.attention_oracle import (
    PATTERNS,
    Case,
    assert_close,
    assert_same_attention,
    attend_by_rows,
    dense_attention,
    dense_counts,
    gradients,
    inputs,
)
from oracles.patterns_oracle import Spec, build, counts
from oracles.strategies import Scene, cases, examples
from torch import Tensor

import sparsering as sr


def reference(query: Tensor, key: Tensor, value: Tensor, pattern: sr.Pattern, **options):
    options = {"backend": "reference", "return_lse": True, **options}
    return sr.attention(query, key, value, pattern, **options)


SMALL = Case(q_len=13, kv_len=13, head_dim=4, value_dim=3)


@pytest.mark.parametrize("heads", [(2, 2), (6, 3), (3, 1)])
@pytest.mark.parametrize("lengths", [(40, 40), (17, 40), (1, 40)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_is_scaled_dot_product_attention_with_a_bool_mask(heads, lengths, is_causal):
    q_len, kv_len = lengths
    case = Case(2, *heads, q_len, kv_len, head_dim=5, value_dim=7)
    query, key, value = inputs(case)
    offset = kv_len - q_len  # the last query sees every key
    mask = torch.ones(q_len, kv_len, dtype=torch.bool)
    mask = mask.tril(offset) if is_causal else mask
    out, _ = reference(query, key, value, sr.Causal() if is_causal else sr.Full())
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    assert_close(out, expected, 1e-14, "out")
    wrt = (query, key, value)
    for got, exact in zip(gradients([out], wrt), gradients([expected], wrt), strict=True):
        assert_close(got, exact, 1e-13, "gradient")


@pytest.mark.parametrize("scale", [None, 0.3, 2.0, -1.0, 0.0])
def test_is_scaled_dot_product_attention_with_the_log_of_the_counts_as_mask(scale):
    case = Case(2, 4, 2, 33, 33, 6, 6)
    pattern = sr.Causal() + sr.SlidingWindow(4) + sr.Causal() + sr.GlobalTokens(3)
    query, key, value = inputs(case)
    out, lse = reference(query, key, value, pattern, scale=scale)
    bias = pattern.to_dense(33).double().log()
    expected = F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=scale, enable_gqa=True
    )
    _, exact = dense_attention(query, key, value, pattern.to_dense(33), scale=scale)
    assert_same_attention((out, lse), (expected, exact), (query, key, value))


@pytest.mark.parametrize("name", PATTERNS)
def test_is_one_softmax_over_each_row_s_multiset_of_keys(name):
    for case in (SMALL, Case(2, 4, 2, 7, 18, 3, 5), Case(1, 2, 1, 12, 7, 2, 2)):
        pattern = PATTERNS[name](case)
        args = inputs(case)
        expected = attend_by_rows(*args, dense_counts(pattern, case))
        assert_same_attention(reference(*args, pattern), expected, args, None, 1e-13, 1e-12)


@examples(15, 40, cases(max_length=18, min_length=1, max_heads=4))
def test_counts_pairs_as_the_rules_of_the_contract_do(case: tuple[Spec, Scene]):
    spec, scene = case
    shapes = Case(scene.batch, scene.num_heads, scene.num_kv_heads, scene.q_len, scene.kv_len, 3, 2)
    args = inputs(shapes)
    pairs = counts(spec, **scene.arguments, batch=scene.batch)
    expected = attend_by_rows(*args, pairs)
    results = reference(*args, build(spec), q_start=scene.q_start)
    assert_same_attention(results, expected, args, None, 1e-13, 1e-12)


@pytest.mark.parametrize(
    "pattern",
    [
        sr.Full(),
        sr.Causal() & sr.SlidingWindow(2),
        sr.LongNet((3, 6), (2, 3)),  # rows without keys
        sr.Causal() + sr.SlidingWindow(1, 1),  # pairs counted twice
        sr.KeyPadding((4,)),
    ],
    ids=repr,
)
def test_first_and_second_derivatives_are_those_of_finite_differences(pattern):
    case = Case(1, 2, 1, 4, 5, 3, 2)
    args = inputs(case)
    empty = dense_counts(pattern, case).sum(-1) == 0

    def function(*args: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = reference(*args, pattern)
        return out, lse.masked_fill(empty, 0.0)  # -inf has no finite difference

    assert torch.autograd.gradcheck(function, args)
    assert torch.autograd.gradgradcheck(function, args)


def test_derivatives_by_block_bias_are_those_of_finite_differences():
    case = Case(2, 2, 1, 20, 20, 2, 2)
    pattern = sr.LongNet((16, 32), (1, 2)) & sr.Causal()
    blocks = pattern.layout(**case.heads, block_size=16).num_blocks
    args = (*inputs(case), torch.randn(1, 2, blocks, dtype=torch.float64, requires_grad=True))

    def function(*args: Tensor) -> tuple[Tensor, Tensor]:
        return reference(*args[:3], pattern, block_size=16, block_bias=args[3])

    assert torch.autograd.gradcheck(function, args, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, args, fast_mode=True)


@pytest.mark.parametrize("pattern", [sr.Causal(), sr.Dilated(5, 2), sr.GlobalTokens(0)], ids=repr)
def test_a_mask_twice_adds_log_2_to_lse_and_nothing_to_out(pattern):
    args = inputs(SMALL)
    out, lse = reference(*args, pattern)
    twice, twice_lse = reference(*args, pattern + pattern)
    assert_close(twice, out, 1e-15, "out")
    assert_close(twice_lse, lse + math.log(2), 1e-15, "lse")


def test_a_pair_in_two_branches_is_a_bias_of_log_2_and_not_a_union():
    args = inputs(SMALL)
    both = sr.Causal() + sr.SlidingWindow(3)
    out, lse = reference(*args, both)
    union, union_lse = reference(*args, sr.Causal() | sr.SlidingWindow(3))
    in_both = sr.SlidingWindow(3).to_dense(13) & sr.Causal().to_dense(13)
    bias = math.log(2) * in_both.double()
    expected = attend_by_rows(*args, sr.Causal().to_dense(13), bias=bias)
    assert_same_attention((out, lse), expected, args)
    assert (out - union).abs().max() > 1e-2
    assert (lse - union_lse).min() > 1e-2


def test_lse_is_the_natural_log_of_the_softmax_denominator():
    query, key, value = inputs(Case(1, 1, 1, 1, 3, 2, 2))
    with torch.no_grad():
        query.copy_(torch.tensor([1.0, 0.0]))
        key[0, 0, :, 0] = torch.tensor([3, 4, 5], dtype=torch.float64).log()
    _, lse = reference(query, key, value, sr.Full(), scale=1.0)
    assert lse.item() == pytest.approx(math.log(12), abs=1e-15)
    _, lse = reference(query, key, value, sr.Full(), scale=2.0)
    assert lse.item() == pytest.approx(math.log(9 + 16 + 25), abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_out_has_the_query_s_dtype_and_lse_at_least_float32(dtype):
    args = inputs(SMALL, dtype)
    out, lse = reference(*args, sr.Causal())
    exact, exact_lse = reference(*(x.double() for x in args), sr.Causal())
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    # rounded once, at the end: half a unit in the last place of out, float32 throughout for lse
    assert (out.dtype, lse.dtype) == (dtype, lse_dtype)
    assert_close(out.double(), exact, 1.1 * torch.finfo(dtype).eps, "out")
    assert_close(lse.double(), exact_lse, 4 * torch.finfo(lse_dtype).eps, "lse")


def test_a_row_without_keys_has_out_0_lse_minus_inf_and_no_gradient():
    case = Case(1, 2, 2, 12, 12, 4, 4)
    pattern = sr.LongNet((4, 6), (2, 3))
    args = inputs(case)
    out, lse = reference(*args, pattern)
    empty = dense_counts(pattern, case).sum(-1) == 0
    assert 0 < empty.sum() < empty.numel()
    assert out[empty].eq(0).all() and lse[empty].eq(-torch.inf).all()
    dq, dk, dv = gradients((out, lse), args)
    assert dq[empty].eq(0).all() and dq[~empty].ne(0).all()
    unseen = dense_counts(pattern, case).sum(-2) == 0
    assert unseen.any()
    assert dk[unseen].eq(0).all() and dv[unseen].eq(0).all()
    assert not any(x.isnan().any() for x in (out, dq, dk, dv))


@pytest.mark.parametrize("pattern", [sr.Full(), sr.Causal() + sr.LongNet((4, 8), (1, 2))], ids=str)
@pytest.mark.parametrize("size", ["batch", "num_heads", "q_len", "kv_len", "head_dim", "value_dim"])
def test_a_dim_of_size_0_gives_an_empty_result_or_empty_rows(size, pattern):
    case = replace(Case(2, 4, 2, 5, 5, 3, 2), **{size: 0})
    case = replace(case, num_kv_heads=0) if size == "num_heads" else case
    args = inputs(case)
    out, lse = reference(*args, pattern)
    assert out.shape == (case.batch, case.num_heads, case.q_len, case.value_dim)
    assert lse.shape == out.shape[:3]
    if size == "kv_len":
        assert out.eq(0).all() and lse.eq(-torch.inf).all()
    if size == "head_dim":  # every score is 0
        number = dense_counts(pattern, case).sum(-1)
        assert_close(lse, number.double().log(), 1e-15, "lse")
    for grad, x in zip(gradients((out, lse), args), args, strict=True):
        assert grad.shape == x.shape
        assert grad.isfinite().all()


@pytest.mark.parametrize("score", [1e4, -1e4])
def test_scores_far_from_0_neither_overflow_nor_vanish(score):
    query, key, value = inputs(Case(1, 1, 1, 6, 6, 4, 4), requires_grad=False)
    query = torch.ones_like(query)
    key = key * 1e-2 + score / 4
    query.requires_grad_(), key.requires_grad_(), value.requires_grad_()
    out, lse = reference(query, key, value, sr.Causal(), scale=1.0)
    expected = attend_by_rows(query, key, value, torch.ones(6, 6).tril(), 1.0)
    assert_same_attention((out, lse), expected, (query, key, value))
    assert lse.sub(score).abs().max() < 5
