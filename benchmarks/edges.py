"""Where memory ends: the batch and the length that the planner names fit, 15% more do not.

    python -m benchmarks.edges --out benchmarks/records

`edges.json`: for each pattern, forward alone and with backward, `choose_batch_size` and
`longest_sequence` name the most that fits in a memory. A fresh process whose heap may grow by that
memory and no more (RLIMIT_DATA, from what it holds before its inputs are made) then runs that call,
and another one a call 15% beyond, which must end for want of memory. Results at the edge are
compared with float64 once the limit is lifted.

RLIMIT_DATA counts what a process has reserved, so it is stricter than memory in use: a buffer with
room that is never touched counts. That is why the planner leaves a part of a memory free.
"""

import argparse
import ctypes
import math
import os
import resource
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sparsering as sr
from sparsering.planner.batch import longest_sequence
from sparsering.planner.sizes import parse_bytes

from .measure import Row, memory, sampled_error, write_record

BEYOND = 1.15


class Case(NamedTuple):
    """A call whose batch is asked for (`tokens` given), or its length (None)."""

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
    """The batch or the length that the planner says fits."""
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
    """15% more, to the next whole batch or 128 tokens."""
    if case.tokens is not None:
        return math.ceil(BEYOND * edge)
    return -(-math.ceil(BEYOND * edge) // 128) * 128


def run_within(case: Case, size: int, backward: bool) -> tuple[str, float]:
    """("fits", error) of a call under the memory limit, or ("too large", what the process said)."""
    context = torch.multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(send, case, size, backward))
    process.start()
    send.close()
    try:
        found: tuple[str, float] = receive.recv()
    except EOFError:  # killed where C++ found no memory
        found = ("too large", math.nan)
    process.join()
    return found


def _run(send: Any, case: Case, size: int, backward: bool) -> None:
    batch, tokens = (size, case.tokens) if case.tokens is not None else (1, size)
    _call(case._replace(pattern="Causal()"), 2, 64, backward)  # threads and buffers of their own
    ctypes.CDLL(None).malloc_trim(0)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = memory("VmData") + parse_bytes(case.memory)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        query, key, value, out = _call(case, batch, tokens, backward)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        send.send(("too large", math.nan))
        return
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    tensors = (x[:1].detach() for x in (out, query, key, value))
    send.send(("fits", sampled_error(*tensors, sr.parse(case.pattern), rows=4)))


def _call(case: Case, batch: int, tokens: int, backward: bool) -> tuple[Tensor, ...]:
    """A call with its inputs, and with backward its gradients, all held to the end."""
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
    """A row of each case, forward and with backward."""
    found: list[Row] = []
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
            found.append(row)
    return found


def main() -> None:
    """Writes the record; fails where an edge is wrong, once it is written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    arguments = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # what is given back leaves the process
    found = rows()
    write_record(arguments.out, "edges", found)
    wrong = [r for r in found if (r["at_edge"], r["past_edge"]) != ("fits", "too large")]
    if wrong:
        raise SystemExit(f"{len(wrong)} of {len(found)} edges are wrong: {wrong}")


if __name__ == "__main__":
    main()
