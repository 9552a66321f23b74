"""Draws pictures of the rows that benchmarks measure, as PNG bytes; needs matplotlib."""

import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from sparsering.commands import install
from sparsering.layouts.drawing import shades
from sparsering.layouts.layout import BlockLayout
from sparsering.patterns.algebra import Pattern

from .measure import Row

SPARSE, DENSE, GREY = "#1f6f8b", "#d1603d", "#8a8f98"
_COLORS = (SPARSE, "#5aa469", "#8e6bbf", "#c99a2e", "#4a4e57", "#3aa6b9", "#b06f9c")
_MARKS = "osv^Dpx"
_LIVE, _DROPPED = torch.tensor([0.12, 0.44, 0.55]), torch.tensor([0.91, 0.92, 0.93])
_BACKENDS = (
    ("cpu", "sparsering", SPARSE), ("flex", "FlexAttention", DENSE), ("dense", "dense SDPA", GREY)
)  # fmt: skip

Points = Mapping[str, Sequence[tuple[float, float]]]
"""(tokens, value) of each line, by its label; labels of dense attention begin with "dense"."""


def require_matplotlib() -> None:
    """Raises ImportError, with the command to install it, if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError(f"drawings need matplotlib; {install('plots')}") from None


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure; `width` and `height` are inches."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Any) -> bytes:
    """Converts a figure to the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, bbox_inches="tight", pad_inches=0.1)
    return buffer.getvalue()


def wrapped(text: str, width: int) -> str:
    """Breaks a text between words into lines of about `width` characters."""
    return textwrap.fill(text, width + 1, break_long_words=False, break_on_hyphens=False)


def short_count(count: int) -> str:
    """Formats a count in powers of 1024, such as 1.5K."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= unit and count % (unit // 4) == 0:
            return f"{count / unit:g}{letter}"
    return f"{count:,}"


def draw_pattern(axes: Any, layout: BlockLayout, *, head: int = 0, cells: int = 512) -> None:
    """Draws one head of a layout on matplotlib axes, in at most cells x cells pixels."""
    frame = layout.frame
    shade = shades(layout, cells, head=head)
    extent = 0, frame.kv_len, frame.q_start + frame.q_len, frame.q_start
    style = {"cmap": "Blues", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    axes.imshow(shade.numpy(), extent=extent, **style)
    axes.set_xlabel("key position", fontsize=8)
    axes.set_ylabel("query position", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[:].set_visible(False)  # they would hide pixels at the edges
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        ticks = [round(low + i * (high - low) / 4) for i in range(5)]
        axis.set_ticks(ticks, [short_count(tick) for tick in ticks])


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
    return png(figure)


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
    return png(figure)


def kept_png(
    pattern: Pattern, lengths: Sequence[int], *, num_heads: int = 1, title: str | None = None
) -> bytes:
    """Draws which keys a cache keeps, a picture per length: positions to the right, a row per head.

    Blue keys are kept, grey keys are dropped, white keys are of later tokens.

    Args:
        lengths: numbers of tokens in the cache; the pictures are one below the other.
        title: default the pattern's expression.

    Raises: ValueError as `Pattern.live_keys`.
    """
    figure = new_figure(9.0, 0.9 + (0.5 + 0.17 * num_heads) * len(lengths))
    most = max(lengths)
    cells = min(most, 2048)
    for place, length in enumerate(lengths, 1):
        axes = figure.add_subplot(len(lengths), 1, place)
        heads = pattern.live_keys(length, num_heads=num_heads)
        share = torch.stack([_share(live, most, cells) for live in heads])
        exists = _share(torch.arange(length), most, cells).expand(num_heads, -1) > 0
        shade = share.sqrt()[..., None] * _LIVE + (1 - share.sqrt())[..., None] * _DROPPED
        axes.imshow(
            torch.where(exists[..., None], shade, 1).numpy(),
            aspect="auto",
            extent=(0, most, num_heads - 0.5, -0.5),
            interpolation="nearest",
        )
        counts = sorted({len(live) for live in heads})
        sizes = " or ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
        text = f"after {length:,} tokens: {sizes} kept of each head"
        axes.set_title(text, fontsize=8, loc="left", pad=3)
        edges = [head + 0.5 for head in range(num_heads - 1)]
        axes.hlines(edges, 0, most, color="white", linewidth=1.5)
        axes.set_yticks(range(num_heads))
        axes.tick_params(labelsize=7, length=0)
        axes.tick_params(axis="x", labelbottom=place == len(lengths), length=2)
        axes.spines[:].set_visible(False)
        axes.set_ylabel("head", fontsize=8)
    axes.set_xlabel("position of the key", fontsize=8)
    figure.suptitle(wrapped(title or str(pattern), 100), fontsize=9)
    return png(figure)


def _share(positions: torch.Tensor, most: int, cells: int) -> torch.Tensor:
    """Cuts the positions below `most` into cells; returns the share of each that is listed."""
    cell = torch.arange(most) * cells // most
    counts = torch.bincount(cell[positions], minlength=cells)
    return counts / torch.bincount(cell, minlength=cells)


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
    return png(figure)


def thumbnail_png(layout: BlockLayout) -> bytes:
    """Draws one head of a layout in a small square, without axes: queries down, keys right."""
    figure = new_figure(2.2, 2.2)
    axes = figure.add_subplot()
    draw_pattern(axes, layout, cells=256)
    axes.set(xlabel="", ylabel="", xticks=[], yticks=[])
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color("#cccccc")
    return png(figure)


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
    return png(figure)


def loss_png(metrics: Sequence[Mapping[str, Any]], baselines: Mapping[str, float]) -> bytes:
    """Draws training and validation losses over steps, and a line for each of `baselines`.

    `metrics` are the records of a run's file `metrics.jsonl`.
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
    return png(figure)


def speed_png(seconds: Mapping[str, tuple[float, float]], *, title: str) -> bytes:
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
    return png(figure)


def patterns_png(
    panels: Sequence[tuple[str, Pattern, int]], *, num_heads: int = 1, columns: int = 1
) -> bytes:
    """Draws the first head of each (caption, pattern, length in tokens), in `columns` columns.

    Cost: O(visited blocks) time, bounded memory.
    """
    rows = -(-len(panels) // columns)
    figure = new_figure(4.6 * columns, 5.0 * rows)
    for place, (caption, pattern, length) in enumerate(panels, 1):
        layout = pattern.layout(length, num_heads=num_heads)
        axes = figure.add_subplot(rows, columns, place)
        draw_pattern(axes, layout)
        pairs = f"{layout.num_pairs:,.0f} pairs per head ({layout.num_pairs / length**2:.2%})"
        axes.set_title(f"{wrapped(caption, 44)}\n{pairs}", fontsize=8.5)
    return png(figure)
