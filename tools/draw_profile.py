"""Draws where a call's time goes: `python -m tools.draw_profile docs/profile.png`.

One rank of two, a window of 256 tokens over 32,768: the first call, forward and backward, as
torch.profiler saw it. Needs matplotlib.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import of_ranks
from sparsering import Causal, SlidingWindow
from sparsering.distributed import ring_attention
from sparsering.plots.figure import DENSE, GREY, SPARSE, image, new_figure

TOKENS = 32_768
ROWS = {
    "plan": ("sparsering::plan", GREY),
    "layout": ("sparsering::layout", "#c9a227"),
    "messages": ("sparsering::messages", DENSE),
    "kernel": ("sparsering_cpu::forward", SPARSE),
    "kernel, backward": ("sparsering_cpu::backward", SPARSE),
}


def spans(rank: int, world: int) -> list[tuple[str, float, float]]:
    """Returns (row, begin, end) in milliseconds of what the rank did in its first call."""
    torch.manual_seed(rank)
    inputs = [torch.randn(1, 8, TOKENS // world, 64, requires_grad=True) for _ in range(3)]
    small = [x[:, :, :256] for x in inputs]
    ring_attention(*small, SlidingWindow(63) & Causal()).sum().backward()  # loads the library
    with torch.profiler.profile() as profile:
        ring_attention(*inputs, SlidingWindow(255) & Causal()).sum().backward()
    events = [(e.name, e.time_range.start / 1e3, e.time_range.end / 1e3) for e in profile.events()]
    first = min(begin for name, begin, _ in events if name.startswith("sparsering"))
    return [
        (row, begin - first, end - first)
        for row, (start, _) in ROWS.items()
        for name, begin, end in events
        if name.startswith(start)
    ]


def picture(found: list[tuple[str, float, float]]) -> Any:
    """Draws the spans, a line for each kind."""
    figure = new_figure(6.4, 2.2)
    axes = figure.add_subplot()
    names = list(ROWS)
    for row, begin, end in found:
        place = len(names) - names.index(row)
        axes.barh(place, max(end - begin, 0.2), left=begin, height=0.6, color=ROWS[row][1])
    axes.set_yticks(range(len(names), 0, -1), names)
    axes.set_xlabel("milliseconds of the first call, forward and backward")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


if __name__ == "__main__":
    found = of_ranks(spans, 2)
    for row in ROWS:
        print(row, f"{sum(end - begin for name, begin, end in found if name == row):.1f} ms")
    Path(sys.argv[1]).write_bytes(image(picture(found)))
