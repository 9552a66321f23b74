"""Compares the costs that `sr.estimate` predicts with 60 measured calls on this machine.

    python -m benchmarks.costs --out benchmarks/records

`costs.json` has a row for each drawn case (pattern, length, heads, head dim, dtype, batch, with or
without backward). It has the peak resident memory of a fresh process beyond what it used before
its inputs, and the median seconds of the call with its layout cached, both next to the estimates.
Each case is saved when it is done: `--seconds` limits a run, and the same command continues it.

A fixed seed draws the cases. Cases of less than 32 MiB are drawn again, since thread stacks and
freed memory would dominate their peak; so are cases estimated to take more than a second.
"""

import argparse
import json
import math
import os
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparsering as sr
from sparsering.ground.files import replace_file

from .measure import Row, give_back_freed, peak_extra_bytes, write_record

CASES, SEED = 60, 16
LEAST_BYTES, MOST_SECONDS = 32 << 20, 1.0
ROUNDS, MOST_ROUNDS = 5, 25


def drawn() -> list[dict[str, Any]]:
    """Draws the cases."""
    draw, cases = random.Random(SEED), []
    while len(cases) < CASES:
        case = _case(draw)
        tensors = 4 if case["backward"] else 2  # as large as the query; keys and values come on top
        tokens = case["tokens"] * (tensors * case["num_heads"] + 2 * case["num_kv_heads"])
        size = getattr(torch, case["dtype"]).itemsize
        most = case["batch_size"] * tokens * case["head_dim"] * size
        if most >= LEAST_BYTES and _rough_seconds(case) <= MOST_SECONDS:
            cases.append(case)
    return cases


def _rough_seconds(case: dict[str, Any]) -> float:
    """Estimates seconds by fixed rates, so that every machine draws the same cases."""
    estimate = estimate_of({**case, "num_heads": 1, "num_kv_heads": 1, "batch_size": 1})
    flops = estimate.flops.value * case["num_heads"] * case["batch_size"]
    return flops / (4e11 if case["dtype"] == "bfloat16" else 1.2e11)


def _case(draw: random.Random) -> dict[str, Any]:
    tokens = draw.choice((256, 512, 1000, 1024, 2048, 3000, 4096, 8192, 10000, 16384, 32768))
    kv_heads = draw.choice((1, 2, 3, 4, 8, 16))
    heads = draw.choice([n for n in (kv_heads, 2 * kv_heads, 4 * kv_heads) if n <= 16])
    return {
        "pattern": _pattern(draw, tokens),
        "tokens": tokens,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": draw.choice((32, 64, 128)),
        "dtype": draw.choice(("float32", "bfloat16")),
        "batch_size": draw.choice((1, 1, 2, 4)),
        "backward": draw.random() < 0.5,
    }


def _pattern(draw: random.Random, tokens: int) -> str:
    kind = draw.randrange(8)
    window = draw.choice((128, 300, 512, 1024))
    if kind == 0:
        return f"SlidingWindow({window}) & Causal()"
    if kind == 1:
        return "Causal()"
    if kind == 2:
        first = draw.choice((256, 512, 1024))
        rate = draw.choice((2, 4))
        return f"LongNet({(first, 4 * first)}, {(1, rate)}) & Causal()"
    if kind == 3:
        return f"BlockWindow({draw.choice((1, 2, 4))}, {draw.choice((64, 128))})"
    if kind == 4:
        density, seed = draw.choice((0.05, 0.1, 0.3)), draw.randrange(100)
        return f"RandomBlocks({density}, {draw.choice((64, 128))}, seed={seed})"
    if kind == 5:
        return f"GlobalTokens({draw.choice((16, 64))}) | SlidingWindow({window}, {window})"
    if kind == 6:
        cuts = sorted(draw.sample(range(1, tokens), 5))
        lengths = tuple(b - a for a, b in zip((0, *cuts), (*cuts, tokens), strict=True))
        name = draw.choice(("Documents", "Packed"))
        return (
            f"Documents({lengths}) & Causal()"
            if name == "Documents"
            else (f"Packed({lengths}, SlidingWindow({window}))")
        )
    return f"Dilated({draw.choice((1024, 4096))}, {draw.choice((2, 4, 8))})"


def estimate_of(case: dict[str, Any]) -> "sr.Estimate":
    """Returns `sr.estimate` of a case."""
    arguments = {name: value for name, value in case.items() if name not in ("pattern", "dtype")}
    dtype = getattr(torch, case["dtype"])
    return sr.estimate(sr.parse(case["pattern"]), dtype=dtype, **arguments)


def call(case: dict[str, Any], inputs: list[Tensor]) -> object:
    """Runs the call, and its backward pass if the case has one."""
    query, key, value, *gradient = inputs
    out = sr.attention(query, key, value, sr.parse(case["pattern"]))
    if gradient:
        return torch.autograd.grad(out, (query, key, value), gradient)
    return out


def inputs_of(case: dict[str, Any]) -> list[Tensor]:
    """Draws query, key, value, and with backward the gradient of the result."""
    backward, dtype = case["backward"], getattr(torch, case["dtype"])
    shapes = [
        (case["batch_size"], heads, case["tokens"], case["head_dim"])
        for heads in (case["num_heads"], case["num_kv_heads"], case["num_kv_heads"])
    ]
    tensors = [torch.empty(s, dtype=dtype).normal_().requires_grad_(backward) for s in shapes]
    return [*tensors, torch.empty(shapes[0], dtype=dtype).normal_()] if backward else tensors


def peak_bytes(case: dict[str, Any]) -> int:
    """Peak resident memory of a fresh process beyond what it uses before it draws its inputs."""
    return peak_extra_bytes(_measured, case)


def _measured(case: dict[str, Any]) -> Iterator[None]:
    warm = {**case, "tokens": 64, "pattern": "Causal()", "batch_size": 2}
    call(warm, inputs_of(warm))
    give_back_freed()
    yield
    call(case, inputs_of(case))


def median_seconds(case: dict[str, Any]) -> float | None:
    """Median seconds of several calls in this process after a warm-up, on an idle machine.

    A call during which other processes computed is repeated. Returns None if they keep computing:
    the case is left for another run. Whether a call counts does not depend on its own time.
    """
    inputs, times = inputs_of(case), []
    call(case, inputs)
    for _ in range(MOST_ROUNDS):
        start, others = time.perf_counter(), _seconds_of_others()
        call(case, inputs)
        took = time.perf_counter() - start
        if _seconds_of_others() - others <= 0.05 * took + 0.02:  # 0.02 s: /proc/stat counts ticks
            times.append(took)
        if len(times) == ROUNDS:
            break
    return statistics.median(times) if len(times) == ROUNDS else None


def _seconds_of_others() -> float:
    """Processor seconds that all other processes have used."""
    user, nice, system, _, _, irq, soft, *_ = (
        int(ticks) for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK") - time.process_time()


def row_of(case: dict[str, Any], measured: dict[str, float]) -> Row:
    """Builds the row of a case: the estimates and the measurements."""
    estimate = estimate_of(case)
    return {
        **case,
        "backend": estimate.backend,
        "block_size": estimate.block_size,
        "density": estimate.density,
        "peak_bytes": measured["peak_bytes"],
        "told_peak_bytes": estimate.peak_bytes.value,
        "told_over_peak": estimate.peak_bytes.value / measured["peak_bytes"],
        "seconds": measured["seconds"],
        "told_seconds": estimate.seconds.value,
        "told_over_seconds": estimate.seconds.value / measured["seconds"],
        "seconds_known": estimate.seconds.known,
    }


def summary(rows: list[Row]) -> Row:
    """Shares of the cases whose estimates are within the bounds, and the extreme ratios."""
    peaks, seconds = (
        torch.tensor([row[name] for row in rows], dtype=torch.float64)
        for name in ("told_over_peak", "told_over_seconds")
    )
    return {
        "cases": len(rows),
        "peaks_within_10_percent": float(((peaks - 1).abs() <= 0.1).double().mean()),
        "lowest_told_over_peak": float(peaks.min()),
        "highest_told_over_peak": float(peaks.max()),
        "seconds_within_factor_1.3": float((seconds.log().abs() <= math.log(1.3)).double().mean()),
        "lowest_told_over_seconds": float(seconds.min()),
        "highest_told_over_seconds": float(seconds.max()),
    }


def main() -> None:
    """Measures the cases that are missing; writes the record when none is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument(
        "--kept", type=Path, default=Path("runs/costs.json"), help="file of finished measurements"
    )
    parser.add_argument(
        "--only", choices=("draw", "peak_bytes", "seconds"), help="run only this part"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    arguments, start = parser.parse_args(), time.perf_counter()
    cases = json.loads(arguments.kept.read_text()) if arguments.kept.exists() else []
    if not cases:
        cases = [{"case": case, "measured": {}} for case in drawn()]
        _keep(arguments.kept, cases)
    kinds = {"peak_bytes": peak_bytes, "seconds": median_seconds}
    for name, measure in kinds.items():
        for one in cases if arguments.only in (None, name) else []:
            late = time.perf_counter() - start > arguments.seconds
            if late or name in one["measured"]:
                continue
            figure = measure(one["case"])
            if figure is not None:
                one["measured"][name] = figure
                _keep(arguments.kept, cases)
    if all(one["measured"].keys() == kinds.keys() for one in cases):
        rows = [row_of(one["case"], one["measured"]) for one in cases]
        write_record(arguments.out, "costs", [summary(rows), *rows])


def _keep(path: Path, cases: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(cases, indent=1).encode())


if __name__ == "__main__":
    main()
