"""Pooled keys against means of slices; attention with a pooled remainder against dense sums."""

import math

import pytest
import torch
from helpers.thinned import thinned
from oracles import blocks_oracle

import sparsering as sr
from sparsering.selection import block_scores, pool_blocks, remainder_attention, select_blocks
from sparsering.selection import remainder as remainder_module


@pytest.mark.parametrize("size", [1, 4, 6])
def test_means_of_windows(size):
    for length in (1, 3, 4, 5, 24, 37):
        for stride in (None, 1, 2, 3, 4, 6, 8, 11):
            assert_means_of_windows(length, size, stride)


def assert_means_of_windows(length, size, stride):
    x = torch.randn(2, 3, length, 5, dtype=torch.float64, requires_grad=True)
    found, step = pool_blocks(x, size, stride), stride or size
    expected = blocks_oracle.pool_blocks(x, size, step)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-15 * 8
    weight = torch.randn_like(found)
    (a,), (b,) = (torch.autograd.grad((y * weight).sum(), x) for y in (found, expected))
    assert (a - b).abs().max() <= 1e-14


def test_halves_are_summed_in_float32():
    x = torch.randn(1, 1, 4096, 2).to(torch.bfloat16) + 100
    found = pool_blocks(x, 4096)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, x.double().mean(2, keepdim=True).to(torch.bfloat16))


def test_no_tokens_are_one_window_of_nothing():
    assert torch.equal(pool_blocks(torch.ones(1, 2, 0, 3), 4), torch.zeros(1, 2, 1, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 3, 4), 2), "batch, heads, tokens"),
        ((torch.ones(1, 2, 3, 4, dtype=torch.int64), 2), "floating point"),
        ((torch.ones(1, 2, 3, 4), 0), "size must be at least 1"),
        ((torch.ones(1, 2, 3, 4), 2, 0), "stride must be at least 1"),
    ],
)
def test_what_does_not_fit_is_said(arguments, message):
    with pytest.raises(ValueError, match=message):
        pool_blocks(*arguments)


@pytest.mark.parametrize(
    ("length", "size", "stride"), [(37, 8, 4), (40, 4, 4), (5, 8, 4), (64, 6, 9)]
)
def test_a_query_sees_the_windows_that_have_ended(length, size, stride):
    """No pooled key that is seen tells of a token past the query."""
    query, key, value = torch.randn(3, 1, 2, length, 4, dtype=torch.float64)
    pattern = sr.PooledCausal(size, stride)
    coarse = [pool_blocks(x, size, stride) for x in (key, value)]
    found, lse = sr.attention(query, *coarse, pattern, q_start=0, return_lse=True)
    for p in range(length):
        count = max(0, (p + 1 - size) // stride + 1)
        keys, values = (
            torch.stack([x[:, :, c * stride : c * stride + size].mean(2) for c in range(count)], 2)
            if count
            else x[:, :, :0]
            for x in (key, value)
        )
        score = (query[:, :, p, None] @ keys.mT)[:, :, 0] * 0.5
        assert (
            (found[:, :, p] - (score.softmax(-1)[:, :, None] @ values)[:, :, 0]).abs() < 1e-13
        ).all()
        if count:
            assert ((lse[:, :, p] - score.logsumexp(-1)).abs() < 1e-13).all()
        else:
            assert lse[:, :, p].isneginf().all() and not found[:, :, p].any()


def test_the_layout_is_that_of_a_slope():
    """Tiles above the slope are not visited, and those below it are whole."""
    pattern = sr.PooledCausal(32, 16)
    layout = pattern.layout(4096, 255, q_start=0, block_size=16)
    dense = pattern.to_dense(4096, 255, q_start=0)[0]
    tiles = torch.nn.functional.pad(dense, (0, 1)).unflatten(1, (16, 16)).unflatten(0, (256, 16))
    assert layout.num_blocks == int((tiles.sum((1, 3)) > 0).sum())
    assert int(layout.num_pairs) == int(dense.sum())
    assert sr.parse(repr(pattern)) == pattern
    with pytest.raises(ValueError, match="PooledCausal size"):
        sr.PooledCausal(0, 4)
    with pytest.raises(ValueError, match="PooledCausal stride"):
        sr.PooledCausal(4, 0)


def remainder(query, key, value, chosen, size, row, causal, start):
    """Computes the remainder by definition, one query at a time."""
    (batch, heads, q_len, dim), (kv_heads, kv_len) = query.shape, key.shape[1:3]
    out = []
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (batch, heads, q_len))).tolist():
        p, g = start + i, h // (heads // kv_heads)
        listed = chosen[b, h * chosen.shape[1] // heads, p // row - start // row].tolist()
        q, keys, values, logs = query[b, h, i], [], [], []
        for c in range(-(-kv_len // size)):
            k, v = key[b, g, c * size :][:size], value[b, g, c * size :][:size]
            if c in listed:
                n = max(0, p - c * size + 1) if causal else size
                keys, values = [*keys, *k[:n]], [*values, *v[:n]]
                logs += [0.0] * len(k[:n])
            elif not causal or c < p // size:
                keys, values = [*keys, k.mean(0)], [*values, v.mean(0)]
                logs.append(math.log(len(k)))
        if not keys:
            out.append(torch.zeros_like(value[0, 0, 0]))
            continue
        score = torch.stack(keys) @ q * dim**-0.5 + torch.tensor(logs, dtype=torch.float64)
        out.append(score.softmax(0) @ torch.stack(values))
    return torch.stack(out).view(batch, heads, q_len, -1)


@pytest.mark.parametrize(
    ("shape", "causal"),
    thinned(
        2,
        [(37, 37, 1, 2), (40, 40, 16, 1), (21, 50, 4, 4), (1, 50, 1, 2), (33, 33, 16, 2)],
        [True, False],
    ),
    ids=str,
)
def test_the_rest_comes_in_by_its_means(shape, causal):
    q_len, kv_len, row, heads = shape
    size, start = 16, kv_len - q_len
    query = torch.randn(2, 4, q_len, 8, dtype=torch.float64, requires_grad=True)
    key, value = torch.randn(2, 2, 2, kv_len, 8, dtype=torch.float64, requires_grad=True)
    rows = -(-kv_len // row) - start // row
    chosen = torch.randint(-1, 5, (2, heads, rows, 3))
    options = {"query_block": row, "causal": causal}
    found = remainder_attention(query, key, value, chosen, size, **options)
    expected = remainder(query, key, value, chosen, size, row, causal, start)
    assert (found - expected).abs().max() <= 1e-13
    weight = torch.randn_like(found)
    inputs = query, key, value
    for a, b in zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        assert (a - b).abs().max() <= 1e-12


def test_all_selected_is_dense_and_none_is_pooled(monkeypatch):
    query, key, value = torch.randn(3, 1, 2, 64, 8, dtype=torch.float64)
    every = torch.arange(4).expand(64, 4)
    found = remainder_attention(query, key, value, every, 16)
    assert (found - sr.attention(query, key, value, sr.Causal())).abs().max() <= 1e-13
    none = torch.full((64, 1), -1)
    found = remainder_attention(query, key, value, none, 16, causal=False)
    coarse = [pool_blocks(x, 16) for x in (key, value)]
    assert (found - sr.attention(query, *coarse, sr.Full())).abs().max() <= 1e-13
    monkeypatch.setattr(remainder_module, "_AT_A_TIME", 1)
    again = remainder_attention(query, key, value, none, 16, causal=False)
    assert (found - again).abs().max() <= 1e-15
    assert not remainder_attention(query, key, value, none, 16)[:, :, :16].any()


def test_the_rest_brings_the_output_nearer():
    query, key, value = torch.randn(3, 1, 1, 512, 64, dtype=torch.float64)
    chosen = select_blocks(block_scores(query, key, 32), 4, block_size=32)
    full = sr.attention(query, key, value, sr.Causal())
    alone = sr.attention(query, key, value, sr.SelectedBlocks(chosen, 32, 1) & sr.Causal())
    both = remainder_attention(query, key, value, chosen, 32)
    assert (both - full).norm() < 0.6 * (alone - full).norm()


def test_remainder_of_halves_and_what_does_not_fit():
    query, key, value = torch.randn(3, 1, 2, 40, 8).to(torch.bfloat16)
    chosen = torch.tensor([0, 1]).expand(40, 2)
    found = remainder_attention(query, key, value, chosen, 16)
    exact = remainder_attention(*(x.double() for x in (query, key, value)), chosen, 16)
    assert found.dtype == torch.bfloat16
    assert (found - exact).abs().max() <= 0.02 * exact.abs().max()
    with pytest.raises(ValueError, match="must cover 40 query blocks of 1"):
        remainder_attention(query, key, value, chosen[:20], 16)
