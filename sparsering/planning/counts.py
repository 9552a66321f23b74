"""Counts the work of a call from its layout: attending pairs, visited blocks, tokens read.

    counts = counts_of(Causal(), frame, 128)
    counts.pairs, counts.entries, flops(counts.pairs, 64, backward=True)

For a very large layout, only some query tiles are counted, and the totals are extrapolated from
them; `Counts.known` says so. A cell is a (query, key) pair in a visited block, attending or not.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..ground.numerics import round_up
from ..ground.once import one_thread
from ..kernels.cpu.build import library
from ..layouts.cache import layout_cache
from ..layouts.compile import axes_of, checked_block_size, compile_table, terms_of
from ..layouts.documents import Ground, ground_of
from ..layouts.layout import BlockLayout, Pass, if_several, tile_counts
from ..layouts.leaves import FULL, VARIES
from ..layouts.lists import lists_of_pattern
from ..layouts.lower import condition
from ..layouts.tiles import GROUP, Axis, Origin, Spans, TilePairs
from ..patterns.algebra import Frame, Mask, Pattern, check_fits
from ..patterns.selected import has_lists, selections_of

MOST_ENTRIES = 1 << 21
"""Largest number of visited blocks, over all tables, that is counted exactly and not sampled."""
_FIRST_TILES = 16  # query tiles that give a first estimate of a layout's size
_TILES, _HEADS = 96, 2  # query tiles and heads sampled from a large layout
_GOLDEN = 0.6180339887498949
_EDGE = 2  # tiles at each end that are always counted, because global tokens lie there
_RUN = 64  # neighboring key tiles that are tested as one


class PassCounts(NamedTuple):
    """Counts of one `Pass` of a layout; floats are means over query heads and batch entries.

    The CPU kernel cuts a tile that has far more visited blocks than others into pieces of work. A
    piece ends where a segment (`Pass.segments`) of queries ends, or a group of segments of keys.
    The counts of pieces are 0 without `counts_of(..., cut=True)`.
    """

    step: int  # distance between neighboring tokens of a tile
    query_tiles: int  # number of query tiles of each head
    key_tiles: int  # number of key tiles of each head
    longest: tuple[int, int]  # most tokens in a query tile, and in a key tile
    entries: float  # visited blocks: pairs of a query tile and a key tile
    cells: float  # query x key tokens of visited blocks, both rounded up to 16
    rows: float  # queries in tiles that visit a block
    key_tiles_seen: float  # key tiles that any query head of a kv head visits; mean over kv heads
    ragged: float  # key tiles of a length that 16 does not divide, which kernels copy
    pieces: float  # pieces of all query tiles that the forward pass cuts
    pieces_by_key: float  # pieces of all key tiles that the backward pass cuts
    segmented: tuple[bool, bool]  # whether query tiles, and key tiles, are in several segments
    tables: int  # heads with separate tables of visited blocks
    batches: int  # number of batch entries with separate tables

    @property
    def num_tables(self) -> int:
        """Number of tables of visited blocks, over all heads and batch entries."""
        return self.batches * self.tables


@dataclass(frozen=True)
class Counts:
    """Counts of a call of `attention` over a layout, and the layout's size in bytes."""

    frame: Frame
    block_size: int
    pairs: float  # (query, key) pairs of all branches, mean over query heads and batch entries
    passes: tuple[PassCounts, ...]
    layout_bytes: int  # bytes of tables and bitmaps, without the transposes for backward
    bitmap_bytes: int  # bytes of bitmaps alone, which kernels also store transposed
    listed_pairs: float = 0.0  # those of `pairs` that are in lists of keys, not in blocks
    list_bytes: int = 0  # bytes of lists of keys, which each call makes
    list_shapes: tuple[tuple[int, ...], ...] = ()  # of each list: batches, tables, queries, slots
    known: str = "arithmetic"  # or "extrapolated from some query tiles"

    @property
    def entries(self) -> float:
        """Visited blocks per query head."""
        return sum(p.entries for p in self.passes)

    @property
    def density(self) -> float:
        """Share of all pairs that is listed, or in visited blocks, as `BlockLayout.density`."""
        visited = self.entries * self.block_size**2 + self.listed_pairs
        return visited / (self.frame.q_len * self.frame.kv_len)


def flops(pairs: float, head_dim: int, backward: bool) -> float:
    """FLOPs of products on exact pairs: two in the forward pass, and five more in backward."""
    return 2.0 * pairs * head_dim * (7 if backward else 2)


@one_thread()
def counts_of(
    pattern: Pattern, frame: Frame, block_size: int, *, cut: bool = False, lists: bool = False
) -> Counts:
    """Counts the pairs, visited blocks and bytes of a pattern's call; later calls find them cached.

    Args:
        cut: also counts the pieces into which the compiled CPU kernel cuts long tiles.
        lists: the backend reads lists of single keys as lists, and not in blocks.

    Raises: ValueError if the pattern is for other lengths or heads.

    Cost: building the layout if it has at most `MOST_ENTRIES` visited blocks, else seconds.
    """
    block_size = checked_block_size(block_size)
    check_fits(pattern, frame)

    def count() -> Counts:
        if lists and has_lists(pattern):
            tiles, listed = lists_of_pattern(pattern, frame)
            rest = counts_of(tiles, frame, block_size, cut=cut)
            pairs = sum(x.num_pairs for x in listed)
            return replace(
                rest,
                pairs=rest.pairs + pairs,
                listed_pairs=pairs,
                list_bytes=sum(x.keys.nbytes for x in listed),
                list_shapes=tuple(tuple(x.keys.shape) for x in listed),
            )
        if not selections_of(pattern):
            # shared by both calls of `_sampled`, since building tiles takes longest
            of_tiles: _Cached = {}
            rough = _sampled(pattern, frame, block_size, _FIRST_TILES, 1, of_tiles)
            if sum(p.num_tables * p.entries for p in rough.passes) > MOST_ENTRIES:
                return _sampled(pattern, frame, block_size, _TILES, _HEADS, of_tiles)
        layout = layout_cache.layout(pattern, frame, block_size, torch.device("cpu"))
        return counted(layout, cut=cut)

    return layout_cache.keep(("counts", pattern, frame, block_size, cut, lists), count)


def about_entries(pattern: Pattern, frame: Frame, block_size: int) -> float:
    """Returns about how many blocks all tables of a layout visit, counted for some query tiles."""
    check_fits(pattern, frame)
    rough = _sampled(pattern, frame, block_size, _FIRST_TILES, 1, {})
    return sum(p.num_tables * p.entries for p in rough.passes)


def counted(layout: BlockLayout, *, cut: bool = False) -> Counts:
    """Counts the work of a layout exactly, in O(visited blocks) of every table."""
    passes = tuple(_counted_pass(p, layout, cut) for p in layout.passes)
    tensors = [getattr(p, f.name) for p in layout.passes for f in fields(p)]
    size = sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))
    bitmaps = sum(p.bitmaps.numel() for p in layout.passes)
    return Counts(
        frame=layout.frame,
        block_size=layout.block_size,
        pairs=float(layout.pairs),
        passes=passes,
        layout_bytes=size,
        bitmap_bytes=bitmaps,
    )


def _tally(
    row: Tensor, first: Tensor, end: Tensor, queries: Tensor, before: Tensor
) -> tuple[int, ...]:
    """Counts visited blocks, their cells and their queries, from runs of key tiles per query tile.

    In run i, query tile row[i] visits the key tiles from first[i] to end[i] - 1. `queries` has the
    tokens of each query tile, and `before` is `_tokens_before` of the key tiles.
    """
    cells = (round_up(queries, 16)[row] * (before[end] - before[first])).sum()
    return tuple(int(x) for x in ((end - first).sum(), cells, queries[row.unique()].sum()))


def _tokens_before(keys: Tensor) -> Tensor:
    """Returns running sums of the tokens in key tiles, each tile rounded up to 16: [tiles + 1].

    `keys` [tiles] has the tokens of each key tile.
    """
    return torch.nn.functional.pad(round_up(keys, 16).cumsum(0), (1, 0))


def _longest(queries: Tensor, keys: Tensor) -> tuple[int, int]:
    """Returns the most tokens in any query tile, and in any key tile."""
    return int(queries.max()) if queries.numel() else 0, int(keys.max()) if keys.numel() else 0


def _ragged(keys: Tensor) -> float:
    """Counts key tiles whose length is no multiple of 16, as a mean over heads.

    Keys [..., tiles].
    """
    return float((keys % 16 > 0).double().sum(-1).mean())


def _counted_pass(p: Pass, layout: BlockLayout, cut: bool) -> PassCounts:
    """Counts the work of one pass exactly, from its tables; with `cut` also the pieces."""
    queries = tile_counts(p.query_start, p.query_stop, p.step, layout.block_size)
    keys = tile_counts(p.key_start, p.key_stop, p.step, layout.block_size)
    (batches, tables), axes = p.row_ptr.shape[:2], len(queries)
    kinds = max(tables, axes)  # number of heads whose table or tiles differ
    groups = min(kinds, layout.frame.num_kv_heads)
    tallies, seen, pieces, pieces_by_key = [], 0.0, 0.0, 0.0
    segments = p.segments(layout.frame.q_start, layout.block_size)
    for b in range(batches):
        by_key = torch.zeros(groups, keys.shape[1], dtype=torch.int64)
        for kind in range(kinds):
            table, axis = kind * tables // kinds, kind * axes // kinds
            count = int(p.num_entries[b, table])
            of_row = p.row_ptr[b, table].long().diff()
            key = p.key_tile[b, table, :count].long()
            of_key = torch.bincount(key, minlength=keys.shape[1])
            row, before = torch.repeat_interleave(of_row), _tokens_before(keys[axis])
            tallies.append(_tally(row, key, key + 1, queries[axis], before))
            by_key[kind * groups // kinds] += of_key
            if cut:
                query_segment, key_segment = (
                    x[axis] if x.numel() else torch.zeros(n, dtype=torch.int32)
                    for x, n in zip(segments, (queries.shape[1], keys.shape[1]), strict=True)
                )
                in_row = _runs_of(row, key_segment[key] // GROUP, len(of_row))
                by_column, order = key.sort(stable=True)
                in_column = _runs_of(by_column, query_segment[row][order], len(of_key))
                pieces += library().pieces(of_row, in_row, False)
                pieces_by_key += library().pieces(of_key, in_column, True)
        seen += float((by_key > 0).sum()) / groups / batches
    entries, cells, rows = (sum(x) / len(tallies) for x in zip(*tallies, strict=True))
    return PassCounts(
        step=p.step,
        query_tiles=queries.shape[1],
        key_tiles=keys.shape[1],
        longest=_longest(queries, keys),
        entries=entries,
        cells=cells,
        rows=rows,
        key_tiles_seen=seen,
        ragged=_ragged(keys),
        pieces=pieces / len(tallies),
        pieces_by_key=pieces_by_key / len(tallies),
        segmented=(segments[0].numel() > 0, segments[1].numel() > 0),
        tables=tables,
        batches=batches,
    )


def _runs_of(tile: Tensor, segment: Tensor, tiles: int) -> Tensor:
    """Counts the runs in each tile's entries, where a new run begins at each change of `segment`.

    tile [entries] is ascending, segment [entries] belongs to it. Returns [tiles].
    """
    first = torch.ones_like(tile, dtype=torch.bool)
    first[1:] = (tile[1:] != tile[:-1]) | (segment[1:] != segment[:-1])
    return torch.bincount(tile[first], minlength=tiles)


class _Tiles(NamedTuple):
    """Tiles of one head in a pass; they are built once for both estimates of `counts_of`."""

    queries: Axis
    keys: Axis
    runs: Axis  # each run joins `_RUN` neighboring key tiles
    joined: Tensor  # True for a run without a gap between its tiles
    before: Tensor  # result of `_tokens_before` for the key tiles


_Cached = dict[tuple[int, int], _Tiles]
"""Tiles of a head, by (index of the pass, offset of the head's first tile)."""


def _sampled(
    pattern: Pattern, frame: Frame, block_size: int, num_tiles: int, num_heads: int, cached: _Cached
) -> Counts:
    """Estimates the work from about `num_tiles` query tiles of up to `num_heads` heads.

    `cached` keeps the tiles for another call with the same pattern, frame and block size.
    """
    passes: list[PassCounts] = []
    pairs = 0.0
    ground = ground_of(pattern, frame, block_size, None, None)
    for number, (_, grid, mask) in enumerate(terms_of(pattern, ground)):
        tables = mask.num_tables(frame)
        sampled_tables = sorted({i * tables // num_heads for i in range(num_heads)})
        shapes = []
        sums = [0.0] * 3
        for table in sampled_tables:
            head = table * frame.num_heads // tables
            key = number, grid.offset_of(frame.kv_head(head), frame.num_kv_heads)
            if key not in cached:
                queries, keys = axes_of(ground, grid, mask, key[1])
                before = _tokens_before(keys.count.clamp(min=0))
                cached[key] = _Tiles(queries, keys, *keys.runs(_RUN), before)
            tiles, mask_of_head = cached[key], mask.at(0, head, frame)
            for places, weight in _draws(len(tiles.queries), num_tiles):
                queries = tiles.queries[places]
                tokens = queries.count.clamp(min=0)
                runs, num_pairs = _runs(ground, mask_of_head, queries, tiles)
                tally = _tally(*runs, tokens, tiles.before)
                weight /= len(sampled_tables)
                sums = [total + weight * x for total, x in zip(sums, tally, strict=True)]
                pairs += weight * num_pairs
                shapes.append((tokens, tiles))
        tokens, tiles = shapes[0]
        key_tokens = tiles.keys.count.clamp(min=0)
        segments = [if_several(grid.segment_of(x.start, block_size)) for x in tiles[:2]]
        entries, cells, rows = sums
        passes.append(
            PassCounts(
                step=grid.step,
                query_tiles=len(tiles.queries),
                key_tiles=len(key_tokens),
                longest=_longest(tokens, key_tokens),
                entries=entries,
                cells=cells,
                rows=rows,
                key_tiles_seen=float(len(key_tokens)),
                ragged=_ragged(key_tokens),
                pieces=0.0,
                pieces_by_key=0.0,
                segmented=(segments[0].numel() > 0, segments[1].numel() > 0),
                tables=tables,
                batches=pattern.num_batches() or 1,
            )
        )
    size = sum(p.num_tables * (8 * p.entries + 4 * p.query_tiles) for p in passes)
    size += sum(16 * (p.query_tiles + p.key_tiles) for p in passes)
    known = "extrapolated from some query tiles"
    return Counts(
        frame=frame,
        block_size=block_size,
        pairs=pairs,
        passes=tuple(passes),
        layout_bytes=int(size),
        bitmap_bytes=0,
        known=known,
    )


def _runs(
    ground: Ground, mask: Mask, queries: Axis, tiles: _Tiles
) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """Finds the runs of key tiles that the sampled query tiles visit, and counts their pairs.

    Returns: (`row`, `first`, `end`) as for `_tally`, and the number of pairs.
    """
    rule, origin = condition(mask, ground.frame, ground.in_document), ground.origin(queries)
    keys, runs = tiles.keys, tiles.runs
    candidates = rule.candidates(queries, keys, origin)
    places = candidates.runs(len(keys), _RUN).expand()
    row, run = places // max(1, len(runs)), places % max(1, len(runs))
    pairs = TilePairs(queries[row], runs[run], Origin(*(x[row] for x in origin)))
    status = torch.where(tiles.joined[run], rule.status(pairs), VARIES)
    begin = (row * len(keys) + run * _RUN)[status != VARIES]
    table, _ = compile_table(ground, mask, queries, keys, candidates - Spans(begin, begin + _RUN))
    full = (status == FULL) & (pairs.q.count > 0)
    first = run[full] * _RUN
    visits = (
        torch.cat((torch.repeat_interleave(table.row_ptr.diff()), row[full])),
        torch.cat((table.key_tile, first)),
        torch.cat((table.key_tile + 1, first + _RUN)),
    )
    return visits, table.num_pairs + int((pairs.q.count * pairs.k.count)[full].sum())


def _draws(count: int, most: int) -> Iterator[tuple[Tensor, float]]:
    """Samples about `most` of `count` tiles; yields (indices, number of tiles each stands for).

    The tiles at both ends are always counted, and stand for themselves.
    """
    if count <= most + 2 * _EDGE:
        yield torch.arange(count), 1.0
        return
    yield torch.tensor([*range(_EDGE), *range(count - _EDGE, count)]), 1.0
    inner = count - 2 * _EDGE
    part = torch.arange(most, dtype=torch.float64)
    place = (part + (part + 0.5) * _GOLDEN % 1) * inner / most
    yield _EDGE + place.long(), inner / most
