"""Cuts a pass's table into units of work for the programs of a Triton launch, on the device.

An entry is a visited pair of tiles. A unit is a tile and some of its entries, of which those that
need no mask come first. A tile with many more entries than others is cut into pieces, whose results
are combined later. A walk is all units of a pass, the longest first. The host never waits for the
device.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...ground.streams import Built, capturing, moved_together
from ...layouts.layout import BlockLayout, Pass, stretched, tile_counts

UNIT, CUT = 5, 3  # how many int32 numbers describe a unit, and a cut tile
_LEAST_ENTRIES = 8  # shorter pieces cost more to combine than they save
_UNITS_PER_PROCESSOR = 4  # units per multiprocessor, so that all finish at about the same time


class Walk(NamedTuple):
    """Lists the units of work of a Triton kernel in one pass, and the entries that each computes.

    Tensors are int32 unless stated. Bt is B, or 1 if all batch entries share the tables; T (1, Hkv
    or Hq) is the number of tables of a batch entry, E the entries of a table. A *unit* is a tile
    and its entries, or some of them if the tile is cut because it has many. The "other tile" of an
    entry is the one that is not the unit's.
    """

    # [Bt, T, units, 5]: tile (-1 for an unused unit), first entry, first entry that needs a mask,
    # end of the entries, slot for a piece's result (-1 if the tile is not cut)
    units: Tensor
    start: Tensor  # [Bt, T, E] first token of the entry's other tile
    tokens: Tensor  # [Bt, T, E] number of tokens of the other tile
    bitmap: Tensor  # [Bt, T, E] index of the entry's bitmap, -1 if it has all pairs
    entry: Tensor  # [Bt, T, E] index of the entry in `layout.entries`
    cuts: Tensor  # [Bt, T, cuts, 3] each cut tile (-1 for none), its first slot, number of pieces
    slots: int  # upper bound of the slots of a table; a slot is memory for a piece's result
    bitmaps: Tensor  # bitmaps of the pass, with a line of bits for each token of a unit's tile
    origin: Tensor | None = None  # [Bt, T, E] int64 the other tile's first position, if not `start`
    # [Bt, T, E] int64 index of the other tile's dropout seed; None for key tiles or a single seed
    stream: Tensor | None = None
    # [Bt, T, E] (depth - position) of the key tile minus that of the query tile; None if all are 0
    shift: Tensor | None = None
    built: Built | None = None  # other CUDA streams wait for it; None if none needs to wait


_captured: list[object] = []  # tensors that captured CUDA graphs read; they are never freed
_walks: WeakKeyDictionary[Pass, dict[object, Walk]] = WeakKeyDictionary()
_builders: WeakKeyDictionary[Pass, tuple[Callable[[int], Walk], ...]] = WeakKeyDictionary()


def hand_over(p: Pass, uncut: Walk, *builders: Callable[[int], Walk]) -> None:
    """Stores a pass's walk by query tiles, which is built already, and functions for its others.

    `selected_layout` calls it, because its kernels have computed the walk already.
    """
    _walks[p] = {(False, p.key_tile.shape[-1] + 1): uncut}
    _builders[p] = builders


def walk(
    layout: BlockLayout,
    number: int,
    *,
    by_key: bool,
    programs: int,
    processors: int,
    in_order: bool = False,
) -> Walk:
    """Returns the `Walk` of pass `number`, by query tiles or by key tiles.

    It is stored with the pass.

    For a pass that `Pass.cut` made, the walk over query tiles is that of `walked_as`. With
    `by_key`, units are key tiles. A unit takes `programs` programs, which `processors`
    multiprocessors run. With `in_order`, no tile is cut, and all entries keep their order, as if
    each needed a mask.
    """
    p = layout.passes[number] if by_key else layout.passes[number].walked_as
    entries = p.key_tile.shape[-1]
    longest = p.longest[by_key] if p.longest else entries
    fair = entries * programs // (_UNITS_PER_PROCESSOR * processors)
    limit = max(_LEAST_ENTRIES, 1 << fair.bit_length())  # powers of two: few distinct walks
    limit = limit if limit < longest and not in_order else entries + 1
    kind: tuple[object, ...] = (by_key, limit, "in order") if in_order else (by_key, limit)
    if p is not layout.passes[number]:  # `Walk.entry` depends on the passes before this one
        kind = *kind, layout.table_shape, *(id(x.walked_as) for x in layout.passes[:number])
    walks = _walks.setdefault(p, {})
    if (found := walks.get(kind)) is not None:
        use(found, layout, number, by_key=by_key)
        return found
    builders = None if in_order else _builders.get(p)
    if capturing(p.key_tile.device):  # not cached, because it is empty until the graph runs
        if builders is not None:
            return builders[by_key](limit)
        layout = replace(layout, passes=tuple(replace(x) for x in layout.passes))  # drops caches
        return _walk(layout, number, by_key, limit, in_order)
    for other in list(walks.values()):  # another stream may still be building the transpose
        _wait(p, other)
    hosts: Any = tuple(x.walked_as.memo.get("host") for x in layout.passes)
    if builders is None and not by_key and all(hosts):  # many small operators, better on the host
        made = _walk(replace(layout, passes=hosts), number, False, limit, in_order)
        tables: dict[str, Any] = {k: x for k, x in made._asdict().items() if isinstance(x, Tensor)}
        del tables["bitmaps"]  # the pass has them on the GPU
        tables |= moved_together(tables, p.bitmaps.device)
        made = made._replace(**tables, bitmaps=p.bitmaps)
    else:
        made = (
            builders[by_key](limit) if builders else _walk(layout, number, by_key, limit, in_order)
        )
    walks[kind] = made = made._replace(built=Built.now(p.key_tile.device))
    return made


def use(w: Walk, layout: BlockLayout, number: int, *, by_key: bool) -> None:
    """Makes the current stream wait for a cached walk; a graph capture keeps the walk forever."""
    if w.built is None:
        return
    cut = layout.passes[number]
    p = cut if by_key else cut.walked_as
    if capturing(p.key_tile.device):
        # of a pass that `cut` made, keep no `key_stop`: its memory belongs to this capture
        _captured.append(((p, cut.query_stop) if p is not cut else layout, w))
    else:
        _wait(p, w)


def _wait(p: Pass, w: Walk) -> None:
    """Makes the current CUDA stream wait until another stream has completed a walk's tensors."""

    def shared() -> Iterator[Tensor]:
        yield from (x for x in w if isinstance(x, Tensor))
        yield from Pass.transpose.stored(p) or ()
        yield p.num_entries

    if w.built is not None:
        w.built.wait(shared())


def _walk(
    layout: BlockLayout, number: int, by_key: bool, limit: int, in_order: bool = False
) -> Walk:
    """Builds a walk on the device of the pass; tiles with more than `limit` entries are cut."""
    p = layout.passes[number] if by_key else layout.passes[number].walked_as
    batch, heads = layout.table_shape
    heads = max(heads, len(p.query_start))
    if p.query_depth is not None:  # entries with equal tables may stand at depths of their own
        batch = max(batch, len(p.query_depth))
    size = p.key_tile.shape[-1]
    if by_key:
        row_ptr, other, entry = (stretched(x, batch, heads).long() for x in p.transpose)
        bitmap = stretched(p.bitmap, batch, heads).gather(-1, entry)
        start, stop, origin, stream = p.query_start, p.query_stop, p.query_origin, p.stream
    else:
        row_ptr, other = (stretched(x, batch, heads).long() for x in (p.row_ptr, p.key_tile))
        entry = torch.arange(size, device=other.device).expand_as(other)
        bitmap = stretched(p.bitmap, batch, heads)
        start, stop, origin, stream = p.key_start, p.key_stop, p.key_origin, None
    other = other.clamp(max=max(0, start.shape[-1] - 1))  # padding may point past the last tile

    def of_other(x: Tensor) -> Tensor:
        return stretched(x[None], batch, heads).gather(-1, other)

    start, stop = of_other(start), of_other(stop)
    tokens = tile_counts(start, stop, p.step, layout.block_size)
    first = stretched(layout.first_entry[number].to(entry.device), batch, heads)

    rows = row_ptr.shape[-1] - 1
    number_of = torch.arange(other.shape[-1], device=other.device).expand_as(other).contiguous()
    row = torch.searchsorted(row_ptr[..., 1:].contiguous(), number_of, right=True)
    needs_mask = (bitmap >= 0) | (tokens < layout.block_size) | in_order
    place, order = (2 * row + needs_mask).sort(dim=-1, stable=True)
    edges = torch.arange(2 * rows + 1, device=row.device).expand(batch, heads, -1).contiguous()
    edges = torch.searchsorted(place, edges)
    begin, masked, end = edges[..., :-1:2], edges[..., 1::2], edges[..., 2::2]

    pieces = ((end - begin + limit - 1) // limit).clamp(min=1)
    cut = pieces > 1
    slots = torch.where(cut, pieces, 0)
    first_slot = slots.cumsum(-1) - slots
    spare = size // limit  # a tile of n > limit entries gets at most n / limit extra pieces
    slots_used = 2 * size // limit if spare else 0
    unit = torch.arange(rows + spare, device=row.device).expand(batch, heads, -1).contiguous()
    last = pieces.cumsum(-1)
    tile = torch.searchsorted(last, unit, right=True)
    real = tile < rows
    tile = tile.clamp(max=max(0, rows - 1))
    of_tile = (begin, masked, end, pieces, first_slot, last - pieces)
    begin_, masked_, end_, pieces_, first_slot_, before = (x.gather(-1, tile) for x in of_tile)
    piece = unit - before
    lower = begin_ + (end_ - begin_) * piece // pieces_
    upper = begin_ + (end_ - begin_) * (piece + 1) // pieces_
    slot = torch.where(pieces_ > 1, first_slot_ + piece, -1)
    middle = torch.minimum(torch.maximum(masked_, lower), upper)
    units = torch.stack((torch.where(real, tile, -1), lower, middle, upper, slot), -1)
    longest = torch.where(real, upper - lower, -1).argsort(dim=-1, descending=True, stable=True)
    units = units.gather(-2, longest[..., None].expand_as(units))

    which = (~cut).to(torch.int8).argsort(dim=-1, stable=True)[..., :spare]
    cuts = torch.stack((which, first_slot.gather(-1, which), pieces.gather(-1, which)), -1)
    cuts = torch.where(cut.gather(-1, which)[..., None], cuts, -1)
    start, tokens, bitmap, entry = (
        x.gather(-1, order).int().contiguous()
        for x in (start, tokens, bitmap, entry + first[..., None])
    )
    origin, stream = (x if x is None else of_other(x).gather(-1, order) for x in (origin, stream))
    shift = None
    if p.query_depth is not None and p.key_depth is not None:
        places = zip(p.depths(0), p.coordinates(layout.frame.q_start), strict=True)
        of_query, of_key = (stretched(x[..., 0] - y, batch, heads) for x, y in places)
        own = row.clamp(max=max(0, rows - 1))
        query, key = (other, own) if by_key else (own, other)
        shift = (of_key.gather(-1, key) - of_query.gather(-1, query)).gather(-1, order)
    return Walk(
        units=units.int().contiguous(),
        start=start,
        tokens=tokens,
        bitmap=bitmap,
        entry=entry,
        cuts=cuts.int().contiguous(),
        slots=slots_used,
        bitmaps=p.transposed_bitmaps if by_key else p.bitmaps,
        origin=origin,
        stream=stream,
        shift=shift,
    )
