"""Draws pictures of a training run: losses over steps, and the time of a step by part."""

from collections.abc import Mapping, Sequence
from typing import Any

from .figure import DENSE, GREY, SPARSE, new_figure, png


def loss_png(metrics: Sequence[Mapping[str, Any]], baselines: Mapping[str, float]) -> bytes:
    """Draws training and validation losses over steps, and the levels of `baselines`.

    `metrics` are the records of `metrics.jsonl`.
    """
    figure = new_figure(4.6, 3.6)
    axes = figure.add_subplot()
    steps = [(r["step"], r["loss"]) for r in metrics if "loss" in r]
    checks = [(r["step"], r["validation_loss"]) for r in metrics if "validation_loss" in r]
    if steps:
        axes.plot(
            *zip(*steps, strict=True), color=SPARSE, alpha=0.45, linewidth=1, label="training"
        )
    if checks:
        axes.plot(
            *zip(*checks, strict=True), color=SPARSE, marker="o", markersize=4, label="validation"
        )
    for (name, level), style in zip(baselines.items(), ("--", ":", "-."), strict=False):
        axes.axhline(
            level, color=DENSE, linestyle=style, linewidth=1.2, label=f"{name} {level:.3f}"
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    return png(figure)


def speed_png(seconds: Mapping[str, tuple[float, float]], *, title: str) -> bytes:
    """Draws a stacked bar per name from (seconds in attention, seconds in total)."""
    figure = new_figure(4.6, 1.1 + 0.7 * len(seconds))
    axes = figure.add_subplot()
    names = list(seconds)
    attention = [seconds[name][0] for name in names]
    rest = [seconds[name][1] - seconds[name][0] for name in names]
    axes.barh(names, rest, color=GREY, label="everything else")
    axes.barh(names, attention, left=rest, color=SPARSE, label="attention")
    for place, name in enumerate(names):
        axes.text(seconds[name][1], place, f" {seconds[name][1]:.2f} s", va="center", fontsize=9)
    axes.set_xlim(0, max(total for _, total in seconds.values()) * 1.25)
    axes.set_xlabel("seconds per training step")
    axes.set_title(title, fontsize=9)
    axes.invert_yaxis()
    axes.legend(fontsize=8, frameon=False)
    return png(figure)
