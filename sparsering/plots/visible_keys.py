"""Draws patterns: the keys that each query sees."""

from typing import Any

import torch

from ..layouts.drawing import pair_shares
from ..layouts.layout import BlockLayout
from ..patterns.algebra import Pattern
from .figure import new_figure, png, short_count, wrapped


def pattern_png(
    pattern: Pattern,
    length: int,
    *,
    num_heads: int = 1,
    block_size: int = 128,
    title: str | None = None,
) -> bytes:
    """Draws the keys that each query sees: queries downwards, keys to the right.

    Darker areas contain more pairs.

    Args:
        pattern: any pattern.
        length: number of queries, and of keys.
        num_heads: heads of the layout; the first four are drawn, side by side.
        block_size: tokens per tile of the layout.
        title: default the pattern's expression.

    Returns: the bytes of a PNG file.

    Raises: ValueError if the pattern is for another length or another number of heads.

    Cost: O(visited blocks) time, bounded memory.
    """
    if length < 1:
        raise ValueError(f"a drawing needs a length of at least 1 token, got {length}")
    layout = pattern.layout(length, num_heads=num_heads, block_size=block_size)
    shown = min(num_heads, 4)
    figure = new_figure(4.2 * shown, 5.0)
    for head in range(shown):
        axes = figure.add_subplot(1, shown, head + 1)
        draw_pattern(axes, layout, head=head)
        share = f"{layout.num_pairs / length**2:.2%} of all pairs"
        axes.set_title(f"head {head}" if num_heads > 1 else share, fontsize=9)
    figure.suptitle(wrapped(title or str(pattern), 52 * shown), fontsize=9)
    return png(figure)


def draw_pattern(axes: Any, layout: BlockLayout, *, head: int = 0, cells: int = 512) -> None:
    """Draws one head of a layout on matplotlib axes, in at most cells x cells pixels."""
    frame = layout.frame
    step = max((p.step for p in layout.passes), default=1)
    if frame.q_len > cells and frame.q_len // step >= 128:
        cells = min(cells, frame.q_len // step)  # a pixel per `step` or more tokens: no moire
    shares = pair_shares(layout, cells, head=head)
    # a pixel with few pairs stays visible
    shade = torch.where(shares > 0, 0.25 + 0.75 * shares.clamp(max=1).pow(0.4), 0)
    extent = 0, frame.kv_len, frame.q_start + frame.q_len, frame.q_start
    style = {"cmap": "Blues", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    axes.imshow(shade.numpy(), extent=extent, **style)
    axes.set_xlabel("key position", fontsize=8)
    axes.set_ylabel("query position", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[:].set_visible(False)  # they would hide pixels at the edges
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        ticks = [round(low + i * (high - low) / 4) for i in range(5)]
        axis.set_ticks(ticks, [short_count(tick) for tick in ticks])
