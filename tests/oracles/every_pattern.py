"""A pattern of each kind, for tests of what holds of all of them, and counts of one shape."""

from typing import Any

import torch
from torch import Tensor

import sparsering as sr

TABLE = torch.tensor([[True, False], [True, True]])
KEYS = torch.tensor([True, True, False, False, True, True, False])


def one_of_each() -> list[Any]:
    """One pattern of every constructor and operator, built anew at each call."""
    causal = sr.Causal()
    return [
        sr.Full(),
        causal,
        sr.PooledCausal(4, 2),
        sr.SlidingWindow(4, 2, 2),
        sr.SlidingWindow(None, 7),
        sr.GlobalTokens(3, rows=False),
        sr.Dilated(8, 2),
        sr.Dilated(8, 2, offset=(1, 0)),
        sr.LongNet((4, 8), (1, 2)),
        sr.BlockDilated((1, 4), 16),
        sr.BlockWindow(2, 16),
        sr.BlockCausal(16),
        sr.BlockCausal((3, 4)),
        sr.BlockCausal(((3, 4), (7, 0))),
        sr.BlockDiffusion(32, 16),
        sr.Neighbourhood((1, 7), (0, 1), (1, 2)),
        sr.ChunkedCausal(6),
        sr.RandomBlocks(0.25, 16, seed=3, per_head=False),
        sr.Hierarchical(((16, 64), (64, None)), 16),
        sr.Documents((3, 4)),
        sr.Packed((3, 4), sr.Dilated(4, 2)),
        sr.Tree((3, 0, 4), (-1, 0, 0), sr.Dilated(4, 2)),
        sr.Documents(((3, 4), (7, 0))),
        sr.Packed(((3, 4), (7, 0)), causal),
        sr.Tree(((3, 4), (7, 0)), ((-1, 0), (-1, 0)), causal),
        sr.KeyPadding((5, 7)),
        sr.KeyMask(KEYS.clone()),
        sr.KeyMask(KEYS.clone().expand(2, -1)),
        sr.Blocks(TABLE.clone(), 16),
        sr.Dense(TABLE.clone()),
        sr.PerHead((causal & sr.SlidingWindow(2), sr.Dilated(4, 2))),
        causal & sr.SlidingWindow(9),
        causal | sr.GlobalTokens(2),
        causal + sr.SlidingWindow(9),
        causal - sr.SlidingWindow(2),
        (causal + sr.SlidingWindow(9)) & sr.Documents((3, 4)),
    ]


INDICES = range(len(one_of_each()))
NAMES = [repr(pattern)[:60] for pattern in one_of_each()]


def expanded(dense: Tensor, batch: int, num_heads: int, q_len: int, kv_len: int) -> Tensor:
    """`to_dense`'s [H or 1, Nq, Nk] or [B, H or 1, Nq, Nk] at [B, H, Nq, Nk], the shape checked."""
    assert dense.dim() in (3, 4)
    assert dense.shape[-3] in (1, num_heads)
    assert dense.shape[-2:] == (q_len, kv_len)
    if dense.dim() == 4:
        assert dense.shape[0] == batch
    return dense.expand(batch, num_heads, q_len, kv_len)
