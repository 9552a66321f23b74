"""`attention_weights` against the dense softmax of each query's multiset of keys."""

import pytest
import torch
from helpers.thinned import thinned
from oracles.attention_oracle import (
    PATTERNS,
    Case,
    assert_close,
    dense_counts,
    dense_weights,
    gradients,
    inputs,
)

import sparsering as sr

CASE = Case(2, 4, 2, 40, 40, 8, 6)

WEIGHED = [
    *("full", "causal", "two-sided window", "dilated, rate not dividing"),
    *("dilated, offset of each head", "longnet", "longnet, every rate above 1", "random blocks"),
    *("blocks of each batch entry", "blocks of each kv head", "key padding", "packed longnet"),
    *("union of steps", "mixture with overlap", "branch twice", "mixture under masks", "nothing"),
]


@pytest.mark.parametrize(
    ("name", "case"),
    thinned(3, WEIGHED, [CASE, Case(2, 2, 1, 9, 50, 5, 5, 32), Case(1, 3, 3, 20, 9, 4, 4)]),
)
def test_weights_are_the_dense_softmax(name, case):
    pattern = PATTERNS[name](case)
    query, key, _ = inputs(case)
    dense = sr.attention_weights(query, key, pattern, block_size=case.block_size).to_dense()
    counts = dense_counts(pattern, case)
    expected = dense_weights(query, key, counts)
    assert_close(dense.detach(), expected.detach(), 1e-12, "weights")
    sums = (counts.sum(-1) > 0).double()
    assert_close(dense.detach().sum(-1), sums, 1e-12, "sum of a row")
    wrt = (query, key)
    for a, b in zip(gradients([dense], wrt), gradients([expected], wrt), strict=True):
        assert_close(a, b, 1e-11, "gradient")


@pytest.mark.parametrize("options", [{"scale": 2.0}, {"q_start": 0}, {"scale": 0.0, "q_start": 3}])
def test_weights_heed_scale_and_q_start(options):
    query, key, _ = inputs(Case(1, 2, 1, 20, 30))
    weights = sr.attention_weights(query, key, sr.Causal(), block_size=16, **options)
    mask = sr.Causal().to_dense(20, 30, q_start=options.get("q_start"))
    expected = dense_weights(query, key, mask, scale=options.get("scale"))
    assert_close(weights.to_dense().detach(), expected.detach(), 1e-12)


def test_weights_with_a_block_bias():
    query, key, _ = inputs(Case(2, 2, 1, 48, 48))
    table = torch.ones(3, 3).tril().bool()
    bias = torch.randn(1, 2, 6, dtype=torch.float64, requires_grad=True)
    pattern = sr.Blocks(table, 16)
    weights = sr.attention_weights(query, key, pattern, block_size=16, block_bias=bias)
    by_block = torch.zeros(1, 2, 3, 3, dtype=torch.float64)
    by_block[:, :, table] = bias
    pairs = by_block.repeat_interleave(16, 2).repeat_interleave(16, 3)
    expected = dense_weights(query, key, pattern.to_dense(48), bias=pairs)
    dense = weights.to_dense()
    assert_close(dense.detach(), expected.detach(), 1e-12)
    wrt = (query, key, bias)
    for a, b in zip(gradients([dense], wrt), gradients([expected], wrt), strict=True):
        assert_close(a, b, 1e-11)


def test_values_lie_in_the_order_of_entries_and_are_0_where_there_is_no_pair():
    case = Case(1, 2, 2, 40, 40)
    query, key, _ = inputs(case, requires_grad=False)
    pattern = PATTERNS["blocks of each head"](case)
    weights = sr.attention_weights(query, key, pattern, block_size=32)
    layout = pattern.layout(**case.heads, block_size=32)
    assert weights.values.shape == (1, 2, layout.num_blocks, 32, 32)
    dense = dense_weights(query, key, dense_counts(pattern, case))
    for head in range(2):
        expected = torch.zeros(layout.num_blocks, 32, 32, dtype=torch.float64)
        for number, (q, k, rows, columns) in enumerate(layout.entries(head=head).tolist()):
            block = dense[0, head, q : q + rows, k : k + columns]
            expected[number, :rows, :columns] = block
        assert_close(weights.values[0, head], expected, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_of_low_precision_are_float32(dtype):
    query, key, _ = inputs(CASE, dtype, requires_grad=False)
    dense = sr.attention_weights(query, key, sr.LongNet((16, 64), (1, 2))).to_dense()
    assert dense.dtype == torch.float32
    counts = dense_counts(sr.LongNet((16, 64), (1, 2)), CASE)
    assert_close(dense.double(), dense_weights(query.double(), key.double(), counts), 1e-5)


def test_weights_under_autocast_sum_to_1():
    query, key, _ = inputs(CASE, torch.float32, requires_grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        dense = sr.attention_weights(query, key, sr.Causal()).to_dense()
    assert dense.dtype == torch.float32
    assert_close(dense.sum(-1), torch.ones(2, 4, 40), 1e-5)


def test_weights_times_values_are_the_output():
    args = inputs(CASE)
    pattern = PATTERNS["mixture under masks"](CASE)
    dense = sr.attention_weights(*args[:2], pattern).to_dense()
    out = sr.attention(*args, pattern)
    assert_close((dense @ args[2].repeat_interleave(2, 1)).detach(), out.detach(), 1e-12)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"q_len": 0}, {"kv_len": 0}, {"head_dim": 0}])
def test_weights_of_a_dim_of_size_0(sizes):
    case = Case(**{"batch": 1, "num_heads": 2, "num_kv_heads": 1, "q_len": 4, "kv_len": 4, **sizes})
    query, key, _ = inputs(case, requires_grad=False)
    dense = sr.attention_weights(query, key, sr.Full()).to_dense()
    assert dense.shape == (case.batch, 2, case.q_len, case.kv_len)
    assert torch.equal(dense, torch.full_like(dense, 0.25))
