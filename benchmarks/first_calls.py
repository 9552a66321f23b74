"""Measures what the first call with a pattern takes beyond the second.

    python -m benchmarks.first_calls --out benchmarks/records

`first-calls.json`: for each pattern, calls at 4,096 tokens with several values of it that no cache
has, and three more calls with each. The CPU milliseconds, on one thread, are the median over the
values of the first call's time less the median of the others'. Heads are narrow, so that the noise
of the calls themselves is small.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import sparsering as sr
from sparsering.kernels.cpu.build import library

from .measure import inputs_of, write_record

TOKENS, HEADS, HEAD_DIM, VALUES = 4096, 4, 16, 15


def patterns() -> dict[str, Callable[[int], sr.Pattern]]:
    """Makes a pattern of each kind from a number; patterns of two numbers differ."""
    return {
        "causal window": lambda i: sr.Causal() & sr.SlidingWindow(1000 + i),
        "LongNet": lambda i: sr.Causal() & sr.LongNet((1024 + 4 * i, 4096, 8192), (1, 4, 8)),
        "documents": lambda i: sr.Packed((1000 + i, 1000, 2096 - i), sr.Causal()),
        "RandomBlocks(0.1)": lambda i: sr.RandomBlocks(0.1, 128, seed=i),
        "Hierarchical": lambda i: sr.Hierarchical(((64, 256 + 64 * i), (256, 4096)), 64),
        "BlockDilated": lambda i: sr.BlockDilated((1, 2, 4, 8 + i), 64),
    }


def milliseconds(call: Callable[[], object]) -> float:
    """Returns the CPU time of one call."""
    begin = time.process_time_ns()
    call()
    return (time.process_time_ns() - begin) / 1e6


def rows() -> list[dict[str, object]]:
    """One row for each pattern."""
    library()
    torch.set_num_threads(1)
    inputs = inputs_of(HEADS, TOKENS, HEAD_DIM, torch.float32)
    found: list[dict[str, object]] = []
    for name, make in patterns().items():
        extra, later = [], []
        for i in range(VALUES + 2):
            pattern = make(i)
            times = [milliseconds(lambda: sr.attention(*inputs, pattern)) for _ in range(4)]  # noqa: B023
            later.append(statistics.median(times[1:]))
            extra.append(times[0] - later[-1])
        found.append({
            "pattern": name, "tokens": TOKENS, "heads": HEADS,
            "ms_beyond_second": statistics.median(extra[2:]), "ms_second": statistics.median(later),
        })  # fmt: skip
    return found


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    write_record(parser.parse_args().out, "first-calls", rows())


if __name__ == "__main__":
    main()
