"""The gather and cpu backends against the reference: forward and gradients.

float64 agrees to 1e-12 forward and 1e-10 in each gradient.
"""

from dataclasses import replace

import pytest
import torch
from each_backend import assert_is_the_reference, attend, each_call, reference
from helpers.thinned import thinned
from hypothesis import assume
from hypothesis import strategies as st
from oracles.attention_oracle import (
    PATTERNS,
    Case,
    arranged,
    assert_close,
    assert_same_attention,
    dense_counts,
    gradients,
    inputs,
    workspace,
)
from oracles.patterns_oracle import Spec, build
from oracles.strategies import Scene, cases, examples

import sparsering as sr

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


@pytest.mark.parametrize(("name", "shape"), thinned(8, PATTERNS, SHAPES))
def test_is_the_reference_forward_and_backward(name, shape):
    case = SHAPES[shape]
    assert_is_the_reference(PATTERNS[name](case), case)


@examples(
    20,
    300,
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


@examples(4, 30, cases(max_length=400, min_length=150, max_heads=3, with_random=True))
def test_is_the_reference_for_any_expression_at_several_blocks(case: tuple[Spec, Scene]):
    spec, scene = case
    assume(scene.kv_len)
    shapes = Case.of(scene, 5, 4, 16)
    assert_is_the_reference(build(spec), shapes)


@pytest.mark.parametrize(
    ("length", "block_size"),
    thinned(3, [1, 15, 16, 17, 127, 129, 257], [16, 48, 80, 128, 256, None]),
)
def test_ragged_lengths_at_every_block_size(length, block_size):
    case = Case(1, 2, 2, length, length, 8, 8, block_size)
    assert_is_the_reference(sr.LongNet((20, 50, 400), (1, 3, 4)) & sr.Causal(), case)
    assert_is_the_reference(sr.SlidingWindow(30, 30) | sr.GlobalTokens(3), case)


@pytest.mark.parametrize(
    ("each_backend", "dtype", "arrange"),
    each_call(
        [torch.float32, torch.float64, torch.bfloat16],
        [
            "tokens before heads",
            "one head expanded",
            "every other of a larger tensor",
            "width before tokens",
        ],
        fast=lambda backend, dtype, arrange: (
            dtype == torch.float32
            and arrange in ("tokens before heads", "one head expanded")[: 1 + (backend != "triton")]
        ),
    ),
    indirect=["each_backend"],
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


def test_a_list_of_tiles_that_begins_like_a_longer_one_has_its_own_end():
    active = torch.ones(4, 4).tril().flip(0).bool()  # each row of blocks sees one block fewer
    assert_is_the_reference(sr.Blocks(active, 16), Case(1, 2, 1, 64, 64, 4, 4, 16))


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
