"""Prov-GigaPath's slide encoder by its contract: one slide, dense, from a checkpoint's tensors.

A checkpoint has names and shapes of slide_encoder.pth, at any width. Shares no code with the
library, nor with Prov-GigaPath.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from oracles.torchscale_oracle import attend_over_segments


def checkpoint_of(
    width: int = 32, depth: int = 3, in_width: int = 24, mlp_width: int | None = None, seed: int = 0
) -> dict[str, dict[str, Tensor]]:
    """Draws a checkpoint {"model": tensors by name}, float32."""
    generator = torch.Generator().manual_seed(seed)
    mlp_width = mlp_width or 4 * width

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def linear(name: str, rows: int, columns: int) -> dict[str, Tensor]:
        weight = drawn(rows, columns) * 1.5 / math.sqrt(columns)
        return {f"{name}.weight": weight, f"{name}.bias": 0.1 * drawn(rows)}

    def norm(name: str, channels: int) -> dict[str, Tensor]:
        return {
            f"{name}.weight": 1 + 0.2 * drawn(channels),
            f"{name}.bias": 0.1 * drawn(channels),
        }

    state = {"cls_token": drawn(1, 1, width), **linear("patch_embed.proj", width, in_width)}
    for i in range(depth):
        name = f"encoder.layers.{i}"
        for proj in ("k_proj", "v_proj", "q_proj", "out_proj"):
            state |= linear(f"{name}.self_attn.{proj}", width, width)
        state |= norm(f"{name}.self_attn.inner_attn_ln", width)
        state |= norm(f"{name}.self_attn_layer_norm", width)
        state |= linear(f"{name}.ffn.fc1", mlp_width, width)
        state |= linear(f"{name}.ffn.fc2", width, mlp_width)
        state |= norm(f"{name}.ffn.ffn_layernorm", mlp_width)
        state |= norm(f"{name}.final_layer_norm", width)
    return {"model": {**state, **norm("encoder.layer_norm", width), **norm("norm", width)}}


def position(width: int, first: int, second: int) -> Tensor:
    """Sines and cosines of a tile's cell, float32 [width]: the second coordinate has half of it."""
    values = []
    for cell in (second, first):
        angles = [cell * 10000 ** -(i / (width / 4)) for i in range(width // 4)]
        values += [*map(math.sin, angles), *map(math.cos, angles)]
    return torch.tensor(values, dtype=torch.float32)


def encoded(
    state: dict[str, Tensor],
    tiles: Tensor,
    coords: Tensor,
    *,
    num_heads: int,
    segments: list[int],
    rates: list[int],
    tile_size: int = 256,
    zeros: bool = True,
    global_pool: bool = False,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Returns a slide's vector, the vectors of all layers, and each layer's weights [H, N, N].

    In the dtype of `state`, of tiles [n, C] at pixels [n, 2]. The weights [row, key] leave out what
    zero keys take.
    """

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(x: Tensor, name: str, eps: float = 1e-5) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        unit = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
        return unit * state[f"{name}.weight"] + state[f"{name}.bias"]

    def pooled(x: Tensor) -> Tensor:
        return norm(x[1:].mean(0) if global_pool else x[0], "norm", 1e-6)

    width = state["cls_token"].shape[-1]
    cells = [(int(a // tile_size), int(b // tile_size)) for a, b in coords.tolist()]
    place = torch.stack([position(width, *cell) for cell in cells]).to(tiles)
    x = torch.cat((state["cls_token"][0], linear(tiles, "patch_embed.proj") + place))
    states, weights = [x], []
    while f"encoder.layers.{len(weights)}.ffn.fc1.weight" in state:
        name = f"encoder.layers.{len(weights)}"
        inner = norm(x, f"{name}.self_attn_layer_norm")
        q, k, v = (
            linear(inner, f"{name}.self_attn.{proj}").view(1, len(x), num_heads, -1).transpose(1, 2)
            for proj in ("q_proj", "k_proj", "v_proj")
        )
        branches = segments, rates
        out = attend_over_segments(q, k, v, *branches, zeros=zeros)
        one_hot = torch.eye(len(x)).to(x).expand(1, num_heads, -1, -1)
        weights.append(weights_of(q, k, one_hot, *branches, zeros=zeros)[0])
        out = norm(out.transpose(1, 2).reshape(len(x), width), f"{name}.self_attn.inner_attn_ln")
        x = x + linear(out, f"{name}.self_attn.out_proj")
        inner = F.gelu(linear(norm(x, f"{name}.final_layer_norm"), f"{name}.ffn.fc1"))
        x = x + linear(norm(inner, f"{name}.ffn.ffn_layernorm"), f"{name}.ffn.fc2")
        states.append(x)
    last = norm(x, "encoder.layer_norm")
    return pooled(last), [pooled(x) for x in states], weights


def weights_of(
    q: Tensor, k: Tensor, one_hot: Tensor, segments: list[int], rates: list[int], zeros: bool
) -> Tensor:
    """Returns weights [1, H, N, N]: attention to values that name their key, some at a time."""
    parts = []
    for values in one_hot.split(q.shape[-1], -1):  # values as wide as keys
        wide = F.pad(values, (0, q.shape[-1] - values.shape[-1]))
        out = attend_over_segments(q, k, wide, segments, rates, zeros=zeros)
        parts.append(out[..., : values.shape[-1]])
    return torch.cat(parts, -1)
