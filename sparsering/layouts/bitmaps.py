"""Bitmaps: which pairs of a query tile and a key tile are in, a bit each."""

import torch
from torch import Tensor


def pack(cells: Tensor) -> Tensor:
    """[n, b, b] bool to [n, b * b / 8] bytes, the first cell in the lowest bit."""
    weights = 1 << torch.arange(8, device=cells.device, dtype=torch.uint8)
    return (cells.reshape(len(cells), -1, 8) * weights).sum(-1, dtype=torch.uint8)


def unpack(bitmaps: Tensor, block_size: int) -> Tensor:
    """The inverse of `pack`: [n, b, b] bool."""
    bits = (bitmaps[..., None] >> torch.arange(8, device=bitmaps.device, dtype=torch.uint8)) & 1
    return bits.view(*bitmaps.shape[:-1], block_size, block_size).bool()
