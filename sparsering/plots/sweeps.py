"""Draws the benchmark record "sweeps": time over density, length and block size."""

from collections.abc import Mapping, Sequence
from typing import Any

from .figure import DENSE, GREY, SPARSE, new_figure, png

_NAMES = {"cpu": "sparsering", "flex": "FlexAttention", "dense": "dense SDPA"}


def sweeps_png(rows: Sequence[Mapping[str, Any]], *, title: str) -> bytes:
    """Draws milliseconds over density, tokens and block size, a line per backend.

    `rows` are the rows of the benchmark record "sweeps".

    Raises: ImportError without matplotlib.
    """
    figure = new_figure(11.5, 3.6)
    panels = (
        ("density", "density", "share of blocks visited"),
        ("length", "tokens", "tokens (causal window of 2048)"),
        ("block size", "block_size", "tokens per block (10% of blocks)"),
    )
    for place, (sweep, column, label) in enumerate(panels):
        axes = figure.add_subplot(1, 3, place + 1)
        lines: dict[str, list[tuple[float, float]]] = {name: [] for name in _NAMES}
        x = 0.0
        for row in rows:
            if row["sweep"] == sweep:
                # Each comparison begins with its "cpu" row, and its other rows share that x.
                x = row[column] if row["backend"] == "cpu" else x
                lines[row["backend"]].append((x, row["ms"]))
        for backend, color in (("cpu", SPARSE), ("flex", DENSE), ("dense", GREY)):
            if line := lines[backend]:
                axes.plot(*zip(*line, strict=True), marker="o", color=color, label=_NAMES[backend])
        axes.set_xscale("log", base=10 if sweep == "density" else 2)
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("milliseconds, forward")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=9)
    return png(figure)
