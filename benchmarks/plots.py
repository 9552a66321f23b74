"""Draws pictures of the rows that benchmarks measure, as PNG bytes; needs matplotlib."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparsering.layouts.layout import BlockLayout
from sparsering.plots.attended import draw_layouts
from sparsering.plots.figure import DENSE, GREY, SPARSE, image, new_figure, short_count

from .measure import Row

_COLORS = (SPARSE, "#5aa469", "#8e6bbf", "#c99a2e", "#4a4e57", "#3aa6b9", "#b06f9c")
_MARKS = "osv^Dpx"
_BACKENDS = (
    ("cpu", "sparsering", SPARSE), ("flex", "FlexAttention", DENSE), ("dense", "dense SDPA", GREY)
)  # fmt: skip

Points = Mapping[str, Sequence[tuple[float, float]]]
"""(tokens, value) of each line, by its label; labels of dense attention begin with "dense"."""


def lengths_png(rows: Sequence[Row], column: str) -> bytes:
    """Draws time or memory per head over tokens: a line for each call, dense attention dashed.

    `rows` are the rows of the table "lengths"; `column` is "ms" or "peak_bytes".
    """
    figure = new_figure(3.9, 4.7)
    axes = figure.add_subplot()
    unit = 1 if column == "ms" else 2**20
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.get(column) is not None:
            value = row[column] / row["heads"] / unit
            lines.setdefault(row["call"], []).append((row["tokens"], value))
    _plot_over_tokens(axes, lines, zip(_COLORS, _MARKS, strict=True))
    axes.tick_params(labelsize=9)
    axes.set_xlabel("tokens", fontsize=9)
    label = "milliseconds a head, warm median" if column == "ms" else "peak MiB a head, no inputs"
    axes.set_ylabel(label, fontsize=9)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return image(figure)


def decoding_png(rows: Sequence[Row], *, title: str) -> bytes:
    """Draws tokens per second, and bytes, over cached tokens: lines for patterns and for dense.

    `rows` are rows of the benchmark record "decoding", for one dtype and batch size.
    """
    figure = new_figure(11.0, 5.2)
    artists: list[Any] = []
    for place, (column, label) in enumerate(
        (("tokens_per_second", "tokens a second, evictions included"), ("bytes", "bytes held")), 1
    ):
        axes = figure.add_subplot(1, 2, place)
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["case"] == "one token" and row["backend"] in ("cache", "dense"):
                dense = row["backend"] == "dense"
                name = "dense SDPA, everything cached" if dense else f"KVCache, {row['pattern']}"
                lines.setdefault(name, []).append((row["tokens"], row[column]))
        artists = _plot_over_tokens(axes, lines, zip(_COLORS[:5], "ooooo", strict=True))
        low, high = axes.get_ylim()
        if column == "bytes":
            sizes = [2**e for e in range(10, 50) if low <= 2**e <= high]
            axes.set_yticks(sizes, [_binary_bytes(size) for size in sizes])
        else:
            rates = [n * 10**e for e in range(8) for n in (1, 2, 5) if low <= n * 10**e <= high]
            axes.set_yticks(rates, [f"{rate:,}" for rate in rates])
        axes.tick_params(labelsize=8)
        axes.set_xlabel("tokens so far", fontsize=9)
        axes.set_title(label, fontsize=9)
    figure.legend(handles=artists, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=9)
    return image(figure)


def _plot_over_tokens(axes: Any, lines: Points, styles: Iterator[tuple[str, str]]) -> list[Any]:
    """Draws lines on logarithmic axes, dense attention dashed; returns matplotlib's lines.

    `styles` are the (color, marker) of the others, in order.
    """
    artists: list[Any] = []
    for name, points in lines.items():
        dense = name.startswith("dense")
        color, marker = (DENSE, "s") if dense else next(styles, (GREY, "o"))
        artists += axes.plot(
            *zip(*points, strict=True),
            color=color,
            linestyle="--" if dense else "-",
            marker=marker,
            markersize=4,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({tokens for points in lines.values() for tokens, _ in points})
    axes.set_xticks(ticks, [short_count(int(tick)) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    return artists


def _binary_bytes(size: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size >> power} {unit}"
    return f"{size} B"


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
    return image(figure)


def thumbnail_png(layout: BlockLayout) -> bytes:
    """Draws one head of a layout in a small square, without axes: queries down, keys right."""
    figure = new_figure(2.2, 2.2)
    axes = figure.add_subplot()
    draw_layouts(axes, [layout], cells=256)
    axes.set(xlabel="", ylabel="", xticks=[], yticks=[])
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color("#cccccc")
    return image(figure)


def sweeps_png(rows: Sequence[Row], *, title: str) -> bytes:
    """Draws milliseconds over density, tokens and block size, a line per backend.

    `rows` are the rows of the benchmark record "sweeps".
    """
    figure = new_figure(11.5, 3.6)
    panels = (
        ("density", "density", "share of blocks visited"),
        ("length", "tokens", "tokens (causal window of 2048)"),
        ("block size", "block_size", "tokens per block (10% of blocks)"),
    )
    for place, (sweep, column, label) in enumerate(panels, 1):
        axes = figure.add_subplot(1, 3, place)
        lines: dict[str, list[tuple[float, float]]] = {}
        x = 0.0
        for row in rows:
            if row["sweep"] == sweep:
                # Each comparison begins with its "cpu" row, and its other rows share that x.
                x = row[column] if row["backend"] == "cpu" else x
                lines.setdefault(row["backend"], []).append((x, row["ms"]))
        for backend, name, color in _BACKENDS:
            if line := lines.get(backend):
                axes.plot(*zip(*line, strict=True), marker="o", color=color, label=name)
        axes.set_xscale("log", base=10 if sweep == "density" else 2)
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("milliseconds, forward")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=9)
    return image(figure)
