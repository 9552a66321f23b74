"""Pictures as PNG bytes: patterns, loss curves, speeds, caches, traffic between ranks.

    Path("pattern.png").write_bytes(pattern_png(LongNet((1024, 4096), (1, 4)), 1 << 20))

Needs matplotlib: `pip install sparsering[plots]`.
"""

from ..layouts.drawing import pair_shares
from .decoding import decoding_png, kept_png
from .figure import require_matplotlib
from .lengths import lengths_png, roofline_png, thumbnail_png
from .losses import loss_png, speed_png
from .rings import traffic_png
from .sweeps import sweeps_png
from .visible_keys import draw_pattern, pattern_png, patterns_png

__all__ = [
    "decoding_png",
    "draw_pattern",
    "kept_png",
    "lengths_png",
    "loss_png",
    "pair_shares",
    "pattern_png",
    "patterns_png",
    "require_matplotlib",
    "roofline_png",
    "speed_png",
    "sweeps_png",
    "thumbnail_png",
    "traffic_png",
]
