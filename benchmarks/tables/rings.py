"""The ring against the number of ranks: processes on this machine, and plans beyond them."""

import statistics
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparsering.distributed import RingPlan, last_traffic, ring_attention, shard, unshard
from sparsering.patterns.positions import Causal, LongNet

from ..comparisons.cases import inputs_of
from ..measure import memory, of_slowest, restart_peak, sampled_error
from .measured import Budget, Case, Row, give_back_freed, left_out

HEADS, WIDTH = 8, 64
PLANNED = (8, 16, 64, 256)


def pattern_of(tokens: int) -> Any:
    """LongNet whose longest branch spans the whole sequence: every rank needs the others."""
    return LongNet((tokens // 64, tokens), (1, 32)) & Causal()


def rings(quick: bool, budget: Budget) -> list[Row]:
    """131,072 tokens over 1, 2 and 4 processes of one thread; and plans for more, not run."""
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
        rows.append(_measured(world, tokens))
        took = time.perf_counter() - begin
    for length in (tokens, tokens << 3):
        for world in PLANNED[: 1 if quick else None]:
            rows.append(_planned(world, length))
    return rows


def _measured(world: int, tokens: int) -> Row:
    """A row of `world` processes. Raises where one fails, or the result is wrong."""
    context = get_context("forkserver")
    receive, send = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{Path(folder) / 'meet'}"
        processes = [
            context.Process(target=_rank, args=(rank, world, tokens, address, send))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        send.close()
        try:
            row: Row = receive.recv()
        except EOFError:
            raise RuntimeError(f"a ring of {world} failed; its processes say why") from None
        finally:
            for process in processes:
                process.join()
    return row


def _rank(rank: int, world: int, tokens: int, address: str, send: Connection) -> None:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
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
    before = restart_peak()
    out = call()
    peak = of_slowest(memory("VmHWM") - before, world)
    received = of_slowest(last_traffic().received_bytes, world)
    complete = unshard(out, sharding=plan.sharding)
    error = 0.0
    if rank == 0:
        error = sampled_error(complete, whole[0], whole[1], whole[2], pattern, rows=8)
        whole.clear()
    del complete
    times = []
    for _ in range(3):
        of_slowest(0.0, world)
        begin = time.perf_counter()
        call()
        times.append(of_slowest(time.perf_counter() - begin, world) * 1e3)
    if rank == 0:
        send.send({
            "call": f"{world} ranks" if world > 1 else "1 rank", "known": "measured",
            "ranks": world,
            "pattern": str(pattern), "tokens": tokens, "heads": HEADS, "head_dim": WIDTH,
            "dtype": "float32", "sharding": plan.sharding,
            "density": float(plan.loads.sum()) / HEADS / tokens**2, "error": error,
            "ms": statistics.median(times), "least_ms": min(times), "most_ms": max(times),
            "rounds": len(times), "peak_bytes": int(peak), "received_bytes": int(received),
            "load_max_over_mean": float(plan.loads.max() / plan.loads.mean()),
        })  # fmt: skip
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def _planned(world: int, tokens: int) -> Row:
    """What the plan says of more ranks than are run: arithmetic."""
    pattern = pattern_of(tokens)
    plan = RingPlan.build(pattern, tokens, world, num_heads=HEADS, sharding="auto")
    received = max(
        plan.bytes_received(rank, head_dim=WIDTH, dtype=torch.float32) for rank in range(world)
    )
    return {
        "call": f"{world} ranks, {tokens:,} tokens", "known": "planned", "ranks": world,
        "pattern": str(pattern), "tokens": tokens, "heads": HEADS, "head_dim": WIDTH,
        "dtype": "float32", "sharding": plan.sharding,
        "density": float(plan.loads.sum()) / HEADS / tokens**2, "received_bytes": int(received),
        "load_max_over_mean": float(plan.loads.max() / plan.loads.mean()),
    }  # fmt: skip
