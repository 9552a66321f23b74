"""How each Triton kernel is cut: block shapes, warps and stages by device, dtype and head dim."""

from typing import NamedTuple

import torch
from torch import Tensor


class Config(NamedTuple):
    """How a kernel is compiled and launched.

    Attributes:
        rows: tokens (of packed heads) of a tile that a program keeps.
        streamed: tokens that it takes in at a step.
        warps, stages: of Triton.
        tma: load what streams past through tensor descriptors, where it can be.
        warp_specialize: split loading and computing between warps.
    """

    rows: int
    streamed: int
    warps: int
    stages: int
    tma: bool = False
    warp_specialize: bool = False


def generation(device: torch.device) -> int:
    return 0


def config(kernel: str, like: Tensor, width: int, tile: int) -> Config:
    """For "forward", "query" or "key" on tensors like this one, at the larger head dim."""
    most = max(16, 1 << (tile - 1).bit_length())
    chosen = Config(64, 64, 4, 2)
    return chosen._replace(rows=min(chosen.rows, most), streamed=min(chosen.streamed, most))
