"""Measures tangents and second derivatives beside the calls that they derive.

    python -m benchmarks.derivatives --out benchmarks/records

`derivatives.json`: a window of 1,024 tokens and 10% random blocks, 16,384 tokens, 8 heads of 64
channels, float32. Per case, in turns: `forward`; `jvp`, a primal with its tangent by query, key and
value; `backward`; `double backward`, the gradient of a function of gradients, which is what a
penalty on gradients adds. The row `gather` has the same by portable torch, and `reference` by dense
mathematics, at a length that fits. `peak_mb` is the memory of a fresh process beyond its inputs,
with results, for a window at 65,536 tokens. Errors are against float64 dense mathematics of a
head at 1,024 tokens, relative to the largest exact number.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import sparsering as sr

from .measure import (
    Row,
    distance_of,
    give_back_freed,
    interleaved_times,
    peak_extra_bytes,
    write_record,
)

LENGTH, LONGEST, DENSE, HEADS, WIDTH = 16_384, 65_536, 2_048, 8, 64
ROUNDS = 7

CASES: dict[str, sr.Pattern] = {
    "window of 1,024": sr.SlidingWindow(1023) & sr.Causal(),
    "10% random blocks": sr.RandomBlocks(0.1, 128),
}
WAYS = ("forward", "jvp", "backward", "double backward")


def drawn(length: int, seed: int, heads: int = HEADS) -> list[Tensor]:
    """Draws tensors of the shape of a query, the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, length, WIDTH, generator=generator) for _ in range(3)]


def calls_of(
    pattern: sr.Pattern, backend: str, inputs: Sequence[Tensor], directions: Sequence[Tensor]
) -> dict[str, Callable[[], Sequence[Tensor]]]:
    """Returns a function for each way; graphs are built before it is called."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sr.attention(query, key, value, pattern, backend=backend)

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [attend(*inputs)]

    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    gradient = torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
    gradient.requires_grad_()
    first = torch.autograd.grad(out, leaves, gradient, create_graph=True)
    grad = partial(torch.autograd.grad, retain_graph=True)
    return {
        "forward": forward,
        "jvp": lambda: torch.func.jvp(attend, tuple(inputs), tuple(directions)),
        "backward": lambda: grad(out, leaves, gradient.detach()),
        "double backward": lambda: grad(first, [*leaves, gradient], directions),
    }


def errors(pattern: sr.Pattern, backend: str) -> Row:
    """Error of each way against float64, at a length that dense mathematics computes fast."""
    x, u = drawn(1024, 0, heads=1), drawn(1024, 1, heads=1)
    calls = calls_of(pattern, backend, x, u)
    exact = calls_of(pattern, "reference", [t.double() for t in x], [t.double() for t in u])
    found = {way: distance_of(calls[way](), exact[way]()) for way in WAYS}
    if not all(error < 1e-3 for error in found.values()):
        raise RuntimeError(f"the timed function is wrong: {found}")
    return {f"error {way}": error for way, error in found.items()}


def times(name: str, backend: str, length: int, rounds: int) -> Row:
    """Milliseconds of all ways of a case, and their ratios."""
    pattern = CASES[name]
    measured = interleaved_times(
        calls_of(pattern, backend, drawn(length, 0), drawn(length, 1)), rounds
    )
    ms = {way: statistics.median(measured[way]) for way in WAYS}
    return {
        "case": name,
        "backend": backend,
        "tokens": length,
        "heads": HEADS,
        "width": WIDTH,
        "density": pattern.layout(length, num_heads=HEADS).density,
        "rounds": rounds,
        **{f"{way} ms": ms[way] for way in WAYS},
        "jvp / forward": ms["jvp"] / ms["forward"],
        "double backward / backward": ms["double backward"] / ms["backward"],
        **errors(pattern, backend),
    }


def _in_a_process(way: str, length: int) -> Iterator[None]:
    """Yields before and after a call."""
    pattern = CASES["window of 1,024"]
    for tokens in (1024, length):  # the first starts threads and builds kernels
        call = calls_of(pattern, "cpu", drawn(tokens, 0), drawn(tokens, 1))[way]
        if tokens == length:
            give_back_freed()
            yield
        call()


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.derivatives", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of the peaks")
    parser.add_argument("--dense", type=int, default=DENSE, help="tokens of dense mathematics")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name in CASES:
        rows.append(times(name, "cpu", arguments.length, arguments.rounds))
        rows.append(times(name, "gather", arguments.length, 1))
        for backend in ("cpu", "reference"):
            rows.append(times(name, backend, arguments.dense, arguments.rounds))
    for way in ("jvp", "double backward"):
        peak = peak_extra_bytes(_in_a_process, way, arguments.longest)
        rows.append({"case": "window of 1,024", "way": way, "tokens": arguments.longest})
        rows[-1] |= {"heads": HEADS, "width": WIDTH, "peak_mb": peak / 1e6}
    write_record(arguments.out, "derivatives", rows)


if __name__ == "__main__":
    main()
