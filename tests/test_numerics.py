"""Laws of `merge_attention`: attention over parts of the keys, merged, is that over all of them."""

import itertools
import math

import pytest
import torch
from oracles.attention_oracle import (
    Case,
    assert_close,
    assert_same_attention,
    attend_by_rows,
    gradients,
    inputs,
)
from torch import Tensor

import sparsering as sr

CASE = Case(2, 3, 3, 9, 14, 4, 5)


def masks_of_parts(number: int, repeated: bool = False) -> list[Tensor]:
    """Bool [Nq, Nk] parts of the pairs, with empty rows; row 0 is in none of them."""
    generator = torch.Generator().manual_seed(7)
    owner = torch.randint(0, number + 1, (CASE.q_len, CASE.kv_len), generator=generator)
    owner[0] = number
    owner[1] = 0  # all in one part
    parts = [owner == i for i in range(number)]
    return [*parts, parts[0]] if repeated else parts


def attended(parts: list[Tensor]) -> tuple[list[Tensor], list[Tensor], tuple[Tensor, ...]]:
    args = inputs(CASE)
    results = [attend_by_rows(*args, part) for part in parts]
    return [out for out, _ in results], [lse for _, lse in results], args


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_parts_of_the_keys_merge_to_the_whole(number, repeated):
    parts = masks_of_parts(number, repeated)
    outs, lses, args = attended(parts)
    whole = attend_by_rows(*args, sum(part.long() for part in parts))
    merged = sr.merge_attention(outs, lses)
    assert merged[0][:, :, 0].eq(0).all() and merged[1][:, :, 0].eq(-torch.inf).all()
    assert_same_attention(merged, whole, args, None, 1e-13, 1e-12)


def test_results_of_the_operator_merge_to_that_of_the_mixture():
    args = inputs(Case(2, 4, 2, 60, 60, 8, 6))
    branches = (sr.Dilated(16, 2), sr.Causal() & sr.SlidingWindow(9), sr.GlobalTokens(0))
    results = [sr.attention(*args, branch, return_lse=True) for branch in branches]
    merged = sr.merge_attention(*zip(*results, strict=True))
    whole = sr.attention(*args, branches[0] + branches[1] + branches[2], return_lse=True)
    assert_same_attention(merged, whole, args, None, 1e-13, 1e-12)


def test_merging_merged_parts_is_merging_all_at_once():
    outs, lses, args = attended(masks_of_parts(4))
    once = sr.merge_attention(outs, lses)
    for first in (1, 2, 3):
        left = sr.merge_attention(outs[:first], lses[:first])
        right = sr.merge_attention(outs[first:], lses[first:])
        nested = sr.merge_attention((left[0], right[0]), (left[1], right[1]))
        assert_same_attention(nested, once, args, None, 1e-13, 1e-12)


def test_the_order_of_the_parts_does_not_matter():
    outs, lses, args = attended(masks_of_parts(3))
    first = sr.merge_attention(outs, lses)
    for order in itertools.permutations(range(3)):
        merged = sr.merge_attention([outs[i] for i in order], [lses[i] for i in order])
        assert_same_attention(merged, first, args, None, 1e-13, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_part_is_itself(dtype):
    out = torch.randn(2, 3, 5, 4, dtype=dtype)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    lse = 9 * torch.randn(2, 3, 5, dtype=lse_dtype)
    lse[:, 1, 2], out[:, 1, 2] = -torch.inf, 0
    merged, merged_lse = sr.merge_attention([out], [lse])
    assert torch.equal(merged, out) and merged.dtype == dtype
    assert torch.equal(merged_lse, lse) and merged_lse.dtype == lse_dtype


def test_a_part_without_keys_adds_nothing_whatever_its_out_says():
    outs, lses, _ = attended(masks_of_parts(2))
    merged = sr.merge_attention(outs, lses)
    nothing = torch.full_like(lses[0], -torch.inf)
    for out in (torch.zeros_like(outs[0]), torch.full_like(outs[0], 1e30)):
        more = sr.merge_attention((*outs, out), (*lses, nothing))
        assert torch.equal(more[0], merged[0]) and torch.equal(more[1], merged[1])


@pytest.mark.parametrize("number", [1, 3])
def test_parts_that_are_all_empty_merge_to_an_empty_row_without_gradient(number):
    outs = [torch.randn(1, 1, 3, 2, requires_grad=True) for _ in range(number)]
    lses = [torch.full((1, 1, 3), -torch.inf, requires_grad=True) for _ in range(number)]
    out, lse = sr.merge_attention(outs, lses)
    assert out.eq(0).all() and lse.eq(-torch.inf).all()
    for grad in gradients((out, lse), (*outs, *lses)):
        assert grad.eq(0).all()


def test_gradients_at_lse_minus_inf_are_0_and_not_nan():
    outs = [torch.randn(1, 1, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    lses = [torch.randn(1, 1, 4, dtype=torch.float64) for _ in range(2)]
    lses[0][..., 0] = lses[1][..., 1] = lses[0][..., 2] = lses[1][..., 2] = -torch.inf
    lses = [lse.requires_grad_() for lse in lses]
    grads = gradients(sr.merge_attention(outs, lses), (*outs, *lses))
    assert all(grad.isfinite().all() for grad in grads)
    for i, empty_rows in ((0, (0, 2)), (1, (1, 2))):
        for row in range(4):
            assert grads[i][..., row, :].ne(0).all() == (row not in empty_rows)
            assert grads[2 + i][..., row].ne(0).all() == (row not in empty_rows)


@pytest.mark.parametrize("empty_rows", [False, True])
def test_first_derivatives_are_those_of_finite_differences(empty_rows):
    outs = [torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    shift = torch.zeros(3, 1, 2, 3, dtype=torch.float64)
    if empty_rows:
        shift[0, 0, 0, 1] = shift[2, 0, 1, 2] = -torch.inf

    def merge(*parts: Tensor) -> tuple[Tensor, ...]:
        return sr.merge_attention(
            parts[:3], [lse + s for lse, s in zip(parts[3:], shift, strict=True)]
        )

    assert torch.autograd.gradcheck(merge, (*outs, *lses))


@pytest.mark.parametrize("shift", [1e4, -1e4, 300.0])
def test_a_shift_of_every_lse_shifts_the_merged_one_and_nothing_else(shift):
    outs, lses, _ = attended(masks_of_parts(3))
    merged = sr.merge_attention(outs, lses)
    shifted = sr.merge_attention(outs, [lse + shift for lse in lses])
    assert_close(shifted[0], merged[0], 2e-12)  # 1e4 leaves 12 digits
    assert_close(shifted[1], merged[1] + shift, 1e-15)


def test_parts_of_very_different_weight_neither_overflow_nor_give_nan():
    outs = [torch.full((1, 1, 1, 2), float(i)) for i in (1, 2)]
    for low, high in ((-1e30, 1e30), (-1e4, 1e4), (-torch.inf, 1e4), (-90.0, 90.0)):
        lses = [torch.full((1, 1, 1), x) for x in (low, high)]
        out, lse = sr.merge_attention(outs, lses)
        assert torch.equal(out, outs[1]) and torch.equal(lse, lses[1])


def test_an_lse_of_exactly_0_is_a_part_like_any_other():
    outs = [torch.full((1, 1, 1, 1), x) for x in (1.0, 5.0)]
    out, lse = sr.merge_attention(outs, [torch.zeros(1, 1, 1)] * 2)
    assert out.item() == pytest.approx(3.0)
    assert lse.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parts_are_mixed_in_float32_and_rounded_once(dtype):
    outs = [torch.randn(1, 2, 300, 8).to(dtype) for _ in range(4)]
    lses = [torch.randn(1, 2, 300) * 3 for _ in range(4)]
    out, lse = sr.merge_attention(outs, lses)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    weights = torch.stack(lses).double().softmax(0)[..., None]
    exact = sum(w * part.double() for w, part in zip(weights, outs, strict=True))
    rounding = torch.finfo(dtype).eps / 2 * exact.abs() * 1.001 + 1e-6
    assert ((out.double() - exact).abs() <= rounding).all()
    assert_close(lse.double(), torch.stack(lses).double().logsumexp(0), 1e-6)


def test_float64_parts_are_merged_in_float64():
    outs, lses, _ = attended(masks_of_parts(2))
    out, lse = sr.merge_attention(outs, lses)
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)])
def test_a_dim_of_size_0(shape):
    lses = [torch.randn(shape[:3]) for _ in range(2)]
    out, lse = sr.merge_attention([torch.zeros(shape)] * 2, lses)
    assert out.shape == shape
    assert_close(lse, torch.stack(lses).logsumexp(0), 1e-6)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], r"at least one, got 0 and 0"),
        ([(1, 1, 3, 2)], [], r"as many outs as lses.* got 1 and 0"),
        ([(1, 1, 3, 2)] * 2, [(1, 1, 3)], r"as many outs as lses.* got 2 and 1"),
        ([(1, 1, 3, 2), (1, 1, 4, 2)], [(1, 1, 3), (1, 1, 4)], r"\(1, 1, 4, 2\).*\(1, 1, 3, 2\)"),
        ([(1, 1, 3, 2)] * 2, [(1, 1, 3), (1, 1, 4)], r"lse \(1, 1, 4\)"),
        ([(1, 1, 3, 2)], [(1, 1, 3, 1)], r"lse \(1, 1, 3, 1\)"),
        ([(1, 1, 3, 2), (1, 1, 3, 1)], [(1, 1, 3)] * 2, r"out \(1, 1, 3, 1\)"),
    ],
)
def test_parts_that_do_not_match_raise(outs, lses, message):
    with pytest.raises(ValueError, match=rf"merge_attention needs .*{message}"):
        sr.merge_attention([torch.zeros(x) for x in outs], [torch.zeros(x) for x in lses])
