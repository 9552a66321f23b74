"""Draws patterns, and returns PNG bytes.

    Path("pattern.png").write_bytes(pattern_png(LongNet((1024, 4096), (1, 4)), 1 << 20))

Drawing needs matplotlib (`pip install sparsering[plots]`); without it, it raises ImportError.
"""

from .figure import require_matplotlib
from .visible_keys import draw_pattern, pattern_png

__all__ = ["draw_pattern", "pattern_png", "require_matplotlib"]
