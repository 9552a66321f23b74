"""Which key tiles each query tile sees in part and in full, by arithmetic on each row of tiles.

Every kind of condition says it in a few runs of key tiles; and, or and not combine them by Kleene
logic. The same code runs on the host, where it tells how much room tables need, and on the device,
where it makes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from ...patterns.arguments import MOST_TOKENS
from ...patterns.blocks import BlockDilated, BlockWindow, BlockwiseMask, Hierarchical
from ...rows import SPLITMIX
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
from .axes import Lanes, floor_divide
from .runs import Runs, united

_MOST_RUNS = 64  # of a row, that a condition may ask for
_ABSENT = -(0x9E3779B97F4A7C15 >> 1)  # in a column of what does not vary
_FACTOR = SPLITMIX[0]


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
    """Query tiles, and the lanes of key tiles that they pair with."""

    grid: Grid
    queries: Axis
    lanes: Lanes

    @property
    def offset(self) -> int:
        """The first position's, where all tiles are in one lane."""
        return self.lanes.first if isinstance(self.lanes.first, int) else 0

    @property
    def whole(self) -> Runs:
        return Runs.of(*self.lanes.whole(self.queries.start))

    @property
    def nothing(self) -> Runs:
        return Runs.none(self.queries.start)

    def touching(self, first: Tensor, last: Tensor) -> Runs:
        """The tiles that reach into [first, last]."""
        return Runs.of(self.lanes.ending_before(first), self.lanes.starting_by(last))

    def within(self, first: Tensor, last: Tensor) -> Runs:
        """The tiles that lie in [first, last]."""
        return Runs.of(self.lanes.starting_by(first - 1), self.lanes.ending_before(last + 1))


@dataclass(frozen=True, eq=False)
class Reach:
    """What each row sees: a superset of the tiles that hold a pair, a subset of the full ones."""

    some: Runs
    full: Runs
    rule: Condition
    parts: "tuple[Reach, ...]" = ()

    def leaves(self) -> "list[Reach]":
        return [leaf for part in self.parts for leaf in part.leaves()] if self.parts else [self]


def simplified(rule: Condition, negate: bool = False) -> Condition:
    """The same with nots at the leaves, nested ands and ors joined, equal parts once."""
    match rule:
        case Negated(part):
            return simplified(part, not negate)
        case AllOf(parts) | AnyOf(parts):
            kind = AnyOf if isinstance(rule, AllOf) == negate else AllOf
            found: dict[Condition, None] = {}
            for part in (simplified(x, negate) for x in parts):
                found |= dict.fromkeys(part.parts if isinstance(part, kind) else (part,))
            return kind(tuple(found)) if len(found) > 1 else next(iter(found))
        case Linear(a, b, c) if negate:
            return Linear(-a, -b, 1 - c)
    return Negated(rule) if negate else rule


def num_runs(rule: Condition, grid: Grid, offset: int) -> tuple[int, int] | None:
    """Most runs of a row that sees tiles in part, and in full; None where there is no closed form.

    That is for a simplified condition.
    """
    match rule:
        case AllOf(parts) | AnyOf(parts):
            of_parts = [num_runs(part, grid, offset) for part in parts]
            if None in of_parts:
                return None
            some, full = zip(*of_parts, strict=True)  # type: ignore[misc]
            if isinstance(rule, AnyOf):
                return sum(some), sum(full)
            return reduce(int.__mul__, some), reduce(int.__mul__, full)
        case Negated(part):
            inner = num_runs(part, grid, offset)
            return None if inner is None else (inner[1] + 1, inner[0] + 1)
        case Linear() | SameSegment():
            return 1, 1
        case Congruent() | OnGrid():
            known = _on_lane(rule, grid, offset)
            return None if known is None else (1, 1)
        case InBlocks(BlockWindow()):
            return 1, 1
        case InBlocks(BlockDilated(rates)):
            return 1 + 2 * len(rates), 1 + 2 * len(rates)
        case InBlocks(Hierarchical(levels)):
            return len(levels), len(levels)
    return None


def has_closed_form(rule: Condition, grid: Grid, offset: int) -> bool:
    """Whether `reach_of` knows a simplified condition on tiles of this grid."""
    if grid.documents is not None:
        return False
    runs = num_runs(rule, grid, offset)
    return runs is not None and runs[0] * (runs[1] + 1) <= _MOST_RUNS


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
            whole = rows.lanes.whole(rows.queries.start)
            return Reach(inner.full.outside(whole), inner.some.outside(whole), rule)
    return Reach(*_runs_of(rule, rows), rule)


def _runs_of(rule: Condition, rows: Rows) -> tuple[Runs, Runs]:
    """The tiles that each row sees in part, and in full."""
    first, last = rows.queries.start, rows.queries.last
    match rule:
        case Linear(a, b, c):
            low, high = (first * a, last * a) if a >= 0 else (last * a, first * a)
            return _half_planes(high - c, low - c, b, rows)
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
    begin, end = rows.lanes.whole(most)
    some, full = (floor_divide(x, abs(b)) for x in (most, least))
    lanes = rows.lanes
    if b < 0:
        return Runs.of(begin, lanes.starting_by(some)), Runs.of(
            begin, lanes.ending_before(full + 1)
        )
    return Runs.of(lanes.ending_before(-some), end), Runs.of(lanes.starting_by(-full - 1), end)


_BY_LANE = 3


def _on_lane(rule: Congruent | OnGrid, grid: Grid, offset: int) -> int | None:
    """What holds of all pairs of tiles of a lane: a status, or that the residue tells; or None."""
    lanes = grid.residues > 1  # whose segments are whole numbers of steps
    match rule:
        case Congruent(modulus):
            if grid.step % modulus:
                return VARIES
            return FULL if lanes or grid.segment % modulus == 0 else None
        case OnGrid(_, segment, rate, residue):
            if grid.step % rate:
                return VARIES
            own = grid.anchor
            if own is not None and (own.segment_length, own.dilation_rate) == (segment, rate):
                return FULL if residue == offset else EMPTY
            if segment % rate:
                return None
            if lanes:
                return _BY_LANE
            if grid.segment % rate == 0:
                return FULL if offset % rate == residue else EMPTY
    return None


def _of_lanes(rule: Congruent | OnGrid, rows: Rows) -> tuple[Runs, Runs]:
    first, whole = rows.lanes.first, rows.whole
    known = _on_lane(rule, rows.grid, rows.offset)
    if known == _BY_LANE and isinstance(rule, OnGrid):
        hit = whole.where(first % rule.rate == rule.residue)  # type: ignore[arg-type]
        return hit, hit
    return rows.nothing if known == EMPTY else whole, whole if known == FULL else rows.nothing


def known_of_lanes(reach: Reach, rows: Rows) -> bool:
    """Whether a condition tells nothing but which lanes hold."""
    rule = reach.rule.part if isinstance(reach.rule, Negated) else reach.rule
    lanes = isinstance(rule, Congruent | OnGrid)
    return lanes and _on_lane(rule, rows.grid, rows.offset) != VARIES  # type: ignore[arg-type]


def same_kinds(a: Condition, b: Condition) -> bool:
    """Whether columns of two leaves mean the same."""
    if isinstance(a, Negated) and isinstance(b, Negated):
        return same_kinds(a.part, b.part)
    if isinstance(a, InBlocks) and isinstance(b, InBlocks):
        return a.mask == b.mask
    return a == b


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
            reach = min(radius, MOST_TOKENS // size)
            some = touching(low - reach, own_last + reach).where(positive)
            return some, within(own_last - reach, own + reach).where(own >= 0)
        case BlockDilated(rates):
            far = MOST_TOKENS // size
            apart = sorted({0, *(min(r, far) for r in rates), *(-min(r, far) for r in rates)})
            some, full = (
                [found.where(where) for found in every]
                for every, where in (
                    ([touching(low + d, own_last + d) for d in apart], positive),
                    ([within(own + d, own + d) for d in apart], single),
                )
            )
            return united(some), united(full)
        case Hierarchical():
            some, full = [], []
            for period, radius in mask.in_blocks():
                reach = MOST_TOKENS // size if radius is None else min(radius, MOST_TOKENS // size)
                lowest = -floor_divide(-low, period) * period
                highest = floor_divide(own_last, period) * period
                seen = lowest <= highest
                some.append(touching(lowest - reach, highest + reach).where(seen))
                all_see = own >= 0 if period == 1 else single & seen
                full.append(within(own_last - reach, own + reach).where(all_see))
            return united(some), united(full)
    raise AssertionError(f"no closed form of {mask}")


def columns_of(rule: Condition, pairs: Pairs) -> list[Tensor]:
    """Integers that fix the cells of pairs of tiles that vary."""
    match rule:
        case Negated(part):
            return columns_of(part, pairs)
        case InBlocks(mask):
            size = mask.block_size
            q, _, k, _ = pairs.edges()
            of_query, of_key = floor_divide(q, size), floor_divide(k, size)
            columns = [q - of_query * size, k - of_key * size, of_query - of_key, q.clamp(max=0)]
            periods = [p for p, _ in mask.in_blocks()] if isinstance(mask, Hierarchical) else []
            return columns + [of_query % period for period in periods if period > 1]
    return rule.signature(pairs)


def kinds_of(reach: Reach, pairs: Pairs, row: Tensor, number: Tensor) -> list[Tensor]:
    """Integers that fix the cells of pairs of tiles that vary, as `Condition.signature`.

    Columns of a part that does not vary are the same for all.

    Args:
        row, number: of each pair of tiles, the row, and the key tile as lanes number them.
    """
    if not reach.parts:
        return columns_of(reach.rule, pairs)
    leaves = reach.leaves()
    sets = [runs for leaf in leaves for runs in (leaf.some, leaf.full)]
    begin, end = (torch.cat([getattr(x, name) for x in sets]) for name in ("begin", "end"))
    inside = (number >= begin.index_select(1, row)) & (number < end.index_select(1, row))
    parts = iter(inside.to(torch.int8).split([len(runs.begin) for runs in sets]))
    status = {}
    for leaf in leaves:
        some, full = (_added(next(parts)) for _ in range(2))
        status[leaf] = some + full
    return _seen(reach, pairs, status)[1]


def _added(rows: Tensor) -> Tensor:
    return rows[0] if len(rows) == 1 else rows.sum(0, dtype=torch.int8)


def _seen(reach: Reach, pairs: Pairs, status: dict[Reach, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """(status of each pair of tiles, columns)."""
    if not reach.parts:
        return status[reach], columns_of(reach.rule, pairs)
    found, columns = [], []
    for part in reach.parts:
        of_part, told = _seen(part, pairs, status)
        varies = of_part == VARIES
        columns += [torch.where(varies, column, _ABSENT) for column in told]
        found.append(of_part)
    extreme = torch.minimum if isinstance(reach.rule, AllOf) else torch.maximum
    return reduce(extreme, found), columns


def digest(columns: Sequence[Tensor]) -> Tensor:
    """One integer for each row of some columns; the host confirms that it tells rows apart."""
    return reduce(lambda known, column: torch.add(column, known, alpha=_FACTOR), columns)
