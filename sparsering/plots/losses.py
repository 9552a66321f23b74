"""Draws pictures of a training run: losses over steps, and the time of a step by part."""

from collections.abc import Mapping, Sequence
from typing import Any

from .figure import DENSE, GREY, SPARSE, image, new_figure


def loss_image(
    metrics: Sequence[Mapping[str, Any]],
    baselines: Mapping[str, float],
    *,
    kind: str = "png",
) -> bytes:
    """Draws training and validation losses over steps, and a line for each of `baselines`.

    `metrics` are the records of a run's file `metrics.jsonl`; `kind` is "png" or "svg".
    """
    figure = new_figure(4.6, 3.6)
    axes = figure.add_subplot()
    for name, style in (
        ("loss", {"alpha": 0.45, "linewidth": 1, "label": "training"}),
        ("validation_loss", {"marker": "o", "markersize": 4, "label": "validation"}),
    ):
        if points := [(r["step"], r[name]) for r in metrics if name in r]:
            axes.plot(*zip(*points, strict=True), color=SPARSE, **style)
    for (name, level), dashes in zip(baselines.items(), ("--", ":", "-."), strict=False):
        label = f"{name} {level:.3f}"
        axes.axhline(level, color=DENSE, linestyle=dashes, linewidth=1.2, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    return image(figure, kind)


def speed_image(
    seconds: Mapping[str, tuple[float, float]], *, title: str, kind: str = "png"
) -> bytes:
    """Draws a stacked bar for each {name: (seconds in attention, seconds in total)}."""
    figure = new_figure(4.6, 1.1 + 0.7 * len(seconds))
    axes = figure.add_subplot()
    names, (attention, total) = list(seconds), zip(*seconds.values(), strict=True)
    rest = [whole - part for part, whole in zip(attention, total, strict=True)]
    axes.barh(names, rest, color=GREY, label="everything else")
    axes.barh(names, attention, left=rest, color=SPARSE, label="attention")
    for place, whole in enumerate(total):
        axes.text(whole, place, f" {whole:.2f} s", va="center", fontsize=9)
    axes.set_xlim(0, max(total) * 1.25)
    axes.set_xlabel("seconds per training step")
    axes.set_title(title, fontsize=9)
    axes.invert_yaxis()
    axes.legend(fontsize=8, frameon=False)
    return image(figure, kind)
