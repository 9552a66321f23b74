"""Where the pairs of a layout are, as a raster, and as characters for a terminal."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .bitmaps import unpack
from .layout import BlockLayout, Pass


def pair_shares(
    layout: BlockLayout, cells: int, *, head: int = 0, most_samples: int = 1 << 24
) -> Tensor:
    """[rows, columns] pairs in each cell over its positions; 1 is dense, more where pairs count
    twice.

    Every position of every tile is counted where there are few; else evenly chosen ones stand for
    their neighbours.

    Args:
        layout: any; its first batch entry is drawn.
        cells: most rows and columns.
        head: query head.
        most_samples: pairs to look at, at most, about.
    """
    q_len, kv_len = layout.frame.q_len, layout.frame.kv_len
    rows, columns = min(cells, q_len), min(cells, kv_len)
    counts = torch.zeros(rows * columns, dtype=torch.float64)
    per_entry = max(most_samples // max(layout.num_blocks, 1), 64)
    samples = min(layout.block_size, math.isqrt(per_entry))
    slots = torch.arange(samples) * layout.block_size // samples
    for p in layout.passes:
        for part in _parts(layout, p, head, samples):
            q, k, held = _sampled_pairs(layout, p, head, part, slots)
            cell = (q * rows // q_len)[:, :, None] * columns + (k * columns // kv_len)[:, None, :]
            counts += torch.bincount(cell[held], minlength=len(counts))
    weight = (layout.block_size / samples) ** 2
    row_size = torch.bincount(torch.arange(q_len) * rows // q_len, minlength=rows)
    column_size = torch.bincount(torch.arange(kv_len) * columns // kv_len, minlength=columns)
    return counts.view(rows, columns) * weight / (row_size[:, None] * column_size)


def _parts(layout: BlockLayout, p: Pass, head: int, samples: int) -> Sequence[Tensor]:
    """The entries of a pass, in pieces of a few million sampled pairs."""
    entries = torch.arange(len(layout.table(p, 0, head)[0]))
    return entries.split(max((1 << 22) // samples**2, 1))


def _sampled_pairs(
    layout: BlockLayout, p: Pass, head: int, entries: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query indices [n, s], key positions [n, s] and which of their pairs [n, s, s] are in."""
    row, key, mask, tiles = layout.table(p, 0, head)
    row, key, mask = row[entries], key[entries], mask[entries]
    q = p.query_start[tiles][row, None] + p.step * slots
    k = p.key_start[tiles][key, None] + p.step * slots
    held = (q < p.query_stop[tiles][row, None])[:, :, None] & (k < p.key_stop[tiles][key, None])[
        :, None, :
    ]
    partial = mask >= 0
    numbers, inverse = mask[partial].unique(return_inverse=True)
    bitmaps = unpack(p.bitmaps[numbers], layout.block_size)[:, slots][:, :, slots]
    held[partial] &= bitmaps[inverse]
    return q, k, held
