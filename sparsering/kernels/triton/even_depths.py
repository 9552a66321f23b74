"""Cuts tiles that span several nodes of a tree, so that depths inside a tile rise by its step.

Kernels sum the gradient of a distance bias along the diagonals of tiles, and expect one distance on
a diagonal. So a call with a distance bias cuts tiles where depths leap, which is between nodes.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...ground.rows import distinct_rows, expand_counts
from ...layouts.bitmaps import pack, unpack
from ...layouts.layout import BlockLayout, Pass, stretched, tile_counts
from ..problem import Gradients, Problem

_MOST_CELLS = 1 << 24  # (query, key) pairs of tiles that are cut at a time, to bound memory


class _Pieces(NamedTuple):
    """Pieces of the tiles of one side; tile t has pieces first[t] to first[t] + number[t] - 1."""

    slot: Tensor  # [S, pieces] index of the piece's first token in its tile
    size: Tensor  # [S, pieces] number of tokens; 0 for padding
    tile: Tensor  # [S, pieces] the tile that the piece is cut from
    first: Tensor  # [S, tiles] the tile's first piece
    number: Tensor  # [S, tiles] the tile's number of pieces
    depth: Tensor  # [B or 1, S, pieces, 1] depth of the piece's first token


class _Parts(NamedTuple):
    """The pairs of pieces of one table in which some (query, key) pair attends."""

    query: Tensor  # [parts] query piece
    key: Tensor  # [parts] key piece
    bitmap: Tensor  # [parts] index in `bitmaps`, or -1 if all pairs attend
    bitmaps: Tensor
    entry: Tensor  # [parts] index of the original tile pair in the table


def with_even_depths(problem: Problem) -> tuple[Problem, Tensor | None]:
    """Returns an equivalent problem whose tiles are cut so that depths in each rise evenly.

    Returns: the problem; and, for each of its tile pairs [Bt, Ht, entries], the index of the
    original tile pair that it is a part of. The second is None if there was nothing to cut.
    """
    layout = problem.layout
    if not any(map(_leaps, layout.passes)):
        return problem, None
    problem = problem.from_bitmap_row_0()
    layout = problem.layout
    cut, entries = layout.memo.get("even depths") or _cut(layout)
    layout.memo["even depths"] = cut, entries
    bias = problem.block_bias
    if bias is not None:
        bias = bias.gather(2, stretched(entries, *bias.shape[:2]))
    return problem._replace(layout=cut, block_bias=bias), entries


def _leaps(p: Pass) -> bool:
    """Whether depths leap in tiles, or differ between batch entries that share a table."""
    return any(x.shape[-1] > 1 or len(x) > len(p.row_ptr) for x in p.depths(0))


def of_whole_tiles(grads: Gradients, problem: Problem, entries: Tensor | None) -> Gradients:
    """Sums the block bias's gradient over the pieces that were cut from each tile pair."""
    if entries is None or grads.block_bias is None or problem.block_bias is None:
        return grads
    place = stretched(entries, *grads.block_bias.shape[:2])
    own = torch.zeros_like(problem.block_bias, dtype=grads.block_bias.dtype)
    own = own.contiguous().scatter_add_(2, place, grads.block_bias)
    return grads._replace(block_bias=own)


def _cut(layout: BlockLayout) -> tuple[BlockLayout, Tensor]:
    """Cuts the tiles of all passes where depths leap.

    Returns: the new layout; for each of its tile pairs [Bt, Ht, entries], the original tile pair.
    """
    host = torch.device("cpu")
    cut = [_cut_pass(layout, p.memo.get("host") or p.to(host)) for p in layout.passes]
    passes = tuple(p for p, _ in cut)
    result = BlockLayout(layout.frame, layout.block_size, passes, layout.pairs)
    batch, heads = result.table_shape
    whole = torch.zeros(batch, heads, result.num_blocks + 1, dtype=torch.int64)
    for number, (p, origin) in enumerate(cut):
        first = layout.first_entry[number][..., None].to(host)
        own = stretched(origin, batch, heads) + stretched(first, batch, heads)
        begin = stretched(result.first_entry[number][..., None], batch, heads)
        index = torch.arange(own.shape[-1])
        real = index < stretched(p.num_entries[..., None], batch, heads)
        whole.scatter_(2, torch.where(real, begin + index, result.num_blocks), own)
    device = layout.passes[0].row_ptr.device
    placed = replace(result, passes=tuple(p.to(device) for p in passes))
    return placed, whole[..., :-1].to(device)


def _cut_pass(layout: BlockLayout, p: Pass) -> tuple[Pass, Tensor]:
    """Cuts one pass; returns it, and the old entry of each new one, [Bt, Ht, entries]."""
    size, frame = layout.block_size, layout.frame
    of_query, of_key = p.depths_of_tokens(frame.q_start, size)
    batch, heads = (max(n) for n in zip(p.row_ptr.shape[:2], (len(of_query), 1), strict=True))
    batch, heads = max(batch, len(of_key)), max(heads, len(p.query_start))
    queries = _pieces(p.query_start, p.query_stop, p.step, of_query)
    keys = _pieces(p.key_start, p.key_stop, p.step, of_key)
    tables: list[list[_Parts]] = []
    for b in range(batch):
        tables.append([])
        for h in range(heads):
            table = b * (len(p.row_ptr) > 1), h * p.row_ptr.shape[1] // heads
            axis = h * len(p.query_start) // heads
            tables[-1].append(_cut_table(p, table, axis, queries, keys, size))
    rows = queries.size.shape[1]
    longest = max(len(x.entry) for row in tables for x in row)

    def stacked(values: list[list[Tensor]]) -> Tensor:
        return torch.stack(
            [torch.stack([pad(x, (0, longest - len(x))) for x in r]) for r in values]
        )

    found = [x.bitmaps for row in tables for x in row]
    bitmaps, index = distinct_rows(torch.cat(found))
    numbers = iter(index.split([len(x) for x in found]))
    of_table = [[_renumbered(x.bitmap, next(numbers)) for x in row] for row in tables]
    row_ptr = [
        [pad(torch.bincount(x.query, minlength=rows).cumsum(0), (1, 0)).int() for x in row]
        for row in tables
    ]

    def moved(start: Tensor, pieces: _Pieces) -> tuple[Tensor, Tensor]:
        first = start.gather(1, pieces.tile) + p.step * pieces.slot
        stop = first + (pieces.size - 1) * p.step + 1
        return torch.where(pieces.size > 0, first, 0), torch.where(pieces.size > 0, stop, 0)

    query_start, query_stop = moved(p.query_start, queries)
    key_start, key_stop = moved(p.key_start, keys)
    origins = p.coordinates(frame.q_start)
    of_tiles = {"query_origin": (origins[0], queries), "key_origin": (origins[1], keys)}
    places: dict[str, Any] = {name: moved(*x)[0] for name, x in of_tiles.items()}
    if p.stream is not None:
        places["stream"] = p.stream.gather(1, queries.tile)
    cut = replace(
        p,
        query_start=query_start,
        query_stop=query_stop,
        key_start=key_start,
        key_stop=key_stop,
        row_ptr=torch.stack([torch.stack(x) for x in row_ptr]),
        key_tile=stacked([[x.key for x in row] for row in tables]).int(),
        bitmap=stacked(of_table).int(),
        bitmaps=bitmaps,
        longest=None,
        query_depth=queries.depth,
        key_depth=keys.depth,
        slot=None,
        **places,
    )
    return cut, stacked([[x.entry for x in row] for row in tables])


def _renumbered(bitmap: Tensor, number: Tensor) -> Tensor:
    """Replaces bitmap indices by the items of `number` that they point to; -1 stays."""
    return torch.where(bitmap >= 0, pad(number, (0, 1))[bitmap], -1)


def _pieces(start: Tensor, stop: Tensor, step: int, depth: Tensor) -> _Pieces:
    """Cuts tiles where depths [B or 1, S, tiles, block_size] do not rise by the step."""
    size = depth.shape[-1]
    count = tile_counts(start, stop, step, size)  # [S, tiles]
    slots = torch.arange(size)
    leaps = pad((depth.diff(dim=-1) != step).any(0), (1, 0), value=True)  # [S, tiles, size]
    begins = leaps & (slots < count[..., None])
    number = begins.sum(-1)  # [S, tiles]
    most = int(number.sum(1).max()) if number.numel() else 0
    columns = []
    for s in range(len(start)):
        tile, slot = torch.nonzero(begins[s], as_tuple=True)
        last = pad(tile[1:] != tile[:-1], (0, 1), value=True)[: len(tile)]
        end = torch.where(last, count[s][tile], pad(slot[1:], (0, 1))[: len(tile)])
        of_set = slot, end - slot, tile, *(x[s][tile, slot] for x in depth)
        columns.append([pad(x, (0, most - len(tile))) for x in of_set])
    slot, length, tile, *depths = (torch.stack(x) for x in zip(*columns, strict=True))
    first = number.cumsum(1) - number
    return _Pieces(
        slot=slot,
        size=length,
        tile=tile,
        first=first,
        number=number,
        depth=torch.stack(depths)[..., None],
    )


def _cut_table(
    p: Pass, table: tuple[int, int], axis: int, queries: _Pieces, keys: _Pieces, size: int
) -> _Parts:
    """Cuts each tile pair of one table into pairs of pieces.

    Drops pairs of pieces without pairs.
    """
    entries = int(p.num_entries[table])
    column, bitmap = p.key_tile[table][:entries].long(), p.bitmap[table][:entries].long()
    row = p.query_tiles()[table][:entries]
    per_query, per_key = queries.number[axis][row], keys.number[axis][column]
    entry, number = expand_counts(per_query * per_key)
    width = per_key[entry].clamp(min=1)
    query = queries.first[axis][row][entry] + number // width
    key = keys.first[axis][column][entry] + number % width
    order = (query * (keys.size.shape[1] + 1) + key).argsort()
    entry, query, key = entry[order], query[order], key[order]
    kept, full = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.bool)]
    parts_of_bits = [p.bitmaps[:0]]
    bitmaps = torch.cat((p.bitmaps, p.bitmaps.new_full((1, size * size // 8), 255)))
    slots = torch.arange(size)
    for part in torch.arange(len(entry)).split(max(1, _MOST_CELLS // size**2)):
        cells = unpack(bitmaps[bitmap[entry[part]]], size)  # [n, size, size]
        at_query = queries.slot[axis][query[part], None] + slots
        at_key = keys.slot[axis][key[part], None] + slots
        real_q = slots < queries.size[axis][query[part], None]
        real_k = slots < keys.size[axis][key[part], None]
        index = torch.arange(len(part))[:, None, None]
        at_query, at_key = (x.clamp(max=size - 1) for x in (at_query, at_key))
        cells = cells[index, at_query[:, :, None], at_key[:, None, :]]
        real = real_q[:, :, None] & real_k[:, None, :]
        cells = cells & real
        some = cells.flatten(1).any(1)
        kept.append(part[some])
        full.append((cells == real).flatten(1).all(1)[some])
        parts_of_bits.append(pack(cells[some]))
    chosen, whole, bits = torch.cat(kept), torch.cat(full), torch.cat(parts_of_bits)
    number = torch.where(whole, -1, (~whole).cumsum(0) - 1)
    return _Parts(
        query=query[chosen],
        key=key[chosen],
        bitmap=number,
        bitmaps=bits[~whole],
        entry=entry[chosen],
    )
