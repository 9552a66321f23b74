"""One mask on the tiles of one axis: which pairs of tiles hold in part, and the cells of those."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...patterns.algebra import Frame, Mask
from ..conditions import Condition
from ..tiles import Axis
from .axes import floor_divide
from .reach import Pairs, Reach, Rows, digest, kinds_of, picked, reach_of
from .runs import Runs, expanded

_MOST_CELLS = 1 << 22  # evaluated at a time


@dataclass(frozen=True, eq=False)
class Varying:
    """Pairs of tiles that hold in part.

    Attributes:
        run: which of the [rows, runs] of `Laid.varying` each is of.
        row, number: its row, and its key tile as lanes number them.
        tiles: the pair.
    """

    run: Tensor
    row: Tensor
    number: Tensor
    tiles: Pairs


Slots = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Which runs of `some`, `full` and `varying` some row has."""


@dataclass(frozen=True, eq=False)
class Laid:
    """A mask on tiles.

    Attributes:
        keys: start and last position of each key tile, of the rows' axis; of several axes end to
            end, `of_row` [rows] being where those of each row begin.
        some, full: ascending runs of key tiles that hold in part or in full, and in full.
        varying: runs of those that hold in part, each inside the run `parents` of `some`.
        slots: of the runs that were found.
    """

    rows: Rows
    keys: Axis
    of_row: Tensor | None
    reach: Reach
    some: Runs
    full: Runs
    varying: Runs
    parents: tuple[int, ...]
    slots: Slots

    @classmethod
    def of(
        cls,
        rule: Condition,
        rows: Rows,
        keys: Axis,
        *,
        ragged: bool,
        of_row: Tensor | None = None,
        slots: Slots | None = None,
    ) -> "Laid":
        """`ragged`: whether some query tile has no position; `slots`: as the host found them."""
        reach, queries = reach_of(rule, rows), rows.queries
        some, full = reach.some.sorted(), reach.full.sorted()
        if not len(some.begin):
            some = Runs(rows.whole.begin, rows.whole.begin)
        if ragged:
            live = queries.last >= queries.start
            some, full = some.where(live), full.where(live)
        of_some, of_full = (some.used(), full.used()) if slots is None else slots[:2]
        some, full = some.kept(of_some), full.kept(of_full)
        varying = some & full.outside(rows.whole)
        of_varying = varying.used() if slots is None else slots[2]
        parents = tuple(i // (len(full.begin) + 1) for i in of_varying)
        return cls(
            rows, keys, of_row, reach, some, full, varying.kept(of_varying), parents,
            (of_some, of_full, of_varying),
        )  # fmt: skip

    def varying_pairs(self, total: int) -> Varying:
        """All of them, of which there are as many."""
        run, number = expanded(self.varying, total)
        row = floor_divide(run, len(self.varying.begin))
        key = self.rows.lanes.tile_of(number)
        if self.of_row is not None:
            key = key + self.of_row.index_select(0, row)
        tiles = Pairs.of(picked(self.rows.queries, row), picked(self.keys, key))
        return Varying(run, row, number, tiles)

    def kinds(self, pairs: Varying) -> list[Tensor]:
        """Columns that fix the cells of pairs of tiles of equal counts."""
        return kinds_of(self.reach, self.rows, pairs.tiles, pairs.row, pairs.number)


def with_counts(columns: list[Tensor], tiles: Pairs, block_size: int) -> list[Tensor]:
    """Also how many positions the tiles have."""
    return [*columns, tiles.q.count * (block_size + 1) + tiles.k.count]


def numbered(columns: list[Tensor], factors: tuple[int, ...], total: int) -> tuple[Tensor, Tensor]:
    """(the number of each row's kind, one row of each kind), of which there are as many.

    `factors`: by which `digest` tells rows apart.
    """
    known, order = digest(columns, factors).sort()
    rank = pad((known[1:] != known[:-1]).cumsum(0), (1, 0))
    number = torch.empty_like(rank).scatter_(0, order, rank)
    first = torch.searchsorted(rank, torch.arange(total, device=rank.device))
    return number, order.index_select(0, first)


def cells_of(mask: Mask, tiles: Pairs, frame: Frame, block_size: int) -> Tensor:
    """[pairs, block_size, block_size] whether pairs of positions hold, running on past the ends."""
    places = tiles.q.step * torch.arange(block_size, device=tiles.q.start.device)
    query, key = (x.start[:, None] + places for x in (tiles.q, tiles.k))
    parts = [
        mask.holds(q[:, :, None], k[:, None, :], frame).expand(len(q), block_size, block_size)
        for q, k in _split(query, key, _MOST_CELLS // block_size**2)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def counts_within(cells: Tensor) -> Tensor:
    """[pairs, b + 1, b + 1] how many cells hold of each corner of so many rows and columns."""
    return pad(cells.cumsum(1, dtype=torch.int32).cumsum(2, dtype=torch.int32), (1, 0, 1, 0))


def held(corners: Tensor, number: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """How many cells hold of so many rows and columns of each number."""
    size = corners.shape[-1]
    return corners.view(-1)[(number * size + rows) * size + columns].long()


def _split(query: Tensor, key: Tensor, at_a_time: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(query.split(at_a_time), key.split(at_a_time), strict=True))
