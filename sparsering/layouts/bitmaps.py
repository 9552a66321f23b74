"""Bitmaps of pairs of tiles, one bit per (query, key) pair, and the tables that share them."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..ground.kernel_library import kernel_operators
from ..ground.rows import distinct_rows

_GATHER = 0x0102040810204080  # factor that packs 8 bytes of 0 or 1 into a word's top byte
_BITS = (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F)  # bit masks of `_ones`
_BYTES = 0x0101010101010101  # factor that puts the sum of a word's 8 bytes into its top byte
_AT_A_TIME = 1 << 23  # most bits that `count_pairs` expands at once, to bound memory
_SWAPS = (7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0)


class Table(NamedTuple):
    """Visited tile pairs of one head in one pass, ordered by query tile, then by key tile."""

    row_ptr: Tensor  # [query tiles + 1], index of each query tile's first tile pair
    key_tile: Tensor  # [tile pairs], index of the key tile
    bitmap: Tensor  # [tile pairs], index of the bitmap, or -1 if all positions attend
    num_pairs: int  # number of (query, key) pairs that attend
    longest: tuple[int, int]  # most tile pairs with one query tile, and with one key tile


def pack(cells: Tensor) -> Tensor:
    """Packs [n, b, b] bool into [n, b * b / 8] bytes; a byte's lowest bit is its first cell."""
    words = cells.contiguous().view(torch.uint8).view(-1).view(torch.int64)
    return (words * _GATHER >> 56).to(torch.uint8).view(len(cells), math.prod(cells.shape[1:]) // 8)


def unpack(bitmaps: Tensor, block_size: int) -> Tensor:
    """Unpacks [n, b * b / 8] bytes to [n, b, b] bool; the inverse of `pack`."""
    bits = (bitmaps[..., None] >> torch.arange(8, device=bitmaps.device, dtype=torch.uint8)) & 1
    return bits.view(*bitmaps.shape[:-1], block_size, block_size).bool()


def transposed(bitmaps: Tensor) -> Tensor:
    """Transposes each bitmap of b x b bits: [n, b * b / 8] uint8, as in `pack`.

    It works on 64-bit words that hold 8 x 8 bits each.
    """
    if bitmaps.device.type == "cpu" and (kernel := kernel_operators()) is not None:
        return kernel.transposed(bitmaps)
    num, nbytes = bitmaps.shape
    size = math.isqrt(8 * nbytes) // 8
    x = bitmaps.view(num, size, 8, size).permute(0, 3, 1, 2)
    words = x.flatten().view(torch.int64)
    for shift, cells in _SWAPS:  # swaps bits above and below the diagonal of 8 x 8 bits
        changed = (words ^ (words >> shift)) & cells
        words = words ^ changed ^ (changed << shift)
    x = words.view(torch.uint8).view(num, size, size, 8)
    return x.permute(0, 1, 3, 2).reshape(num, nbytes)


def count_pairs(bitmaps: Tensor, number: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Counts the 1 bits in the first rows[i] rows and columns[i] columns of bitmaps[number[i]]."""
    size = int((8 * bitmaps.shape[1]) ** 0.5)
    corner = columns + (size + 1) * (rows + (size + 1) * number)
    corner, of_each = corner.unique(return_inverse=True)
    first = pack(torch.arange(size) < torch.arange(size + 1)[:, None])  # row c: c bits of 1
    counts = [torch.zeros(0, dtype=torch.int64)]
    for part in corner.split(_AT_A_TIME // size**2):
        part, columns = part // (size + 1), part % (size + 1)
        number, rows = part // (size + 1), part % (size + 1)
        real = torch.arange(size) < rows[:, None]
        real_bits = first[columns, None] & (real.view(torch.uint8) * 255)[:, :, None]
        bits = bitmaps[number].view_as(real_bits) & real_bits
        counts.append(_ones(bits.view(len(bits), -1).view(torch.int64)).sum(1))
    return torch.cat(counts)[of_each]


def _ones(words: Tensor) -> Tensor:
    """Counts the 1 bits of each 64-bit integer; the result has the shape of `words`."""
    pairs, fours, bytes_ = _BITS
    words = words - (words >> 1 & pairs)
    words = (words & fours) + (words >> 2 & fours)
    return ((words + (words >> 4)) & bytes_) * _BYTES >> 56


def share_tables(
    tables: list[tuple[Table, Tensor]], rows: list[list[int]]
) -> tuple[Tensor, list[list[Table]]]:
    """Stores equal tables and bitmaps once.

    Takes the distinct (table, its bitmaps), and for each batch entry and head the index of its
    table. Returns (bitmaps, tables [batch][head]); a list has one item if all its items would be
    equal.
    """
    bitmaps, distinct = tables[0][1], [table for table, _ in tables]
    if not all(torch.equal(bitmaps, other) for _, other in tables[1:]):
        bitmaps, distinct = share_bitmaps(tables)
    shared = [[distinct[number] for number in row] for row in rows]
    if all(_equal(table, row[0]) for row in shared for table in row):
        shared = [row[:1] for row in shared]
    if all(all(map(_equal, row, shared[0])) for row in shared):
        shared = shared[:1]
    return bitmaps, shared


def share_bitmaps(tables: list[tuple[Table, Tensor]]) -> tuple[Tensor, list[Table]]:
    """Stores equal bitmaps once and drops unused ones.

    Returns (distinct bitmaps, the tables with indices into them).
    """
    start, numbers = 0, []
    for table, bitmaps in tables:
        numbers.append(torch.where(table.bitmap < 0, -1, table.bitmap + start))
        start += len(bitmaps)
    number = torch.cat(numbers)
    masked = number >= 0
    used, inverse = number[masked].unique(return_inverse=True)
    distinct, rank = distinct_rows(torch.cat([bitmaps for _, bitmaps in tables])[used])
    number[masked] = rank[inverse].int()
    split = number.split([len(table.bitmap) for table, _ in tables])
    return distinct, [table._replace(bitmap=x) for (table, _), x in zip(tables, split, strict=True)]


def _equal(a: Table, b: Table) -> bool:
    return a is b or all(map(torch.equal, a[:3], b[:3]))
