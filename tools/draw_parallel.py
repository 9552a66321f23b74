"""Draws who sends what in docs/parallel.md: `python -m tools.draw_parallel docs/parallel.png`.

The layers are those of the page's script: 65,536 tokens over 4 ranks, zigzag, one kv head.
"""

import sys
from pathlib import Path

from sparsering import Causal, SlidingWindow
from sparsering.distributed import RingPlan
from sparsering.plots.traffic import traffic_image

TOKENS, RANKS, ROW_BYTES = 65_536, 4, 2 * 32 * 4  # a row: key and value, head dim 32, float32
LAYERS = {
    "each layer with a window of 512 tokens": SlidingWindow(511) & Causal(),
    "the layer that sees all earlier tokens": Causal(),
}

if __name__ == "__main__":
    plans = {
        caption: RingPlan.build(pattern, TOKENS, RANKS, sharding="zigzag")
        for caption, pattern in LAYERS.items()
    }
    panels = [(caption, plan.tokens, ROW_BYTES) for caption, plan in plans.items()]
    Path(sys.argv[1]).write_bytes(traffic_image(panels))
