"""What the choice of backend and block size costs beside the best of all: `choices.json`.

    python -m benchmarks.choices --out benchmarks/records --seconds 70

Forty drawn calls, each run unnamed and with every backend and block size that can run it, in turn.
A run that ends before all are measured is gone on with by the next, from a file beside the record.

Times are processor time of one thread: what else runs on the machine adds little to it.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import sparsering as sr
from sparsering.bench.measure import Row, write_record
from sparsering.patterns.expression import parse

CASES, SEED = 40, 16
DTYPES = ("float32", "float32", "bfloat16", "bfloat16", "float64")
LENGTHS = (64, 128, 200, 384, 512, 1000, 1536, 2048, 4096)
MOST_WORK = 1.5e9  # multiplications of a dense call; heads are fewer until it is less
SECONDS = 0.8  # that a case is measured for, about


def drawn_cases() -> list[Row]:
    """The calls, the same each time."""
    draw = random.Random(SEED)
    return [_drawn(draw, number) for number in range(CASES)]


def _drawn(draw: random.Random, number: int) -> Row:
    tokens, head_dim = draw.choice(LENGTHS), draw.choice((32, 64, 64, 128))
    heads, batch, backward = draw.choice((4, 8, 12)), draw.choice((1, 1, 2, 4)), draw.random() < 0.5
    wide, narrow = draw.randrange(100, 1500), draw.randrange(7, 130)
    pattern = draw.choice(
        (
            "Full()",
            "Causal()",
            "Causal()",
            f"SlidingWindow({narrow})",
            f"SlidingWindow({wide})",
            f"SlidingWindow({narrow}, {narrow})",
            f"Causal() & (SlidingWindow({narrow}) | GlobalTokens(4))",
            f"Causal() & (SlidingWindow({wide}) | GlobalTokens(16))",
            "LongNet((256, 1024), (1, 4)) & Causal()",
            "LongNet((512, 2048), (1, 2))",
            f"Dilated({draw.choice((512, 1024))}, {draw.choice((2, 4))}) & Causal()",
        )
    )
    while tokens**2 * head_dim * heads * batch > MOST_WORK and heads * batch > 1:
        heads, batch = (heads, batch // 2) if batch > 1 else (heads // 2, 1)
    dtype = draw.choice(DTYPES)
    return {
        "case": number,
        "pattern": pattern,
        "tokens": tokens,
        "batch": batch,
        "heads": heads,
        "head_dim": head_dim,
        "dtype": dtype,
        "backward": backward,
    }


def measured(case: Row) -> Row:
    """A case with the time of each candidate, and what the choice costs beside the best."""
    torch.manual_seed(int(str(case["case"])))
    pattern = parse(str(case["pattern"]), [])
    shape = [int(str(case[name])) for name in ("batch", "heads", "tokens", "head_dim")]
    dtype = getattr(torch, str(case["dtype"]))
    inputs = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    for x in inputs:
        x.requires_grad_(bool(case["backward"]))
    grad = torch.randn(shape, dtype=dtype)

    def call(**named: object) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            out = sr.attention(*inputs, pattern, **named)  # type: ignore[call-overload]
            return (out, *(torch.autograd.grad(out, inputs, grad) if case["backward"] else ()))

        return run

    runs = sr.explain(*inputs, pattern).split(";")[0].removeprefix("runs: ")
    backend, size = runs.split(", ")
    chosen = backend if size == "no blocks" else f"{backend} {size.removeprefix('blocks of ')}"
    calls = {"": call()}
    tiled = "gather" if dtype == torch.float64 else "cpu"
    for tokens in (32, 64, 128, 256):
        if tokens < 2 * shape[2]:
            calls[f"{tiled} {tokens}"] = call(backend=tiled, block_size=tokens)
    if tiled == "cpu" and shape[2] <= 512:
        calls["gather 128"] = call(backend="gather", block_size=128)
    if "usable" in next(x for x in sr.explain(*inputs, pattern).split("\n") if "sdpa: " in x):
        calls["sdpa"] = call(backend="sdpa")
    assert chosen in calls, chosen
    error = _error(calls[""](), inputs, pattern, grad if case["backward"] else None)
    begin = time.process_time()
    for run in calls.values():
        run()
    rounds = max(5, min(100, int(SECONDS / (time.process_time() - begin))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, run in calls.items():
            start = time.process_time()
            run()
            times[name].append((time.process_time() - start) * 1e3)
    medians = {name: statistics.median(found) for name, found in times.items()}
    least = {name: min(found) for name, found in times.items()}
    unnamed, quickest = medians.pop(""), least.pop("")
    best = min(medians, key=lambda name: medians[name])
    return {
        **case,
        "density": pattern.layout(shape[2], num_heads=shape[1]).density,
        "chosen": chosen,
        "best": best,
        "ms": unnamed,
        "over_best": medians[chosen] / medians[best],
        "least_over_best": least[chosen] / min(least.values()),
        "noise": abs(unnamed / medians[chosen] - 1),
        "least_noise": abs(quickest / least[chosen] - 1),
        "error": error,
        "rounds": rounds,
        "candidates_ms": medians,
    }


def _error(
    found: tuple[Tensor, ...], inputs: list[Tensor], pattern: sr.Pattern, grad: Tensor | None
) -> float:
    """Largest difference to float64 by other tiles, over the largest number there."""
    exact = [x.detach().double().requires_grad_(grad is not None) for x in inputs]
    out = sr.attention(*exact, pattern, backend="gather", block_size=128)
    right = (out,) if grad is None else (out, *torch.autograd.grad(out, exact, grad.double()))
    with torch.no_grad():
        return max(
            float((a.double() - b).abs().max() / b.abs().max())
            for a, b in zip(found, right, strict=True)
        )


def main() -> int:
    """Measures what is left of the cases, or as much as there is time for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--seconds", type=float, default=1e9, help="to measure for at most")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begun = arguments.out / "choices.part.jsonl"
    lines = begun.read_text().splitlines() if begun.exists() else []
    rows: list[Row] = [json.loads(line) for line in lines]
    end = time.monotonic() + arguments.seconds
    for case in drawn_cases()[len(rows) :]:
        if time.monotonic() > end:
            print(f"{len(rows)} of {CASES} measured; run again to go on")
            return 0
        rows.append(measured(case))
        begun.parent.mkdir(parents=True, exist_ok=True)
        with begun.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    write_record(arguments.out, "choices", [*rows, summary(rows)])
    begun.unlink()
    return 0


def summary(rows: list[Row]) -> Row:
    """How many choices cost at most 5% over the best, the worst and the mean."""
    over = [float(str(row["over_best"])) for row in rows]
    least = [float(str(row["least_over_best"])) for row in rows]
    return {
        "case": "all",
        "within_5_percent": sum(x <= 1.05 for x in over),
        "of": len(over),
        "worst": max(over),
        "mean": statistics.mean(over),
        "least_within_5_percent": sum(x <= 1.05 for x in least),
        "least_worst": max(least),
        "least_mean": statistics.mean(least),
        "median_noise": statistics.median(float(str(row["noise"])) for row in rows),
        "largest_error_float32": _largest(rows, "float32"),
        "largest_error_bfloat16": _largest(rows, "bfloat16"),
        "largest_error_float64": _largest(rows, "float64"),
    }


def _largest(rows: list[Row], dtype: str) -> float:
    return max((float(str(row["error"])) for row in rows if row["dtype"] == dtype), default=0.0)


if __name__ == "__main__":
    raise SystemExit(main())
