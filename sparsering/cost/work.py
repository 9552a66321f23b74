"""What a call visits, counted from its layout: pairs, blocks, products, tokens read and written.

    work = work_of(Causal(), frame, 128)
    work.pairs, work.entries, work.products(5, head_dim=64)

A layout that would be very large is never built only to be counted: some of its query tiles stand
for the rest then, and `known` says so.
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
"""Visited blocks of all tables, above which a pattern is counted by some of its query tiles."""
_LOOKED_AT_FIRST = 16  # query tiles that tell about how large a layout is
_TILES, _HEADS = 96, 2  # that stand for the rest


class PassWork(NamedTuple):
    """What one pass visits; means over query heads and batch entries where nothing else is said.

    Attributes:
        step: tokens between neighbours in a tile.
        query_tiles, key_tiles: how many each head has.
        longest: most tokens of a query tile and of a key tile.
        entries: visited blocks.
        masked: those that have a bitmap.
        cells: products of tile lengths, both rounded up to 16, over all entries.
        wide_cells: the same with query tiles rounded up to 32.
        rows: queries in tiles that visit anything.
        key_tiles_seen: key tiles that a head of a kv head visits, to a kv head.
        pieces, pieces_by_key: parts of tiles with far more entries than others, which are summed
            apart.
        tables: how many tables of entries there are, of all heads and batch entries.
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
    """What a call visits.

    Attributes:
        frame, block_size: as of the layout.
        pairs: (query, key) pairs with multiplicity, mean over query heads and batch entries.
        passes: of the layout.
        layout_bytes: of its tables and bitmaps, without what a backward pass adds.
        bitmap_bytes: of its bitmaps alone, which kernels keep transposed too.
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
        """Visited blocks to a query head."""
        return sum(p.entries for p in self.passes)

    @property
    def density(self) -> float:
        """Share of all tokens' pairs that lies in visited blocks, as `BlockLayout.density`."""
        dense = self.frame.q_len * self.frame.kv_len
        return self.entries * self.block_size**2 / dense if dense else 0.0

    @property
    def nbytes(self) -> int:
        """About what this object holds, for the cache that keeps it."""
        return 400 * (1 + len(self.passes))


def flops(pairs: float, head_dim: int, backward: bool) -> float:
    """FLOPs on exact pairs of one query head: two products forward, and five more backward."""
    return 2.0 * pairs * head_dim * (7 if backward else 2)


def work_of(pattern: Pattern, frame: Frame, block_size: int) -> Work:
    """The counts of a pattern, kept by value beside its layout.

    Raises: ValueError where the pattern does not fit.

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
    """The counts of a layout, exact.

    Cost: O(visited blocks) of every table.
    """
    passes = tuple(_of_pass(p, layout) for p in layout.passes)
    tensors = [getattr(p, f.name) for p in layout.passes for f in fields(p)]
    size = sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))
    bitmaps = sum(p.bitmaps.numel() for p in layout.passes)
    return Work(layout.frame, layout.block_size, float(layout.pairs), passes, size, bitmaps)


class _Tally(NamedTuple):
    """Sums over the entries of some query tiles of one head, named as in `PassWork`."""

    entries: float
    masked: float
    cells: float
    wide_cells: float
    rows: float


def _tally(visits: Visits, queries: Tensor, keys: Tensor) -> _Tally:
    """`queries`, `keys`: tokens of the tiles."""
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
    """Entries beyond which the CPU kernel cuts a tile's, as its layout.h has it."""
    return max(16, 2 * entries // max(tiles, at_least))


def _pieces(entries: Tensor, longest: int) -> int:
    """Parts of the tiles that have more than `longest` entries."""
    many = entries[entries > longest]
    return int((-(-many // longest)).sum())


def _of_pass(p: Pass, layout: BlockLayout) -> PassWork:
    frame, block = layout.frame, layout.block_size
    queries, keys = (
        tile_counts(start, stop, p.step, block)
        for start, stop in ((p.query_start, p.query_stop), (p.key_start, p.key_stop))
    )
    (batches, tables), axes = p.row_ptr.shape[:2], len(queries)
    kinds = max(tables, axes)  # heads that differ
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
    """The counts by some query tiles of some heads of the first batch entry."""
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
