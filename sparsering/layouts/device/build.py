"""Layouts made on their device from arithmetic: nothing is read from it, nothing copied to it.

The host tells how much room each table needs (`plan`); the device does the same row arithmetic,
writes out the runs that it finds, and evaluates the cells of each kind of tile pair that varies.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...patterns.algebra import Frame, Pattern
from ..bitmaps import pack
from ..layout import BlockLayout, Pass
from ..tiles import Axis
from .axes import Lanes, one_of
from .laid import Laid, cells_of, counts_within, held, numbered, with_counts
from .plan import PassPlan, TablePlan, axes_of, plan
from .reach import Rows
from .runs import expanded


def arithmetic_layout(
    pattern: Pattern, frame: Frame, block_size: int, device: torch.device
) -> BlockLayout | None:
    """The layout of a pattern that fits the frame; None where some of it has no closed form.

    Tables have room for all pairs of tiles that may hold, and end before what holds no pair.

    Cost: O(tiles) on the host, O(visited blocks) on the device.
    """
    planned = plan(pattern, frame, block_size)
    if planned is None:
        return None
    made = [make_pass(x, frame, block_size, device) for x in planned]
    pairs = torch.stack([of_pass for _, of_pass in made]).sum()
    return BlockLayout(frame, block_size, tuple(p for p, _ in made), pairs)


def make_pass(
    planned: PassPlan, frame: Frame, block_size: int, device: torch.device
) -> tuple[Pass, Tensor]:
    """A pass, and its pairs as a mean over heads."""
    queries, keys = axes_of(planned.grid, frame, block_size, planned.offsets, device)
    shared = len(planned.use) == 1
    made = [
        _make_table(t, planned, queries, keys, frame, block_size, shared) for t in planned.tables
    ]
    first_bitmap, tables = 0, []
    for table, (row_ptr, key_tile, bitmap, *_) in zip(planned.tables, made, strict=True):
        bitmap = torch.where(bitmap < 0, bitmap, bitmap + first_bitmap) if first_bitmap else bitmap
        tables.append((row_ptr, key_tile, bitmap))
        first_bitmap += table.kinds
    room = max(t.entries for t in planned.tables)
    row_ptr, key_tile, bitmap = (
        _stacked([_padded(tables[number][i], room if i else 0) for number in planned.use])
        for i in range(3)
    )
    bitmaps = [x for *_, x, _ in made]
    pairs = [made[number][-1] for number in planned.use]
    laid = Pass(
        step=planned.grid.step,
        query_start=queries.start - frame.q_start if frame.q_start else queries.start,
        query_stop=_stops(queries, frame.q_start),
        key_start=keys.start,
        key_stop=_stops(keys, 0),
        row_ptr=row_ptr,
        key_tile=key_tile,
        bitmap=bitmap,
        bitmaps=bitmaps[0] if len(bitmaps) == 1 else torch.cat(bitmaps),
        covers=planned.covers,
        longest=(
            max(t.longest[0] for t in planned.tables),
            max(t.longest[1] for t in planned.tables),
        ),
        branch=planned.branch,
    )
    return laid, torch.cat(pairs).double().mean()


def _stops(tiles: Axis, first: int) -> Tensor:
    stop = tiles.stop - first if first else tiles.stop
    return stop.expand(len(tiles.start), -1).contiguous()


def _stacked(tables: list[Tensor]) -> Tensor:
    return (tables[0][None] if len(tables) == 1 else torch.stack(tables))[None]


def _padded(table: Tensor, room: int) -> Tensor:
    return pad(table, (0, room - len(table))) if len(table) < room else table


def _make_table(
    table: TablePlan,
    planned: PassPlan,
    queries: Axis,
    keys: Axis,
    frame: Frame,
    block_size: int,
    shared: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(row_ptr, key_tile, bitmap, bitmaps, pairs of each axis that the table serves)."""
    offset, axis = planned.offsets[table.axis], table.axis
    own, others = one_of(queries, axis), one_of(keys, axis)
    lanes = Lanes.of(planned.grid, own, frame.kv_len, block_size, offset)
    placed = Rows.of(planned.grid, offset, frame, own, lanes)
    laid = Laid.of(table.rule, placed, others, ragged=table.ragged, slots=table.slots)
    served = slice(None) if shared else slice(axis, axis + 1)
    counts = queries.count[served].clamp(min=0), keys.count[served].clamp(min=0)

    room, rows = table.entries, len(own.start)
    count = laid.some.counts().reshape(-1)
    before = count.cumsum(0) - count
    row_begin = pad(before.view(rows, -1)[:, 0], (0, 1), value=room)
    _, number = expanded(laid.some, room)
    key_tile = laid.rows.lanes.tile_of(number).int()
    pairs = _full_pairs(laid, counts)
    if not table.varying:
        bitmap, bitmaps = torch.full_like(key_tile, -1), _no_bitmaps(key_tile, block_size)
        return row_begin.int(), key_tile, bitmap, bitmaps, pairs

    varying = laid.varying_pairs(table.varying)
    tiles = varying.tiles
    columns = laid.kinds(varying)
    columns = columns if table.even else with_counts(columns, tiles, block_size)
    kind, first = numbered(columns, table.factors, table.kinds)
    cells = cells_of(table.mask, tiles[first], frame, block_size)
    corners = counts_within(cells)
    real = tiles.q.count, tiles.k.count
    holds = held(corners, kind, *real)
    if shared and len(planned.offsets) > 1:
        key = laid.rows.lanes.tile_of(varying.number)
        rows_of, columns_of = counts[0][:, varying.row], counts[1][:, key]
        pairs = pairs + held(corners, kind, rows_of, columns_of).sum(1)
    else:
        pairs = pairs + holds.sum()

    base = before.view(rows, -1).T - laid.some.begin
    base = torch.stack([base[parent] for parent in laid.parents], 1).flatten()
    place = base.index_select(0, varying.run) + varying.number
    told = torch.where(holds == real[0] * real[1], -1, kind).int()
    bitmap = torch.full_like(key_tile, -1).scatter_(0, place, told)
    kept = torch.ones_like(key_tile, dtype=torch.bool).scatter_(0, place, holds > 0)
    end = kept.cumsum(0)
    to = torch.where(kept, end - 1, room)
    key_tile, bitmap = (x.new_zeros(room + 1).scatter_(0, to, x)[:room] for x in (key_tile, bitmap))
    row_ptr = pad(end, (1, 0)).index_select(0, row_begin)
    return row_ptr.int(), key_tile, bitmap, pack(cells), pairs


def _full_pairs(laid: Laid, counts: tuple[Tensor, Tensor]) -> Tensor:
    """Pairs of positions of the tile pairs that hold in full, of each axis."""
    rows, columns = counts
    before = pad(columns.cumsum(-1), (1, 0))
    begin, end = (
        laid.rows.lanes.tile_of(x).clamp(max=columns.shape[-1]).reshape(-1)
        for x in (laid.full.begin, laid.full.end)
    )
    seen = before.index_select(1, end) - before.index_select(1, begin)
    return (seen.view(len(rows), -1, rows.shape[-1]) * rows[:, None]).sum((1, 2))


def _no_bitmaps(like: Tensor, block_size: int) -> Tensor:
    return like.new_empty(0, block_size**2 // 8, dtype=torch.uint8)
