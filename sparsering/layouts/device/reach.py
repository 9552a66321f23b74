"""Which key tiles each query tile sees in part and in full, by arithmetic on each row of tiles.

Every kind of condition says it in a few runs of key tiles; and, or and not combine them by Kleene
logic. The same code runs on the host, where it tells how much room tables need, and on the device,
where it makes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ...patterns.algebra import Frame
from ...patterns.blocks import BlockDilated, BlockWindow, BlockwiseMask, Hierarchical
from ..conditions import (
    EMPTY,
    FULL,
    VARIES,
    AllOf,
    AnyOf,
    Condition,
    Congruent,
    InBlocks,
    Linear,
    Negated,
    OnGrid,
    SameSegment,
)
from ..tiles import Axis, Grid, Origin, TilePairs
from .axes import Lanes, floor_divide, scaled, shifted
from .rules import BY_LANE, far_apart, on_lane
from .runs import Runs, united


class Pairs(TilePairs):
    """Pairs of tiles whose positions count from 0."""

    @classmethod
    def of(cls, q: Axis, k: Axis) -> "Pairs":
        start = q.start[:1] * 0
        return cls(q, k, Origin(start, start, start))

    def __getitem__(self, index: Tensor) -> "Pairs":
        return Pairs.of(picked(self.q, index), picked(self.k, index))

    def edges(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q.start, self.q.last, self.k.start, self.k.last


def picked(tiles: Axis, index: Tensor) -> Axis:
    """Some tiles, by where they start and end."""
    start, last = tiles.start.index_select(0, index), tiles.last.index_select(0, index)
    return Axis(tiles.step, start, start, last, last)


@dataclass(frozen=True, eq=False)
class Rows:
    """Query tiles, and the lanes of key tiles that they pair with.

    Attributes:
        grid, offset: of the tiles.
        far: a distance that no two positions are apart.
        whole: all of each row's lane.
    """

    grid: Grid
    offset: int
    far: int
    queries: Axis
    lanes: Lanes
    whole: Runs

    @classmethod
    def of(cls, grid: Grid, offset: int, frame: Frame, queries: Axis, lanes: Lanes) -> "Rows":
        """Those of a frame."""
        begin, end = lanes.whole(queries.start)
        whole = Runs(begin[None], end[None])
        return cls(grid, offset, far_apart(frame), queries, lanes, whole)

    def until(self, number: Tensor) -> Runs:
        """Lanes before a number, as `Lanes` tells it."""
        return Runs(self.whole.begin, number[None])

    def since(self, number: Tensor) -> Runs:
        """Lanes from a number on."""
        return Runs(number[None], self.whole.end)

    @property
    def nothing(self) -> Runs:
        return Runs.none(self.queries.start)

    def touching(self, first: Tensor, last: Tensor) -> Runs:
        """The tiles that reach into [first, last]."""
        return Runs.of(self.lanes.ending_before(first), self.lanes.starting_by(last))

    def within(self, first: Tensor, last: Tensor) -> Runs:
        """The tiles that lie in [first, last]."""
        return Runs.of(self.lanes.starting_by(first, -1), self.lanes.ending_before(last, 1))


@dataclass(frozen=True, eq=False)
class Reach:
    """What each row sees: a superset of the tiles that hold a pair, a subset of the full ones."""

    some: Runs
    full: Runs
    rule: Condition
    parts: "tuple[Reach, ...]" = ()


def reach_of(rule: Condition, rows: Rows) -> Reach:
    """Of a simplified condition that has a closed form."""
    match rule:
        case AllOf(parts) | AnyOf(parts):
            found = tuple(reach_of(part, rows) for part in parts)
            some, full = [x.some for x in found], [x.full for x in found]
            if isinstance(rule, AllOf):
                return Reach(reduce(Runs.__and__, some), reduce(Runs.__and__, full), rule, found)
            return Reach(united(some), united(full), rule, found)
        case Negated(part):
            inner = reach_of(part, rows)
            whole = rows.whole
            return Reach(inner.full.outside(whole), inner.some.outside(whole), rule, (inner,))
    return Reach(*_runs_of(rule, rows), rule)


def _runs_of(rule: Condition, rows: Rows) -> tuple[Runs, Runs]:
    """The tiles that each row sees in part, and in full."""
    first, last = rows.queries.start, rows.queries.last
    match rule:
        case Linear(a, b, c):
            low, high = (shifted(scaled(x, a), -c) for x in (first, last)[:: 1 if a >= 0 else -1])
            return _half_planes(high, low, b, rows)
        case SameSegment(length):
            own, own_last = (floor_divide(x, length) for x in (first, last))
            begin, end = own * length, own_last * length + (length - 1)
            within = rows.within(begin, end).where(own == own_last)
            return rows.touching(begin, end), within
        case Congruent() | OnGrid():
            return _of_lanes(rule, rows)
        case InBlocks(mask):
            return _of_blocks(mask, rows)
    raise AssertionError(f"no closed form of {rule}")


def _half_planes(most: Tensor, least: Tensor, b: int, rows: Rows) -> tuple[Runs, Runs]:
    """Keys with `most` + b * k >= 0, of each row, and with `least` + b * k >= 0."""
    if b == 0:
        whole = rows.whole
        return whole.where(most >= 0), whole.where(least >= 0)
    some, full = (floor_divide(x, abs(b)) for x in (most, least))
    lanes = rows.lanes
    if b < 0:
        return rows.until(lanes.starting_by(some)), rows.until(lanes.ending_before(full, 1))
    return rows.since(lanes.ending_before(-some)), rows.since(lanes.starting_by(-full, -1))


def _of_lanes(rule: Congruent | OnGrid, rows: Rows) -> tuple[Runs, Runs]:
    first, whole = rows.lanes.first, rows.whole
    known = on_lane(rule, rows.grid, rows.offset)
    if known == BY_LANE and isinstance(rule, OnGrid):
        hit = whole.where(torch.as_tensor(first % rule.rate == rule.residue))
        return hit, hit
    return rows.nothing if known == EMPTY else whole, whole if known == FULL else rows.nothing


def _of_blocks(mask: BlockwiseMask, rows: Rows) -> tuple[Runs, Runs]:
    """Of masks whose key blocks lie at distances from the query's own."""
    size, first, last = mask.block_size, rows.queries.start, rows.queries.last
    own, own_last = (floor_divide(x, size) for x in (first, last))
    low, positive, single = own.clamp(min=0), own_last >= 0, (own == own_last) & (own >= 0)

    def touching(begin: Tensor, end: Tensor) -> Runs:
        """The tiles that touch key blocks begin .. end."""
        return rows.touching(begin * size, end * size + (size - 1))

    def within(begin: Tensor, end: Tensor) -> Runs:
        return rows.within(begin * size, end * size + (size - 1))

    match mask:
        case BlockWindow(radius):
            reach = min(radius, rows.far // size + 1)
            some = touching(low - reach, own_last + reach).where(positive)
            return some, within(own_last - reach, own + reach).where(own >= 0)
        case BlockDilated(rates):
            far = rows.far // size + 1
            apart = sorted({0, *(min(r, far) for r in rates), *(-min(r, far) for r in rates)})
            of_some = [touching(low + d, own_last + d).where(positive) for d in apart]
            return united(of_some), united([within(own + d, own + d).where(single) for d in apart])
        case Hierarchical():
            of_levels: list[tuple[Runs, Runs]] = []
            for period, level in mask.in_blocks():
                reach = rows.far // size + 1 if level is None else min(level, rows.far // size + 1)
                lowest = -floor_divide(-low, period) * period
                highest = floor_divide(own_last, period) * period
                seen = lowest <= highest
                all_see = own >= 0 if period == 1 else single & seen
                of_levels.append(
                    (
                        touching(lowest - reach, highest + reach).where(seen),
                        within(own_last - reach, own + reach).where(all_see),
                    )
                )
            return united([x for x, _ in of_levels]), united([x for _, x in of_levels])
    raise AssertionError(f"no closed form of {mask}")


Seen = tuple[Tensor, Tensor, list[Tensor]]


def kinds_of(reach: Reach, rows: Rows, pairs: Pairs, row: Tensor, number: Tensor) -> list[Tensor]:
    """Integers that fix the cells of pairs of tiles that vary, as `Condition.signature`.

    Columns of a part that does not vary are the same for all.

    Args:
        row, number: of each pair of tiles, the row, and the key tile as lanes number them.
    """

    def look(reach: Reach) -> Seen:
        """(whether some, whether all pairs of positions hold, columns) of each pair of tiles."""
        if not reach.parts:
            return _seen(reach, rows, pairs, row, number)
        found = [look(part) for part in reach.parts]
        if isinstance(reach.rule, Negated):
            ((some, full, columns),) = found
            return ~full, ~some, columns
        columns, flags = [], None
        for i, (some, full, told) in enumerate(found):
            if told:
                varies = some ^ full
                flags = (
                    varies.to(number.dtype) if flags is None else flags.add(varies, alpha=1 << i)
                )
                columns += [column * varies for column in told]
        columns += [] if flags is None else [flags]
        join: Any = torch.logical_and if isinstance(reach.rule, AllOf) else torch.logical_or
        return reduce(join, [x[0] for x in found]), reduce(join, [x[1] for x in found]), columns

    return look(reach)[2]


def _seen(reach: Reach, rows: Rows, pairs: Pairs, row: Tensor, number: Tensor) -> Seen:
    """The same of one condition."""
    q, q_last, k, k_last = pairs.edges()
    match reach.rule:
        case Linear(a, b, c):
            low = _combined(a, b, q if a >= 0 else q_last, k if b >= 0 else k_last)
            high = _combined(a, b, q_last if a >= 0 else q, k_last if b >= 0 else k)
            return high >= c, low >= c, [_combined(a, b, q, k)]
        case SameSegment(length):
            of_q, of_q_last, of_k, of_k_last = (floor_divide(x, length) for x in pairs.edges())
            meet = (of_q <= of_k_last) & (of_k <= of_q_last)
            one = (of_q == of_q_last) & (of_k == of_k_last)
            columns = [q - of_q * length, k - of_k * length, of_q - of_k]
            return meet, meet & one, columns
        case Congruent() | OnGrid():
            known = on_lane(reach.rule, rows.grid, rows.offset)
            columns = reach.rule.signature(pairs) if known == VARIES else []
            if known != BY_LANE:
                some = torch.full_like(q, known != EMPTY, dtype=torch.bool)
                return some, torch.full_like(some, known == FULL), columns
            return _inside(reach.some, row, number), _inside(reach.full, row, number), columns
        case InBlocks(mask):
            size = mask.block_size
            of_query, of_key = floor_divide(q, size), floor_divide(k, size)
            columns = [q - of_query * size, k - of_key * size, of_query - of_key, q.clamp(max=0)]
            periods = [p for p, _ in mask.in_blocks()] if isinstance(mask, Hierarchical) else []
            columns += [of_query % period for period in periods if period > 1]
            return _inside(reach.some, row, number), _inside(reach.full, row, number), columns
    raise AssertionError(f"no closed form of {reach.rule}")


def _combined(a: int, b: int, q: Tensor, k: Tensor) -> Tensor:
    """The sum a * q + b * k."""
    if a == 0 or b == 0:
        return scaled(k, b) if a == 0 else scaled(q, a)
    return torch.add(scaled(q, a), k, alpha=b)


def _inside(runs: Runs, row: Tensor, number: Tensor) -> Tensor:
    begin, end = (x.index_select(1, row) for x in (runs.begin, runs.end))
    return ((number >= begin) & (number < end)).any(0)


def digest(columns: Sequence[Tensor], factors: Sequence[int]) -> Tensor:
    """One integer for each row of some columns."""
    known = columns[0].long()
    for column, factor in zip(columns[1:], factors, strict=True):
        known = torch.add(column, known, alpha=factor)
    return known
