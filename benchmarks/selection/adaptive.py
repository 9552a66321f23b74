"""Adaptive training: dense, fixed sparse, scheduled, gated and refined, at equal steps.

A byte model trains on the demo's text, the sources of Python's standard library, as `sparsering
train --attention selected` does. All arms see the same windows in the same order.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from sparsering.training import Recipe, train

from ..measure import Row

_RECIPE = Recipe(
    pattern="Causal()", context=1024, batch_size=2, steps=400, width=96, num_layers=3, num_heads=3,
    learning_rate=6e-3, dtype="float32", block_size=32, blocks=6,
)  # fmt: skip
_WINDOW = _RECIPE.blocks * _RECIPE.block_size
_ARMS = {
    "dense": {},
    "window": {"pattern": f"SlidingWindow({_WINDOW - 1}) & Causal()"},
    "fixed": {"attention": "selected"},
    "scheduled": {"attention": "selected", "schedule": "0:dense, 100:16, 200:6"},
    "gated": {"attention": "selected", "schedule": "0:dense, 50:16, 100:6", "gate": "loss<=2.2"},
    "refined": {"attention": "selected", "refine": 5},
    "refined after dense": {
        "attention": "selected", "refine": 5, "schedule": "0:dense, 200:6",
    },
}  # fmt: skip


def adaptive(seed: int) -> list[Row]:
    """Trains each arm; returns its validation loss and its seconds."""
    rows = []
    for arm, changes in _ARMS.items():
        recipe = replace(_RECIPE, seed=seed, **changes)
        with tempfile.TemporaryDirectory() as folder:
            run = train(recipe, Path(folder), save_every=1000, validate_every=100)
        steps = [record for record in run.metrics if "loss" in record]
        validations = [r for r in run.metrics if "validation_loss" in r]
        rows.append({
            "experiment": "adaptive", "seed": seed, "arm": arm, "steps": recipe.steps,
            "tokens": recipe.context, "blocks": recipe.blocks, "of": recipe.context // 32,
            "schedule": recipe.schedule, "gate": recipe.gate, "refine": recipe.refine,
            "validation_loss": run.validation_loss,
            "validation_losses": [r["validation_loss"] for r in validations],
            "blocks_at_the_end": run.selection.k if run.selection else None,
            "seconds": sum(record["seconds"] for record in steps),
            "seconds_of_the_last_50": sum(record["seconds"] for record in steps[-50:]),
        })  # fmt: skip
    return rows
