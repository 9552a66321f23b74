"""Layouts over cached keys, whose index in memory differs from their position.

`page_over` builds a pass of one tile of queries over keys in any order, given each key's position.
`Spanned` is a layout over the visited keys alone, stored one after the other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from ..patterns.algebra import And, Frame, Mask, Or
from ..patterns.positions import Dilated
from .bitmaps import pack, transposed
from .layout import BlockLayout, Pass, if_several
from .lower import native_page
from .tiles import Spans

_MOST_TILES = 1.3  # cut tiles at segments only if that makes at most 1.3 times as many
_MOST_CELLS = 1 << 21  # (query, key) pairs evaluated at a time, to bound memory


def page_over(
    number: int,
    branch: Mask,
    positions: Tensor,
    live: Tensor,
    starts: Tensor,
    frame: Frame,
    queries: int,
    block_size: int,
    segments: Callable[[Tensor], Tensor] | None = None,
    boundary: int = 0,
) -> Pass:
    """Builds the pass of one mask of a mixture, for one tile of queries and keys in any order.

    Args:
        number, branch: index of the mask in the mixture, and the mask.
        positions: [B or 1, Hkv, keys] int64 position of each key, -1 for no key.
        live: [B or 1, Hkv, keys] bool, False if by this mask no query visits the key.
        starts: [B or 1] position of the first query.
        queries: number of queries, at most `block_size`.
        segments: returns the segment (`Pass.segments`) of keys, given their positions; default one.
            Tiles end where the segment of the first row's keys changes, if this makes few more.
        boundary: slot at which a tile begins, 0 for any.

    Cost: O(queries keys) for each head and batch entry that differs in keys or mask.
    """
    keys = torch.where(live, positions, -1)
    entries, kv_heads, num_keys = keys.shape
    batches, tables = branch.num_batches(), branch.num_tables(frame)
    heads = kv_heads if tables <= kv_heads else frame.num_heads
    if tables == 1 and bool((keys == keys[:, :1]).all()):
        heads, keys = 1, keys[:, :1]
    else:
        keys = keys.repeat_interleave(heads // max(1, kv_heads), 1)  # [B or 1, heads, keys]
    every = max(entries, batches or 1)
    keys, starts = (
        keys.expand(every, -1, -1).flatten(0, 1),
        starts.expand(every),
    )  # [B * heads, keys]
    of_keys = None
    if segments is not None:
        of_keys = torch.where(keys >= 0, segments(keys.clamp(min=0)), -1).int()
    start, stop = _cut(None if of_keys is None else of_keys[:1], num_keys, block_size, boundary)
    # A short tile repeats its last key: bits there mean nothing, and the tile may still be full.
    slots = (start[:, None] + torch.arange(block_size)).minimum(stop[:, None] - 1).flatten()
    keys = keys[:, slots]
    numbers = [head * (frame.num_heads // heads) for head in range(heads)]
    numbers = numbers[:1] if tables == 1 and not batches else numbers
    masks = [branch.at(b, h, frame) for b in range(batches or 1) for h in numbers]
    rows = masks, frame, starts.repeat_interleave(heads), keys, queries, block_size
    *table, bitmaps = native_page(*rows) or _page_in_torch(*rows)
    # [B, heads, 2], [B, heads, visited], [B, heads, visited]
    row_ptr, key_tile, bitmap = (x.view(every, heads, x.shape[1]) for x in table)
    segment = none = torch.zeros(0, dtype=torch.int32)
    if of_keys is not None and num_keys:
        cut = row_ptr, key_tile, bitmap, bitmaps
        column, segment, cut = _in_segments(of_keys[:, slots], *cut)
        row_ptr, key_tile, bitmap, bitmaps = cut
        start, stop = start[column], stop[column]
    longest = key_tile.shape[2]
    zero = torch.zeros(1, 1, dtype=torch.int64)
    return Pass(
        step=1,
        query_start=zero,
        query_stop=zero + queries,
        key_start=start[None],
        key_stop=stop[None],
        row_ptr=row_ptr,
        key_tile=key_tile,
        bitmap=bitmap,
        bitmaps=bitmaps,
        covers=(True, True),
        longest=(longest, min(longest, 1)),
        branch=number,
        query_segment=none,
        key_segment=if_several(segment),
    )


def _cut(
    of_keys: Tensor | None, num_keys: int, block_size: int, boundary: int
) -> tuple[Tensor, Tensor]:
    """Cuts keys, in stored order, into tiles: (first index, exclusive end) [tiles] of each.

    Args: `of_keys` [0 or 1, keys] has the segment of each key, -1 for no key; None if there is one
    segment. Tiles also end where the segment changes, unless that makes too many of them.

    Returns: index of each tile's first key, and its exclusive end.
    """
    edges = [0, boundary, num_keys] if 0 < boundary < num_keys else [0, num_keys]
    if of_keys is not None and len(of_keys):
        real = torch.nonzero(of_keys[0] >= 0)[:, 0]
        of_real = of_keys[0, real]
        finer = sorted({*edges, *real[1:][of_real[1:] != of_real[:-1]].tolist()})
        tiles = sum(-(-(b - a) // block_size) for a, b in pairwise(finer))
        edges = finer if tiles <= _MOST_TILES * -(-num_keys // block_size) + 1 else edges
    first = [x for a, b in pairwise(edges) for x in range(a, b, block_size)]
    last = [min(x + block_size, b) for a, b in pairwise(edges) for x in range(a, b, block_size)]
    return torch.tensor(first, dtype=torch.int64), torch.tensor(last, dtype=torch.int64)


def _in_segments(
    of_keys: Tensor, row_ptr: Tensor, key_tile: Tensor, bitmap: Tensor, bitmaps: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Splits tiles whose keys are in several segments of sums: one table entry for each segment.

    Sums of attention are added segment by segment, so a visited tile may have only one.

    Args: `of_keys` [rows, keys] int32 has the segment of each key, -1 for no key; a row per table.
    The others are the tables of a pass [B, heads, ...] and its bitmaps.

    Returns: for each new key tile, the old tile that it is a part of; its segment [1, tiles]; and
    the new tables and bitmaps.
    """
    rows, block = len(of_keys), math.isqrt(8 * bitmaps.shape[1])
    tiles = -(-of_keys.shape[1] // block)
    padding = (0, tiles * block - of_keys.shape[1])
    of_keys = torch.nn.functional.pad(of_keys, padding, value=-1).view(rows, tiles, block)
    real = of_keys >= 0
    least = torch.where(real, of_keys, torch.iinfo(torch.int32).max).amin((0, 2))
    most = of_keys.amax((0, 2))  # -1 for a tile without keys, which no table lists
    mixed, column, segment = least < most, torch.arange(tiles), most.clamp(min=0)
    if not mixed.any():
        return column, segment[None], (row_ptr, key_tile, bitmap, bitmaps)
    number_of, many = torch.nonzero(mixed), int(most.max()) + 1
    pairs = (number_of * many + of_keys[:, mixed])[real[:, mixed]]
    pairs = torch.cat((column[~mixed] * many + segment[~mixed], pairs)).unique()
    column, segment = pairs // many, (pairs % many).int()
    shape = row_ptr.shape[:2]
    entries = torch.arange(key_tile.shape[2]) < row_ptr[..., 1:]
    number = torch.full((rows, tiles + 1), -2)  # index of the bitmap of each visited tile
    place = torch.where(entries, key_tile.long(), tiles).view(rows, -1)
    number.scatter_(1, place, bitmap.long().view(rows, -1))
    number = number[:, :tiles]
    inside = of_keys[:, column] == segment[:, None]  # [rows, columns, block]
    listed = inside.any(2) & (number[:, column] > -2)
    shared = real.sum(2)[:, column] > inside.sum(2)  # the tile has keys of other segments, too
    row, cut = torch.nonzero(listed & shared, as_tuple=True)
    number = torch.where(listed, number[:, column], -1)
    if len(row):
        old = number[row, cut]
        bits = (
            torch.where((old >= 0)[:, None], bitmaps[old.clamp(min=0)], 255)
            if len(bitmaps)
            else torch.full((len(row), block * block // 8), 255, dtype=torch.uint8)
        )
        kept = pack(inside[row, cut]).repeat(1, block)
        number[row, cut] = len(bitmaps) + torch.arange(len(row))
        bitmaps = torch.cat((bitmaps, bits & kept))
    count = listed.sum(1)
    longest = int(count.max()) if rows else 0
    order = (~listed).to(torch.int8).argsort(dim=1, stable=True)[:, :longest]
    filled = torch.arange(longest) < count[:, None]
    tables = (torch.where(filled, x, 0).int() for x in (order, number.gather(1, order)))
    row_ptr = torch.nn.functional.pad(count[:, None], (1, 0)).int()
    key_tile, bitmap = (x.view(*shape, longest) for x in tables)
    return column, segment[None], (row_ptr.view(*shape, 2), key_tile, bitmap, bitmaps)


def _page_in_torch(
    masks: Sequence[Mask], frame: Frame, first: Tensor, keys: Tensor, queries: int, block_size: int
) -> list[Tensor]:
    """Finds visited key tiles and their bitmaps as `native_page` does, without the C++ kernel."""
    rows, tiles = len(keys), -(-keys.shape[1] // block_size)
    of_rows = [*masks] * (rows // len(masks)) if len(masks) > 1 else masks
    query = (first[:, None] + torch.arange(queries))[:, None]  # [rows, 1, queries] positions
    # Key-major while it is filled: a byte has 8 queries of one key. The end transposes it.
    bits = torch.zeros(rows, tiles * block_size, block_size // 8, dtype=torch.uint8)
    real = keys >= 0
    most = int(real.sum(1).max()) if real.numel() else 0
    slot = (~real).to(torch.int8).argsort(dim=1, stable=True)[:, :most]  # [rows, most]
    for part in slot.split(max(1, _MOST_CELLS // max(1, rows * queries)), 1):
        key = keys.gather(1, part)[:, :, None]  # [rows, part, 1]
        pairs = _hold(of_rows, query, key.clamp(min=0), frame) & (key >= 0)
        cells = pairs.expand(*part.shape, queries).reshape(-1, queries)  # [rows * part, queries]
        part_bits = pack(cells).view(*part.shape, queries // 8)  # [rows, part, queries / 8]
        bits[..., : queries // 8].scatter_(1, part[..., None].expand_as(part_bits), part_bits)
    bits = bits.view(rows, tiles, block_size, block_size // 8)
    visited = (bits != 0).flatten(2).any(2)  # [rows, tiles]
    varies = visited & (bits[..., : queries // 8] != 255).flatten(2).any(2)
    index = torch.full((rows, tiles), -1)
    index[varies] = torch.arange(int(varies.sum()))
    count = visited.sum(1)
    longest = int(count.max()) if count.numel() else 0
    tile = (~visited).to(torch.int8).argsort(dim=1, stable=True)[:, :longest]  # [rows, longest]
    real = torch.arange(longest) < count[:, None]
    row_ptr = torch.nn.functional.pad(count[:, None], (1, 0))  # [rows, 2]
    listed = (torch.where(real, x, 0) for x in (tile, index.gather(1, tile)))
    return [*(x.int() for x in (row_ptr, *listed)), transposed(bits[varies].flatten(1))]


def _hold(masks: Sequence[Mask], p: Tensor, k: Tensor, frame: Frame) -> Tensor:
    """Evaluates masks[i] on queries p[i] and keys k[i], in one call where the masks allow it."""
    first = masks[0]
    if all(mask == first for mask in masks):
        return first.holds(p, k, frame)
    kinds = {type(mask) for mask in masks}
    if isinstance(first, Dilated) and kinds == {Dilated}:
        dilated = cast(Sequence[Dilated], masks)
        if len({(mask.segment_length, mask.dilation_rate) for mask in dilated}) == 1:
            grid = torch.tensor([mask.offset_of(0, 1) for mask in dilated])
            return first.on_grid(grid[:, None, None], p, k)
    if isinstance(first, And | Or) and len(kinds) == 1:
        parts = list(zip(*(cast(And | Or, mask).masks for mask in masks), strict=True))
        joined = torch.logical_and if isinstance(first, And) else torch.logical_or
        return reduce(joined, (_hold(part, p, k, frame) for part in parts))
    rows = torch.arange(len(masks))[:, None].unbind()
    shape = torch.broadcast_shapes(p.shape, k.shape)[1:]
    pairs = (mask.holds(p[i], k[i], frame) for mask, i in zip(masks, rows, strict=True))
    return torch.cat([x.expand(1, *shape) for x in pairs])


@dataclass(frozen=True, eq=False)
class Spanned:
    """A layout whose keys are only the visited ranges of positions, stored one after the other.

    A cache that holds just these keys attends over it.
    """

    layout: BlockLayout  # `Pass.key_start` is an index in the stored keys, `key_origin` a position
    begin: Tensor  # first position of each range; ranges are ascending and disjoint
    end: Tensor  # exclusive end of each range

    @classmethod
    def of(cls, layout: BlockLayout) -> "Spanned":
        none = torch.zeros(0, dtype=torch.int64)
        pairs = list(zip(layout.passes, [p.visited_keys() for p in layout.passes], strict=True))
        starts = torch.cat([none, *(p.key_start[tiles] for p, tiles in pairs)])
        spans = Spans(starts, torch.cat([none, *(p.key_stop[tiles] for p, tiles in pairs)]))
        spanned = cls(layout, spans.begin, spans.end)
        frame = layout.frame._replace(kv_len=spanned.length)
        passes = tuple(spanned._moved(p, tiles) for p, tiles in pairs)
        return replace(spanned, layout=BlockLayout(frame, layout.block_size, passes, math.nan))

    @property
    def length(self) -> int:
        """Number of stored keys, in all ranges."""
        return int((self.end - self.begin).sum())

    def place_of(self, positions: Tensor) -> Tensor:
        """Converts positions to indices among the stored keys.

        A key that is not stored gets `length`.
        """
        if not len(self.begin):
            return torch.zeros_like(positions)
        lengths = self.end - self.begin
        first = lengths.cumsum(0) - lengths
        span = (torch.searchsorted(self.begin, positions, right=True) - 1).clamp(min=0)
        inside = (positions >= self.begin[span]) & (positions < self.end[span])
        return torch.where(inside, positions - self.begin[span] + first[span], self.length)

    def _moved(self, p: Pass, visited: Tensor) -> Pass:
        """Renumbers a pass for gathered keys: its key tiles begin at their first key's new index.

        Tiles that are not visited become empty.
        """
        start = torch.where(visited, self.place_of(p.key_start), 0)
        stop = torch.where(visited, start + p.key_stop - p.key_start, 0)
        covers = (p.covers[0], False)
        return p.like(key_start=start, key_stop=stop, key_origin=p.key_start, covers=covers)
