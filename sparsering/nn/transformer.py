"""A pre-norm transformer block with rotary positions, after RoFormer (arXiv 2104.09864), eq. 34."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ground.arguments import checked_integer, shortened

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Type of an attention function: maps (query, key, value), each [B, H, N, D], to [B, H, N, D]."""


def checked_heads(embed_dim: int, num_heads: int) -> tuple[int, int]:
    """Returns (embed_dim, num_heads) as ints; an error if one is invalid or they do not divide."""
    embed_dim = checked_integer("embed_dim", embed_dim, 1)
    num_heads = checked_integer("num_heads", num_heads, 1)
    if embed_dim % num_heads:
        raise ValueError(
            f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}; "
            f"{num_heads * 64} gives head dim 64"
        )
    return embed_dim, num_heads


def checked_sizes(
    width: int, num_heads: int, num_layers: int, mlp_ratio: int, axes: int = 1
) -> tuple[int, int, int, int]:
    """Returns the sizes of a model as ints; TypeError or ValueError if one is invalid.

    The head dim must be a multiple of 2 * axes: rotary positions rotate channel pairs on each axis.
    """
    width = checked_integer("width", width, 1)
    num_heads = checked_integer("num_heads", num_heads, 1)
    num_layers = checked_integer("num_layers", num_layers, 0)
    mlp_ratio = checked_integer("mlp_ratio", mlp_ratio, 1)
    if width % num_heads or width // num_heads % (2 * axes):
        multiple = "even head dim" if axes == 1 else f"head dim that is a multiple of {2 * axes}"
        raise ValueError(
            f"width must be num_heads times a {multiple}, got width {width} and {num_heads} heads; "
            f"width {num_heads * 64} gives head dim 64"
        )
    return width, num_heads, num_layers, mlp_ratio


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, num_heads: int, mlp_width: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)
        for layer in (self.qkv, self.up):
            nn.init.normal_(layer.weight, std=width**-0.5)
        for layer in (self.out, self.down):  # a new block is the identity
            nn.init.zeros_(layer.weight)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, shares: Tensor | None = None
    ) -> Tensor:
        """Returns the new residual stream of x [B, N, width], of the same shape.

        cos and sin are [N, D / 2] or [B, 1, N, D / 2], where D is the head dim. For batch entry b,
        `shares[0, b]` scales the attention's output and `shares[1, b]` the MLP's, if given.
        """
        B, N, width = x.shape
        heads = self.num_heads, width // self.num_heads
        qkv = self.qkv(self.attention_norm(x)).view(B, N, 3, *heads)
        qk, v = qkv.permute(2, 0, 3, 1, 4).split((2, 1))  # [2, B, H, N, D], [1, B, H, N, D]
        q, k = rotate(F.rms_norm(qk, qk.shape[-1:]), cos, sin)
        attended = attend(q, k, v[0])  # [B, H, N, D]
        added = self.out(attended.transpose(1, 2).reshape(B, N, width))
        x = x + (added if shares is None else shares[0, :, None, None] * added)
        added = self.down(F.relu(self.up(self.mlp_norm(x))).square())
        return x + (added if shares is None else shares[1, :, None, None] * added)


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
    """Raises ValueError unless `rope` is (cosine, sine), each [N, D / 2]."""
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
