"""Measures attention over a mesh with a bias per edge, beside a gather in plain torch.

    python -m benchmarks.graphs --out benchmarks/records

`graphs.json`: 41,162 points on a sphere; each attends to its 32 nearest points, itself among them,
4 heads of 64 channels, float32. A learned number per edge and head is added to its score. The call
is measured forward and with backward, which has gradients of query, key, value and of each edge's
number. The peer copies the keys and values of each point's neighbours (`index_select`), and takes a
softmax. Both run in turns; peaks are of a fresh process each: beyond the inputs, and in all. Errors
are those of sampled rows against float64: out, the gradient of the query, and that of the bias.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import sparsering as sr

from .measure import (
    Row,
    give_back_freed,
    interleaved_times,
    memory,
    peak_and_figures,
    spread_of,
    write_record,
)

POINTS, NEAR, HEADS, WIDTH = 41_162, 32, 4, 64
ROUNDS, SAMPLE = 7, 32

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # query, key, value, bias [H, E]


def sphere(points: int) -> Tensor:
    """Points spread evenly on a sphere, [points, 3], float32."""
    number = torch.arange(points, dtype=torch.float64)
    height = 1 - (2 * number + 1) / points
    turn = number * math.pi * (3 - math.sqrt(5))
    radius = (1 - height.square()).sqrt()
    return torch.stack((radius * turn.cos(), radius * turn.sin(), height), 1).float()


def nearest(points: Tensor, near: int) -> Tensor:
    """Edges from each point to its `near` nearest points, itself among them: [2, E], shuffled."""
    parts = [torch.cdist(x, points).topk(near, largest=False).indices for x in points.split(1024)]
    keys = torch.cat(parts).flatten()
    index = torch.stack((torch.arange(len(points)).repeat_interleave(near), keys))
    return index[:, torch.randperm(len(keys), generator=torch.Generator().manual_seed(0))]


def drawn(edges: int, points: int) -> Inputs:
    """Draws query, key, value and a bias per edge, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    shapes = [*[(1, HEADS, points, WIDTH)] * 3, (HEADS, edges)]
    query, key, value, bias = (
        torch.randn(shape, generator=generator).requires_grad_() for shape in shapes
    )
    return query, key, value, bias


def in_slots(graph: sr.SelectedBlocks, bias: Tensor) -> Tensor:
    """Scatters a bias per edge [H, E] to the slots of a graph."""
    slots = bias.new_zeros(graph.slot_shape).flatten(-2)
    return slots.index_copy(-1, graph.slots, bias[None]).view(graph.slot_shape)


def ours(graph: sr.SelectedBlocks, inputs: Inputs) -> Tensor:
    """Attends by the library."""
    return sr.attention(*inputs[:3], graph, slot_bias=in_slots(graph, inputs[3]))


def gathered(graph: sr.SelectedBlocks, inputs: Inputs) -> Tensor:
    """Attends by copies of each query's keys and values; every query has as many."""
    query, key, value, bias = inputs
    lists = graph.indices
    keys, values = (
        x.index_select(2, lists.flatten()).unflatten(2, lists.shape) for x in (key, value)
    )
    score = torch.einsum("bhnd,bhnkd->bhnk", query, keys) * WIDTH**-0.5
    weight = (score + in_slots(graph, bias)).softmax(-1)
    return torch.einsum("bhnk,bhnkd->bhnd", weight, values)


WAYS: dict[str, Callable[[sr.SelectedBlocks, Inputs], Tensor]] = {
    "sparsering": ours,
    "index_select and softmax": gathered,
}


def step(way: str, backward: bool, graph: sr.SelectedBlocks, inputs: Inputs) -> list[Tensor]:
    """Runs a way; returns out, and with `backward` the gradients of the inputs."""
    if not backward:
        with torch.no_grad():
            return [WAYS[way](graph, inputs)]
    out = WAYS[way](graph, inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, sent(out))]


def sent(out: Tensor) -> Tensor:
    """Gradient of the output, the same at every call and in each part of a row."""
    return torch.sin(torch.arange(out.numel(), dtype=torch.float32)).view(out.shape)


def errors(results: list[Tensor], index: Tensor, inputs: Inputs) -> Row:
    """Largest errors of sampled rows against float64, relative to the largest exact number."""
    query, key, value, bias = (x.detach().double() for x in inputs)
    gradient = sent(results[0]).double()
    worst: dict[str, list[tuple[float, float]]] = {"out": [], "query": [], "bias": []}
    for row in torch.linspace(0, query.shape[2] - 1, SAMPLE).long().tolist():
        edges = (index[0] == row).nonzero()[:, 0]
        keys, values = (x[0, :, index[1, edges]] for x in (key, value))  # [H, k, D]
        own = query[0, :, row].requires_grad_()
        number = bias[:, edges].requires_grad_()
        score = (keys @ own[..., None])[..., 0] * WIDTH**-0.5 + number
        out = (score.softmax(-1)[:, None] @ values)[:, 0]
        got = {"out": results[0][0, :, row]}
        exact = {"out": out.detach()}
        if len(results) > 1:
            got |= {"query": results[1][0, :, row], "bias": results[4][:, edges]}
            grads = torch.autograd.grad(out, (own, number), gradient[0, :, row])
            exact |= dict(zip(("query", "bias"), grads, strict=True))
        for name, numbers in exact.items():
            apart = (got[name].double() - numbers).abs().max()
            worst[name].append((float(apart), float(numbers.abs().max())))
    found = {}
    for name, pairs in worst.items():
        if pairs:
            apart, largest = (max(column) for column in zip(*pairs, strict=True))
            found[f"error_{name}"] = apart / largest
    if not all(x < 1e-4 for x in found.values()):
        raise RuntimeError(f"the timed function is wrong: {found}")
    return found


def graph_of(points: int, near: int) -> tuple[Tensor, sr.SelectedBlocks, Inputs]:
    """Makes the edges, their lists, and the inputs."""
    index = nearest(sphere(points), near)
    graph = sr.SelectedBlocks.from_edges(index, points, num_heads=HEADS)
    return index, graph, drawn(index.shape[1], points)


def _in_a_process(way: str, backward: bool, points: int, near: int) -> Iterator[int | None]:
    """Yields before and after the call, then the process's largest resident memory."""
    _, graph, inputs = graph_of(min(points, 1024), near)  # starts threads, builds kernels
    step(way, backward, graph, inputs)
    _, graph, inputs = graph_of(points, near)
    give_back_freed()
    yield None
    step(way, backward, graph, inputs)
    yield None
    yield memory("VmHWM")


def rows(points: int, near: int, rounds: int) -> list[Row]:
    """Measures both ways, forward and with backward."""
    index, graph, inputs = graph_of(points, near)
    begin = time.perf_counter()
    sr.SelectedBlocks.from_edges(index, points, num_heads=HEADS)
    once = (time.perf_counter() - begin) * 1e3
    results: list[Row] = []
    for backward in (False, True):
        peaks = {w: peak_and_figures(_in_a_process, w, backward, points, near) for w in WAYS}
        calls = {way: partial(step, way, backward, graph, inputs) for way in WAYS}
        times = interleaved_times(calls, rounds)
        for way, call in calls.items():
            extra, whole = peaks[way]
            row: Row = {"way": way, "points": points, "edges": index.shape[1], "heads": HEADS}
            row |= {"width": WIDTH, "backward": backward, "peak_mb": extra / 1e6}
            row |= {"process_mb": whole / 1e6, **spread_of(times[way])}
            row |= {"from_edges_ms": once} if way == "sparsering" else {}
            results.append(row | errors(call(), index, inputs))
    return results


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graphs", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--points", type=int, default=POINTS)
    parser.add_argument("--near", type=int, default=NEAR, help="edges of each point")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    results = rows(arguments.points, arguments.near, arguments.rounds)
    write_record(arguments.out, "graphs", results)


if __name__ == "__main__":
    main()
