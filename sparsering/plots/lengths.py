"""Draws pictures of the report: time and memory over length, and this machine's roofline."""

from collections.abc import Mapping, Sequence
from typing import Any

from .figure import DENSE, GREY, SPARSE, new_figure, png
from .visible_keys import short_count

_COLORS = (SPARSE, "#5aa469", "#8e6bbf", "#c99a2e", "#4a4e57", "#3aa6b9", "#b06f9c")
_MARKS = "osv^Dpx"


def lengths_png(rows: Sequence[Mapping[str, Any]], column: str) -> bytes:
    """Draws time or memory per head over tokens: a line for each call, dense attention dashed.

    `rows` are the rows of the table "lengths"; `column` is "ms" or "peak_bytes".

    Raises: ImportError without matplotlib.
    """
    figure = new_figure(3.9, 4.7)
    axes = figure.add_subplot()
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get(column) is not None:
            lines.setdefault(row["call"], []).append(row)
    styles = iter(zip(_COLORS, _MARKS, strict=True))
    for name, line in lines.items():
        dense = name.startswith("dense")
        color, mark = (DENSE, "s") if dense else next(styles, (GREY, "o"))
        unit = 1 if column == "ms" else 2**20
        axes.plot(
            [row["tokens"] for row in line],
            [row[column] / row["heads"] / unit for row in line],
            color=color,
            linestyle="--" if dense else "-",
            marker=mark,
            markersize=4,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    tokens = sorted({row["tokens"] for line in lines.values() for row in line})
    axes.set_xticks(tokens, [short_count(count) for count in tokens])
    axes.minorticks_off()
    axes.tick_params(labelsize=9)
    axes.set_xlabel("tokens", fontsize=9)
    label = "milliseconds a head, warm median" if column == "ms" else "peak MiB a head, no inputs"
    axes.set_ylabel(label, fontsize=9)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return png(figure)


def roofline_png(
    points: Sequence[tuple[str, str, float, float]],
    peaks: Mapping[str, float],
    bytes_per_second: float,
) -> bytes:
    """Draws GFLOP/s over FLOP per byte: calls as points below the limits of the machine.

    Args:
        points: (name, dtype, FLOP for each byte of inputs and results, GFLOP/s).
        peaks: GFLOP/s of a matrix product by dtype.
        bytes_per_second: bandwidth of memory.

    Raises: ImportError without matplotlib.
    """
    figure = new_figure(3.9, 4.6)
    axes = figure.add_subplot()
    intensities = [point[2] for point in points] or [1.0]
    low, high = min(intensities) / 4, max(intensities) * 4
    for (dtype, peak), color in zip(peaks.items(), (SPARSE, DENSE), strict=False):
        ridge = peak * 1e9 / bytes_per_second
        axes.plot(
            [low, max(ridge, low), max(high, ridge)],
            [low * bytes_per_second / 1e9, peak, peak],
            color=color,
            linewidth=1.2,
            label=f"{dtype}: matrix product {peak:,.0f} GFLOP/s",
        )
        names = dict.fromkeys(name for name, kind, *_ in points if kind == dtype)
        for name, mark in zip(names, "osv^DPx*", strict=False):
            own = [(x, y) for n, kind, x, y in points if (n, kind) == (name, dtype)]
            axes.plot(*zip(*own, strict=True), mark, color=color, markersize=5, linestyle="none")
    names = dict.fromkeys(name for name, *_ in points)
    for name, mark in zip(names, "osv^DPx*", strict=False):
        axes.plot([], [], mark, color=GREY, markersize=5, linestyle="none", label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.tick_params(labelsize=9)
    axes.set_xlabel("FLOP for each byte of inputs and results", fontsize=9)
    axes.set_ylabel("GFLOP/s on the pairs that attend", fontsize=9)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=1, fontsize=8.5, frameon=False)
    return png(figure)


def thumbnail_png(layout: Any) -> bytes:
    """Draws one head of a layout in a small square, without axes: queries down, keys right."""
    from .visible_keys import draw_pattern

    figure = new_figure(2.2, 2.2)
    axes = figure.add_subplot()
    draw_pattern(axes, layout, cells=256)
    axes.set(xlabel="", ylabel="", xticks=[], yticks=[])
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color("#cccccc")
    return png(figure)
