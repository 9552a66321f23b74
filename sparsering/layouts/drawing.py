"""Where the pairs of a layout are: as a raster, and as characters for a terminal."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .bitmaps import unpack

if TYPE_CHECKING:  # a layout prints itself by what is here
    from .layout import BlockLayout, Pass

_SHADES = " .:-=+*#%@"
_AT_A_TIME = 1 << 22  # sampled pairs


def drawing(layout: "BlockLayout", rows: int = 32, columns: int = 64) -> list[str]:
    """Lines of characters, queries downwards, darker where more pairs of an area are in."""
    shares = pair_shares(layout, rows, columns, most_samples=1 << 20)
    if not shares.numel():
        return []
    most = shares.max().clamp(min=1e-30)
    shade = (shares / most * (len(_SHADES) - 1)).ceil().long()
    return ["|" + "".join(_SHADES[x] for x in line) + "|" for line in shade.tolist()]


def pair_shares(
    layout: "BlockLayout",
    rows: int,
    columns: int | None = None,
    *,
    head: int = 0,
    most_samples: int = 1 << 24,
) -> Tensor:
    """[rows, columns] pairs in each area over its positions; 1 is dense.

    More than 1 is where pairs count twice. Every position of every tile is counted where there are
    few; else evenly chosen ones stand for their neighbours.

    Args:
        layout: any; its first batch entry is drawn.
        rows, columns: at most, default as many columns as rows.
        head: query head.
        most_samples: pairs to look at, at most, about.
    """
    q_len, kv_len = layout.frame.q_len, layout.frame.kv_len
    rows, columns = min(rows, q_len), min(rows if columns is None else columns, kv_len)
    counts = torch.zeros(rows * columns, dtype=torch.float64)
    per_entry = max(most_samples // max(layout.num_blocks, 1), 64)
    samples = min(layout.block_size, math.isqrt(per_entry))
    slots = torch.arange(samples) * layout.block_size // samples
    for p in layout.passes:
        entries = torch.arange(len(layout.table(p, 0, head)[0]))
        for part in entries.split(max(_AT_A_TIME // samples**2, 1)):
            q, k, held = _sampled_pairs(layout, p, head, part, slots)
            row, column = q * rows // q_len, k * columns // kv_len
            area = row[:, :, None] * columns + column[:, None, :]
            counts += torch.bincount(area[held], minlength=len(counts))
    weight = (layout.block_size / samples) ** 2
    height = torch.bincount(torch.arange(q_len) * rows // max(q_len, 1), minlength=rows)
    width = torch.bincount(torch.arange(kv_len) * columns // max(kv_len, 1), minlength=columns)
    return counts.view(rows, columns) * weight / (height[:, None] * width)


def _sampled_pairs(
    layout: "BlockLayout", p: "Pass", head: int, entries: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query indices [n, s], key positions [n, s] and which of their pairs [n, s, s] are in."""
    row, key, bitmap, axis = layout.table(p, 0, head)
    row, key, bitmap = row[entries], key[entries], bitmap[entries]
    q = p.query_start[axis][row, None] + p.step * slots
    k = p.key_start[axis][key, None] + p.step * slots
    real_q, real_k = q < p.query_stop[axis][row, None], k < p.key_stop[axis][key, None]
    held = (real_q[:, :, None] & real_k[:, None, :]).clone()
    masked = bitmap >= 0
    numbers, inverse = bitmap[masked].unique(return_inverse=True)
    cells = unpack(p.bitmaps[numbers], layout.block_size)[:, slots][:, :, slots]
    held[masked] &= cells[inverse]
    return q, k, held
