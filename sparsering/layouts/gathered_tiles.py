"""`GatheredTiles`: a layout as tables that plain operators gather by, for exported programs.

A program that leaves Python cannot look up a layout, so these tables are operands of it. A *unit*
is one query tile with all key tiles that it visits in a pass. Units of about as many tiles stand
together in `GatheredUnits`, padded to one size, so that a program needs few operators at any
length.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..ground.numerics import power_of_2
from ..ground.once import one_thread, unseen
from ..patterns.algebra import Frame, Pattern
from .bitmaps import unpack
from .cache import layout_cache
from .layout import BlockLayout, tile_counts

_MOST_PADDING = 1.5  # tile pairs of units with padding, over those without; else units are sorted
_MOST_LENGTHS = 512  # distinct lengths of units that are told apart when they are sorted
_SIZES = (128, 64, 32, 16)  # tokens of a tile that are tried


class GatheredUnits(NamedTuple):
    """U units of m query slots and c key tiles of w slots each, n = c * w key slots.

    Rows are those of `folded` tensors. A slot past the end of its tile repeats the last token, and
    an empty tile repeats the first one: results of such queries are not read, and such keys are in
    no pair.
    """

    query_slot: Tensor  # int64 [m], 0 to m - 1
    key_slot: Tensor  # int64 [w], 0 to w - 1
    step: Tensor  # int64 [U, 1] distance of neighbouring tokens in a tile
    query_ends: Tensor  # int64 [2, U, 1] first and last row of the query tile
    key_ends: Tensor  # int64 [2, U, c] first and last row of each key tile
    # int64 [U, c] index in `GatheredTiles.cells`; [0, c] if all pairs of all units attend
    kind: Tensor
    # For distances: int64 [U, m] and [U, n] positions, and [U, 1] the index of the table. Else
    # empty, as the next.
    query_place: Tensor
    key_place: Tensor
    table: Tensor
    block: Tensor  # int64 [U, c] index of the tile's block bias in `folded` ones

    @property
    def query(self) -> Tensor:
        """Row of each query slot, int64 [U, m]."""
        first, last = self.query_ends[0], self.query_ends[1]
        return torch.minimum(first + self.step * self.query_slot, last)

    @property
    def key(self) -> Tensor:
        """Row of each key slot, int64 [U, n]."""
        first, last = self.key_ends[0, ..., None], self.key_ends[1, ..., None]
        return torch.minimum(first + self.step[..., None] * self.key_slot, last).flatten(1)

    @property
    def num_slots(self) -> tuple[int, int, int]:
        """Returns U, m and n."""
        units, tiles = self.key_ends.shape[1:]
        return units, len(self.query_slot), tiles * len(self.key_slot)


class GatheredTiles(NamedTuple):
    """The tables of a layout's tiles. Bt batch entries and T groups of heads have tables."""

    # int64 [Bt, T, Nq, R] row of each query in the slots of all units, one unit after the other;
    # -1 for none. R is the most units of any query.
    place: Tensor
    cells: Tensor  # bool [Z, m, w], the distinct bitmaps; m and w are the most of any units
    units: tuple[GatheredUnits, ...]

    def num_numbers(self, head_dim: int) -> int:
        """Counts the numbers of a head that are in memory at once: scores, and gathered rows."""
        sizes = [x.num_slots for x in self.units]
        return sum(u * (m * n + 2 * head_dim * (m + n)) for u, m, n in sizes)

    def operands(self) -> list[Tensor]:
        """Returns all tables in the order in which `from_operands` takes them."""
        return [self.place, self.cells, *(x for units in self.units for x in units)]

    @classmethod
    def from_operands(cls, tables: Sequence[Tensor]) -> "GatheredTiles":
        """Puts together what `operands` returned."""
        place, cells, *rest = tables
        width = len(GatheredUnits._fields)
        units = [GatheredUnits(*rest[i : i + width]) for i in range(0, len(rest), width)]
        return cls(place, cells, tuple(units))


def differs(batches: int) -> bool:
    """Whether batch entries have tables of their own; so they do if their number is dynamic."""
    return not isinstance(batches, int) or batches > 1


def folded(x: Tensor, batches: int, heads: int) -> Tensor:
    """Moves the batch entries and heads that have tables of their own into the tokens.

    Takes [B, H, N, D], returns [B or 1, H / heads, batches * heads * N, D]; a row of it is
    `(entry * heads + head) * N + token`.
    """
    x = x.unflatten(1, (heads, x.shape[1] // heads)).transpose(1, 2)  # [B, H / heads, heads, N, D]
    if differs(batches):
        x = x.permute(1, 0, 2, 3, 4)[None]  # [1, H / heads, B, heads, N, D]
    return x.flatten(2, -2)


def unfolded(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Undoes `folded` for [B or 1, H / heads, batches * heads * N, ...]; `shape` is these three."""
    x = x.unflatten(2, shape)
    x = x[0].transpose(0, 1) if differs(shape[0]) else x[:, :, 0]  # [B, H / heads, heads, N, ...]
    return x.transpose(1, 2).flatten(1, 2)


def gathered_tiles(
    pattern: Pattern,
    frame: Frame,
    block_size: int | None,
    head_dim: int,
    *,
    has_distances: bool = False,
    has_blocks: bool = False,
) -> GatheredTiles:
    """Returns the tables of a pattern; they are stored in its layout, so that layers share them.

    Args:
        block_size: tokens of a tile; None for those with the fewest numbers in memory.
        head_dim: of keys and values, to choose the block size.
        has_distances: the call has a distance bias.
        has_blocks: the call has a block bias, for the blocks of the layout with this block size.
    """
    kind, found = ("gathered", has_distances, has_blocks), []
    with unseen(), one_thread():
        for size in _SIZES if block_size is None else (block_size,):
            layout = layout_cache.layout(pattern, frame, size, torch.device("cpu"))
            if kind not in layout.memo:
                layout.memo[kind] = _tables(layout, has_distances, has_blocks)
            found.append(layout.memo[kind])
            numbers = [tables.num_numbers(head_dim) for tables in found]
            if numbers[-1] > min(numbers):  # still smaller tiles would gather keys still more often
                break
    return found[numbers.index(min(numbers))]


class _TilePairs(NamedTuple):
    """Visited pairs of tiles of all passes and tables, as columns [pairs]."""

    table: Tensor  # entry * heads + head
    unit: Tensor  # query tile, counted over passes and tables
    first_query: Tensor
    num_queries: Tensor
    first_key: Tensor
    num_keys: Tensor
    step: Tensor
    bitmap: Tensor  # index in the bitmaps of all passes, or -1
    block: Tensor  # index in the layout's `entries`
    query_place: Tensor  # [pairs, b] positions for distances, [pairs, 0] if none are wanted
    key_place: Tensor
    width: Tensor  # widths of the pass's tiles as one number, by which units are grouped


def _tables(layout: BlockLayout, has_distances: bool, has_blocks: bool) -> GatheredTiles:
    """Builds the tables of a layout."""
    frame, b = layout.frame, layout.block_size
    batches, heads = layout.table_shape
    heads = max([heads, *(len(p.query_start) for p in layout.passes)])
    if has_distances:
        depths = [p.query_depth for p in layout.passes if p.query_depth is not None]
        batches = max([batches, *map(len, depths)])
    found, tiles, bitmaps = [], 0, 0
    for number, p in enumerate(layout.passes):
        for entry in range(batches):
            for head in range(heads):
                found.append(
                    _pairs_of(layout, number, (entry, head), heads, tiles, bitmaps, has_distances)
                )
                tiles += p.query_start.shape[1]
        bitmaps += len(p.bitmaps)
    shape = batches, heads, frame.q_len
    if not found or not sum(len(x.unit) for x in found):
        empty = torch.zeros(*shape, 0, dtype=torch.int64)
        return GatheredTiles(empty, torch.zeros(0, 1, 1, dtype=torch.bool), ())
    pairs = _TilePairs(*map(torch.cat, zip(*found, strict=True)))
    every = torch.cat([p.bitmaps for p in layout.passes])
    kind, cells = _kinds(pairs, every, b)
    units, rows, first = [], [], 0
    for number in pairs.width.unique().tolist():
        group = torch.nonzero(pairs.width == number)[:, 0]
        for part in _of_like_length(pairs.unit[group]):
            chosen = group[part]
            own, queries = _units(
                _TilePairs(*(x[chosen] for x in pairs)), kind[chosen], frame, heads, b,
                (has_distances, layout.num_blocks if has_blocks else 0),
            )  # fmt: skip
            units.append(own)
            rows.append(queries)
            first += queries.numel()
    m, w = max(len(x.query_slot) for x in units), max(len(x.key_slot) for x in units)
    cells = cells[:, :m, :w].contiguous()
    if all(bool(cells[x.kind.unique()].all()) for x in units):
        units = [x._replace(kind=x.kind[:0]) for x in units]
    return GatheredTiles(_places(rows, shape), cells, tuple(units))


def _pairs_of(
    layout: BlockLayout,
    number: int,
    table: tuple[int, int],
    heads: int,
    first_tile: int,
    first_bitmap: int,
    has_distances: bool,
) -> _TilePairs:
    """Returns the pairs of tiles that one table of a pass visits, without empty tiles."""
    p, frame, b = layout.passes[number], layout.frame, layout.block_size
    entry, head = table
    of_head = head * frame.num_heads // heads
    row, key, bitmap, axis = layout.table(p, entry, of_head)
    ends = [(p.query_start, p.query_stop), (p.key_start, p.key_stop)]
    queries, keys = (tile_counts(x[axis], y[axis], p.step, b) for x, y in ends)
    real = (queries[row] > 0) & (keys[key] > 0)
    batch_tables, head_tables = layout.first_entry.shape[1:]
    first = layout.first_entry[
        number, entry if batch_tables > 1 else 0, of_head * head_tables // max(1, frame.num_heads)
    ]
    block = first + torch.arange(len(row))
    row, key, bitmap, block = (x[real] for x in (row, key, bitmap, block))
    places = [key[:, None][:, :0]] * 2
    if has_distances:
        depths = p.depths_of_tokens(frame.q_start, b)
        places = [x[entry % len(x), axis][tile] for x, tile in zip(depths, (row, key), strict=True)]
    most = int(queries.max()) if len(row) else 1, int(keys.max()) if len(row) else 1
    width = power_of_2(most[0]) * 1024 + power_of_2(most[1])
    return _TilePairs(
        table=torch.full_like(row, entry * heads + head),
        unit=row + first_tile,
        first_query=p.query_start[axis][row],
        num_queries=queries[row],
        first_key=p.key_start[axis][key],
        num_keys=keys[key],
        step=torch.full_like(row, p.step),
        bitmap=torch.where(bitmap >= 0, bitmap + first_bitmap, -1),
        block=block,
        query_place=places[0],
        key_place=places[1],
        width=torch.full_like(row, width),
    )


def _kinds(pairs: _TilePairs, bitmaps: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Numbers the distinct pairs of tiles: [pairs], and which pairs attend bool [Z, b, b].

    Kind 0 has no pairs, for empty slots.
    """
    both = (pairs.bitmap + 1) * (b + 1) + pairs.num_keys
    distinct, kind = both.unique(return_inverse=True)
    number, keys = distinct // (b + 1) - 1, distinct % (b + 1)
    full = torch.full_like(bitmaps[:1] if len(bitmaps) else bitmaps.new_empty(1, b * b // 8), 255)
    cells = unpack(torch.cat((bitmaps, full))[number], b) & (torch.arange(b) < keys[:, None, None])
    return kind + 1, torch.cat((torch.zeros_like(cells[:1]), cells))


def _of_like_length(unit: Tensor) -> list[Tensor]:
    """Splits pairs into parts whose units have about as many pairs, so that padding is bounded.

    Takes the unit of each pair, ascending; returns indices of pairs. There are as few parts as keep
    padding within a half of the pairs, the best of their number.
    """
    _, of_pair, length = unit.unique_consecutive(return_inverse=True, return_counts=True)
    step = -(-int(length.max()) // _MOST_LENGTHS)
    rounded = -(-length // step) * step
    values, counts = rounded.unique(return_counts=True)
    below = torch.cat((counts.new_zeros(1), counts.cumsum(0)))  # units of fewer pairs
    # cost[i, j]: pairs with padding, if the units of values i to j have one size
    cost = (below[1:] - below[:-1, None]) * values
    cost = torch.where(
        torch.arange(len(values)) >= torch.arange(len(values))[:, None], cost, 1 << 60
    )
    best, begins = cost[0], [torch.zeros_like(values)]
    while float(best[-1]) > _MOST_PADDING * len(unit) and len(begins) < len(values):
        best, begin = (torch.cat((best.new_full((1,), 1 << 60), best[:-1]))[:, None] + cost).min(0)
        begins.append(begin)
    parts, end = [], len(values)
    for begin in reversed(begins):
        first = int(begin[end - 1])
        inside = (rounded >= values[first]) & (rounded <= values[end - 1])
        parts.append(torch.nonzero(inside[of_pair])[:, 0])
        end = first
    return parts[::-1]


def _units(
    pairs: _TilePairs, kind: Tensor, frame: Frame, heads: int, b: int, options: tuple[bool, int]
) -> tuple[GatheredUnits, Tensor]:
    """Builds units of one size from their pairs; also returns each slot's query, [U, m] or -1."""
    has_distances, blocks = options
    _, unit, length = pairs.unit.unique_consecutive(return_inverse=True, return_counts=True)
    first = length.cumsum(0) - length
    number = torch.arange(len(unit)) - first[unit]
    m, w = int(pairs.num_queries.max()), int(pairs.num_keys.max())
    count, c = len(length), int(length.max())

    def of_pairs(x: Tensor) -> Tensor:
        """Writes a value of each pair [pairs, ...] to [U, c, ...]; empty slots repeat the first."""
        table = x[first][:, None].expand(-1, c, *x.shape[1:]).clone()
        table[unit, number] = x
        return table

    table = pairs.table[first, None]
    # heads that share keys have them once
    kv_heads = min(heads, max(1, frame.num_kv_heads))
    of_keys = table // heads * kv_heads + table % heads * kv_heads // heads

    def ends(start: Tensor, tokens: Tensor) -> Tensor:
        """Returns the first and the last token of tiles, as rows of one table: [2, pairs]."""
        return torch.stack((start, start + pairs.step * (tokens - 1)))

    query_ends = ends(pairs.first_query, pairs.num_queries)[:, first, None] + table * frame.q_len
    key_ends = torch.stack([of_pairs(x) for x in ends(pairs.first_key, pairs.num_keys)])
    kinds = torch.zeros(count, c, dtype=torch.int64)
    kinds[unit, number] = kind
    none = torch.zeros(0, dtype=torch.int64)
    own = GatheredUnits(
        query_slot=torch.arange(m),
        key_slot=torch.arange(w),
        step=pairs.step[first, None],
        query_ends=query_ends,
        key_ends=key_ends + of_keys * frame.kv_len,
        kind=kinds,
        query_place=pairs.query_place[first][:, :m].contiguous() if has_distances else none,
        key_place=of_pairs(pairs.key_place[:, :w]).flatten(1) if has_distances else none,
        table=table if has_distances else none,
        block=of_pairs(pairs.block) + table * blocks if blocks else none,
    )
    real = own.query_slot < pairs.num_queries[first, None]
    return own, torch.where(real, own.query, -1)


def _places(rows: list[Tensor], shape: tuple[int, int, int]) -> Tensor:
    """Returns `GatheredTiles.place` from the query of each slot of all units, -1 for none."""
    query = torch.cat([x.flatten() for x in rows])
    slot = torch.nonzero(query >= 0)[:, 0]
    query, order = query[slot].sort(stable=True)
    count = torch.bincount(query, minlength=shape[0] * shape[1] * shape[2])
    number = torch.arange(len(query)) - (count.cumsum(0) - count)[query]
    place = torch.full((len(count), int(count.max())), -1)
    place[query, number] = slot[order]
    return place.view(*shape, -1)
