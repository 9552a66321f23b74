"""Pictures as PNG bytes: patterns, training runs, traffic of ranks.

    Path("pattern.png").write_bytes(pattern_png(LongNet((1024, 4096), (1, 4)), 1 << 20))

They need matplotlib (`pip install sparsering[plots]`), and raise ImportError without it.
"""

from ..layouts.drawing import pair_shares
from .figure import require_matplotlib
from .losses import loss_png, speed_png
from .rings import traffic_png
from .visible_keys import draw_pattern, pattern_png, patterns_png

__all__ = [
    "draw_pattern",
    "loss_png",
    "pair_shares",
    "pattern_png",
    "patterns_png",
    "require_matplotlib",
    "speed_png",
    "traffic_png",
]
