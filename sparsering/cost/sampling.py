"""Tables of some query tiles of a pattern, for what is too large to be laid out only to be counted.

The tiles are those of the layout: what is counted of them stands for the rest.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..layouts.compile import Table, compile_table, terms, tokens_of_tile
from ..layouts.ground import ground_of, laid_in_documents
from ..layouts.tiles import Axis
from ..patterns.algebra import And, Frame, Mask, Not, Or, Pattern

_GOLDEN = 0.6180339887498949
_EDGE = 2  # tiles at both ends stand for themselves: global tokens lie there


class Sample(NamedTuple):
    """Some query tiles of one head in one pass, and what they visit.

    Attributes:
        number: of the pass.
        queries, keys: the tiles, and all key tiles.
        num_queries: how many query tiles the pass has.
        weight: how many query tiles each stands for, over the heads that are looked at.
        table: what they visit.
        tables: how many heads see tables of their own.
    """

    number: int
    queries: Axis
    keys: Axis
    num_queries: int
    weight: float
    table: Table
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
                    found, _ = compile_table(ground, seen, part, keys, frame, block_size)
                    weight /= len(looked_at)
                    yield Sample(number, part, keys, len(queries), weight, found, tables)


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
