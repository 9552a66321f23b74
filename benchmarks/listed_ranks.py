"""Measures a layer that chooses keys, as DeepSeek-V3.2's, over processes that share its tokens.

    python -m benchmarks.listed_ranks --out benchmarks/records

`listed-ranks.json`: `top_tokens(group=)` chooses 256 keys for each query, `ring_attention` attends
to them, forward and backward. Beside it every rank gathers all index keys, keys and values, and
calls the same kernels. Both results must be equal. Index keys are drawn so that queries choose keys
all over the row ("spread": almost every key is on some list of a rank), or mostly the same 1 of 32
("shared"). Each process has one thread, float32. Times and peaks are of the rank that needs most.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import sparsering as sr
from sparsering.distributed import ring_attention, unshard
from sparsering.selection import top_tokens

from .measure import (
    Row,
    distance_of,
    give_back_freed,
    interleaved_times,
    of_ranks,
    of_slowest,
    peak_of,
    slowest_milliseconds,
    spread_of,
    write_record,
)

LENGTHS, WORLDS, CHOSEN = (8192, 32768), (2, 4), 256
HEADS, WIDTH, INDEX_HEADS, INDEX_WIDTH = 8, 128, 2, 32
OURS, GATHERED = "lists over ranks", "gather everything"


def drawn(length: int, world: int, rank: int, choice: str) -> tuple[list[Tensor], list[Tensor]]:
    """Draws a rank's query, key and value, which need gradients, and its index tensors."""
    generator = torch.Generator().manual_seed(rank)
    own = length // world

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    layer = [normal(1, heads, own, WIDTH).requires_grad_() for heads in (HEADS, 1, 1)]
    index = [normal(1, INDEX_HEADS, own, INDEX_WIDTH), normal(1, own, INDEX_WIDTH)]
    if choice == "shared":  # every index query has a large product with some keys
        index[0] = index[0].abs()
        index[1] = index[1] + 4.0 * (torch.arange(own) % 32 == 0)[:, None]
    return layer, [*index, torch.ones(1, own, INDEX_HEADS)]


def over_ranks(layer: list[Tensor], index: list[Tensor], chosen: int) -> list[Tensor]:
    """Runs forward and backward; what moves are index keys and listed keys."""
    group = dist.group.WORLD
    assert group is not None
    listed = top_tokens(*index, chosen, group=group)
    first = group.rank() * layer[0].shape[2]
    pattern = sr.SelectedBlocks(listed, 1, query_block=1, first_row=first) & sr.Causal()
    out = ring_attention(*layer, pattern, group=group)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), layer)]


def after_a_gather(layer: list[Tensor], index: list[Tensor], chosen: int) -> list[Tensor]:
    """Does the same with all keys of the row on every rank."""
    group = dist.group.WORLD
    assert group is not None
    (query, key, value), (index_query, index_key, weight) = layer, index
    first = group.rank() * query.shape[2]
    index_key = unshard(index_key, dim=1, group=group)
    listed = top_tokens(index_query, index_key, weight, chosen, q_start=first)
    pattern = sr.SelectedBlocks(listed, 1, query_block=1, first_row=first) & sr.Causal()
    whole = [unshard(x, group=group) for x in (key, value)]
    out = sr.attention(query, *whole, pattern, q_start=first)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), layer)]


def received_by(name: str, rank: int, world: int, length: int) -> tuple[float, float]:
    """Returns the bytes of keys, values and their gradients of the last step, and of index keys.

    A gather's are counted: all rows of other ranks, and for its own rows as many gradients from
    each of them.
    """
    own = length // world
    row, index_row = 2 * WIDTH * 4, INDEX_WIDTH * 4
    if name == OURS:
        moved = (ring_attention.last_traffic(backward=x) for x in (False, True))  # type: ignore[attr-defined]
        return float(sum(x.received_bytes for x in moved)), float(rank * own * index_row)
    others = (world - 1) * own
    return float(2 * others * row), float(others * index_row)


def measured(rank: int, world: int, length: int, choice: str, rounds: int) -> list[Row]:
    """Measures both ways. Raises if their results differ."""
    layer, index = drawn(length, world, rank, choice)
    chosen = min(CHOSEN, length // 8)
    ways = {OURS: over_ranks, GATHERED: after_a_gather}
    calls: dict[str, Callable[[], list[Tensor]]] = {
        name: partial(way, layer, index, chosen) for name, way in ways.items()
    }
    results, received, peaks = {}, {}, {}
    for name, call in calls.items():
        results[name] = call()
        moved = received_by(name, rank, world, length)
        received[name] = [of_slowest(x, world) for x in (sum(moved), *moved)]
    error = of_slowest(distance_of(results[OURS], results[GATHERED]), world)
    if not error <= 1e-4:
        raise RuntimeError(f"lists over ranks compute another result: {error:.3g}")
    results.clear()
    clock = partial(slowest_milliseconds, world=world)
    times = interleaved_times(calls, rounds, clock=clock, warm=True)
    for name, call in calls.items():
        give_back_freed()
        of_slowest(0.0, world)
        peaks[name] = of_slowest(peak_of(call), world)
    return [
        {
            "method": name, "choice": choice, "tokens": length, "processes": world,
            "chosen": chosen, "received_mb": received[name][0] / 1e6,
            "of_keys_and_gradients_mb": received[name][1] / 1e6,
            "of_index_keys_mb": received[name][2] / 1e6, "peak_extra_mb": peaks[name] / 1e6,
            **spread_of(times[name]), "error": error,
        }
        for name in calls
    ]  # fmt: skip


def main() -> int:
    """Writes the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.listed_ranks", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--quick", action="store_true", help="short sequences, one round")
    arguments = parser.parse_args()
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        os.environ[name] = "65536"  # freed memory leaves the process, so peaks are those of a call
    rounds = 1 if arguments.quick else 2
    rows: list[Row] = []
    for length in (512,) if arguments.quick else LENGTHS:
        for world in WORLDS:
            for choice in ("shared", "spread"):
                rows += of_ranks(measured, world, length, choice, rounds)
                write_record(arguments.out, "listed-ranks", rows)  # of all rows so far
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
