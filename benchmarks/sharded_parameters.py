"""Measures the memory of a rank that trains with all parameters, and with a part of each (FSDP2).

    python -m benchmarks.sharded_parameters --out benchmarks/records

`sharded-parameters.json`: bytes of a rank after a training step (weights, gradients and AdamW's two
states), and the largest extra bytes during a step, with `sparsering train` and with its `--shard`,
over 2 and 4 processes that share a short sequence. Losses that differ raise.
"""

import argparse
import gc
import os
from pathlib import Path

import torch

from sparsering.training import Recipe
from sparsering.training.ranks import arrange
from sparsering.training.step import adamw, training_step

from .measure import Row, give_back_freed, memory, of_ranks, of_slowest, peak_of, write_record

TOKENS = 256
LARGE = Recipe(
    pattern="SlidingWindow(63) & Causal()",
    context=TOKENS,
    width=768,
    num_layers=8,
    num_heads=12,
    dtype="float32",
    learning_rate=1e-3,
)
SMALL = Recipe(
    pattern=LARGE.pattern, context=64, width=64, num_layers=2, num_heads=2, dtype="float32"
)


def rows_of(rank: int, world: int, recipe: Recipe) -> list[Row]:
    """Measures both methods; RuntimeError if their losses differ."""
    for shard in (False, True):  # loads kernels, FSDP and autograd, which are no part of a model
        row_of(world, SMALL, shard=shard)
    whole, losses = row_of(world, recipe, shard=False)
    parts, losses_of_parts = row_of(world, recipe, shard=True)
    if max(abs(a - b) for a, b in zip(losses, losses_of_parts, strict=True)) > 1e-5:
        raise RuntimeError(f"expected equal losses, got {losses} and {losses_of_parts}")
    return [whole, parts]


def row_of(world: int, recipe: Recipe, *, shard: bool) -> tuple[Row, list[float]]:
    """Measures three steps, on the rank that needs most; returns the figures and the losses."""
    text = torch.randint(256, (4 * TOKENS,), generator=torch.Generator().manual_seed(0))
    ranks = arrange(world, shard_parameters=shard)
    gc.collect()
    give_back_freed()
    before = memory("VmRSS")
    model = recipe.build_model()
    numel = sum(p.numel() for p in model.parameters())
    ranks.place(model)
    optimizer = adamw(model, recipe)
    losses: list[float] = []

    def step() -> None:
        loss, _, _ = training_step(model, optimizer, recipe, len(losses), text, ranks)
        losses.append(loss)

    step()  # makes the gradients and AdamW's states
    gc.collect()
    give_back_freed()
    held = of_slowest(memory("VmRSS") - before, world)
    peak = of_slowest(peak_of(step), world)
    step()
    row: Row = {
        "method": "train --shard" if shard else "train",
        "processes": world,
        "parameters": numel,
        "held_mb": held / 1e6,
        "expected_mb": 16 * numel / (world if shard else 1) / 1e6,  # float32, 4 of each parameter
        "peak_extra_mb": peak / 1e6,
    }
    return row, losses


def main() -> int:
    """Writes the record."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharded_parameters", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--quick", action="store_true", help="a small model")
    arguments = parser.parse_args()
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        os.environ[name] = "65536"  # freed memory leaves the process
    recipe = SMALL if arguments.quick else LARGE
    rows = [row for world in (2, 4) for row in of_ranks(rows_of, world, recipe)]
    write_record(arguments.out, "sharded-parameters", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
