"""Draws the README's three patterns: `python -m tools.draw_patterns docs/patterns.png`."""

import sys
from pathlib import Path

from sparsering import Causal, GlobalTokens, LongNet, RandomBlocks, SlidingWindow
from sparsering.plots.attended import patterns_image

TOKENS = 4096
PANELS = [
    ("LongNet((1024, 4096), (1, 4)) & Causal()", LongNet((1024, 4096), (1, 4)) & Causal(), TOKENS),
    (
        "Causal() & (SlidingWindow(512) | GlobalTokens(128))",
        Causal() & (SlidingWindow(512) | GlobalTokens(128)),
        TOKENS,
    ),
    ("RandomBlocks(0.1, 128)", RandomBlocks(0.1, 128), TOKENS),
]

if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(patterns_image(PANELS, columns=len(PANELS)))
