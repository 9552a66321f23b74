"""Ring attention by number of ranks: measured processes on this machine, and larger plans."""

import time
from functools import partial
from typing import Any

import torch

from sparsering.distributed import RingPlan, last_traffic, ring_attention, shard, unshard
from sparsering.patterns.positions import Causal, LongNet

from ..measure import (
    Budget,
    Row,
    give_back_freed,
    inputs_of,
    interleaved_times,
    of_ranks,
    of_slowest,
    peak_of,
    sampled_error,
    slowest_milliseconds,
    spread_of,
)
from .measured import Case, left_out

HEADS, WIDTH = 8, 64
PLANNED = (8, 16, 64, 256)


def pattern_of(tokens: int) -> Any:
    """LongNet whose longest branch spans the whole sequence, so every rank needs the others."""
    return LongNet((tokens // 64, tokens), (1, 32)) & Causal()


def rings(quick: bool, budget: Budget) -> list[Row]:
    """Measures 131,072 tokens over 1, 2 and 4 processes of one thread, and plans more ranks."""
    tokens = 2048 if quick else 131072
    pattern = pattern_of(tokens)
    rows: list[Row] = []
    took = 0.0
    for world in (1, 2) if quick else (1, 2, 4):
        begin = time.perf_counter()
        if budget.left < 1.5 * took:
            case = Case(f"{world} ranks", pattern, tokens, heads=HEADS)
            rows.append({**left_out(case, "no time left"), "ranks": world})
            continue
        rows.append(of_ranks(_measured, world, tokens, start="forkserver"))
        took = time.perf_counter() - begin
    for length in (tokens, tokens << 3):
        for world in PLANNED[: 1 if quick else None]:
            rows.append(_planned(world, length))
    return rows


def _measured(rank: int, world: int, tokens: int) -> Row:
    """Measures one ring; rank 0 checks the result and raises if it is wrong."""
    pattern = pattern_of(tokens)
    plan = RingPlan.build(pattern, tokens, world, num_heads=HEADS, sharding="auto")
    whole = inputs_of(HEADS, tokens, WIDTH, torch.float32)
    own = [shard(x, sharding=plan.sharding) for x in whole]
    if rank:
        whole.clear()

    def call() -> torch.Tensor:
        out = ring_attention(own[0], own[1], own[2], pattern, sharding=plan.sharding, timeout=300)
        assert isinstance(out, torch.Tensor)
        return out

    of_slowest(0.0, world)
    give_back_freed()
    outs: list[torch.Tensor] = []
    peak = of_slowest(peak_of(lambda: outs.append(call())), world)
    received = of_slowest(last_traffic().received_bytes, world)
    complete = unshard(outs.pop(), sharding=plan.sharding)
    error = 0.0
    if rank == 0:
        error = sampled_error(complete, whole[0], whole[1], whole[2], pattern, rows=8)
        whole.clear()
    del complete
    timed = partial(slowest_milliseconds, world=world)
    times = interleaved_times({"": call}, 3, clock=timed, warm=True)[""]
    return {
        "call": f"{world} ranks" if world > 1 else "1 rank", "known": "measured",
        "ranks": world, "pattern": pattern.normal_text, "tokens": tokens, "heads": HEADS,
        "head_dim": WIDTH, "dtype": "float32", "sharding": plan.sharding,
        "density": float(plan.loads.sum()) / HEADS / tokens**2, "error": error,
        **spread_of(times), "peak_bytes": int(peak), "received_bytes": int(received),
        "load_max_over_mean": float(plan.loads.max() / plan.loads.mean()),
    }  # fmt: skip


def _planned(world: int, tokens: int) -> Row:
    """Plans a ring of more ranks than are run; arithmetic only."""
    pattern = pattern_of(tokens)
    plan = RingPlan.build(pattern, tokens, world, num_heads=HEADS, sharding="auto")
    received = max(
        plan.bytes_received(rank, head_dim=WIDTH, dtype=torch.float32) for rank in range(world)
    )
    return {
        "call": f"{world} ranks, {tokens:,} tokens", "known": "planned", "ranks": world,
        "pattern": pattern.normal_text, "tokens": tokens, "heads": HEADS, "head_dim": WIDTH,
        "dtype": "float32", "sharding": plan.sharding,
        "density": float(plan.loads.sum()) / HEADS / tokens**2, "received_bytes": int(received),
        "load_max_over_mean": float(plan.loads.max() / plan.loads.mean()),
    }  # fmt: skip
