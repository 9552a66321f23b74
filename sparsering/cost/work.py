"""Counts the work of a call from its layout: pairs, blocks, cells, tokens read and written.

    work = work_of(Causal(), frame, 128)
    work.pairs, work.entries, flops(work.pairs, 64, backward=True)

A very large layout is never built only to be counted. Its counts are extrapolated from some of its
query tiles, and `known` says so.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..layouts.cache import layout_cache
from ..layouts.compile import check_block_size
from ..layouts.layout import BlockLayout, Pass, tile_counts
from ..numerics import round_up
from ..patterns.algebra import Frame, Pattern, check_fits
from ..patterns.selected import selections_of
from .sampling import Visits, samples

MOST_ENTRIES = 1 << 21
"""Most visited blocks, over all tables, that are counted exactly; above, tiles are sampled."""
_LOOKED_AT_FIRST = 16  # this many query tiles suffice to estimate a layout's size
_TILES, _HEADS = 96, 2  # query tiles and heads that are sampled of a large layout


class PassWork(NamedTuple):
    """Work of one pass; a mean over query heads and batch entries unless stated otherwise.

    Attributes:
        step: distance of neighbours in a tile, in tokens.
        query_tiles, key_tiles: number of tiles of each head.
        longest: largest number of tokens in a query tile, and in a key tile.
        entries: visited blocks.
        masked: visited blocks that have a bitmap.
        cells: sum over entries of query tokens x key tokens, both rounded up to 16.
        wide_cells: `cells` with query tokens rounded up to 32.
        rows: queries in tiles that visit a block.
        key_tiles_seen: key tiles that any query head of a kv head visits; mean over kv heads.
        pieces, pieces_by_key: parts of query tiles, and of key tiles, with far more entries than
            others; the kernel cuts these and sums each part separately.
        tables: number of tables of entries, over all heads and batch entries.
    """

    step: int
    query_tiles: int
    key_tiles: int
    longest: tuple[int, int]
    entries: float
    masked: float
    cells: float
    wide_cells: float
    rows: float
    key_tiles_seen: float
    pieces: float
    pieces_by_key: float
    tables: int


@dataclass(frozen=True)
class Work:
    """Work of a call.

    Attributes:
        frame, block_size: those of the layout.
        pairs: (query, key) pairs with multiplicity, mean over query heads and batch entries.
        passes: work of each pass of the layout.
        layout_bytes: bytes of its tables and bitmaps, without those that a backward pass adds.
        bitmap_bytes: bytes of its bitmaps alone, which kernels also store transposed.
        known: "arithmetic", or "extrapolated from some query tiles".
    """

    frame: Frame
    block_size: int
    pairs: float
    passes: tuple[PassWork, ...]
    layout_bytes: int
    bitmap_bytes: int
    known: str = "arithmetic"

    @cached_property
    def entries(self) -> float:
        """Visited blocks per query head."""
        return sum(p.entries for p in self.passes)

    @property
    def density(self) -> float:
        """Share of all pairs that lies in visited blocks, as `BlockLayout.density`."""
        dense = self.frame.q_len * self.frame.kv_len
        return self.entries * self.block_size**2 / dense if dense else 0.0

    @property
    def nbytes(self) -> int:
        """Approximate size of this object, for the cache that stores it."""
        return 400 * (1 + len(self.passes))


def flops(pairs: float, head_dim: int, backward: bool) -> float:
    """FLOPs on exact pairs of one query head: two products forward, and five more backward."""
    return 2.0 * pairs * head_dim * (7 if backward else 2)


def work_of(pattern: Pattern, frame: Frame, block_size: int) -> Work:
    """Counts the work of a pattern; the layout cache stores the result.

    Raises: ValueError if the pattern does not fit.

    Cost: that of its layout, if that has at most `MOST_ENTRIES` visited blocks, else seconds.
    """
    check_block_size(block_size)
    check_fits(pattern, frame)

    def count() -> Work:
        if selections_of(pattern) or not frame.num_heads or pattern.num_batches() == 0:
            return counted(_layout(pattern, frame, block_size))
        first = _sampled(pattern, frame, block_size, _LOOKED_AT_FIRST, 1)
        tables = sum(p.tables * p.entries for p in first.passes)
        if tables * (pattern.num_batches() or 1) <= MOST_ENTRIES:
            return counted(_layout(pattern, frame, block_size))
        return _sampled(pattern, frame, block_size, _TILES, _HEADS)

    return layout_cache.keep(("work", pattern, frame, block_size), count)


def _layout(pattern: Pattern, frame: Frame, block_size: int) -> BlockLayout:
    return layout_cache.layout(pattern, frame, block_size, torch.device("cpu"))


def counted(layout: BlockLayout) -> Work:
    """Counts the work of a layout exactly.

    Cost: O(visited blocks) of every table.
    """
    passes = tuple(_of_pass(p, layout) for p in layout.passes)
    tensors = [getattr(p, f.name) for p in layout.passes for f in fields(p)]
    size = sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))
    bitmaps = sum(p.bitmaps.numel() for p in layout.passes)
    return Work(layout.frame, layout.block_size, float(layout.pairs), passes, size, bitmaps)


class _Tally(NamedTuple):
    """Sums over the entries of some query tiles of one head, with the names of `PassWork`."""

    entries: float
    masked: float
    cells: float
    wide_cells: float
    rows: float


def _tally(visits: Visits, queries: Tensor, keys: Tensor) -> _Tally:
    """Sums the work of some visits; `queries`, `keys`: number of tokens of each tile."""
    row, first, end, masked, _ = visits
    up, wide = round_up(queries, 16)[row], round_up(queries, 32)[row]
    before = torch.nn.functional.pad(round_up(keys, 16).cumsum(0), (1, 0))
    tokens = before[end] - before[first]
    return _Tally(
        int((end - first).sum()),
        int(masked.sum()),
        int((up * tokens).sum()),
        int((wide * tokens).sum()),
        int(queries[row.unique()].sum()),
    )


def longest_piece(entries: int, tiles: int, at_least: int) -> int:
    """Most entries of a tile that the CPU kernel leaves in one piece, by the rule of layout.h."""
    return max(16, 2 * entries // max(tiles, at_least))


def _pieces(entries: Tensor, longest: int) -> int:
    """Counts the parts of tiles that have more than `longest` entries."""
    many = entries[entries > longest]
    return int((-(-many // longest)).sum())


def _of_pass(p: Pass, layout: BlockLayout) -> PassWork:
    frame, block = layout.frame, layout.block_size
    queries, keys = (
        tile_counts(start, stop, p.step, block)
        for start, stop in ((p.query_start, p.query_stop), (p.key_start, p.key_stop))
    )
    (batches, tables), axes = p.row_ptr.shape[:2], len(queries)
    kinds = max(tables, axes)  # number of different heads
    groups = min(kinds, max(1, frame.num_kv_heads))
    tallies, seen, pieces, pieces_by_key = [], 0.0, 0.0, 0.0
    for b in range(batches):
        by_key = torch.zeros(groups, keys.shape[1], dtype=torch.int64)
        for kind in range(kinds):
            table, axis = kind * tables // kinds, kind * axes // kinds
            count = int(p.num_entries[b, table])
            of_row = p.row_ptr[b, table].long().diff()
            key, bitmap = (x[b, table, :count].long() for x in (p.key_tile, p.bitmap))
            of_key = torch.bincount(key, minlength=keys.shape[1])
            row = torch.repeat_interleave(of_row)
            visits = Visits(row, key, key + 1, bitmap >= 0, 0)
            tallies.append(_tally(visits, queries[axis], keys[axis]))
            by_key[kind * groups // kinds] += of_key
            pieces += _pieces(of_row, longest_piece(count, queries.shape[1], 64))
            pieces_by_key += _pieces(of_key, longest_piece(count, keys.shape[1], 1))
        seen += float((by_key > 0).sum()) / groups / batches
    entries, masked, cells, wide, rows = (sum(x) / len(tallies) for x in zip(*tallies, strict=True))
    longest_tiles = (
        int(queries.max()) if queries.numel() else 0,
        (int(keys.max()) if keys.numel() else 0),
    )
    return PassWork(
        p.step, queries.shape[1], keys.shape[1], longest_tiles, entries, masked, cells, wide, rows,
        seen, pieces / len(tallies), pieces_by_key / len(tallies), batches * tables,
    )  # fmt: skip


def _sampled(pattern: Pattern, frame: Frame, block_size: int, tiles: int, heads: int) -> Work:
    """Estimates the work from some query tiles of some heads of the first batch entry."""
    passes: list[PassWork] = []
    pairs = 0.0
    size = 0.0
    batches = pattern.num_batches() or 1
    for sample in samples(pattern, frame, block_size, tiles, heads):
        queries, keys = (x.count.clamp(min=0) for x in (sample.queries, sample.keys))
        tally = _tally(sample.visits, queries, keys)
        if sample.number == len(passes):
            tables = sample.tables * batches
            most = tuple(int(x.max()) if len(x) else 0 for x in (queries, keys))
            blank = PassWork(
                sample.queries.step, sample.num_queries, len(keys), (most[0], most[1]),
                0.0, 0.0, 0.0, 0.0, 0.0, float(len(keys)), 0.0, 0.0, tables,
            )  # fmt: skip
            passes.append(blank)
        old, w = passes[sample.number], sample.weight
        sums = {name: getattr(old, name) + w * x for name, x in tally._asdict().items()}
        passes[sample.number] = old._replace(**sums)
        pairs += w * sample.visits.num_pairs
    for p in passes:
        size += p.tables * (8 * p.entries + 4 * p.query_tiles) + 16 * (p.query_tiles + p.key_tiles)
    known = "extrapolated from some query tiles"
    return Work(frame, block_size, pairs, tuple(passes), int(size), 0, known)
