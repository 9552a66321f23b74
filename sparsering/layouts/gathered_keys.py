"""Layouts over cached keys, whose index in memory differs from their position.

`page_over` builds a pass of one tile of queries over keys in any order, given each key's position.
`Spanned` is a layout over the visited keys alone, stored one after the other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..patterns.algebra import And, Frame, Mask, Or
from ..patterns.arguments import MOST_TOKENS
from ..patterns.positions import Causal, Dilated, intersection
from .bitmaps import pack, transposed
from .layout import BlockLayout, Pass
from .leaves import EMPTY, FULL, VARIES
from .lower import condition
from .tiles import Axis, Spans, TilePairs

_MOST_CELLS = 1 << 21  # (query, key) pairs evaluated at a time, to bound memory


class _Rows(NamedTuple):
    """Mask, first query and keys of each row; a row is one head of one batch entry."""

    masks: list[Mask]  # mask of each row; only one if all rows have the same mask
    first: Tensor  # [rows] position of the first query
    keys: Tensor  # [rows, keys] positions, -1 for no key


def page_over(
    number: int,
    branch: Mask,
    positions: Tensor,
    live: Tensor,
    starts: Tensor,
    frame: Frame,
    queries: int,
    block_size: int,
) -> Pass:
    """Builds the pass of one mask of a mixture, for one tile of queries and keys in any order.

    Args:
        number, branch: index of the mask in the mixture, and the mask, which is causal.
        positions: [B or 1, Hkv, keys] int64 position of each key, -1 for no key. The last `queries`
            keys are at the positions of the queries; all other keys precede the queries.
        live: [B or 1, Hkv, keys] bool, False if by this mask no query visits the key.
        starts: [B or 1] position of the first query.
        queries: number of queries, at most `block_size`.

    Cost: O(queries keys) for each head and batch entry that differs in keys or mask. A mask that
        all share is evaluated only on tiles in which some, but not all, pairs may attend.
    """
    keys = torch.where(live, positions, -1)
    entries, kv_heads, num_keys = keys.shape
    batches, tables = branch.num_batches(), branch.num_tables(frame)
    heads = kv_heads if tables <= kv_heads else frame.num_heads
    if tables == 1 and bool((keys == keys[:, :1]).all()):
        heads, keys = 1, keys[:, :1]
    else:
        keys = keys.repeat_interleave(heads // max(1, kv_heads), 1)
    every = max(entries, batches or 1)
    keys, starts = keys.expand(every, -1, -1).flatten(0, 1), starts.expand(every)
    numbers = [head * (frame.num_heads // heads) for head in range(heads)]
    masks = [branch.at(b if batches else 0, h, frame) for b in range(every) for h in numbers]
    if tables == 1 and not batches:
        masks = masks[:1]
    rows = _Rows(masks, starts.repeat_interleave(heads), keys)
    find = _by_tiles if len(masks) == 1 else _by_keys
    visited, bitmap, bitmaps = find(rows, frame, queries, block_size)
    count = visited.sum(1)
    longest = int(count.max()) if count.numel() else 0
    tile = (~visited).to(torch.int8).argsort(dim=1, stable=True)[:, :longest]
    real = torch.arange(longest) < count[:, None]
    start = torch.arange(0, num_keys, block_size)[None]
    zero = torch.zeros(1, 1, dtype=torch.int64)

    def table(x: Tensor) -> Tensor:
        return x.int().view(every, heads, x.shape[1]).contiguous()

    p = Pass(
        step=1,
        query_start=zero,
        query_stop=zero + queries,
        key_start=start,
        key_stop=(start + block_size).clamp(max=num_keys),
        row_ptr=table(torch.nn.functional.pad(count[:, None], (1, 0))),
        key_tile=table(torch.where(real, tile, 0)),
        bitmap=table(torch.where(real, bitmap.gather(1, tile), 0)),
        bitmaps=transposed(bitmaps),
        covers=(True, True),
        longest=(longest, min(longest, 1)),
        branch=number,
    )
    Pass.transposed_bitmaps.store(p, bitmaps)
    return p


def _by_tiles(rows: _Rows, frame: Frame, queries: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the key tiles that each row visits, for rows (heads of a batch entry) of one mask.

    Returns: [rows, tiles] whether a tile is visited; [rows, tiles] index of its bitmap, or -1 if
        all pairs attend; the bitmaps, with queries along the bits.
    """
    (mask,), (count, keys) = rows.masks, rows.keys.shape
    tiles = -(-keys // size)
    k = torch.nn.functional.pad(rows.keys, (0, tiles * size - keys), value=-1)
    k, p = k.view(count * tiles, size), rows.first.repeat_interleave(tiles)
    status = _status(mask, p, p + queries - 1, k, frame)
    varies = torch.nonzero(status == VARIES)[:, 0]
    bitmaps = torch.zeros(len(varies), size, size // 8, dtype=torch.uint8)
    for part in torch.arange(len(varies)).split(max(1, _MOST_CELLS // size**2)):
        which = varies[part]
        query = (p[which, None] + torch.arange(queries))[:, None]
        bitmaps[part, :, : queries // 8] = _bits(mask.holds, query, k[which], frame)
    bitmaps = bitmaps.flatten(1)
    status[varies[~(bitmaps != 0).any(1)]] = EMPTY
    number = torch.full_like(status, -1, dtype=torch.int64)
    number[varies] = torch.arange(len(varies))
    return (status != EMPTY).view(count, tiles), number.view(count, tiles), bitmaps


def _by_keys(rows: _Rows, frame: Frame, queries: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what `_by_tiles` does, for rows of different masks; evaluates them on every key."""
    count, keys = rows.keys.shape
    tiles, old = -(-keys // size), max(0, keys - queries)  # `old` keys precede all queries
    query = (rows.first[:, None] + torch.arange(queries))[:, None]
    bits = torch.zeros(count, tiles * size, size // 8, dtype=torch.uint8)
    past = [_without_causal(mask) for mask in rows.masks]
    for begin, end, masks in ((0, old, past), (old, keys, rows.masks)):
        real = rows.keys[:, begin:end] >= 0
        most = int(real.sum(1).max()) if real.numel() else 0
        slot = (~real).to(torch.int8).argsort(dim=1, stable=True)[:, :most] + begin
        for part in slot.split(max(1, _MOST_CELLS // max(1, count * queries)), 1):
            part_bits = _bits(partial(_hold, masks), query, rows.keys.gather(1, part), frame)
            bits[..., : queries // 8].scatter_(1, part[..., None].expand_as(part_bits), part_bits)
    bits = bits.view(count * tiles, size**2 // 8)
    visited = (bits.view(torch.int64) != 0).any(1)
    return visited.view(count, tiles), (visited.cumsum(0) - 1).view(count, tiles), bits[visited]


def _bits(holds: Callable[..., Tensor], query: Tensor, key: Tensor, frame: Frame) -> Tensor:
    """Returns bits [rows, keys, queries / 8]: 1 if `query` [rows, 1, queries] sees `key`."""
    real, shape = key >= 0, (*key.shape, query.shape[2])
    pairs = holds(query, key.clamp(min=0)[:, :, None], frame)
    pairs = pairs & real[:, :, None] if not bool(real.all()) else pairs
    return pack(pairs.expand(shape).reshape(-1, shape[2])).view(*key.shape, shape[2] // 8)


def _without_causal(mask: Mask) -> Mask:
    """Drops `Causal` from a mask, for keys before all queries: there `Causal` always holds."""
    if not isinstance(mask, And):
        return mask
    return intersection([part for part in mask.masks if part != Causal()])


def _hold(masks: Sequence[Mask], p: Tensor, k: Tensor, frame: Frame) -> Tensor:
    """Evaluates masks[i] on p[i] and k[i]; all at once if only offsets of `Dilated` differ."""
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


def _status(mask: Mask, first: Tensor, last: Tensor, k: Tensor, frame: Frame) -> Tensor:
    """Returns EMPTY, VARIES or FULL for each tile: keys k[i], queries first[i] to last[i]."""
    real = k >= 0
    some = torch.nonzero(real.any(1))[:, 0]
    low, high = torch.where(real, k, MOST_TOKENS).amin(1)[some], k.amax(1)[some]
    none, first, last = torch.zeros_like(some), first[some], last[some]
    queries = Axis(1, none, first, last + 1, last)
    keys = Axis(1, none, low, high + 1, high)
    pairs = TilePairs.of_sequence(queries, keys, frame.kv_len)
    status = torch.full((len(k),), EMPTY, dtype=torch.int8)
    status[some] = condition(mask, frame).status(pairs).to(torch.int8)
    return torch.where((status == FULL) & ~real.all(1), VARIES, status)


@dataclass(frozen=True, eq=False)
class Spanned:
    """A layout whose keys are only the visited ranges of positions, stored one after the other."""

    layout: BlockLayout  # `Pass.key_start` has indices in the stored keys, `key_origin` positions
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
        """Returns the index of each position in the stored keys; `length` if no range has it."""
        if not len(self.begin):
            return torch.zeros_like(positions)
        lengths = self.end - self.begin
        first = lengths.cumsum(0) - lengths
        span = (torch.searchsorted(self.begin, positions, right=True) - 1).clamp(min=0)
        inside = (positions >= self.begin[span]) & (positions < self.end[span])
        return torch.where(inside, positions - self.begin[span] + first[span], self.length)

    def _moved(self, p: Pass, visited: Tensor) -> Pass:
        start = torch.where(visited, self.place_of(p.key_start), 0)
        stop = torch.where(visited, start + p.key_stop - p.key_start, 0)
        covers = (p.covers[0], False)
        return p.like(key_start=start, key_stop=stop, key_origin=p.key_start, covers=covers)
