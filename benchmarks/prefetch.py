"""Times training steps whose pattern changes, with and without prefetching layouts.

    python -m benchmarks.prefetch --out benchmarks/records [--only CASE ...]

`prefetch.json`: milliseconds of a step (forward and backward of one attention), medians of
interleaved runs. "without": the call builds its layout. "prefetch": a thread builds the next step's
layout while this step computes; the time to finish the last one counts. "kept": all layouts are
already built, the lower bound. Measured with one thread, which leaves a core for the prefetch, and
with two, which leave none. `cores`: the speedup of two threads over one, since a prefetch needs a
core of its own. Cases that are not run keep their rows.
"""

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparsering as sr

from .measure import (
    Row,
    inputs_of,
    interleaved,
    interleaved_times,
    sampled_error,
    write_record,
)

HEADS, WIDTH = 4, 64
STEPS = 3  # steps of a run
METHODS = ("without", "prefetch", "kept")

Patterns = Iterator[sr.Pattern]
Ahead = Callable[[sr.Pattern], Future[Any]]


def random_blocks(density: float) -> Callable[[int], Patterns]:
    """Builds a stream of patterns: new random blocks at each step, different for each head."""
    return lambda tokens: (
        sr.RandomBlocks(density, 128, seed=seed) & sr.Causal() for seed in itertools.count()
    )


def documents(tokens: int) -> Patterns:
    """Yields documents of new lengths at each step, some 500 tokens each."""
    generator = torch.Generator().manual_seed(0)
    while True:
        cuts = torch.randperm(tokens - 1, generator=generator)[: tokens // 512 - 1].sort()[0] + 1
        ends = torch.cat((torch.tensor([0]), cuts, torch.tensor([tokens])))
        yield sr.Packed(tuple(ends.diff().tolist()), sr.Causal())


def selected(tokens: int) -> Patterns:
    """Yields unions of selected blocks and a window; the host builds the layout of a union."""
    generator, blocks = torch.Generator().manual_seed(0), tokens // 64
    while True:
        indices = torch.randint(blocks, (2, blocks, 8), generator=generator)
        yield (sr.SelectedBlocks(indices, 64) | sr.SlidingWindow(127)) & sr.Causal()


CASES: dict[str, tuple[Callable[[int], Patterns], int]] = {
    "random blocks 10%": (random_blocks(0.1), 8192),
    "random blocks 5%": (random_blocks(0.05), 16384),
    "random blocks 2%": (random_blocks(0.02), 32768),
    "documents": (documents, 16384),
    "selected blocks and a window": (selected, 8192),
}


def run(
    method: str, patterns: list[sr.Pattern], step: Callable[..., object], ahead: Ahead
) -> float:
    """Mean milliseconds of a step in one run; the last pattern is only prefetched."""
    sr.layout_cache.clear()
    now = {"without": [], "prefetch": patterns[:1], "kept": patterns[:-1]}[method]
    for pattern in now:
        ahead(pattern).result()
    begin = time.perf_counter()
    for pattern, following in itertools.pairwise(patterns):
        if method == "prefetch":
            future = ahead(following)
        step(pattern)
    if method == "prefetch":
        future.result()
    return (time.perf_counter() - begin) * 1e3 / (len(patterns) - 1)


def in_turns(of_method: Callable[[str], float], rounds: int) -> dict[str, list[float]]:
    """Times all methods in turn: milliseconds of a step, by method and round."""
    runs = {method: partial(of_method, method) for method in METHODS}
    return interleaved_times(runs, rounds, clock=lambda run: run(), warm=True)


def alone(name: str, threads: int, rounds: int) -> list[Row]:
    """Measures a case in this process, by every method."""
    torch.set_num_threads(threads)
    drawn, tokens = CASES[name]
    patterns, (query, key, value) = drawn(tokens), inputs(tokens)
    leaves = [x.requires_grad_() for x in (query, key, value)]

    def step(pattern: sr.Pattern) -> None:
        torch.autograd.grad(sr.attention(*leaves, pattern).sum(), leaves)

    def ahead(pattern: sr.Pattern) -> Future[Any]:
        return sr.layout_cache.prefetch(pattern, tokens, num_heads=HEADS, num_kv_heads=2)

    def of_method(method: str) -> float:
        return run(method, list(itertools.islice(patterns, STEPS + 1)), step, ahead)

    times = in_turns(of_method, rounds)
    pattern = next(patterns)
    begin = time.perf_counter()
    layout = ahead(pattern).result()
    build = (time.perf_counter() - begin) * 1e3
    with torch.no_grad():
        error = sampled_error(sr.attention(*leaves, pattern), *leaves, pattern, rows=8)
    figures = {"tokens": tokens, "density": layout.density, "layout_ms": build, "error": error}
    return rows_of(name, 1, threads, times, figures)


def rows_of(
    name: str, ranks: int, threads: int, times: dict[str, list[float]], figures: Row
) -> list[Row]:
    """Builds one row for each method."""
    return [
        {
            "pattern": name, "ranks": ranks, "threads": threads, "method": method,
            "ms": statistics.median(times[method]), "least_ms": min(times[method]), **figures,
        }
        for method in METHODS
    ]  # fmt: skip


def cores(rounds: int) -> Row:
    """Measures the speedup of two threads over one: the number of cores really available."""
    torch.set_num_threads(1)
    x = torch.randn(512, 512)

    def work() -> None:
        for _ in range(20):
            x @ x

    def both() -> None:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    times = interleaved({"one": work, "both": both}, 4 * rounds)
    return {"pattern": "none: two threads at once", "ranks": 1,
            "cores": 2 * times["one"] / times["both"]}  # fmt: skip


def inputs(tokens: int) -> list[Tensor]:
    """Draws query, key and value of a whole sequence: 4 query heads, 2 kv heads."""
    return inputs_of(HEADS, tokens, WIDTH, kv_heads=2)


def main() -> int:
    """Writes the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefetch", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each method")
    parser.add_argument("--only", nargs="*", default=[*CASES], help="names of cases")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    arguments = parser.parse_args()
    earlier, rows = arguments.out / "prefetch.json", []
    for row in json.loads(earlier.read_text())["rows"] if earlier.exists() else ():
        rows += [row] if row["pattern"] not in arguments.only and "cores" not in row else []
    rows.append(cores(arguments.rounds))
    for name in CASES:
        for threads in arguments.threads if name in arguments.only else ():
            rows += alone(name, threads, arguments.rounds)
    write_record(arguments.out, "prefetch", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
