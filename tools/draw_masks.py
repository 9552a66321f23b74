"""Draws docs/masks.png: each mask of the record "masks", and a bar for each library.

python -m tools.draw_masks benchmarks/records/masks.json docs/masks.png
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from benchmarks.masks import Case, cases_of
from sparsering.plots.figure import DENSE, GREY, SPARSE, image, new_figure, wrapped

TOKENS, CELLS, COLUMNS = 2048, 128, 3
COLORS = {"sparsering": SPARSE, "sdpa by chunks": DENSE, "FlexAttention": "#8e6bbf"}
Row = dict[str, Any]


def small_mask(case: Case) -> Tensor:
    """Whether an area of the mask has pairs, float [rows, keys] of at most 128 x 128 areas.

    Drafts are drawn over the last keys alone, since the mask is 63 rows high.
    """
    pairs = case.make().to_dense(case.queries, case.tokens).squeeze().float().clamp(max=1)
    if case.queries < CELLS:
        return pairs[:, -CELLS:]
    return F.adaptive_avg_pool2d(pairs[None], CELLS)[0].sqrt()  # faint areas stay visible


def bars(axes: Any, rows: list[Row]) -> None:
    """Draws the seconds of each library: forward, and backward behind it, lighter."""
    ran = [row for row in rows if "forward" in row]
    for place, row in enumerate(ran):
        color = COLORS.get(row["library"], GREY)
        forward = row["forward"]["ms"] / 1e3
        axes.barh(place, forward, color=color, height=0.45)
        total, note = forward, ", forward alone"
        if "backward" in row:
            total, note = forward + row["backward"]["ms"] / 1e3, ""
            axes.barh(place, total - forward, left=forward, color=color, alpha=0.5, height=0.45)
        text = f" {row['library']}, {total:.2g} s{note}"
        axes.text(0, place - 0.44, text, fontsize=6.5, va="center")
    axes.set_ylim(len(ran) - 0.6, -0.8)
    axes.set_yticks([])
    axes.tick_params(labelsize=6)
    axes.set_xlabel("seconds", fontsize=6.5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def picture(rows: list[Row]) -> Any:
    """Draws a cell for each mask: its pairs at 2,048 tokens, and the bars beside them."""
    names = list(dict.fromkeys(row["mask"] for row in rows))
    cases = dict(zip((case.name for case in cases_of(rows[0]["tokens"]).values()),
                     cases_of(TOKENS).values(), strict=True))  # fmt: skip
    lines = -(-len(names) // COLUMNS)
    figure = new_figure(4.4 * COLUMNS, 2.1 * lines)
    grid = figure.add_gridspec(lines, 2 * COLUMNS, width_ratios=[1, 1.4] * COLUMNS)
    for place, name in enumerate(names):
        line, column = divmod(place, COLUMNS)
        own = [row for row in rows if row["mask"] == name]
        axes = figure.add_subplot(grid[line, 2 * column])
        axes.imshow(small_mask(cases[name]).numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set(xticks=[], yticks=[])
        axes.set_title(f"{wrapped(name, 26)}\n{own[0]['density']:.2%} of pairs", fontsize=7.5)
        bars(figure.add_subplot(grid[line, 2 * column + 1]), own)
    return figure


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["rows"]
    Path(sys.argv[2]).write_bytes(image(picture(found)))
