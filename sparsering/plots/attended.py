"""Draws patterns: the keys that each query sees, and the keys that a cache keeps.

Path("pattern.png").write_bytes(pattern_image(Causal() & SlidingWindow(512), 8192))
"""

import ast
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..layouts.drawing import pair_shares
from ..layouts.layout import BlockLayout
from ..patterns.algebra import Pattern
from .figure import image, new_figure, short_count, wrapped

_ALONE = "#08306b"  # color of a pattern that is a single mask
_BRANCHES = ("#1f6f8b", "#d1603d", "#8e6bbf", "#c99a2e", "#5aa469", "#4a4e57", "#b06f9c")
_MOST_HEADS = 4
_MOST_IN_LEGEND = 8
_LONGEST_SIDE = 4  # a side more times as long as the other is not drawn with square tokens
_LEGEND_LINE = 0.18  # height of a line in inches
_LEGEND = {
    "title": "shares of all pairs; an area with fewer pairs is fainter",
    "title_fontsize": 7.5,
    "fontsize": 7.5,
    "frameon": False,
}
_LIVE, _DROPPED = torch.tensor([0.12, 0.44, 0.55]), torch.tensor([0.91, 0.92, 0.93])


def pattern_image(
    pattern: Pattern,
    length: int,
    *,
    num_heads: int = 1,
    block_size: int = 128,
    title: str | None = None,
    kind: str = "png",
) -> bytes:
    """Draws the keys that each query sees: queries downwards, keys to the right, in tokens.

    Darker areas have more pairs. Each branch of a mixture has a color, which the legend explains.

    Args:
        pattern: any pattern.
        length: number of queries, and of keys.
        num_heads: heads of the layout; the first four are drawn, side by side.
        block_size: tokens of a block of the layout; large layouts are sampled by block.
        title: default the pattern's expression.
        kind: "png" or "svg".

    Returns: the bytes of the image file.

    Raises: ValueError if the pattern is for another length or another number of heads; ImportError
        without matplotlib.

    Cost: O(visited blocks) time, bounded memory.
    """
    shown = min(num_heads, _MOST_HEADS)
    layouts = branch_layouts(pattern, length, num_heads, block_size)
    legend = legend_of(pattern, layouts, length)
    figure = new_figure(max(5.2, 4.2 * shown), 5.2 + _LEGEND_LINE * len(legend))
    for head in range(shown):
        axes = figure.add_subplot(1, shown, head + 1)
        draw_layouts(axes, layouts, head=head)
        if num_heads > 1:
            axes.set_title(f"head {head} of {num_heads}", fontsize=9)
    text = wrapped(title or plain_text(pattern), max(64, 52 * shown))
    figure.suptitle(f"{text}\n{pairs_text(layouts, length)}", fontsize=9, parse_math=False)
    if legend:
        figure.legend(handles=legend, loc="outside lower center", **_LEGEND)
    return image(figure, kind)


def patterns_image(
    panels: Sequence[tuple[str, Pattern, int]],
    *,
    num_heads: int = 1,
    columns: int = 1,
    kind: str = "png",
) -> bytes:
    """Draws the first head of each (caption, pattern, length in tokens), in `columns` columns.

    `pattern_image` says what a panel shows, and lists the errors and the cost.
    """
    rows = -(-len(panels) // columns)
    drawn = [branch_layouts(pattern, length, num_heads) for _, pattern, length in panels]
    lines = max(len(layouts) for layouts in drawn)
    figure = new_figure(4.6 * columns, (5.0 + _LEGEND_LINE * (lines if lines > 1 else 0)) * rows)
    for place, (caption, pattern, length) in enumerate(panels, 1):
        layouts = drawn[place - 1]
        axes = figure.add_subplot(rows, columns, place)
        draw_layouts(axes, layouts)
        text = f"{wrapped(caption, 44)}\n{pairs_text(layouts, length)}"
        axes.set_title(text, fontsize=8.5, parse_math=False)
        if legend := legend_of(pattern, layouts, length):
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13)}
            axes.legend(handles=legend, **below, **_LEGEND)
    return image(figure, kind)


def kept_image(
    pattern: Pattern,
    lengths: Sequence[int],
    *,
    num_heads: int = 1,
    title: str | None = None,
    kind: str = "png",
) -> bytes:
    """Draws which keys a cache keeps, a picture per length: positions to the right, a row per head.

    Blue keys are kept, grey keys are dropped, white keys are of later tokens.

    Args:
        lengths: numbers of tokens in the cache; the pictures are one below the other.
        title: default the pattern's expression.

    Raises: ValueError as `Pattern.live_keys`.
    """
    figure = new_figure(9.0, 0.9 + (0.5 + 0.17 * num_heads) * len(lengths))
    most = max(lengths)
    cells = min(most, 2048)
    for place, length in enumerate(lengths, 1):
        axes = figure.add_subplot(len(lengths), 1, place)
        heads = pattern.live_keys(length, num_heads=num_heads)
        share = torch.stack([_share(live, most, cells) for live in heads])
        exists = _share(torch.arange(length), most, cells).expand(num_heads, -1) > 0
        shade = share.sqrt()[..., None] * _LIVE + (1 - share.sqrt())[..., None] * _DROPPED
        axes.imshow(
            torch.where(exists[..., None], shade, 1).numpy(),
            aspect="auto",
            extent=(0, most, num_heads - 0.5, -0.5),
            interpolation="nearest",
        )
        counts = sorted({len(live) for live in heads})
        sizes = " or ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
        text = f"after {length:,} tokens: {sizes} kept of each head"
        axes.set_title(text, fontsize=8, loc="left", pad=3)
        edges = [head + 0.5 for head in range(num_heads - 1)]
        axes.hlines(edges, 0, most, color="white", linewidth=1.5)
        axes.set_yticks(range(num_heads))
        axes.tick_params(labelsize=7, length=0)
        axes.tick_params(axis="x", labelbottom=place == len(lengths), length=2)
        axes.spines[:].set_visible(False)
        axes.set_ylabel("head", fontsize=8)
    axes.set_xlabel("position of the key", fontsize=8)
    figure.suptitle(wrapped(title or plain_text(pattern), 100), fontsize=9)
    return image(figure, kind)


def branch_layouts(
    pattern: Pattern, length: int, num_heads: int = 1, block_size: int = 128
) -> list[BlockLayout]:
    """Builds a layout for each branch of a pattern, in their order; a mask is its only branch."""
    if length < 1:
        raise ValueError(f"a drawing needs a length of at least 1 token, got {length}")
    branches = pattern.branches if len(pattern.branches) > 1 else (pattern,)
    return [x.layout(length, num_heads=num_heads, block_size=block_size) for x in branches]


def draw_layouts(
    axes: Any, layouts: Sequence[BlockLayout], *, head: int = 0, cells: int = 512
) -> None:
    """Draws one head of layouts on matplotlib axes, each in its color; positions are in tokens.

    Args:
        axes: matplotlib axes.
        layouts: layouts of equal lengths, such as those of a mixture's branches.
        head: index of the query head.
        cells: largest number of pixels in a row and in a column.
    """
    frame = layouts[0].frame
    axes.imshow(
        shades(layouts, cells, head=head).numpy(),
        extent=(0, frame.kv_len, frame.q_start + frame.q_len, frame.q_start),
        interpolation="nearest",
    )
    sides = sorted((frame.q_len, frame.kv_len))
    if sides[1] > _LONGEST_SIDE * sides[0]:  # a thin strip shows nothing
        axes.set_aspect("auto")
        axes.set_box_aspect(1)
    axes.set_xlabel("key position (tokens)", fontsize=8)
    axes.set_ylabel("query position (tokens)", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[:].set_color("#cccccc")
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        ticks = sorted({round(low + i * (high - low) / 4) for i in range(5)})
        axis.set_ticks(ticks, [short_count(tick) for tick in ticks])


def shades(layouts: Sequence[BlockLayout], cells: int, *, head: int = 0) -> Tensor:
    """Returns the colors of a picture's pixels, [rows, columns, 3] from 0 to 1, white for no pair.

    A pixel with few pairs stays visible, and one with pairs of several layouts is darker.
    """
    q_len = layouts[0].frame.q_len
    step = max((p.step for layout in layouts for p in layout.passes), default=1)
    if q_len > cells and q_len // step >= 128:
        cells = min(cells, q_len // step)  # a pixel has at least `step` tokens, against moire
    pixels: Tensor | float = 1.0
    for layout, color in zip(layouts, colors_of(len(layouts)), strict=True):
        share = pair_shares(layout, cells, head=head)  # [rows, columns]
        shade = torch.where(share > 0, 0.25 + 0.75 * share.clamp(max=1).pow(0.4), 0)
        ink = torch.tensor([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        pixels = pixels * (1 - shade[..., None] * (1 - ink))  # colors multiply, as inks on paper do
    assert isinstance(pixels, Tensor)
    return pixels


def colors_of(number: int) -> list[str]:
    """Returns a color for each of some branches; from the eighth on, colors repeat."""
    return [_ALONE] if number == 1 else [_BRANCHES[i % len(_BRANCHES)] for i in range(number)]


def legend_of(pattern: Pattern, layouts: Sequence[BlockLayout], length: int) -> list[Any]:
    """Returns a colored patch for each branch with its text and density; none for a mask."""
    from matplotlib.patches import Patch

    if len(layouts) == 1:
        return []
    patches = [
        Patch(color=color, label=f"{plain_text(branch)}: {share_text([layout], length)}")
        for branch, layout, color in zip(
            pattern.branches, layouts, colors_of(len(layouts)), strict=True
        )
    ]
    if (more := len(patches) - _MOST_IN_LEGEND) > 0:
        patches[_MOST_IN_LEGEND:] = [Patch(color="none", label=f"and {more} more branches")]
    return patches


def plain_text(pattern: Pattern) -> str:
    """Returns a pattern's text, without parentheses that enclose the whole text."""
    text = str(pattern)
    in_parentheses = ast.parse(text, mode="eval").body.col_offset > 0  # (a) & (b) is not
    return text[1:-1] if in_parentheses else text


def share_text(layouts: Sequence[BlockLayout], length: int) -> str:
    """Formats the layouts' pairs as a percentage of all pairs, with two digits if it is small."""
    percent = 100 * sum(layout.num_pairs for layout in layouts) / length**2
    return f"{percent:.2f}%" if percent >= 0.1 or not percent else f"{percent:.2g}%"


def pairs_text(layouts: Sequence[BlockLayout], length: int) -> str:
    """Says how many (query, key) pairs a head has, and which share of length^2 that is.

    `layouts` has a layout for each branch of a mixture; their pairs are summed.
    """
    pairs = sum(layout.num_pairs for layout in layouts)
    share = share_text(layouts, length)
    return f"{pairs:,.0f} pairs a head, {share} of all at {length:,} tokens"


def _share(positions: torch.Tensor, most: int, cells: int) -> torch.Tensor:
    """Cuts 0 .. most - 1 into cells; returns for each the share of its numbers in `positions`."""
    cell = torch.arange(most) * cells // most
    counts = torch.bincount(cell[positions], minlength=cells)
    return counts / torch.bincount(cell, minlength=cells)
