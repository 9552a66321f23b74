"""Measures meshes of heads and tokens beside the ring alone: planned bytes, real processes, memory.

    python -m benchmarks.meshes --out benchmarks/records

`meshes.json`, float32, 16 query heads on 4 kv heads of 64 channels, six patterns:

- "planned": for 8 ranks and 131,072 tokens, the bytes that the busiest rank receives forward and
  backward, and the largest share of pairs, on meshes of (1, 8), (2, 4), (4, 2) and (8, 1) ranks of
  (heads, tokens), with the sharding that "auto" chooses; and which of them `RingPlan.best` takes.
- "measured": for 4 gloo processes of one thread each and 4,096 tokens, the time of a forward and
  backward pass on (1, 4), (2, 2) and (4, 1), of the slowest rank. Meshes take turns. The times are
  those of processes that share the cores of one machine, where a message is a copy in memory.
- "memory": the peak of the busiest rank at 1,024 tokens a rank, for 2, 4 and 8 ranks.

Outputs and gradients are compared with those of one process before times are taken.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sparsering as sr
from sparsering.distributed import RingPlan, ring_attention, shard, unshard

from .measure import (
    Row,
    distance_of,
    gradient_of,
    inputs_of,
    interleaved_times,
    of_ranks,
    of_slowest,
    peak_of,
    slowest_milliseconds,
    write_record,
)

HEADS, KV_HEADS, WIDTH = 16, 4, 64
PLANNED, MEASURED, SHARD, ROUNDS = 131_072, 4_096, 1_024, 3
Shape = tuple[int, int]


def patterns(tokens: int) -> dict[str, sr.Pattern]:
    """Six patterns of a sequence, by name."""
    window = sr.SlidingWindow(tokens // 32)
    documents = torch.tensor([3, 1, 4, 2, 5, 1]) * (tokens // 16)
    return {
        "causal": sr.Causal(),
        "window": window & sr.Causal(),
        "window with sinks": (window | sr.GlobalTokens(64, rows=False)) & sr.Causal(),
        "LongNet": sr.LongNet((tokens // 16, tokens), (1, 8)) & sr.Causal(),
        "documents": sr.Documents(tuple(documents.tolist())) & sr.Causal(),
        "10% random blocks": sr.RandomBlocks(0.1, 128),
    }


def shapes(ranks: int) -> list[Shape]:
    """All meshes of a number of ranks, a power of two."""
    return [(1 << i, ranks >> i) for i in range(ranks.bit_length()) if ranks >> i]


def planned() -> list[Row]:
    """Rows of plans for 8 ranks; nothing runs."""
    rows: list[Row] = []
    heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS}
    for name, pattern in patterns(PLANNED).items():
        best = RingPlan.best(pattern, PLANNED, 8, **heads).shape
        for shape in shapes(8):
            plan = RingPlan.build(pattern, PLANNED, shape, sharding="auto", **heads)
            moved = [
                max(
                    plan.bytes_received(
                        rank, head_dim=WIDTH, dtype=torch.float32, backward=backward
                    )
                    for rank in range(8)
                )
                for backward in (False, True)
            ]
            loads = plan.loads
            rows.append(
                {
                    "what": "planned", "pattern": name, "mesh": list(shape), "tokens": PLANNED,
                    "density": float(loads.sum()) / (HEADS * PLANNED**2),
                    "received_mb_forward": moved[0] / 1e6, "received_mb_backward": moved[1] / 1e6,
                    "load_max_over_mean": float(loads.max() / loads.mean()), "cost": plan.cost,
                    "best": shape == best,
                }
            )  # fmt: skip
        sr.layout_cache.clear()
    return rows


def step(
    own: list[Tensor], grad: Tensor, pattern: sr.Pattern, mesh: DeviceMesh, sharding: str
) -> list[Tensor]:
    """Returns a rank's (out, dq, dk, dv)."""
    leaves = [x.detach().requires_grad_() for x in own]
    out = ring_attention(*leaves, pattern, mesh=mesh, sharding=sharding, timeout=600)
    assert isinstance(out, Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def inputs(tokens: int) -> list[Tensor]:
    """Draws query, key, value and the gradient of the output for the whole sequence."""
    query, key, value = inputs_of(HEADS, tokens, WIDTH)
    return [query, key[:, :KV_HEADS], value[:, :KV_HEADS], gradient_of(query)]


def measured(rank: int, world: int, rounds: int) -> list[Row]:
    """Rows of times on one rank, for every mesh and pattern."""
    meshes = {
        shape: init_device_mesh("cpu", shape, mesh_dim_names=("heads", "tokens"))
        for shape in shapes(world)
    }
    whole, rows = inputs(MEASURED), []
    for name, pattern in patterns(MEASURED).items():
        leaves = [x.detach().requires_grad_() for x in whole[:3]]
        out = sr.attention(*leaves, pattern)
        expected = [out.detach(), *torch.autograd.grad(out, leaves, whole[3])]
        calls, facts = {}, {}
        for shape, mesh in meshes.items():
            plan = RingPlan.build(
                pattern, MEASURED, shape, num_heads=HEADS, num_kv_heads=KV_HEADS, sharding="auto"
            )
            place = {"mesh": mesh, "sharding": plan.sharding}
            own = [shard(x, **place) for x in whole]  # type: ignore[arg-type]
            calls[shape] = partial(step, own[:3], own[3], pattern, mesh, plan.sharding)
            joined = [unshard(x, **place) for x in calls[shape]()]  # type: ignore[arg-type]
            error = distance_of(joined, expected)
            if not error < 1e-4:
                raise RuntimeError(f"{name} on {shape} is wrong by {error}")
            facts[shape] = error, float(plan.loads.sum()) / (HEADS * MEASURED**2)
        clock = partial(slowest_milliseconds, world=world)
        times = interleaved_times(calls, rounds, clock=clock, warm=True)  # type: ignore[type-var,arg-type]
        for shape in meshes:
            rows.append(
                {
                    "what": "measured", "pattern": name, "mesh": list(shape), "tokens": MEASURED,
                    "ms": statistics.median(times[shape]), "error": facts[shape][0],  # type: ignore[index]
                    "density": facts[shape][1],
                }
            )  # fmt: skip
        sr.layout_cache.clear()
    return rows


def memory(rank: int, world: int) -> list[Row]:
    """Rows of peak memory at a fixed number of tokens a rank."""
    rows: list[Row] = []
    tokens = SHARD * world
    for name in ("causal", "LongNet"):
        pattern = patterns(tokens)[name]
        for shape in shapes(world):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("heads", "tokens"))
            own = [torch.randn(1, heads, SHARD, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
            call = partial(step, own, torch.randn(own[0].shape), pattern, mesh, "contiguous")
            call()  # builds and caches the layouts
            of_slowest(0.0, world)
            peak = of_slowest(peak_of(call), world)
            row: Row = {"what": "memory", "pattern": name, "mesh": list(shape)}
            rows.append(row | {"tokens_per_rank": SHARD, "peak_extra_mb": peak / 1e6})
    return rows


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.meshes", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    found = planned()
    parts = [partial(of_ranks, measured, 4, arguments.rounds)]
    parts += [partial(of_ranks, memory, world) for world in (2, 4, 8)]
    for part in parts:
        found += part()
        write_record(arguments.out, "meshes", found)  # A run that is cut short keeps its parts.


if __name__ == "__main__":
    main()
