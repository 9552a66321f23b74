"""Measures ring attention over processes, and plans rings that are too large to run here.

    python -m benchmarks.ring --out benchmarks/records

`ring.json`: time and bytes of a forward and backward pass over P processes of one thread each. Two
peers: a ring that sends every key to every rank (the same kernels and messages, every key counted
as needed), and an all-gather of the keys. Methods take turns; wrong results raise before timing.
`ring-memory.json`: peak memory at a fixed shard length. `ring-plans.json`: figures of plans,
arithmetic with nothing run. `ring.png` plots the first two.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import sparsering as sr
from sparsering.distributed import RingPlan, ring_attention, shard, unshard
from sparsering.distributed import rank as rank_module
from sparsering.distributed.needs import TokenRanges
from sparsering.distributed.sharding import chunk_owners, num_tokens

from .measure import (
    Row,
    distance_of,
    gradient_of,
    inputs_of,
    interleaved_times,
    of_ranks,
    of_slowest,
    peak_of,
    sampled_error,
    slowest_milliseconds,
    write_record,
)

TOKENS, HEADS, WIDTH = 16384, 4, 64
SHARD = 4096  # tokens per rank in the memory comparison
WORLDS = (1, 2, 4, 8)
ROUNDS = 3

Call = Callable[[list[Tensor], Tensor], list[Tensor]]


def patterns(tokens: int, own: int) -> dict[str, tuple[sr.Pattern, str]]:
    """Patterns and shardings by name; one LongNet's segments lie within shards of `own` tokens."""
    documents = torch.tensor([1, 4, 2, 3, 1, 5]) * tokens // 16
    within = sr.LongNet((own // 4, own), (1, 4))
    return {
        "causal": (sr.Causal(), "zigzag"),
        "window 1024": (sr.SlidingWindow(1024) & sr.Causal(), "contiguous"),
        "LongNet within shards": (within & sr.Causal(), "contiguous"),
        "LongNet across shards": ((within + sr.Dilated(tokens, 16)) & sr.Causal(), "contiguous"),
        "documents": (sr.Documents(tuple(documents.tolist())) & sr.Causal(), "auto"),
        "random blocks 5%": (sr.RandomBlocks(0.05, 128), "contiguous"),
    }


def full_ring(plan: RingPlan) -> RingPlan:
    """Builds a plan with the same computation that moves every key to every rank."""
    owners = [owner for owner in chunk_owners(plan.sharding, plan.world_size) for _ in range(2)]
    pieces = [
        (receiver * plan.world_size + sender, start, stop - 1)
        for receiver in range(plan.world_size)
        for sender, ranges in enumerate(plan.ranges)
        for start, stop in ranges
        if sender != receiver
    ]
    every = TokenRanges(1, *torch.tensor(pieces, dtype=torch.int64).view(-1, 3).T.contiguous())
    name = "chunks:" + ",".join(map(str, owners))  # same ranges under a name of its own: cache key
    need_of = ((0,) * plan.frame.num_kv_heads,)
    return replace(plan, needs=(every,), need_of=need_of, travellers=(), sharding=name)


@contextmanager
def planned_as(plan: RingPlan) -> Iterator[None]:
    """Makes `ring_attention` use this plan."""

    class Planned:
        build = staticmethod(lambda *arguments, **options: plan)

    before, rank_module.RingPlan = rank_module.RingPlan, Planned  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        rank_module.RingPlan = before  # type: ignore[misc]


def methods(pattern: sr.Pattern, plan: RingPlan, rank: int) -> dict[str, Call]:
    """Methods by name; each returns (out, dq, dk, dv) of a rank's shards."""
    world = plan.world_size

    def needed(own: list[Tensor], grad: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in own]
        out = ring_attention(*leaves, pattern, sharding=plan.sharding, timeout=300)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    everything = full_ring(plan) if world > 1 else plan

    def every(own: list[Tensor], grad: Tensor) -> list[Tensor]:
        with planned_as(everything):
            return needed(own, grad)

    def gathered(own: list[Tensor], grad: Tensor) -> list[Tensor]:
        whole = [torch.empty(world, *own[1].shape[1:]) for _ in range(2)]
        for room, x in zip(whole, own[1:], strict=True):
            dist.all_gather_into_tensor(room, x.contiguous())
        key, value = (x.transpose(0, 1).flatten(1, 2)[None].requires_grad_() for x in whole)
        query = own[0].detach().requires_grad_()
        out = sr.attention(query, key, value, pattern, q_start=plan.ranges[rank][0][0])
        dq, *of_keys = torch.autograd.grad(out, (query, key, value), grad)
        grads = [torch.empty_like(x) for x in own[1:]]
        for room, x in zip(grads, of_keys, strict=True):
            dist.reduce_scatter_tensor(
                room, x[0].unflatten(1, (world, -1)).transpose(0, 1).contiguous()
            )
        return [out.detach(), dq, *grads]

    calls: dict[str, Call] = {"needed keys": needed}
    if world > 1:
        calls["full ring"] = every
        if plan.sharding == "contiguous":
            calls["all-gather"] = gathered
    return calls


def inputs(tokens: int) -> list[Tensor]:
    """Draws query, key, value and the gradient of the output for the whole sequence."""
    whole = inputs_of(HEADS, tokens, WIDTH)
    return [*whole, gradient_of(whole[0])]


def measured(rank: int, world: int, name: str, rounds: int) -> list[Row]:
    """Measures a pattern by every method; times of the slowest rank. Raises on a wrong result."""
    pattern, sharding = patterns(TOKENS, TOKENS // max(WORLDS))[name]
    plan = RingPlan.build(pattern, TOKENS, world, num_heads=HEADS, sharding=sharding)
    whole = inputs(TOKENS)
    own = [shard(x, sharding=plan.sharding) for x in whole]
    calls = methods(pattern, plan, rank)
    of_methods = {}
    for method, call in calls.items():
        results = call(own[:3], own[3])
        moved = received(method, own, world)
        whole_results = [unshard(x, sharding=plan.sharding) for x in results]
        errors = errors_of(whole_results, whole, pattern) if rank == 0 else (0.0, 0.0)
        of_methods[method] = (moved, errors)
    timed = {method: partial(call, own[:3], own[3]) for method, call in calls.items()}
    clock = partial(slowest_milliseconds, world=world)
    times = interleaved_times(timed, rounds, clock=clock, warm=True)
    loads = [plan.load(r) for r in range(world)]
    return [
        {
            "pattern": name, "ranks": world, "sharding": plan.sharding, "tokens": TOKENS,
            "method": method, "density": sum(loads) / (HEADS * TOKENS**2),
            "ms": statistics.median(times[method]),
            "received_mb_forward": moved[0] / 1e6, "received_mb_backward": moved[1] / 1e6,
            "error": errors[0], "gradient_error": errors[1],
            "load_max_over_mean": max(loads) * world / sum(loads),
        }
        for method, (moved, errors) in of_methods.items()
    ]  # fmt: skip


def received(method: str, own: list[Tensor], world: int) -> list[float]:
    """Most bytes that a rank received in the last call, forward and backward."""
    if method == "all-gather":  # its traffic is not counted: this is the least it can move
        return [2.0 * (world - 1) * own[1].nbytes] * 2
    traffics = (ring_attention.last_traffic(backward=backward) for backward in (False, True))
    return [of_slowest(traffic.received_bytes, world) for traffic in traffics]


def errors_of(
    results: list[Tensor], whole: list[Tensor], pattern: sr.Pattern
) -> tuple[float, float]:
    """Errors of the output against float64, and of the gradients against one process.

    Raises RuntimeError if the results are wrong.
    """
    out, *grads = results
    query, key, value, grad = whole
    error = sampled_error(out, query, key, value, pattern)
    leaves = [x.detach().requires_grad_() for x in whole[:3]]
    expected = torch.autograd.grad(sr.attention(*leaves, pattern), leaves, grad)
    off = distance_of(grads, expected)
    if not off <= 1e-4:
        raise RuntimeError(f"the timed gradients are wrong: {off:.3g}")
    return error, off


def memory_of_shards(rank: int, world: int, name: str) -> list[Row]:
    """Measures peak memory at a fixed shard length, by method."""
    tokens = SHARD * world
    pattern, sharding = patterns(tokens, SHARD)[name]
    sharding = "contiguous" if sharding == "auto" else sharding
    plan = RingPlan.build(pattern, tokens, world, num_heads=HEADS, sharding=sharding)
    own = [torch.randn(1, HEADS, num_tokens(plan.ranges[rank]), WIDTH) for _ in range(4)]
    rows: list[Row] = []
    for method, call in methods(pattern, plan, rank).items():
        call(own[:3], own[3])  # warm-up: builds and caches the layouts
        of_slowest(0.0, world)
        peak = of_slowest(peak_of(partial(call, own[:3], own[3])), world)
        rows.append(
            {
                "pattern": name, "ranks": world, "tokens_per_rank": SHARD, "method": method,
                "peak_extra_mb": peak / 1e6, "shard_mb": own[0].nbytes / 1e6,
            }
        )  # fmt: skip
    return rows


def plans() -> list[Row]:
    """Plans 64 to 1024 ranks and a million to a billion tokens; arithmetic, nothing is run.

    8 kv heads of 128 in bfloat16; bytes of one layer's forward pass.
    """
    rows: list[Row] = []
    for tokens, world in ((1 << 20, 64), (1 << 24, 256), (1 << 27, 512), (1 << 30, 1024)):
        longnet = sr.LongNet((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
        far = sr.LongNet((1024, 4096, 32768, 1 << 18, tokens), (1, 2, 4, 8, max(16, tokens >> 16)))
        cases = {
            "causal": sr.Causal(),
            "window 4096": sr.SlidingWindow(4096) & sr.Causal(),
            "LongNet to 32768": longnet & sr.Causal(),
            "LongNet to all tokens": far & sr.Causal(),
            "window 512 | 64 global": sr.SlidingWindow(512, 512) | sr.GlobalTokens(64),
        }
        for name, pattern in cases.items():
            for sharding in ("contiguous", "zigzag"):
                sr.layout_cache.clear()
                begin = time.perf_counter()
                plan = RingPlan.build(pattern, tokens, world, sharding=sharding)
                seconds = time.perf_counter() - begin
                sizes = {"num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
                came = [plan.bytes_received(rank, **sizes) for rank in range(world)]
                full = (world - 1) * tokens // world * 8 * 2 * 128 * 2
                rows.append(
                    {
                        "planned": "arithmetic", "pattern": name, "tokens": tokens,
                        "ranks": world, "sharding": sharding,
                        "received_mb_max": max(came) / 1e6,
                        "received_mb_mean": sum(came) / world / 1e6,
                        "full_ring_or_all_gather_mb": full / 1e6,
                        "load_max_over_mean": float(plan.loads.max() / plan.loads.mean()),
                        "plan_seconds": seconds, "plan_mb": _plan_bytes(plan) / 1e6,
                    }
                )  # fmt: skip
    return rows


def _plan_bytes(plan: RingPlan) -> int:
    tensors = (x for runs in plan.needs for x in (runs.number, runs.start, runs.last))
    return sum(x.nbytes for x in tensors)


def plot(times: list[Row], memories: list[Row], path: Path) -> None:
    """Plots bytes, peak memory and time of each pattern by method as bars, to a PNG file."""
    from matplotlib.figure import Figure

    colours = {"needed keys": "#1f6f8b", "full ring": "#d1603d", "all-gather": "#8a8f98"}
    names = list(patterns(TOKENS, TOKENS))
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    panels = (
        (
            f"MB received, {TOKENS} tokens",
            times,
            8,
            ("received_mb_forward", "received_mb_backward"),
        ),
        (f"peak MB of the call, {SHARD} tokens a rank", memories, 8, ("peak_extra_mb",)),
        (f"ms, {TOKENS} tokens", times, 2, ("ms",)),
    )
    for number, (title, rows, world, columns) in enumerate(panels):
        axes = figure.add_subplot(1, 3, number + 1)
        for i, (method, colour) in enumerate(colours.items()):
            chosen = {r["pattern"]: r for r in rows if (r["method"], r["ranks"]) == (method, world)}
            sizes = [sum(chosen[n][c] for c in columns) if n in chosen else 0 for n in names]
            places = [place + 0.27 * (i - 1) for place in range(len(names))]
            bars = axes.barh(places, sizes, 0.25, color=colour, label=method)
            labels = [
                (f"{size:,.0f}" if size >= 1000 else f"{size:.3g}") if n in chosen else ""
                for n, size in zip(names, sizes, strict=True)
            ]
            axes.bar_label(bars, labels, fontsize=7, padding=2)
        axes.set_title(f"{title}, {world} ranks", fontsize=9)
        axes.set_yticks(range(len(names)), names if number == 0 else [""] * len(names), fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=8, loc="lower right")
    title = f"Forward and backward, {HEADS} heads of {WIDTH}, float32, one thread per rank"
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=110)


def work(rank: int, world: int, rounds: int) -> list[Row]:
    """Measures all patterns on one rank: times, or with 0 rounds the peak memory."""
    rows: list[Row] = []
    for name in patterns(TOKENS, TOKENS):
        if rounds:
            rows += measured(rank, world, name, rounds)
        else:
            rows += memory_of_shards(rank, world, name)
        sr.layout_cache.clear()
    return rows


def main() -> int:
    """Writes the records."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ring", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed calls of each method")
    parser.add_argument("--plans-only", action="store_true", help="only the planned figures")
    arguments = parser.parse_args()
    if arguments.plans_only:
        write_record(arguments.out, "ring-plans", plans())
        return 0
    times = [row for world in WORLDS for row in of_ranks(work, world, arguments.rounds)]
    write_record(arguments.out, "ring", times)
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        os.environ[name] = "65536"  # freed memory leaves the process, so peaks are those of a call
    memories = [row for world in WORLDS[1:] for row in of_ranks(work, world, 0)]
    write_record(arguments.out, "ring-memory", memories)
    write_record(arguments.out, "ring-plans", plans())
    plot(times, memories, arguments.out / "ring.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
