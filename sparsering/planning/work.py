"""Counts the work of a call from its layout: pairs, blocks, cells, tokens read and written.

    work = work_of(Causal(), frame, 128)
    work.pairs, work.entries, flops(work.pairs, 64, backward=True)

A very large layout is never built only to be counted. Its counts are extrapolated from some of its
query tiles, and `known` says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.cpu.build import library
from ..layouts.cache import layout_cache
from ..layouts.compile import check_block_size, compile_table, terms, tokens_of_tile
from ..layouts.documents import Ground, ground_of, laid_in_documents
from ..layouts.layout import BlockLayout, Pass, tile_counts
from ..layouts.leaves import FULL, VARIES
from ..layouts.lower import condition
from ..layouts.tiles import Axis, Origin, Spans, TilePairs
from ..numerics import round_up
from ..patterns.algebra import And, Frame, Mask, Not, Or, Pattern, check_fits
from ..patterns.selected import selections_of

MOST_ENTRIES = 1 << 21
"""Most visited blocks, over all tables, that are counted exactly; above, tiles are sampled."""
_LOOKED_AT_FIRST = 16  # this many query tiles suffice to estimate a layout's size
_TILES, _HEADS = 96, 2  # query tiles and heads that are sampled of a large layout
_GOLDEN = 0.6180339887498949
_EDGE = 2  # tiles at both ends are not extrapolated, because global tokens lie there
_RUN = 64  # number of neighbouring key tiles that are tested as one


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
        ragged: key tiles of a length that is no multiple of 16, which kernels copy.
        pieces, pieces_by_key: parts of query tiles, and of key tiles, with far more entries than
            others; the CPU kernel cuts these and sums each part separately. 0 if not asked for.
        tables: number of different tables of entries, over all heads.
        batches: number of batch entries with tables of their own.
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
    ragged: float
    pieces: float
    pieces_by_key: float
    tables: int
    batches: int

    @property
    def num_tables(self) -> int:
        """Number of tables of entries, over all heads and batch entries."""
        return self.batches * self.tables


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


def work_of(pattern: Pattern, frame: Frame, block_size: int, *, cut: bool = False) -> Work:
    """Counts the work of a pattern; the layout cache stores the result.

    `cut` asks the CPU kernel, which must be there, for the pieces that it cuts long rows into.

    Raises: ValueError if the pattern does not fit.

    Cost: that of its layout, if that has at most `MOST_ENTRIES` visited blocks, else seconds.
    """
    check_block_size(block_size)
    check_fits(pattern, frame)

    def count() -> Work:
        if not selections_of(pattern) and frame.num_heads and pattern.num_batches() != 0:
            axes: _Axes = {}  # building the tiles of a long sequence takes most of the time
            first = _sampled(pattern, frame, block_size, _LOOKED_AT_FIRST, 1, axes)
            if sum(p.num_tables * p.entries for p in first.passes) > MOST_ENTRIES:
                return _sampled(pattern, frame, block_size, _TILES, _HEADS, axes)
        layout = layout_cache.layout(pattern, frame, block_size, torch.device("cpu"))
        return counted(layout, cut=cut)

    return layout_cache.keep(("work", pattern, frame, block_size, cut), count)


def counted(layout: BlockLayout, *, cut: bool = False) -> Work:
    """Counts the work of a layout exactly.

    Cost: O(visited blocks) of every table.
    """
    passes = tuple(_of_pass(p, layout, cut) for p in layout.passes)
    tensors = [getattr(p, f.name) for p in layout.passes for f in fields(p)]
    size = sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))
    bitmaps = sum(p.bitmaps.numel() for p in layout.passes)
    return Work(layout.frame, layout.block_size, float(layout.pairs), passes, size, bitmaps)


class _Visits(NamedTuple):
    """Visits of some query tiles: runs of key tiles, most of them of one tile.

    Attributes:
        row: the query tile of each run.
        first, end: the first key tile of each run, and the one after its last.
        masked: True for a run of one tile that has a bitmap.
        num_pairs: number of (query, key) pairs of all runs.
    """

    row: Tensor
    first: Tensor
    end: Tensor
    masked: Tensor
    num_pairs: int


class _Tally(NamedTuple):
    """Work of some query tiles of one head; the fields mean the same as in `PassWork`."""

    entries: float
    masked: float
    cells: float
    wide_cells: float
    rows: float


def _before(keys: Tensor) -> Tensor:
    """Returns the padded tokens before each key tile, and of all; `keys` has those of each tile."""
    return torch.nn.functional.pad(round_up(keys, 16).cumsum(0), (1, 0))


def _tally(visits: _Visits, queries: Tensor, before: Tensor) -> _Tally:
    """Sums the work of some visits; `queries`: number of tokens of each query tile."""
    row, first, end, masked, _ = visits
    up, wide = round_up(queries, 16)[row], round_up(queries, 32)[row]
    tokens = before[end] - before[first]
    return _Tally(
        int((end - first).sum()),
        int(masked.sum()),
        int((up * tokens).sum()),
        int((wide * tokens).sum()),
        int(queries[row.unique()].sum()),
    )


def _of_pass(p: Pass, layout: BlockLayout, cut: bool) -> PassWork:
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
            visits = _Visits(row, key, key + 1, bitmap >= 0, 0)
            tallies.append(_tally(visits, queries[axis], _before(keys[axis])))
            by_key[kind * groups // kinds] += of_key
            if cut:
                pieces += library().pieces(of_row, False)
                pieces_by_key += library().pieces(of_key, True)
        seen += float((by_key > 0).sum()) / groups / batches
    entries, masked, cells, wide, rows = (sum(x) / len(tallies) for x in zip(*tallies, strict=True))
    longest_tiles = (
        int(queries.max()) if queries.numel() else 0,
        (int(keys.max()) if keys.numel() else 0),
    )
    return PassWork(
        p.step, queries.shape[1], keys.shape[1], longest_tiles, entries, masked, cells, wide, rows,
        seen, _ragged(keys), pieces / len(tallies), pieces_by_key / len(tallies), tables, batches,
    )  # fmt: skip


def _ragged(tokens: Tensor) -> float:
    """Counts the tiles of a length that 16 does not divide; mean over heads."""
    return float((tokens % 16 > 0).double().sum(-1).mean())


def _sampled(
    pattern: Pattern, frame: Frame, block_size: int, tiles: int, heads: int, axes: "_Axes"
) -> Work:
    """Estimates the work from some query tiles of some heads of the first batch entry.

    `axes` gets the tiles of each pass, and saves building them again.
    """
    passes: list[PassWork] = []
    pairs = 0.0
    size = 0.0
    batches = pattern.num_batches() or 1
    for sample in _samples(pattern, frame, block_size, tiles, heads, axes):
        queries, keys = sample.queries.count.clamp(min=0), sample.tiles.key_tokens
        tally = _tally(sample.visits, queries, sample.tiles.before)
        if sample.number == len(passes):
            most = tuple(int(x.max()) if len(x) else 0 for x in (queries, keys))
            blank = PassWork(
                sample.queries.step, len(sample.tiles.queries), len(keys), (most[0], most[1]),
                0.0, 0.0, 0.0, 0.0, 0.0, float(len(keys)), _ragged(keys), 0.0, 0.0,
                sample.tables, batches,
            )  # fmt: skip
            passes.append(blank)
        old, w = passes[sample.number], sample.weight
        sums = {name: getattr(old, name) + w * x for name, x in tally._asdict().items()}
        passes[sample.number] = old._replace(**sums)
        pairs += w * sample.visits.num_pairs
    for p in passes:
        size += p.num_tables * (8 * p.entries + 4 * p.query_tiles)
        size += 16 * (p.query_tiles + p.key_tiles)
    known = "extrapolated from some query tiles"
    return Work(frame, block_size, pairs, tuple(passes), int(size), 0, known)


class _Tiles(NamedTuple):
    """All tiles of one head in one pass.

    Attributes:
        queries, keys: the tiles.
        runs, joined: runs of `_RUN` key tiles, and whether each is one range of positions.
        key_tokens, before: tokens of each key tile, and padded tokens of those before it.
    """

    queries: Axis
    keys: Axis
    runs: Axis
    joined: Tensor
    key_tokens: Tensor
    before: Tensor


_Axes = dict[tuple[int, int], _Tiles]
"""Tiles by the number of the pass and the offset of a head's first tile."""


class _Sample(NamedTuple):
    """Some query tiles of one head in one pass, and their visits.

    Attributes:
        number: number of the pass.
        queries, tiles: the sampled query tiles, and all tiles.
        weight: number of query tiles that each represents, divided by the number of sampled heads.
        visits: visits of the sampled tiles.
        tables: number of different tables over the heads.
    """

    number: int
    queries: Axis
    tiles: _Tiles
    weight: float
    visits: _Visits
    tables: int


def _samples(
    pattern: Pattern, frame: Frame, block_size: int, tiles: int, heads: int, axes: _Axes
) -> Iterator[_Sample]:
    """Yields about `tiles` query tiles of up to `heads` heads of the first batch entry, by pass.

    Cost: laying out these tiles.
    """
    number = -1
    for branch in pattern.branches:
        ground = ground_of(pattern.restarts, frame, None, None)
        laid = branch if pattern.restarts is None else laid_in_documents(branch)
        earlier: list[Mask] = []
        for grid, term in terms(laid, block_size):
            mask = And((term, Not(Or(tuple(earlier))))) if earlier else term
            earlier.append(term)
            number += 1
            grid = ground.fitting(grid, block_size)
            tokens = tokens_of_tile(mask, grid, block_size)
            tables = mask.num_tables(frame)
            looked_at = dict.fromkeys(i * tables // heads for i in range(heads))
            for table in looked_at:
                head = table * frame.num_heads // tables
                kv_head, offset = frame.kv_head(head), 0
                if grid.anchor is not None:
                    offset = grid.anchor.offset_of(kv_head, frame.num_kv_heads)
                if (number, offset) not in axes:
                    keys = ground.keys(grid, block_size, offset)
                    alike = tokens == block_size and frame.q_len == frame.kv_len
                    queries = keys
                    if not alike or pattern.restarts is not None:
                        queries = ground.queries(grid, tokens, offset)
                    key_tokens = keys.count.clamp(min=0)
                    runs = keys.runs(_RUN)
                    axes[number, offset] = _Tiles(
                        queries, keys, *runs, key_tokens, _before(key_tokens)
                    )
                of_head, seen = axes[number, offset], mask.at(0, head, frame)
                for rows, weight in _drawn(len(of_head.queries), tiles):
                    part = of_head.queries[rows]
                    visits = _visits(ground, seen, part, of_head, frame, block_size)
                    weight /= len(looked_at)
                    yield _Sample(number, part, of_head, weight, visits, tables)


def _visits(
    ground: Ground, mask: Mask, queries: Axis, tiles: _Tiles, frame: Frame, block_size: int
) -> _Visits:
    """Returns the visits of some query tiles.

    Cost: laying out their masked tiles, and one test for each run of `_RUN` other key tiles.
    """
    rule, origin = condition(mask, frame, ground.in_document), ground.origin(queries)
    keys, runs, joined = tiles.keys, tiles.runs, tiles.joined
    among = rule.candidates(queries, keys, origin)
    places = among.runs(len(keys), _RUN).expand()
    row, run = places // max(1, len(runs)), places % max(1, len(runs))
    pairs = TilePairs(queries[row], runs[run], Origin(*(x[row] for x in origin)))
    status = torch.where(joined[run], rule.status(pairs), VARIES)
    begin = (row * len(keys) + run * _RUN)[status != VARIES]
    table, _ = compile_table(
        ground, mask, queries, keys, frame, block_size, among - Spans(begin, begin + _RUN)
    )
    full = (status == FULL) & (pairs.q.count > 0)
    first = run[full] * _RUN
    return _Visits(
        torch.cat((torch.repeat_interleave(table.row_ptr.diff()), row[full])),
        torch.cat((table.key_tile, first)),
        torch.cat((table.key_tile + 1, first + _RUN)),
        torch.nn.functional.pad(table.bitmap >= 0, (0, len(first))),
        table.num_pairs + int((pairs.q.count * pairs.k.count)[full].sum()),
    )


def _drawn(count: int, most: int) -> Iterator[tuple[Tensor, float]]:
    """Yields sampled tile numbers below `count` with their weight: both ends, and some between.

    The range between is cut into equal parts; each gives one tile, at places without a period.
    """
    if count <= most + 2 * _EDGE:
        yield torch.arange(count), 1.0
        return
    yield torch.tensor([*range(_EDGE), *range(count - _EDGE, count)]), 1.0
    inner = count - 2 * _EDGE
    part = torch.arange(most, dtype=torch.float64)
    place = (part + (part + 0.5) * _GOLDEN % 1) * inner / most
    yield _EDGE + place.long(), inner / most
