"""Draws a layout as characters, and counts the shares of pairs that pictures of it show."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # `layout` imports this module, so the import would be circular
    from .layout import BlockLayout

_SHADES = " .:-=+*#%@"
_AT_A_TIME = 1 << 22  # (query, key) pairs evaluated at once, to bound memory


def drawing(layout: "BlockLayout", rows: int = 32, columns: int = 64) -> list[str]:
    """Returns lines of characters, one row of queries each; darker where more pairs attend."""
    shares = pair_shares(layout, rows, columns, most_samples=1 << 20)
    if not shares.numel():
        return []
    shade = (shares / shares.max().clamp(min=1e-30) * (len(_SHADES) - 1)).ceil().long()
    return ["|" + "".join(_SHADES[x] for x in line) + "|" for line in shade.tolist()]


def pair_shares(
    layout: "BlockLayout",
    rows: int,
    columns: int | None = None,
    *,
    head: int = 0,
    most_samples: int = 1 << 24,
) -> Tensor:
    """Returns which share of each area's (query, key) pairs attends: a picture [rows, columns].

    A share of 1 is dense; a mixture, which may count a pair several times, may exceed 1. In large
    layouts, only evenly spaced positions of each tile are counted.

    Args:
        layout: any layout; its first batch entry is drawn.
        rows, columns: largest size of the raster; `columns` defaults to `rows`.
        head: index of the query head to draw.
        most_samples: about how many pairs to evaluate at most.
    """
    q_len, kv_len = layout.frame.q_len, layout.frame.kv_len
    rows, columns = min(rows, q_len), min(rows if columns is None else columns, kv_len)
    counts = torch.zeros(rows * columns, dtype=torch.float64)
    per_entry = max(most_samples // max(layout.num_blocks, 1), 64)
    samples = min(layout.block_size, math.isqrt(per_entry))
    slots = torch.arange(samples) * layout.block_size // samples
    for p in layout.passes:
        size = max(_AT_A_TIME // samples**2, 1)
        for begin in range(0, len(layout.table(p, 0, head)[0]), size):
            q, k, pairs = layout.cells(p, 0, head, slots, slice(begin, begin + size))
            row, column = q * rows // q_len, k * columns // kv_len
            area = row[:, :, None] * columns + column[:, None, :]
            counts += torch.bincount(area[pairs], minlength=len(counts))
    weight = (layout.block_size / samples) ** 2
    height, width = _positions(q_len, rows), _positions(kv_len, columns)
    return counts.view(rows, columns) * weight / (height[:, None] * width)


def _positions(length: int, parts: int) -> Tensor:
    """Counts the positions in each of `parts` parts; position x is in part x * parts // length."""
    first = [-(-part * length // parts) for part in range(parts + 1)] if parts else [0]
    return torch.tensor(first).diff()
