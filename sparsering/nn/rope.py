"""Rotary positions: channels turned by position, so that scores see distances alone.

Source: RoFormer (arXiv 2104.09864), equation 34.
"""

import torch
from torch import Tensor


def rotary_table(
    length: int,
    head_dim: int,
    base: float,
    device: torch.device,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [..., N, D / 2] of position x frequency.

    For positions 0 .. length - 1, or those given, [..., N].
    """
    channel = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    frequency = base ** (-channel / head_dim)
    if positions is None:
        positions = torch.arange(length, device=device)
    angle = positions.to(device, torch.float32)[..., None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns channels (i, i + D / 2) of x [B, H, N, D] by position; scores see distances alone."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)  # [B, H, N, D / 2]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
