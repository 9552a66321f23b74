"""Checks the planner's memory limits: its largest batch or length fits, and 15% more does not.

    python -m benchmarks.edges --out benchmarks/records

`edges.json`: for each pattern, forward alone and with backward, `choose_batch_size` and
`longest_sequence` give the largest size that fits in a memory. A fresh process runs that call; its
heap may grow by that memory and no more (RLIMIT_DATA, set before the inputs are made). Another
process runs a call 15% larger, which must run out of memory. After the limit is lifted, the results
of the first are compared with float64.

RLIMIT_DATA counts reserved memory, also a buffer that is never touched, so it is stricter than a
limit on memory in use. That is why the planner leaves a part of the memory free.
"""

import argparse
import math
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sparsering as sr
from sparsering.planning.fit import longest_sequence
from sparsering.planning.sizes import parse_bytes

from .measure import (
    Row,
    give_back_freed,
    peak_and_figures,
    sampled_error,
    within_memory,
    write_record,
)

BEYOND = 1.15


class Case(NamedTuple):
    """A call; the planner chooses its batch (`tokens` given) or its length (`tokens` None)."""

    pattern: str
    tokens: int | None
    memory: str = "512MB"
    num_heads: int = 8
    num_kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"


CASES = (
    Case("SlidingWindow(256) & Causal()", 2048),
    Case("SlidingWindow(256) & Causal()", None),
    Case("LongNet((512, 4096), (1, 4)) & Causal()", 4096, memory="1GB"),
    Case("LongNet((512, 4096), (1, 4)) & Causal()", None, memory="1GB"),
    Case("Causal()", 1024, num_kv_heads=2),
    Case("Causal()", None, num_heads=32, num_kv_heads=8, head_dim=128),
    Case("RandomBlocks(0.1, 64, seed=1)", 2048, dtype="bfloat16"),
    Case("GlobalTokens(32) | SlidingWindow(300, 300)", None, num_heads=16, num_kv_heads=4),
    Case("Dilated(1024, 4)", 3000, memory="1GB", head_dim=128),
    Case("Dilated(1024, 4)", None, dtype="bfloat16", num_heads=16, num_kv_heads=16),
)


def edge_of(case: Case, backward: bool) -> int:
    """Largest batch or length that fits, by the planner."""
    options: dict[str, Any] = {
        "memory": case.memory,
        "num_heads": case.num_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_dim": case.head_dim,
        "dtype": getattr(torch, case.dtype),
        "backward": backward,
    }
    pattern = sr.parse(case.pattern)
    if case.tokens is not None:
        return sr.choose_batch_size(pattern, tokens=case.tokens, **options)
    return longest_sequence(pattern, **options)


def beyond(case: Case, edge: int) -> int:
    """Size 15% beyond the edge, rounded up to a whole batch or to 128 tokens."""
    if case.tokens is not None:
        return math.ceil(BEYOND * edge)
    return -(-math.ceil(BEYOND * edge) // 128) * 128


def run_within(case: Case, size: int, backward: bool) -> tuple[str, float]:
    """Runs a call under the memory limit: ("fits", error) or ("too large", NaN)."""
    try:
        error = peak_and_figures(_attended, case, size, backward)[1]
    except RuntimeError:  # a failed allocation in C++ kills the process
        error = None
    return ("too large", math.nan) if error is None else ("fits", error)


def _attended(case: Case, size: int, backward: bool) -> Iterator[float | None]:
    """Yields before and after the call, and then its error, None if it ran out of memory."""
    batch, tokens = (size, case.tokens) if case.tokens is not None else (1, size)
    _call(case._replace(pattern="Causal()"), 2, 64, backward)  # starts threads, fills buffers
    give_back_freed()
    yield None
    limit = parse_bytes(case.memory)
    tensors = within_memory(limit, partial(_call, case, batch, tokens, backward))
    yield None
    if tensors is None:
        yield None
        return
    query, key, value, out = (x[:1].detach() for x in tensors)
    yield sampled_error(out, query, key, value, sr.parse(case.pattern), rows=4)


def _call(case: Case, batch: int, tokens: int, backward: bool) -> tuple[Tensor, ...]:
    """Runs a call, and its backward; keeps all tensors until the end, so that they count."""
    dtype = getattr(torch, case.dtype)
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    shapes = [(batch, number, tokens, case.head_dim) for number in heads]
    inputs = [torch.empty(s, dtype=dtype).normal_().requires_grad_(backward) for s in shapes]
    gradient = torch.empty(shapes[0], dtype=dtype).normal_() if backward else None
    out = sr.attention(*inputs, sr.parse(case.pattern))
    if gradient is not None:
        gradients = torch.autograd.grad(out, inputs, gradient)
        assert all(x.isfinite().all() for x in gradients[0][0])
    return (*inputs, out)


def rows() -> list[Row]:
    """Measures each case, forward and with backward."""
    results: list[Row] = []
    for case in CASES:
        for backward in (False, True):
            edge = edge_of(case, backward)
            more = beyond(case, edge)
            at_edge, error = run_within(case, edge, backward)
            past, _ = run_within(case, more, backward)
            row: Row = {**case._asdict(), "asked": "batch" if case.tokens else "tokens"}
            row |= {"backward": backward, "edge": edge, "at_edge": at_edge, "error": error}
            row |= {"beyond": more, "past_edge": past}
            print(row, flush=True)
            results.append(row)
    return results


def main() -> None:
    """Writes the record, then fails if an edge is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    arguments = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # freed memory leaves the process
    results = rows()
    write_record(arguments.out, "edges", results)
    wrong = [r for r in results if (r["at_edge"], r["past_edge"]) != ("fits", "too large")]
    if wrong:
        raise SystemExit(f"{len(wrong)} of {len(results)} edges are wrong: {wrong}")


if __name__ == "__main__":
    main()
