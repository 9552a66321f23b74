"""Draws the picture that previews of pages show: `python -m tools.draw_card docs/_static/card.png`.

It stands for pages that have no picture of their own, in the 1200 x 630 points that messengers ask
for. Needs matplotlib.
"""

import io
import sys
from pathlib import Path

from sparsering import Causal, GlobalTokens, LongNet, RandomBlocks, SlidingWindow
from sparsering.plots.attended import branch_layouts, shades
from sparsering.plots.figure import GREY, new_figure

TOKENS = 512
PATTERNS = {
    "LongNet": LongNet((128, 512), (1, 4)) & Causal(),
    "window, global tokens": Causal() & (SlidingWindow(64) | GlobalTokens(16)),
    "random blocks": RandomBlocks(0.1, 32),
}


def card() -> bytes:
    """Returns the picture's PNG file."""
    figure = new_figure(12, 6.3)
    figure.set_layout_engine("none")
    figure.text(0.06, 0.85, "sparsering", fontsize=54, weight="bold", va="center")
    about = "Exact sparse attention for very long sequences, in PyTorch"
    figure.text(0.06, 0.71, about, fontsize=25, color=GREY, va="center")
    for i, (name, pattern) in enumerate(PATTERNS.items()):
        axes = figure.add_axes((0.06 + 0.31 * i, 0.1, 0.26, 0.26 * 12 / 6.3))
        axes.imshow(shades(branch_layouts(pattern, TOKENS), 256).numpy(), interpolation="nearest")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel(name, fontsize=18, labelpad=8)
        axes.spines[:].set_color(GREY)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(card())
