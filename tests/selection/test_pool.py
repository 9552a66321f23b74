"""Pooled keys against means of slices, and the layout of their mask."""

import pytest
import torch
from oracles import blocks_oracle

import sparsering as sr
from sparsering.selection import pool_blocks


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


@pytest.mark.parametrize("padded", [False, True])
def test_gradients_of_overlapping_windows_are_summed_in_float32(padded):
    x = torch.randn(1, 1, 40, 2).half().requires_grad_()
    valid = torch.arange(40) < 37 if padded else None
    found = pool_blocks(x, 16, 1, valid=valid)
    weight = torch.randn_like(found)
    (given,) = torch.autograd.grad(found, x, weight)
    exact = x.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(pool_blocks(exact, 16, 1, valid=valid), exact, weight.double())
    assert ((given - right).abs() <= 2.0**-11 * right.abs() + 1e-6).all()  # one rounding


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
