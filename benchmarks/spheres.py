"""Measures attention to the 32 nearest nodes of a globe, beside SDPA with a mask of all pairs.

    python -m benchmarks.spheres --out benchmarks/records

`spheres.json`: the 40,320 nodes of the octahedral grid O96, on which anemoi's processors work. Each
node attends to its 32 nearest, itself among them; heads of 32 channels, float32. The key of a node
counts by the node's area: log(area) is added to each score. Measured are the library over lists of
edges, with the areas as `slot_bias`, with 4 heads and with anemoi's 16, and
`scaled_dot_product_attention` with a dense mask of floats [N, N], -inf where a node is no
neighbour, with 4 heads, forward and with backward.

Each way runs in a fresh process, after a small call. The first call on the grid is measured for its
memory, beyond inputs, lists and mask. SDPA's time, a minute or more, is that of this call too;
the library's is the median of `--rounds` further ones. Errors are of one head's output and
gradients, all rows, against float64 by copies of the neighbours, each relative to its largest exact
number.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sparsering as sr

from .measure import (
    Row,
    distance_of,
    give_back_freed,
    gradient_of,
    inputs_of,
    memory,
    milliseconds,
    peak_and_figures,
    spread_of,
    write_record,
)
from .neighbourhoods import step

RINGS, NEAR, WIDTH, ROUNDS = 96, 32, 32, 7
HEADS, MOST_HEADS = 4, 16
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def octahedral(rings: int) -> tuple[Tensor, Tensor]:
    """Nodes of the octahedral grid O<rings>: points [N, 3] and areas [N], float64, sum 4 pi.

    Each hemisphere has `rings` circles of latitude, at the nodes of Gauss and Legendre; the i-th
    one from the pole has 4 i + 16 points.
    """
    step = torch.arange(1, 2 * rings, dtype=torch.float64)
    beside = step / (4 * step.square() - 1).sqrt()
    height, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    weight = 2 * vectors[0].square()  # of each circle; their sum is 2
    number = torch.arange(1, rings + 1)
    count = 4 * torch.cat((number, number.flip(0))) + 16
    ring = torch.arange(2 * rings).repeat_interleave(count)
    place = torch.arange(len(ring)) - (count.cumsum(0) - count)[ring]
    turn = 2 * math.pi * place / count[ring]
    z = height.flip(0)[ring]
    radius = (1 - z.square()).sqrt()
    points = torch.stack((radius * turn.cos(), radius * turn.sin(), z), 1)
    return points, (2 * math.pi * weight / count)[ring]


def neighbours(points: Tensor, near: int) -> Tensor:
    """The `near` nearest nodes of each node, ascending, int64 [N, near]."""
    flat = points.float()
    parts = [(x @ flat.T).topk(near).indices for x in flat.split(1024)]
    return torch.cat(parts).sort(1).values


def ours(keys: Tensor, area: Tensor) -> Attend:
    """Attends by the library, over lists of edges."""
    count, near = keys.shape
    edges = torch.stack((torch.arange(count).repeat_interleave(near), keys.flatten()))
    graph = sr.SelectedBlocks.from_edges(edges, count)
    bias = torch.zeros(graph.slot_shape).flatten(-2)
    bias[..., graph.slots] = area.log().float()[edges[1]]
    return partial(sr.attention, pattern=graph, slot_bias=bias.view(graph.slot_shape))


def masked(keys: Tensor, area: Tensor) -> Attend:
    """Attends by sdpa and a tensor of all pairs."""
    mask = torch.full((len(keys), len(keys)), -torch.inf)
    mask.scatter_(1, keys, area.log().float()[keys])
    return partial(F.scaled_dot_product_attention, attn_mask=mask)


WAYS: dict[str, Callable[[Tensor, Tensor], Attend]] = {
    "sparsering": ours,
    "sdpa with a dense mask": masked,
}


def exact(
    keys: Tensor, area: Tensor, inputs: list[Tensor], backward: bool, head: int = 0
) -> list[Tensor]:
    """Results of one head in float64, [N, D] each, from copies of each node's neighbours."""
    query, key, value = leaves = [
        x[0, head].detach().double().requires_grad_(backward) for x in inputs
    ]
    score = torch.einsum("nd,nkd->nk", query, key[keys]) * query.shape[1] ** -0.5
    weight = (score + area.log()[keys]).softmax(-1)
    out = torch.einsum("nk,nkd->nd", weight, value[keys])
    if not backward:
        return [out]
    sent = gradient_of(inputs[0])[0, head].double()
    return [out.detach(), *torch.autograd.grad(out, leaves, sent)]


def _in_a_process(
    way: str, backward: bool, heads: int, rounds: int, keys: Tensor, area: Tensor
) -> Iterator[Any]:
    """Yields before and after a call, then the figures of a way."""
    _, small_area = octahedral(8)  # starts threads, builds kernels
    small = torch.arange(len(small_area))[:, None].expand(-1, keys.shape[1])
    small = (small + torch.arange(keys.shape[1])) % len(small)
    step(WAYS[way](small, small_area), list(inputs_of(heads, len(small), WIDTH)), backward)
    begin = time.perf_counter()
    attend = WAYS[way](keys, area)
    once = (time.perf_counter() - begin) * 1e3
    inputs = list(inputs_of(heads, len(keys), WIDTH))
    give_back_freed()
    results: list[Tensor] = []

    def call() -> None:
        results[:] = step(attend, inputs, backward)

    yield None
    times = [milliseconds(call)]
    yield None
    process = memory("VmHWM")
    if way == "sparsering":
        times = [milliseconds(call) for _ in range(rounds)]
    error = distance_of([x[0, 0] for x in results], exact(keys, area, inputs, backward))
    yield {"process_mb": process / 1e6, "once_ms": once, **spread_of(times), "error": error}


def rows(rings: int, near: int, rounds: int) -> list[Row]:
    """Measures both ways with few heads, and the library with many, forward and with backward."""
    found: list[Row] = []
    points, area = octahedral(rings)
    keys = neighbours(points, near)
    calls = [(way, HEADS) for way in WAYS] + [("sparsering", MOST_HEADS)]
    for way, heads in calls:
        for backward in (False, True):
            peak, figures = peak_and_figures(
                _in_a_process, way, backward, heads, rounds, keys, area
            )
            if not figures["error"] < 1e-4:
                raise RuntimeError(f"{way} is wrong by {figures['error']}")
            row: Row = {"way": way, "nodes": len(keys), "edges": keys.numel(), "heads": heads}
            row |= {"width": WIDTH, "density": near / len(keys), "backward": backward}
            found.append(row | {"peak_mb": peak / 1e6, **figures})
            print(found[-1], flush=True)
    return found


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spheres", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--rings", type=int, default=RINGS, help="circles of a hemisphere")
    parser.add_argument("--near", type=int, default=NEAR, help="neighbours of each node")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    write_record(arguments.out, "spheres", rows(arguments.rings, arguments.near, arguments.rounds))


if __name__ == "__main__":
    main()
