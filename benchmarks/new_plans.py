"""Measures what a pattern that is new in each step costs a rank of ring attention, beside the step.

    python -m benchmarks.new_plans --out benchmarks/records

`new-plans.json`: 1,048,576 tokens over 4 and 64 ranks, 4 query heads and 1 key head of 64 channels,
float32. For the rank in the middle: milliseconds to plan the exchange and to build its layouts for
a pattern of another value each time (one thread, as in training), then the same rank's attention,
forward and backward, with keys that arrive as random numbers (no network), and the other products
of a layer of width 256 on its tokens, forward and backward. A step has 12 such layers, which share
the plan. The errors are those of `attention`: tests compare `ring_attention` with it.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparsering as sr
from sparsering.call import NO_OPTIONS
from sparsering.distributed import RingPlan
from sparsering.distributed.rank import Rank, Saved
from sparsering.distributed.rank_layouts import local_step, round_step
from sparsering.distributed.wire import wire_format
from sparsering.kernels.cpu.build import library

from .measure import write_record
from .new_layouts import lengths_of

TOKENS, WORLDS, LAYERS = 1 << 20, (4, 64), 12
HEADS, KV_HEADS, WIDTH = 4, 1, 64
CPU = torch.device("cpu")


def kinds(tokens: int) -> dict[str, Callable[[int], sr.Pattern]]:
    """Makes a pattern of each kind from a number; patterns of two numbers differ."""
    near = min(4096, tokens // 16)
    window, causal = sr.SlidingWindow(near), sr.Causal()
    many = tokens // 1024
    return {
        f"window of {near:,} and 4 sinks": lambda i: (
            causal & (sr.SlidingWindow(near + i) | sr.GlobalTokens(4, rows=False))
        ),
        f"10 documents, a window of {near:,}": lambda i: sr.Packed(
            lengths_of(tokens, 10, i), window & causal
        ),
        f"{many:,} documents": lambda i: sr.Packed(lengths_of(tokens, many, i), causal),
        "LongNet of 3 branches": lambda i: (
            causal & sr.LongNet((2048 + 4 * i, 4 * near, 8 * near), (1, 2, 4))
        ),
        "random blocks of 128, 16 a row": lambda i: (
            causal & sr.RandomBlocks(16 * 128 / tokens, 128, seed=i)
        ),
    }


def planned(pattern: sr.Pattern, tokens: int, world: int) -> tuple[RingPlan, float, float]:
    """Plans a ring and builds the layouts of its middle rank; the plan, and ms of both."""
    begin = time.perf_counter()
    plan = RingPlan.build(pattern, tokens, world, num_heads=HEADS, num_kv_heads=KV_HEADS)
    between = time.perf_counter()
    local_step(plan, world // 2, CPU)
    for number in range(len(plan.rounds)):
        round_step(plan, world // 2, number, 1, CPU)
    return plan, (between - begin) * 1e3, (time.perf_counter() - between) * 1e3


def attended(plan: RingPlan, number: int) -> float:
    """Seconds of a rank's attention, forward and backward, without what is sent."""
    kernels, wire = "cpu", wire_format(None, torch.float32)
    rank = Rank(plan, number, kernels, WIDTH**-0.5, wire, torch.float32, NO_OPTIONS)
    tokens = sum(len(range(*piece)) for piece in plan.ranges[number])
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int) -> Tensor:
        return torch.randn(1, heads, tokens, WIDTH, generator=generator)

    query, key, value, grad = drawn(HEADS), drawn(KV_HEADS), drawn(KV_HEADS), drawn(HEADS)
    arrived = []
    for which in range(len(plan.rounds)):
        room, _ = rank.room(which, key, value)
        arrived.append(room.normal_(generator=generator))
    begin = time.perf_counter()
    out, lse = rank.forward((query, key, value), iter(arrived), iter(()))
    x = Saved(query, key, value, out, lse, grad, torch.zeros_like(lse))
    dq, *_ = rank.local_gradients(x, lambda: None, None)
    for which, rows in enumerate(arrived):
        rank.round_gradients(which, rows, x, dq, None)
    return time.perf_counter() - begin


def products(tokens: int) -> float:
    """Seconds of the other products of a layer, forward and backward."""
    width = HEADS * WIDTH
    layer = nn.Sequential(
        nn.Linear(width, width + 2 * KV_HEADS * WIDTH),
        nn.Linear(width + 2 * KV_HEADS * WIDTH, width),
        nn.Linear(width, 4 * width),
        nn.GELU(),
        nn.Linear(4 * width, width),
    )
    x = torch.randn(tokens, width, requires_grad=True)
    begin = time.perf_counter()
    layer(x).sum().backward()
    return time.perf_counter() - begin


def row_of(name: str, make: Callable[[int], sr.Pattern], tokens: int, world: int) -> dict[str, Any]:
    """Costs of new patterns of a kind, and the share of a step that they are."""
    times = [planned(make(i), tokens, world) for i in range(1, 6)]
    plan, *_ = times[-1]
    plan_ms, layout_ms = (statistics.median(x[i] for x in times[1:]) for i in (1, 2))
    rounds = 1 if tokens // world > 100_000 else 3  # a minute each
    attention = min(attended(plan, world // 2) for _ in range(rounds))
    others = min(products(tokens // world) for _ in range(rounds))
    step = LAYERS * (attention + others)
    return {
        "pattern": name,
        "tokens": tokens,
        "ranks": world,
        "density": float(plan.loads.sum()) / HEADS / tokens**2,
        "ms_plan": plan_ms,
        "ms_layouts": layout_ms,
        "s_attention_of_a_layer": attention,
        "s_products_of_a_layer": others,
        "share_of_step": (plan_ms + layout_ms) / 1e3 / step,
        "share_of_attention_of_a_layer": (plan_ms + layout_ms) / 1e3 / attention,
    }


def main(argv: list[str] | None = None) -> None:
    """Measures all kinds and writes the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.new_plans", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the whole sequence")
    arguments = parser.parse_args(argv)
    library()
    rows = [
        row_of(name, make, arguments.tokens, world)
        for world in WORLDS
        for name, make in kinds(arguments.tokens).items()
    ]
    write_record(arguments.out, "new-plans", rows)


if __name__ == "__main__":
    main()
