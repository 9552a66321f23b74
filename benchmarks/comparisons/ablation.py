"""Measures what each part brings: switches it off and on, in turns, on the same call.

    python -m benchmarks ablation --out benchmarks/records

`ablation.json`: per part, milliseconds off and on (medians), peak memory of a call beyond its
inputs, bytes that a rank receives, and the error of the result, relative to its largest number. The
off-switches are here, not in the library: they clear the cache before each call, visit blocks in
random order, compute one product a block, wait for each message at once, and so on. The prior
documents promise "memory -40 to -60%, speed +30 to +50%, communication -50 to -70%" from parts like
these.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparsering as sr
from sparsering.distributed import exchange as exchange_module
from sparsering.distributed import last_traffic, ring_attention, shard
from sparsering.kernels import cpu
from sparsering.kernels.problem import Problem
from sparsering.layouts.layout import BlockLayout

from ..measure import (
    Row,
    distance_of,
    give_back_freed,
    inputs_of,
    interleaved_times,
    of_ranks,
    of_slowest,
    peak_and_figures,
    slowest_milliseconds,
    write_record,
)

HEADS, WIDTH, ROUNDS, WORLD = 8, 64, 15, 2
BLOCKS = sr.RandomBlocks(0.1, 128, per_head=False)
WINDOW = sr.Causal() & sr.SlidingWindow(1023)

Calls = dict[str, Callable[[], Any]]

attention: Callable[..., Any] = sr.attention
ring_of: Callable[..., Any] = ring_attention
problem_of: Callable[..., Any] = Problem


def in_random_order(layout: BlockLayout) -> BlockLayout:
    """Shuffles the blocks that each query tile visits; all must be whole."""
    (p,) = layout.passes
    assert int(p.bitmap.max()) < 0 and p.key_tile.shape[:2] == (1, 1)
    generator, keys = torch.Generator().manual_seed(0), p.key_tile.clone()
    for first, last in zip(p.row_ptr[0, 0].tolist(), p.row_ptr[0, 0, 1:].tolist(), strict=False):
        order = torch.randperm(last - first, generator=generator)
        keys[0, 0, first:last] = keys[0, 0, first:last][order]
    return replace(layout, passes=(replace(p, key_tile=keys),))


def one_product_a_block(tensors: list[Tensor], layout: BlockLayout) -> Tensor:
    """Attention by two torch products a visited block, and a running softmax."""
    query, key, value = (x[0] for x in tensors)
    out = torch.empty_like(query)
    tiles: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for first, k, rows, columns in layout.entries().tolist():
        tiles.setdefault((first, rows), []).append((k, columns))
    for (first, rows), visited in tiles.items():
        q = query[:, first : first + rows] * WIDTH**-0.5
        most = torch.full((*q.shape[:2], 1), -torch.inf)
        total, sums = torch.zeros_like(most), torch.zeros_like(q)
        for k, columns in visited:
            scores = q @ key[:, k : k + columns].mT
            higher = torch.maximum(most, scores.amax(-1, keepdim=True))
            weights, old = (scores - higher).exp(), (most - higher).exp()
            total = total * old + weights.sum(-1, keepdim=True)
            sums = sums * old + weights @ value[:, k : k + columns]
            most = higher
        out[:, first : first + rows] = sums / total
    return out[None]


def calls_of(part: str) -> tuple[Calls, Callable[[], Tensor] | None]:
    """Returns the calls off and on, and one that gives the exact result, if they give one."""
    tensors: Any = inputs_of(HEADS, 8192, WIDTH)
    layout = BLOCKS.layout(8192, num_heads=HEADS, block_size=128)

    def forward(pattern: sr.Pattern, given: Any = tensors, **options: Any) -> Any:
        return lambda: attention(*given, pattern, **options)

    def exact(pattern: sr.Pattern, given: Any = tensors) -> Callable[[], Tensor]:
        return lambda: attention(*(x.double() for x in given), pattern, backend="gather")

    def kernel(visited: BlockLayout) -> Callable[[], Tensor]:
        return lambda: cpu.forward(problem_of(visited, *tensors, WIDTH**-0.5))[0]

    if part == "layout cache, documents of 8,192 tokens":
        pattern = sr.Causal() & sr.Documents((300,) * 27 + (92,))

        def without() -> Tensor:
            sr.layout_cache.clear()
            return attention(*tensors, pattern)

        return {"off": without, "on": forward(pattern)}, exact(pattern)
    if part == "one kernel for all blocks, not a product a block":
        off = lambda: one_product_a_block(tensors, layout)  # noqa: E731
        return {"off": off, "on": forward(BLOCKS)}, exact(BLOCKS)
    if part == "visiting order, ascending keys":
        return {"off": kernel(in_random_order(layout)), "on": kernel(layout)}, exact(BLOCKS)
    if part == "block size by density, not 128; window of 64":
        narrow = sr.Causal() & sr.SlidingWindow(63)
        return {"off": forward(narrow, block_size=128), "on": forward(narrow)}, exact(narrow)
    if part == "weights of visited blocks, not of all pairs":
        query, key, _ = inputs_of(1, 4096, WIDTH)
        weights = lambda: sr.attention_weights(query, key, BLOCKS)  # noqa: E731
        return {"off": lambda: weights().to_dense(), "on": lambda: weights().values}, None
    assert part == "bfloat16"
    half = [x.bfloat16() for x in tensors]
    return {"off": forward(BLOCKS), "on": forward(BLOCKS, half)}, exact(BLOCKS)


PARTS = (
    "layout cache, documents of 8,192 tokens",
    "one kernel for all blocks, not a product a block",
    "visiting order, ascending keys",
    "block size by density, not 128; window of 64",
    "weights of visited blocks, not of all pairs",
    "bfloat16",
)


def one_call(part: str, state: str) -> Iterator[Any]:
    """Prepares a call, runs it for its peak, and gives no figures."""
    calls, _ = calls_of(part)
    calls[state]()
    give_back_freed()
    yield
    calls[state]()
    yield
    yield {}


def row_of(part: str) -> Row:
    """Times, peaks and errors of a part, off and on."""
    calls, exact = calls_of(part)
    times = interleaved_times(calls, ROUNDS)
    row: Row = {"part": part, "rounds": ROUNDS}
    ratios = [on / off for off, on in zip(times["off"], times["on"], strict=True)]
    row |= {f"ms_{state}": statistics.median(x) for state, x in times.items()}
    row["on_over_off"] = statistics.median(ratios)
    for state, call in calls.items():
        row[f"peak_mb_{state}"] = peak_and_figures(one_call, part, state)[0] / 1e6
        if exact is not None:
            row[f"error_{state}"] = distance_of([call().double()], [exact()])
    return row


@contextmanager
def waiting_at_once() -> Iterator[None]:
    """Makes every message of a ring finish before anything is computed."""
    before = exchange_module.Exchange.start

    def start(self: Any, *arguments: Any, **options: Any) -> Any:
        pending = before(self, *arguments, **options)
        pending.wait()
        return pending

    exchange_module.Exchange.start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        exchange_module.Exchange.start = before  # type: ignore[method-assign]


def messages(rank: int, world: int) -> list[Row]:
    """Rows of a ring of processes: needed keys, overlap, compression."""
    whole: Any = inputs_of(HEADS, 16384, WIDTH)
    own: Any = [shard(x) for x in whole]
    exact = shard(attention(*whole, WINDOW))

    def ring(**options: Any) -> Callable[[], Tensor]:
        return lambda: ring_of(*own, WINDOW, **options)

    def waiting() -> Tensor:
        with waiting_at_once():
            return ring()()

    parts: dict[str, Calls] = {
        "overlap of messages, window over 2 ranks": {"off": waiting, "on": ring()},
        "messages in bf16": {"off": ring(), "on": ring(compression="bf16")},
        "messages in int8": {"off": ring(), "on": ring(compression="int8")},
    }
    rows = []
    for part, calls in parts.items():
        clock = lambda call: slowest_milliseconds(call, world)  # noqa: E731
        times = interleaved_times(calls, ROUNDS, clock=clock)
        ratios = [on / off for off, on in zip(times["off"], times["on"], strict=True)]
        row: Row = {"part": part, "rounds": ROUNDS, "on_over_off": statistics.median(ratios)}
        for state, call in calls.items():
            row[f"ms_{state}"] = statistics.median(times[state])
            row[f"error_{state}"] = of_slowest(distance_of([call()], [exact]), world)
            row[f"received_mb_{state}"] = of_slowest(last_traffic().received_bytes / 1e6, world)
        rows.append(row)
    return rows


def ablation(out: Path) -> Path:
    """Measures every part and writes the record."""
    rows = [row_of(part) for part in PARTS]
    return write_record(out, "ablation", [*rows, *of_ranks(messages, WORLD)])
