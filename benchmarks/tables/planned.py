"""Plans the longest sequences of some GPUs from their published memory; nothing is run.

    python -m benchmarks.tables.planned --out benchmarks/records

writes `planned-machines.json`: the prior documents' own machines at the lengths that they claim.
"""

import argparse
from pathlib import Path

import torch

from sparsering.patterns.algebra import Pattern
from sparsering.patterns.blocks import RandomBlocks
from sparsering.patterns.positions import Causal, Full, LongNet
from sparsering.planning.estimate import estimate
from sparsering.planning.machines import named

from ..measure import Row, write_record

MACHINES = ("H100 SXM", "H200", "A100 80GB", "RTX 4090", "L4")
HEADS, WIDTH, STEP = 8, 64, 4096
LENGTHS = (32768, 65536, 131072)


def planned_longest(quick: bool) -> list[Row]:
    """Most tokens of a forward pass on some GPUs, 8 heads of 64 in float16, by `sr.estimate`.

    The peak memory at three lengths is extrapolated by a parabola: it is linear in the tokens and
    in the entries of the layout. A layout of tens of millions of tokens would take too long.
    """
    patterns: tuple[tuple[str, Pattern], ...] = (
        ("all pairs", Full()),
        ("99% sparse", RandomBlocks(0.01, 128)),
        ("LongNet", LongNet((2048, 4096, 8192), (1, 2, 4))),
    )
    rows: list[Row] = []
    for name in MACHINES[: 1 if quick else None]:
        machine = named(name)
        for what, pattern in patterns:
            estimates = [
                estimate(
                    pattern, tokens=tokens, num_heads=HEADS, head_dim=WIDTH, dtype=torch.float16,
                    machine=machine,
                )
                for tokens in LENGTHS
            ]  # fmt: skip
            assert machine.memory_bytes is not None
            peaks = [x.peak_bytes.value for x in estimates]
            tokens = most_tokens(peaks, machine.memory_bytes)
            seconds = through([x.seconds.value for x in estimates], tokens)
            rows.append({
                "call": f"{name}, {what}", "known": "planned", "pattern": pattern.normal_text,
                "dtype": "float16", "tokens": tokens, "heads": HEADS, "head_dim": WIDTH,
                "density": through([x.pairs for x in estimates], tokens) / HEADS / tokens**2,
                "limit_bytes": machine.memory_bytes, "at_least_seconds": seconds,
            })  # fmt: skip
    return rows


OWN = (("GTX 1080", 2), ("V100", 4), ("A100 80GB", 8))
CLAIMED = (65_536, 131_072, 1_600_000, 8_000_000)


def own_machines() -> list[Row]:
    """Bounds of a causal LongNet's forward pass on each machine, 8 heads of 64, float16."""
    pattern = LongNet((2048, 4096, 8192), (1, 2, 4)) & Causal()
    rows: list[Row] = []
    for name, ranks in OWN:
        memory = named(name).memory_bytes
        assert memory is not None
        for tokens in CLAIMED:
            told = estimate(
                pattern, tokens=tokens, num_heads=HEADS, head_dim=WIDTH, dtype=torch.float16,
                machine=name, ranks=ranks,
            )  # fmt: skip
            rows.append({
                "gpus": f"{ranks} x {name}", "tokens": tokens, "pattern": pattern.normal_text,
                "peak_bytes_of_each": told.peak_bytes.value, "memory_bytes": memory,
                "fits": told.peak_bytes.value <= memory, "at_least_seconds": told.seconds.value,
            })  # fmt: skip
    return rows


def most_tokens(peaks: list[float], limit: float) -> int:
    """Largest multiple of 4,096 tokens whose extrapolated peak is within a limit."""
    low, high = 0, 1 << 20  # in steps of 4,096 tokens
    while high - low > 1:
        middle = (low + high) // 2
        if through(peaks, middle * STEP) <= limit:
            low = middle
        else:
            high = middle
    return low * STEP


def through(values: list[float], tokens: int) -> float:
    """Evaluates at `tokens` the parabola through the values at `LENGTHS`."""
    total = 0.0
    for place, value in enumerate(values):
        share = 1.0
        for other, length in enumerate(LENGTHS):
            if other != place:
                share *= (tokens - length) / (LENGTHS[place] - length)
        total += share * value
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/records"))
    write_record(parser.parse_args().out, "planned-machines", own_machines())
