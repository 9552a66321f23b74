"""Rotary positions: rotates channels by position, so that scores depend on distances alone.

Source: RoFormer (arXiv 2104.09864), equation 34.
"""

import torch
from torch import Tensor

from ..patterns.arguments import shortened


def rotary_table(
    length: int, head_dim: int, base: float, device: torch.device, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine [..., N, D / 2] of positions [..., N], default 0 .. length - 1."""
    channel = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    frequency = base ** (-channel / head_dim)
    if positions is None:
        positions = torch.arange(length, device=device)
    angle = positions.to(device, torch.float32)[..., None] * frequency
    return angle.cos(), angle.sin()


def check_rope(rope: object, tokens: int, head_dim: int) -> None:
    """Raises ValueError unless `rope` is cosine and sine, each [N, D / 2]."""
    pair = rope if isinstance(rope, tuple | list) else ()
    shapes = [tuple(x.shape) for x in pair if isinstance(x, Tensor) and x.is_floating_point()]
    if len(pair) != 2 or shapes != [(tokens, head_dim // 2)] * 2:
        raise ValueError(
            f"rope must be cosine and sine [{tokens}, {head_dim // 2}], got "
            f"{shapes or shortened(repr(rope))}; rotary_table makes them"
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the channel pairs (i, i + D / 2) of x [B, H, N, D] by position."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)  # [B, H, N, D / 2]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
