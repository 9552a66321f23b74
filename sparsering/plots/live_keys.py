"""Draws the keys that a cache stores, and the keys that it drops."""

from collections.abc import Sequence

import torch

from ..patterns.algebra import Pattern
from .figure import new_figure, png, wrapped

_LIVE, _DROPPED = torch.tensor([0.12, 0.44, 0.55]), torch.tensor([0.91, 0.92, 0.93])


def kept_png(
    pattern: Pattern, lengths: Sequence[int], *, num_heads: int = 1, title: str | None = None
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
    figure.suptitle(wrapped(title or str(pattern), 100), fontsize=9)
    return png(figure)


def _share(positions: torch.Tensor, most: int, cells: int) -> torch.Tensor:
    """Cuts the positions below `most` into cells; returns the share of each that is listed."""
    cell = torch.arange(most) * cells // most
    counts = torch.bincount(cell[positions], minlength=cells)
    return counts / torch.bincount(cell, minlength=cells)
