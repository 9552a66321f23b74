"""Pictures of the records: accuracy over length, mass and bits per byte over density.

python -m benchmarks.selection.pictures --records benchmarks/records --out docs
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sparsering.plots.figure import DENSE, GREY, SPARSE, image, new_figure, short_count

from ..measure import Row

GREEN, VIOLET, YELLOW, DARK = "#5aa469", "#8e6bbf", "#c99a2e", "#4a4e57"
STYLES = {
    "full": ("full attention", DENSE, "--"),
    "exact": ("best blocks by exact mass", DENSE, "--"),
    "kl": ("learned scorer", SPARSE, "-"),
    "learned": ("learned scorer", SPARSE, "-"),
    "pooled": ("learned through a pooled branch", GREEN, "-"),
    "sub": ("sub-block means, no weights", VIOLET, "-"),
    "mean": ("block means, no weights", YELLOW, "-"),
    "bounds": ("bounds, no weights", DARK, ":"),
    "gauss": ("mean and variance, no weights", DARK, "-."),
    "window": ("window of as many blocks", GREY, "-"),
    "random": ("random blocks", GREY, ":"),
}


def drawn(axes, rows: Iterable[Row], arm: str, x: str, y: str, ways: Sequence[str]) -> None:
    """A line for each way: the mean of `y` over all rows of one `x`."""
    table = list(rows)
    for way in ways:
        points: dict[float, list[float]] = {}
        for row in table:
            if row[arm] == way:
                points.setdefault(row["k"] if x == "density" else row[x], []).append(
                    (row[x], row[y])
                )
        if not points:
            continue
        line = sorted(
            tuple(map(statistics.mean, zip(*values, strict=True))) for values in points.values()
        )
        label, color, style = STYLES[way]
        axes.plot(
            *zip(*line, strict=True), style, color=color, marker="o", markersize=4, label=label
        )
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=8)


def lengths_png(rows: Sequence[Row]) -> bytes:
    """Accuracy of flagged facts over length, trained at 512 tokens."""
    figure = new_figure(6.4, 3.8)
    axes = figure.add_subplot()
    table = [row for row in rows if row.get("experiment") == "length"]
    drawn(
        axes, table, "arm", "tokens", "accuracy", ("full", "kl", "pooled", "sub", "mean", "window")
    )
    axes.set_xscale("log", base=2)
    ticks = sorted({row["tokens"] for row in table})
    axes.set_xticks(ticks, [short_count(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 1.04)
    axes.set_xlabel("tokens; trained at 512, 4 blocks of 16 to a question throughout", fontsize=9)
    axes.set_ylabel("right answers", fontsize=9)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return image(figure)


def captured_png(rows: Sequence[Row]) -> bytes:
    """Captured mass over density, a panel for each number of queries that share a choice."""
    table = [row for row in rows if row.get("experiment") == "captured"]
    sizes = sorted({(row["query_block"], row["block_size"]) for row in table})
    figure = new_figure(3.6 * len(sizes) + 2.6, 3.6)
    for place, size in enumerate(sizes):
        axes = figure.add_subplot(1, len(sizes), place + 1)
        own = [row for row in table if (row["query_block"], row["block_size"]) == size]
        ways = ("exact", "learned", "sub", "mean", "bounds", "window", "random")
        drawn(axes, own, "way", "density", "captured", ways)
        axes.set_xlabel("share of the causal pairs", fontsize=9)
        axes.set_ylim(0, 1.02)
        who = "each query" if size[0] == 1 else f"{size[0]} queries together"
        axes.set_title(f"{who}, blocks of {size[1]}", fontsize=9)
    figure.axes[0].set_ylabel("captured softmax mass", fontsize=9)
    figure.axes[-1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return image(figure)


def switched_png(rows: Sequence[Row]) -> bytes:
    """Bits per byte of a dense model run sparse, over density: all bytes, and far copies."""
    table = [row for row in rows if row.get("experiment") == "switched"]
    table = [row for row in table if row.get("block_size") != 16]
    figure = new_figure(9.6, 3.6)
    panels = (("bits_per_byte", "bits per byte"), ("far_copies", "bits per byte of far copies"))
    for place, (column, title) in enumerate(panels):
        axes = figure.add_subplot(1, 2, place + 1)
        full = statistics.mean(row[column] for row in table if row["way"] == "full")
        axes.axhline(full, color=DENSE, linewidth=1, label="full attention")
        ways = ("exact", "learned", "sub", "mean", "bounds", "window", "random")
        drawn(axes, table, "way", "density", column, ways)
        axes.set_xlabel("share of the causal pairs", fontsize=9)
        axes.set_title(title, fontsize=9)
    figure.axes[-1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return image(figure)


PICTURES: dict[str, tuple[str, Callable[[Sequence[Row]], bytes]]] = {
    "selection-length.png": ("selection-lengths", lengths_png),
    "selection-mass.png": ("selection-captured", captured_png),
    "selection-bits.png": ("selection-captured", switched_png),
}


def main() -> None:
    """Draws what there are records for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=Path, default=Path("benchmarks/records"))
    parser.add_argument("--out", type=Path, default=Path("docs"))
    options = parser.parse_args()
    for picture, (record, draw) in PICTURES.items():
        path = options.records / f"{record}.json"
        if path.exists():
            (options.out / picture).write_bytes(draw(json.loads(path.read_text())["rows"]))


if __name__ == "__main__":
    main()
