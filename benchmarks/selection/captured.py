"""Measures choices of blocks: captured mass, error and bits per byte over density.

On the dense byte model of `language`, with scorers trained beside it, on held-out text.
"""

import statistics
import time

import torch
from torch import Tensor

import sparsering as sr
from sparsering.selection import block_scores, select_blocks

from ..measure import Row
from .flagged import shuffle
from .language import (
    LAYERS,
    SIZES,
    TOKENS,
    Choice,
    dense_model,
    density_of,
    evaluate,
    held_out,
    new_scorers,
    warm_scorers,
    warmed,
)
from .models import dense

WAYS = ("exact", "sub", "mean", "gauss", "bounds", "antidiagonal", "learned", "window", "random")
ROWS = ((32, 1), (32, 8), (32, 32), (16, 1))  # tokens of a block, queries that share a choice
SLOTS = (2, 3, 5, 8, 12, 20)  # numbers of blocks of 32; twice as many of 16


@torch.no_grad()
def inputs_of_layers(model: torch.nn.Module, tokens: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Query, key and value of each layer of the dense model."""
    x, heads = model.tokens(tokens), []
    for layer in model.layers:
        heads.append(layer.heads_of(x))
        x = layer(x, dense)
    return heads


@torch.no_grad()
def captured(seed: int, texts: int = 4) -> list[Row]:
    """Captured mass, output error and density of every way to choose, by row and blocks."""
    model = dense_model(seed)
    rows: list[Row] = []
    inputs = inputs_of_layers(model, held_out()[0][:texts])
    for size, query_block in ROWS:
        scorers = warm_scorers(seed, model, size)
        for layer, (q, k, v) in enumerate(inputs):
            full, full_lse = sr.attention(q, k, v, sr.Causal(), return_lse=True)
            scorers[layer].query_block = query_block
            for way in WAYS:
                if way == "antidiagonal" and query_block < 8:
                    continue  # needs rows of at least its stride
                for slots in SLOTS:
                    choice = Choice(
                        way, size, slots * 32 // size, scorers[layer],
                        sink=int(way == "window"), local=1, query_block=query_block,
                    )  # fmt: skip
                    out, lse = sr.attention(q, k, v, choice.pattern(q, k), return_lse=True)
                    mass = (lse - full_lse).exp()
                    error = (out - full).norm(dim=-1) / full.norm(dim=-1)
                    rows.append(
                        {
                            "experiment": "captured", "seed": seed, "layer": layer, "way": way,
                            "block_size": size, "query_block": query_block, "k": choice.k,
                            "density": density_of(choice), "captured": mass.mean().item(),
                            "captured_of_heads": mass.mean((0, 2)).tolist(),
                            "captured_p05": mass.flatten().quantile(0.05).item(),
                            "error": error.mean().item(),
                            "blocks_of_32_queries": union(choice),
                        }
                    )  # fmt: skip
    return rows


def union(choice: Choice) -> float:
    """Blocks that 32 neighbouring queries choose together, over those of one of them; mean."""
    blocks = TOKENS // choice.size
    listed = choice.indices.repeat_interleave(choice.query_block, 2)
    chosen = torch.zeros(*listed.shape[:3], blocks + 1).scatter_(3, listed % (blocks + 1), 1.0)
    chosen = chosen[..., :-1].unflatten(2, (-1, 32))
    return (chosen.amax(3).sum(3) / chosen.sum(4).mean(3)).mean().item()


def fitted(seed: int) -> list[Row]:
    """A scorer learns the frozen model's masses: recall of its 8 best blocks, before and after."""
    start = time.perf_counter()
    model, scorers = dense_model(seed), new_scorers(seed, 32)
    before = [p.detach().clone() for p in model.parameters()]
    inputs = inputs_of_layers(model, held_out()[0][:4])
    recalls = {"frozen": recall(inputs, lambda i, q, k: scorers[i](q, k))}
    losses = warmed(model, scorers, seed)
    recalls["learned"] = recall(inputs, lambda i, q, k: scorers[i](q, k))
    recalls["shuffled"] = recall(inputs, lambda i, q, k: shuffle(scorers[i](q, k)))
    for method in ("mean", "sub"):
        recalls[method] = recall(inputs, lambda i, q, k, m=method: block_scores(q, k, 32, method=m))
    quarter = len(losses) // 4
    smooth = [statistics.mean(losses[i : i + quarter]) for i in range(0, len(losses), quarter)]
    pairs = zip(before, model.parameters(), strict=True)
    return [
        {
            "experiment": "fitted",
            "seed": seed,
            "steps": len(losses),
            **{f"recall_{name}": value for name, value in recalls.items()},
            "divergence_of_quarters": smooth,
            "model_bit_equal": all(torch.equal(a, b) for a, b in pairs),
            "seconds": time.perf_counter() - start,
        }
    ]


@torch.no_grad()
def recall(inputs: list, scores_of) -> float:
    """Share of the 8 past blocks of most exact mass among the 8 best by score; late queries."""
    hits = []
    for layer, (q, k, _) in enumerate(inputs):
        best = [
            select_blocks(scores, 8, block_size=32, sink=0, local=0)[:, :, TOKENS // 2 :]
            for scores in (block_scores(q, k, 32, method="exact"), scores_of(layer, q, k))
        ]
        hit = (best[0][..., None] == best[1][..., None, :]).any(-1)
        hits.append(hit.float().mean().item())
    return statistics.mean(hits)


@torch.no_grad()
def switched(seed: int, texts: int = 8) -> list[Row]:
    """Bits per byte of the dense model run sparse, without any training."""
    model = dense_model(seed)
    shared = {"experiment": "switched", "seed": seed}
    full = evaluate(model, [dense] * LAYERS, texts)
    rows: list[Row] = [shared | {"way": "full", "density": 1.0} | full]
    for size in SIZES:
        scorers = warm_scorers(seed, model, size)
        for way in ("exact", "sub", "mean", "gauss", "bounds", "learned", "window", "random"):
            for slots in (3, 5, 8, 16):
                attends = [Choice(way, size, slots * 32 // size, x, local=1) for x in scorers]
                row = {**shared, "way": way, "block_size": size, "k": attends[0].k}
                row |= evaluate(model, attends, texts)
                rows.append(row | {"density": density_of(attends[0])})
    return rows
