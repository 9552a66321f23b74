"""Attention with changed scores as dense mathematics, and inputs for its tests."""

import torch

from oracles.attention_oracle import assert_close, dense_attention

BATCH, HEADS, KV_HEADS, QUERIES, KEYS = 2, 4, 2, 70, 90
ABLE = ("reference", "gather")


def drawn(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(BATCH, HEADS, QUERIES, 16), *[(BATCH, KV_HEADS, KEYS, 16)] * 2]
    options = {"generator": generator, "dtype": dtype}
    return [torch.randn(s, **options).requires_grad_() for s in shapes]


def table(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def dense(query, key, value, counts, change):
    """Attention with scores [B, H, Nq, Nk] that `change` maps, all at once."""
    return dense_attention(query, key, value, counts, change=change)[0]


def assert_equal(out, expected, leaves, bound=1e-10):
    assert_close(out, expected, bound)
    sent = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(9))
    wanted = torch.autograd.grad(expected, leaves, sent, retain_graph=True)
    found = torch.autograd.grad(out, leaves, sent, retain_graph=True)
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert_close(a, b, bound, f"gradient {number}")
