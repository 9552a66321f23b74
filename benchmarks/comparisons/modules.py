"""Modules: `nn.MultiheadAttention` over its parts, `nn.SelectedAttention` with pooled queries."""

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsering.functional import attention
from sparsering.nn import MultiheadAttention, SelectedAttention
from sparsering.patterns.positions import Causal, SlidingWindow
from sparsering.patterns.selected import SelectedBlocks
from sparsering.selection import selection_report

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


def hierarchical(quick: bool) -> list[Row]:
    """`SelectedAttention.hierarchical` with queries as they are, and pooled in its coarse branch.

    `captured`: the share of full attention's mass in the blocks chosen, on inputs drawn at random;
    both choose the same blocks. `error`: of the outputs, against the same layer in float64.
    """
    rows: list[Row] = []
    for tokens in (1024, 2048) if quick else (4096, 16384):
        torch.manual_seed(0)
        x = torch.randn(1, tokens, EMBED_DIM)
        layers = {
            pools: SelectedAttention.hierarchical(
                EMBED_DIM, HEADS, query_block=16, pool_queries=pools
            )
            for pools in (False, True)
        }
        layers[True].load_state_dict(layers[False].state_dict())

        def with_backward(layer: SelectedAttention, x: Tensor = x) -> None:
            layer(x).sum().backward()

        calls = {pools: partial(layer, x) for pools, layer in layers.items()}
        with torch.no_grad():
            forward = interleaved({str(p): call for p, call in calls.items()}, 3 if quick else 7)
        both = {str(p): partial(with_backward, layer) for p, layer in layers.items()}
        ms = interleaved(both, 3 if quick else 5)
        for pools, layer in layers.items():
            with torch.no_grad():
                exact = copy.deepcopy(layer).double()(x.double()) if tokens <= 4096 else None
                query, key, value = (
                    p(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
                    for p in (layer.q_proj, layer.k_proj, layer.v_proj)
                )
                chosen = layer._select(layer.scores(query, key))
                pattern = SelectedBlocks(chosen, layer.block_size, layer.query_block) & Causal()
                report = selection_report(query, key, value, pattern, rows=64)
                error = None if exact is None else distance_of([layer(x)], [exact])
            rows.append({
                "case": "hierarchical", "pool_queries": pools, "tokens": tokens,
                "embed_dim": EMBED_DIM, "heads": HEADS, "dtype": "float32", "query_block": 16,
                "ms": forward[str(pools)], "with_backward_ms": ms[str(pools)],
                "captured": float(report.captured.mean.mean()),
                "density": float(report.density.mean()), "error": error,
            })  # fmt: skip
    return rows
