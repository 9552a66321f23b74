"""Overhead of `nn.MultiheadAttention` over its parts: two projections and `attention`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsering.functional import attention
from sparsering.nn import MultiheadAttention
from sparsering.patterns.positions import SlidingWindow

from ..measure import Row, distance_of, interleaved

EMBED_DIM, HEADS = 512, 8


def modules(quick: bool) -> list[Row]:
    """Self-attention of one sequence over a window of 511 keys, forward, float32."""
    rows: list[Row] = []
    for tokens in (512, 1024) if quick else (1024, 4096, 16384):
        torch.manual_seed(0)
        pattern = SlidingWindow(255, 255)
        module = MultiheadAttention(EMBED_DIM, HEADS, batch_first=True, pattern=pattern)
        x = torch.randn(1, tokens, EMBED_DIM)

        def called(x: Tensor = x, module: MultiheadAttention = module) -> Tensor:
            out: Tensor = module(x, x, x, need_weights=False)[0]
            return out

        def bare(x: Tensor = x, module: MultiheadAttention = module) -> Tensor:
            projected = F.linear(x, module.in_proj_weight, module.in_proj_bias)
            parts = projected.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            query, key, value = parts.unbind()
            out = attention(query, key, value, module.pattern)
            joined: Tensor = module.out_proj(out.transpose(1, 2).flatten(2))
            return joined

        with torch.no_grad():
            ms = interleaved({"module": called, "bare": bare}, 3 if quick else 15)
            error = distance_of([called()], [bare()])
        if error > 1e-5:
            raise RuntimeError(f"the module is not what it is made of: {error}")
        rows += [
            {
                "case": "forward", "backend": name, "pattern": str(pattern), "dtype": "float32",
                "tokens": tokens, "embed_dim": EMBED_DIM, "heads": HEADS, "ms": ms[name],
                "times_bare": ms[name] / ms["bare"], "error": error,
            }
            for name in ms
        ]  # fmt: skip
    return rows
