"""The bias of each visited block."""

import math

import pytest
import torch
from each_backend import attend, reference
from helpers.thinned import thinned
from oracles.attention_oracle import (
    PATTERNS,
    Case,
    assert_close,
    assert_same_attention,
    attend_by_rows,
    dense_counts,
    gradients,
    inputs,
    workspace,
)
from torch import Tensor

import sparsering as sr


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


@pytest.mark.parametrize(
    ("name", "outer"), thinned(4, BIASED, ["full", "one batch entry", "one head", "one of both"])
)
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


OTHERS = (
    *("full", "longnet", "longnet, offset of each head", "longnet, every rate above 1", "nothing"),
    *("union of steps", "mixture with overlap", "branch twice", "mixture under masks"),
    *("packed longnet", "dilated window"),
)


@pytest.mark.parametrize(("name", "limit"), thinned(2, OTHERS, [1, 64 << 20]))
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
