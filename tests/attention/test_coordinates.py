"""`coordinate_bias` against dense attention with all distances: results and all gradients."""

import pytest
import torch
from helpers.tensor_bytes import measure
from oracles.attention_oracle import assert_close
from oracles.scored_oracle import (
    ABLE,
    BATCH,
    HEADS,
    KEYS,
    KV_HEADS,
    QUERIES,
    assert_equal,
    dense,
    drawn,
    table,
)

import sparsering as sr


def placed(*shape, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 40).requires_grad_()


@pytest.mark.parametrize("backend", ABLE)
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("entries", [BATCH, 1])
def test_a_bias_by_coordinates_is_exact(backend, dims, entries):
    x, pattern = drawn(), sr.LongNet((32, 128), (1, 2))
    coords, own = placed(entries, KEYS, dims), placed(entries, QUERIES, dims, seed=6)
    slopes = table(HEADS)
    bias = sr.coordinate_bias(coords, slopes, query_coords=own)
    out = sr.attention(*x, pattern, score_mod=bias, backend=backend)
    apart = (own[:, :, None] - coords[:, None]).square().sum(-1).sqrt()  # [B or 1, Nq, Nk]
    counts = pattern.to_dense(QUERIES, KEYS, num_heads=HEADS, num_kv_heads=KV_HEADS)
    expected = dense(*x, counts, lambda s: s - slopes[:, None, None] * apart[:, None])
    assert_equal(out, expected, [*x, slopes, coords, own])


def test_tokens_at_one_place_have_finite_gradients():
    x = [y[:, :, :70] for y in drawn()]
    coords, slopes = placed(70, 2), table(HEADS)
    out = sr.attention(*x, sr.Full(), score_mod=sr.coordinate_bias(coords, slopes))
    grads = torch.autograd.grad(out.sum(), [coords, slopes])
    assert all(y.isfinite().all() and y.any() for y in grads)
    pixels = (coords.detach() * 256).long()
    whole = sr.attention(*x, sr.Full(), score_mod=sr.coordinate_bias(pixels, slopes / 256))
    assert_close(whole, out, 5e-2)


def test_no_tensor_of_all_pairs_is_made():
    tokens = 8192
    x = [torch.randn(1, 2, tokens, 16, requires_grad=True) for _ in range(3)]
    coords, slopes = torch.rand(tokens, 2) * 100, torch.tensor([0.5, 0.1], requires_grad=True)
    pattern = sr.SlidingWindow(64, 64)

    def step():
        out = sr.attention(*x, pattern, score_mod=sr.coordinate_bias(coords, slopes))
        return list(torch.autograd.grad(out.sum(), [*x, slopes]))

    assert measure(step).peak < 2 * tokens * tokens  # of 2 heads, 8 times that in float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((placed(3, KEYS, 2), table(HEADS)), r"coords must be \[2 or 1, 70, dims\].*\(3, 90, 2\)"),
        ((placed(QUERIES, 2), table(HEADS)), r" coords must be \[2 or 1, 90, dims\].*\(1, 70, 2\)"),
        ((placed(KEYS, 2), table(HEADS)), r"query_coords must be \[2 or 1, 70, dims\]"),
        ((placed(KEYS), table(HEADS)), r"numbers \[B, tokens, dims\]"),
        ((placed(KEYS, 2) > 1, table(HEADS)), r"numbers \[B, tokens, dims\].*bool"),
        ((placed(KEYS, 2), table(HEADS, 1)), r"floating point tensor \[heads\]"),
    ],
)
def test_coordinates_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sr.attention(*drawn(), sr.Full(), score_mod=sr.coordinate_bias(*arguments))
