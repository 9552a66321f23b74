"""Tables of some query tiles of a pattern, for what is too large to be laid out only to be counted.

The tiles are those of the layout: what is counted of them stands for the rest. Where a query tile
sees many neighbouring key tiles whole, those are counted together and never listed.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..layouts.compile import compile_table, terms, tokens_of_tile
from ..layouts.conditions import FULL, VARIES
from ..layouts.ground import Ground, ground_of, laid_in_documents
from ..layouts.lowering import condition
from ..layouts.tiles import Axis, Origin, Spans, TilePairs
from ..patterns.algebra import And, Frame, Mask, Not, Or, Pattern

_GOLDEN = 0.6180339887498949
_EDGE = 2  # tiles at both ends stand for themselves: global tokens lie there
_RUN = 64  # key tiles that are looked at together


class Visits(NamedTuple):
    """What some query tiles visit: runs of key tiles, most of them of one tile.

    Attributes:
        row: the query tile of each run.
        first, end: its first key tile, and the one behind its last.
        masked: whether it is a tile that has a bitmap.
        num_pairs: (query, key) pairs of all runs.
    """

    row: Tensor
    first: Tensor
    end: Tensor
    masked: Tensor
    num_pairs: int


class Sample(NamedTuple):
    """Some query tiles of one head in one pass, and what they visit.

    Attributes:
        number: of the pass.
        queries, keys: the tiles, and all key tiles.
        num_queries: how many query tiles the pass has.
        weight: how many query tiles each stands for, over the heads that are looked at.
        visits: what they visit.
        tables: how many heads see tables of their own.
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
    """About `tiles` query tiles of up to `heads` heads of the first batch entry, pass by pass.

    Cost: that of laying out these tiles.
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
    """The visits of some query tiles.

    Cost: that of their masked tiles, and of one key tile in `_RUN` of the others.
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
    """Tiles of `count`, and how many each stands for: both ends, and some between them.

    Those between are one of each of as many equal parts, at places that follow no period.
    """
    if count <= most + 2 * _EDGE:
        yield torch.arange(count), 1.0
        return
    yield torch.tensor([*range(_EDGE), *range(count - _EDGE, count)]), 1.0
    inner = count - 2 * _EDGE
    part = torch.arange(most, dtype=torch.float64)
    place = (part + (part + 0.5) * _GOLDEN % 1) * inner / most
    yield _EDGE + place.long(), inner / most
