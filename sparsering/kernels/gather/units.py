"""Cuts a pass into units, and units of equal shape into chunks that the gather backend batches.

A unit is a few query tiles and the keys that all of them visit. This file computes indices from the
layout's tables only; it reads no query, key or value.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ground.rows import expand_counts, first_in_row, mix, number_rows
from ...ground.streams import moved
from ...layouts.bitmaps import unpack
from ...layouts.layout import Pass, slots_of, tile_counts
from ...layouts.lists import Coordinates, Lists
from ..problem import Problem


@dataclass(frozen=True)
class Units:
    """Units of equal shape. In each, t query tiles all visit the same e key tiles.

    Attributes:
        batch, head: [units] batch entry and head of each unit's table; batch is 0 if all batch
            entries share one table.
        query_tiles: [units, t] indices of query tiles.
        key_tiles: [units, e] indices of key tiles.
        entries: [units, e] index, in the table, of each key tile's pair with the first query tile.
        bitmaps: [units, e] index of each tile pair's bitmap (-1: all pairs attend), [1, e] if all
            units share them, None if all pairs attend in all of them.
        num_queries, num_keys: tokens in a unit's query tiles and in its key tiles.
        fresh: True if no earlier units of the pass have these query tiles.
    """

    batch: Tensor
    head: Tensor
    query_tiles: Tensor
    key_tiles: Tensor
    entries: Tensor
    bitmaps: Tensor | None
    num_queries: int
    num_keys: int
    fresh: bool


_plans: WeakKeyDictionary[Pass, dict[tuple[int, int], list[Units]]] = WeakKeyDictionary()


def plan(p: Pass, block_size: int, most_queries: int, most_keys: int) -> list[Units]:
    """Returns a pass's units, which are stored as long as the pass exists.

    A unit has at most `most_queries` neighboring query tiles and `most_keys` key tiles. Tile pairs
    with and without a bitmap are in different units, unless one unit for both saves a merge.
    """
    plans = _plans.setdefault(p, {})
    if (most_queries, most_keys) not in plans:
        plans[most_queries, most_keys] = list(_units(p, block_size, most_queries, most_keys))
    return plans[most_queries, most_keys]


def _units(p: Pass, block_size: int, most_queries: int, most_keys: int) -> Iterator[Units]:
    """Groups the tile pairs of a pass into units, and yields units of equal shape together."""
    heads, tiles = max(p.row_ptr.shape[1], len(p.query_start)), p.query_start.shape[-1]
    tables = p.row_ptr.shape[1]
    real = torch.arange(p.bitmap.shape[-1], device=p.bitmap.device) < p.num_entries[..., None]
    real = real.repeat_interleave(heads // tables, 1).flatten(0, 1)
    table, entry = torch.nonzero(real, as_tuple=True)  # table is batch entry * heads + head
    head = table % heads
    place = (table // heads, head * tables // heads, entry)
    row, key, bitmap = p.query_tiles()[place], p.key_tile[place].long(), p.bitmap[place].long()
    axis = head * len(p.query_start) // heads
    queries = tile_counts(p.query_start, p.query_stop, p.step, block_size)[axis, row]
    keys = tile_counts(p.key_start, p.key_stop, p.step, block_size)[axis, key]
    written = torch.zeros(len(p.row_ptr) * heads * tiles, dtype=torch.bool, device=bitmap.device)
    row = table * tiles + row
    with_bitmap = (bitmap >= 0) | _rows_in_one_unit(row, bitmap, most_keys)[row]
    for masked in (False, True):
        index = torch.nonzero((with_bitmap == masked) & (queries > 0) & (keys > 0))[:, 0]
        if not len(index):
            continue
        begin, length, piece = _runs(row[index], most_keys)
        if masked or most_queries == 1:
            first = torch.arange(len(begin), device=begin.device)
        else:
            # A unit joins runs of equal `line`: they are of one table and have one index in rows.
            line = table[index][begin] * (piece.max() + 1) + piece
            order = line.argsort(stable=True)
            begin, length, piece = begin[order], length[order], piece[order]
            first = _first_runs(begin, length, line[order], key[index], most_queries)
        width = torch.diff(first, append=first.new_tensor([len(begin)]))
        num_queries = _sums(queries[index][begin], first)
        num_keys = _sums(keys[index], begin, length)[first]
        for group in _equal_rows([piece[first], width, length[first], num_queries, num_keys]):
            run = first[group][:, None] + torch.arange(int(width[group[0]]), device=group.device)
            slots = torch.arange(int(length[run[0, 0]]), device=group.device)
            entries = index[begin[run[:, :1]] + slots]
            parts = _by_bitmaps(bitmap[entries]) if masked else ((slice(None), None),)
            for part, bitmaps in parts:
                tile_rows = row[index][begin[run[part]]]
                fresh = not written[tile_rows].any()
                written[tile_rows] = True
                yield Units(
                    batch=table[entries[part, 0]] // heads,
                    head=table[entries[part, 0]] % heads,
                    query_tiles=tile_rows % tiles,
                    key_tiles=key[entries[part]],
                    entries=entry[entries[part]],
                    bitmaps=bitmaps,
                    num_queries=int(num_queries[group[0]]),
                    num_keys=int(num_keys[group[0]]),
                    fresh=fresh,
                )


def _rows_in_one_unit(row: Tensor, bitmap: Tensor, most_keys: int) -> Tensor:
    """Returns for which query tiles one unit computes pairs with bitmap and full pairs alike.

    That saves a merge if the tile has few key tiles, and its bitmaps are shared or tiles are few.
    """
    total = torch.bincount(row)
    place = torch.arange(len(row), device=row.device) - (total.cumsum(0) - total)[row]
    digest = torch.zeros_like(total).index_add_(0, row, mix(place) * (bitmap + 2))
    _, kind, num_equal = digest.unique(return_inverse=True, return_counts=True)
    masked = torch.bincount(row[bitmap >= 0], minlength=len(total)) > 0
    return masked & (total <= most_keys) & ((num_equal[kind] > 1) | (len(total) <= 64))


def _runs(row: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts each query tile's tile pairs into runs of at most `longest`: (begin, length, number).

    `row` is the query tile of each pair, ascending. Returns, for each run: its first pair, its
    number of pairs, and its index in its tile.
    """
    index = torch.arange(len(row), device=row.device)
    head = torch.diff(row, prepend=row[:1] - 1) != 0
    place = index - index[head][head.cumsum(0) - 1]
    begin = torch.nonzero(place % longest == 0)[:, 0]
    return begin, torch.diff(begin, append=begin.new_tensor([len(row)])), place[begin] // longest


def _first_runs(begin: Tensor, length: Tensor, line: Tensor, key: Tensor, most: int) -> Tensor:
    """Returns which run each unit begins with; a unit joins query tiles that visit equal keys.

    A unit has at most `most` runs, which must follow one another.
    """
    index = torch.arange(len(begin), device=begin.device)
    before = (index - 1).clamp(min=0)
    same = (line == line[before]) & (length == length[before]) & (index > 0)
    run, place = expand_counts(length)
    other = begin[before][run] + torch.minimum(place, (length[before] - 1)[run])
    differ = torch.bincount(run[key[begin[run] + place] != key[other]], minlength=len(begin))
    head = ~same | (differ > 0)
    place = index - index[head][head.cumsum(0) - 1]
    return torch.nonzero(place % most == 0)[:, 0]


def _sums(values: Tensor, begin: Tensor, length: Tensor | None = None) -> Tensor:
    """Sums `values[begin : begin + length]`; without `length`, up to the next begin."""
    total = F.pad(values.cumsum(0), (1, 0))
    if length is None:
        return torch.diff(total[begin], append=total[-1:])
    return total[begin + length] - total[begin]


def _equal_rows(columns: list[Tensor]) -> Iterator[Tensor]:
    """Groups the equal rows of a table, given by columns; yields the row indices of each group."""
    number, _ = number_rows(columns)
    yield from number.argsort(stable=True).split(torch.bincount(number).tolist())


def _by_bitmaps(bitmaps: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Groups units that have equal bitmaps, so that these are unpacked once for each group.

    Yields, for each group: (unit indices, bitmap indices [1, key tiles]). If there are too many
    groups, it yields all units at once, with bitmap indices [units, key tiles].
    """
    sets = list(_equal_rows(list(bitmaps.unbind(1))))
    if len(sets) > max(8, len(bitmaps) // 16):
        yield torch.arange(len(bitmaps), device=bitmaps.device), bitmaps
        return
    for group in sets:
        yield group, bitmaps[group[:1]]


class Places(NamedTuple):
    """Positions of the tokens of C units, each with g query heads, m queries and n keys."""

    batch: Tensor  # [C]
    head: Tensor  # [C, g] query heads
    branch: int  # index of the mixture's branch
    query: Tensor  # [C, m] absolute positions
    key: Tensor  # [C, n] absolute positions
    stream: Tensor  # [C, m] index of the dropout seed
    depths: tuple[Tensor, Tensor]  # [C, m], [C, n] positions that give distances


@dataclass(frozen=True)
class Chunk:
    """C units of m queries and n keys each, as indices of the rows to gather.

    Attributes:
        q: [C, g, m] rows of the flattened [B * Hq * Nq, ...] tensors; g query heads share keys.
        k: [C, n] rows of the flattened [B * Hkv * Nk, ...] tensors.
        cells: bool [C or 1, m, n], True for pairs of the pattern; None if it has all of them.
        bias: None without block bias, else two tensors of indices. [C, g, e]: index in the
            flattened block bias, for each of a unit's e key tiles. [C, n]: index of each key's tile
            among these e tiles.
        places: None if no extra depends on positions.
    """

    q: Tensor
    k: Tensor
    cells: Tensor | None
    bias: tuple[Tensor, Tensor] | None
    places: Places | None


def chunks(
    problem: Problem, number: int, units: Units, workspace: int, per_token: int, per_pair: int
) -> Iterator[Chunk]:
    """Cuts the units of pass `number` into chunks whose buffers take at most `workspace` bytes.

    `per_token` is the bytes of a gathered token (its query, key, value and results), `per_pair`
    those of a pair (its score, bias and mask).
    """
    layout, batch = problem.layout, len(problem.query)
    p, frame, b = layout.passes[number], layout.frame, layout.block_size
    batch_tables, heads = len(p.row_ptr), max(p.row_ptr.shape[1], len(p.query_start))
    unit_heads = max(heads, frame.num_kv_heads)  # heads whose keys are gathered separately
    group = frame.num_heads // unit_heads  # query heads that share gathered keys
    device = units.head.device
    counts = batch // batch_tables, unit_heads // heads, len(units.head)
    each = torch.cartesian_prod(*(torch.arange(count, device=device) for count in counts))
    if not len(each):  # the batch is empty
        return
    m, n = units.num_queries, units.num_keys
    per_pair = per_pair * group + 6 * (units.bitmaps is not None and len(units.bitmaps) > 1)
    per_unit = (group * m + n) * (per_token + 40) + m * n * per_pair
    bias = None
    by_position = problem.distance_bias is not None or problem.dropout_p is not None
    depths = p.depths_of_tokens(frame.q_start, b) if by_position else None
    for bat, hd, which in (part.unbind(1) for part in each.split(max(1, workspace // per_unit))):
        axis = units.head[which] * len(p.query_start) // heads
        bat, hd = bat + units.batch[which], hd + units.head[which] * (unit_heads // heads)
        q_head = hd[:, None] * group + torch.arange(group, device=device)
        kv_head = hd * frame.num_kv_heads // unit_heads
        query_tiles, key_tiles = units.query_tiles[which], units.key_tiles[which]
        q, real_q = _positions(p.query_start, p.query_stop, axis, query_tiles, p.step, b)
        k, real_k = _positions(p.key_start, p.key_stop, axis, key_tiles, p.step, b)
        ragged = q[0].numel() * k[0].numel() != m * n
        cells = None
        if units.bitmaps is not None:
            bitmaps = units.bitmaps if len(units.bitmaps) == 1 else units.bitmaps[which]
            full = torch.full_like(p.bitmaps[:1], 255)
            cells = unpack(torch.cat((p.bitmaps, full))[bitmaps], b)  # [C or 1, e, b, b]
            cells = cells.transpose(1, 2).flatten(2)  # [C or 1, b, e * b]
            if ragged:
                pairs = real_q[:, :, None] & real_k[:, None, :]
                cells = cells.expand(pairs.shape)[pairs].view(-1, m, n)
        if problem.block_bias is not None and not problem.lists:
            tables = layout.table_shape
            table = (bat[:, None] * (tables[0] > 1), q_head * tables[1] // frame.num_heads)
            first = (bat[:, None] * frame.num_heads + q_head) * problem.block_bias.shape[2]
            first = first + layout.first_entry[number][table]
            slots = torch.arange(k.shape[1], device=device).div(b, rounding_mode="floor")
            slots = slots.expand(k.shape)
            slots = slots[real_k].view(-1, n) if ragged else slots
            bias = first[..., None] + units.entries[which][:, None], slots
        places = None
        if depths is not None:
            first_query, first_key = p.coordinates(frame.q_start)
            stream = torch.zeros_like(p.query_start) if p.stream is None else p.stream
            stream = _per_token(stream, axis, query_tiles, b)
            query = q + _per_token(first_query - p.query_start, axis, query_tiles, b)
            key = k + _per_token(first_key - p.key_start, axis, key_tiles, b)
            query_depth, key_depth = (
                x[bat[:, None] * (len(x) > 1), axis[:, None], tiles].flatten(1)
                for x, tiles in zip(depths, (query_tiles, key_tiles), strict=True)
            )
            if ragged:
                rows = query, query_depth, stream
                query, query_depth, stream = (x[real_q].view(-1, m) for x in rows)
                key, key_depth = (x[real_k].view(-1, n) for x in (key, key_depth))
            places = Places(
                batch=bat,
                head=q_head,
                branch=p.branch,
                query=query,
                key=key,
                stream=stream,
                depths=(query_depth, key_depth),
            )
        if ragged:
            q, k = q[real_q].view(-1, m), k[real_k].view(-1, n)
        first_q = (bat[:, None] * frame.num_heads + q_head) * frame.q_len
        first_k = (bat * frame.num_kv_heads + kv_head) * frame.kv_len
        yield Chunk(
            q=first_q[..., None] + q[:, None],
            k=first_k[:, None] + k,
            cells=cells,
            bias=bias,
            places=places,
        )


def list_chunks(
    problem: Problem, lists: Lists, first_bias: int, workspace: int, per_token: int
) -> Iterator[Chunk]:
    """Cuts lists of keys into chunks of about `workspace` bytes; a unit is a query with its list.

    A chunk has at least one unit. `per_token` is the bytes of a gathered token, `first_bias` the
    index of the lists' first number in a head's block bias.
    """
    query, frame, (batches, tables, rows_of_lists, n) = (
        problem.query,
        problem.layout.frame,
        lists.keys.shape,
    )
    device, heads = query.device, max(tables, frame.num_kv_heads)
    group = frame.num_heads // max(1, heads)
    shape = len(query), heads, rows_of_lists
    if not math.prod(shape) * n:
        return
    keys, at = moved(lists.keys, device), lists.coordinates
    queries, place_of = (
        None if x is None else moved(x, device) for x in (lists.queries, lists.place)
    )
    if at is not None:
        at = Coordinates(moved(at.query, device), moved(at.key, device))
    per_unit = (group + n) * (per_token + 40) + group * n * per_token
    for part in torch.arange(math.prod(shape), device=device).split(max(1, workspace // per_unit)):
        # torch.unravel_index would copy the shape to a GPU, and the host would wait for the copy
        row, table = part % rows_of_lists, part // rows_of_lists
        bat, hd = table // heads, table % heads
        q = row if queries is None else queries[row]
        key = keys[bat * (batches > 1), hd * tables // heads, row].long()
        cells, key = first_in_row(key, frame.kv_len), key.clamp(min=0)
        q_head = hd[:, None] * group + torch.arange(group, device=device)
        rows = (bat[:, None] * frame.num_heads + q_head) * frame.q_len + q[:, None]
        first = (bat * frame.num_kv_heads + hd * frame.num_kv_heads // heads) * frame.kv_len
        bias = None
        if problem.block_bias is not None:
            assert place_of is not None
            place = place_of[bat * (batches > 1), hd * tables // heads, row].long()
            numbers = problem.block_bias.shape[2:].numel()  # of a head
            number = (bat[:, None] * frame.num_heads + q_head) * numbers
            number = (number + first_bias + row[:, None] * n)[..., None]
            bias = (number + torch.arange(n, device=device), place)
        position = query_depth = q[:, None] + frame.q_start
        key_position = key_depth = key
        stream = torch.zeros_like(position)
        if at is not None:
            own = bat * (len(at.query) > 1)
            position, query_depth, stream = at.query[own, :, row][..., None].unbind(1)
            kv_head = hd * frame.num_kv_heads // heads
            of_head = kv_head * at.key.shape[2] // max(1, frame.num_kv_heads)
            of_key = at.key.movedim(1, -1)  # [B or 1, H, Nk, 2]
            key_position, key_depth = of_key[own[:, None], of_head[:, None], key].unbind(-1)
        places = Places(
            batch=bat,
            head=q_head,
            branch=lists.branch,
            query=position,
            key=key_position,
            stream=stream,
            depths=(query_depth, key_depth),
        )
        yield Chunk(
            q=rows[..., None],
            k=first[:, None] + key,
            cells=cells[:, None],
            bias=bias,
            places=places,
        )


def _positions(
    start: Tensor, stop: Tensor, axis: Tensor, tiles: Tensor, step: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Returns the tokens of the tiles with indices `tiles` [C, t], and False where one is padding.

    Both are [C, t * block_size].
    """
    first, end = (edge[axis[:, None], tiles] for edge in (start, stop))
    positions, real = slots_of(first, end, step, block_size)
    return positions.flatten(1), real.flatten(1)


def _per_token(per_tile: Tensor, axis: Tensor, tiles: Tensor, block_size: int) -> Tensor:
    """Repeats a value of each tile [C, t] for the tile's tokens: [C, t * block_size]."""
    return per_tile[axis[:, None], tiles].repeat_interleave(block_size, 1)
