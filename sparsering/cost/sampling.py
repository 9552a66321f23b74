"""Samples query tiles of a pattern, to estimate counts of layouts that are too large to build.

The sampled tiles are tiles of the layout, and their counts are extrapolated to the others. Where a
query tile sees many neighbouring key tiles in full, these count as one run and are never listed.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..layouts.compile import compile_table, terms, tokens_of_tile
from ..layouts.documents import Ground, ground_of, laid_in_documents
from ..layouts.leaves import FULL, VARIES
from ..layouts.lower import condition
from ..layouts.tiles import Axis, Origin, Spans, TilePairs
from ..patterns.algebra import And, Frame, Mask, Not, Or, Pattern

_GOLDEN = 0.6180339887498949
_EDGE = 2  # tiles at both ends are not extrapolated, because global tokens lie there
_RUN = 64  # number of neighbouring key tiles that are tested as one


class Visits(NamedTuple):
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


class Sample(NamedTuple):
    """Some query tiles of one head in one pass, and their visits.

    Attributes:
        number: number of the pass.
        queries, keys: the sampled query tiles, and all key tiles.
        num_queries: number of query tiles in the pass.
        weight: number of query tiles that each represents, divided by the number of sampled heads.
        visits: visits of the sampled tiles.
        tables: number of different tables over the heads.
    """

    number: int
    queries: Axis
    keys: Axis
    num_queries: int
    weight: float
    visits: Visits
    tables: int


def samples(
    pattern: Pattern, frame: Frame, block_size: int, tiles: int, heads: int
) -> Iterator[Sample]:
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
                queries = ground.queries(grid, tokens, offset)
                keys = ground.keys(grid, block_size, offset)
                seen = mask.at(0, head, frame)
                for rows, weight in _drawn(len(queries), tiles):
                    part = queries[rows]
                    found = _visits(ground, seen, part, keys, frame, block_size)
                    weight /= len(looked_at)
                    yield Sample(number, part, keys, len(queries), weight, found, tables)


def _visits(
    ground: Ground, mask: Mask, queries: Axis, keys: Axis, frame: Frame, block_size: int
) -> Visits:
    """Returns the visits of some query tiles.

    Cost: laying out their masked tiles, and one test for each run of `_RUN` other key tiles.
    """
    rule, origin = condition(mask, frame, ground.in_document), ground.origin(queries)
    among = rule.candidates(queries, keys, origin)
    runs, joined = keys.runs(_RUN)
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
    return Visits(
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
