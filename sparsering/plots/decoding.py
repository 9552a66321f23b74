"""Draws pictures of decoding: the keys that a cache keeps, and speed and bytes over tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..patterns.algebra import Pattern
from .figure import DENSE, GREY, SPARSE, new_figure, png, wrapped
from .visible_keys import short_count

_COLORS = (SPARSE, "#5aa469", "#8e6bbf", "#c99a2e", "#4a4e57")
_LIVE, _DROPPED = torch.tensor([0.12, 0.44, 0.55]), torch.tensor([0.91, 0.92, 0.93])


def decoding_png(rows: Sequence[Mapping[str, Any]], *, title: str) -> bytes:
    """Draws tokens per second, and bytes, over cached tokens: lines for patterns and for dense.

    `rows` are rows of the benchmark record "decoding", for one dtype and batch size.

    Raises: ImportError without matplotlib.
    """
    figure = new_figure(11.0, 5.2)
    lines: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["case"] == "one token" and row["backend"] in ("cache", "dense"):
            lines.setdefault((row["backend"], row["pattern"]), []).append(row)
    drawn: list[Any] = []
    for place, (column, label) in enumerate(
        (("tokens_per_second", "tokens a second, evictions included"), ("bytes", "bytes held"))
    ):
        axes = figure.add_subplot(1, 2, place + 1)
        colors = iter(_COLORS)
        drawn = []
        for (backend, pattern), line in lines.items():
            dense = backend == "dense"
            drawn += axes.plot(
                [row["tokens"] for row in line],
                [row[column] for row in line],
                color=DENSE if dense else next(colors, GREY),
                linestyle="--" if dense else "-",
                marker="s" if dense else "o",
                markersize=4,
                label="dense SDPA, everything cached" if dense else f"KVCache, {pattern}",
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({row["tokens"] for line in lines.values() for row in line})
        axes.set_xticks(ticks, [short_count(tick) for tick in ticks])
        axes.minorticks_off()
        low, high = axes.get_ylim()
        if column == "bytes":
            sizes = [2**e for e in range(10, 50) if low <= 2**e <= high]
            axes.set_yticks(sizes, [_bytes(size) for size in sizes])
        else:
            rates = [n * 10**e for e in range(8) for n in (1, 2, 5) if low <= n * 10**e <= high]
            axes.set_yticks(rates, [f"{rate:,}" for rate in rates])
        axes.tick_params(labelsize=8)
        axes.set_xlabel("tokens so far", fontsize=9)
        axes.set_title(label, fontsize=9)
        axes.grid(alpha=0.25)
    figure.legend(handles=drawn, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=9)
    return png(figure)


def kept_png(
    pattern: Pattern, lengths: Sequence[int], *, num_heads: int = 1, title: str | None = None
) -> bytes:
    """Draws the live keys after each of some lengths: positions to the right, a row per head.

    Blue keys are kept, grey keys are dropped, and white ones have yet to come. `title`: default the
    pattern's expression.

    Raises: ValueError as `Pattern.live_keys`; ImportError without matplotlib.
    """
    figure = new_figure(9.0, 0.9 + (0.5 + 0.17 * num_heads) * len(lengths))
    most = max(lengths)
    cells = min(most, 2048)
    for place, length in enumerate(lengths, 1):
        axes = figure.add_subplot(len(lengths), 1, place)
        heads = pattern.live_keys(length, num_heads=num_heads)
        share = torch.stack([_share(live, most, cells) for live in heads])
        there = _share(torch.arange(length), most, cells).expand(num_heads, -1)
        shade = share.sqrt()[..., None] * _LIVE + (1 - share.sqrt())[..., None] * _DROPPED
        axes.imshow(
            torch.where(there[..., None] > 0, shade, 1).numpy(),
            aspect="auto",
            extent=(0, most, num_heads - 0.5, -0.5),
            interpolation="nearest",
        )
        counts = sorted({len(live) for live in heads})
        sizes = " or ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
        axes.set_title(
            f"after {length:,} tokens: {sizes} kept of each head", fontsize=8, loc="left", pad=3
        )
        axes.hlines(
            [head + 0.5 for head in range(num_heads - 1)], 0, most, color="white", linewidth=1.5
        )
        axes.set_yticks(range(num_heads))
        axes.tick_params(labelsize=7, length=0)
        axes.tick_params(axis="x", labelbottom=place == len(lengths), length=2)
        axes.spines[:].set_visible(False)
        axes.set_ylabel("head", fontsize=8)
    axes.set_xlabel("position of the key", fontsize=8)
    figure.suptitle(wrapped(title or str(pattern), 100), fontsize=9)
    return png(figure)


def _bytes(size: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size >> power} {unit}"
    return f"{size} B"


def _share(positions: torch.Tensor, most: int, cells: int) -> torch.Tensor:
    """Returns [cells]: the share of each cell's positions below `most` that `positions` has."""
    cell = torch.arange(most) * cells // most
    counts = torch.bincount(cell[positions], minlength=cells)
    return counts / torch.bincount(cell, minlength=cells)
