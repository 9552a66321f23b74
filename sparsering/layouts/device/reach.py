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
    _Joint,
)
from ..tiles import Axis, Grid, Origin, TilePairs
from .axes import Lanes, floor_divide
from .runs import Runs, united

_MOST_RUNS = 64  # of a row, that a condition may ask for


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
    """

    grid: Grid
    offset: int
    far: int
    queries: Axis
    lanes: Lanes

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


def simplified(rule: Condition, frame: Frame, negate: bool = False) -> Condition:
    """The same on a frame's positions, by fewer leaves: nots at leaves, nested ands and ors joined.

    Leaves that hold everywhere, or nowhere, and those that are said again, are left out.
    """
    match rule:
        case Negated(part):
            return simplified(part, frame, not negate)
        case AllOf(parts) | AnyOf(parts):
            kind, other = (AllOf, AnyOf) if isinstance(rule, AllOf) != negate else (AnyOf, AllOf)
            found: dict[Condition, None] = {}
            for part in (simplified(x, frame, negate) for x in parts):
                found |= dict.fromkeys(part.parts if isinstance(part, kind) else (part,))
            absorbing, neutral = (_NEVER, _ALWAYS) if kind is AllOf else (_ALWAYS, _NEVER)
            kept = [_without(x, found, kind, other) for x in found if x != neutral]
            if absorbing in kept:
                return absorbing
            kept = [x for x in kept if x != neutral]
            return kind(tuple(kept)) if len(kept) > 1 else kept[0] if kept else neutral
        case Linear(a, b, c):
            if negate:
                a, b, c = -a, -b, 1 - c
            ends = (frame.q_start, frame.q_start + frame.q_len - 1), (0, frame.kv_len - 1)
            values = [a * p + b * k for p in ends[0] for k in ends[1]]
            return _ALWAYS if min(values) >= c else _NEVER if max(values) < c else Linear(a, b, c)
    return Negated(rule) if negate else rule


_ALWAYS, _NEVER = Linear(0, 0, 0), Linear(0, 0, 1)


def _without(
    part: Condition, known: dict[Condition, None], kind: type[_Joint], other: type[_Joint]
) -> Condition:
    """A part of a joint condition, without what stands beside it in the joint itself."""
    if not isinstance(part, other):
        return part
    inner = []
    for x in part.parts:
        parts = x.parts if isinstance(x, kind) else (x,)
        left = tuple(y for y in parts if y not in known)
        if not left:  # what is left of it is neutral to `kind`, and takes the others in
            return _ALWAYS if kind is AllOf else _NEVER
        inner.append(kind(left) if len(left) > 1 else left[0])
    return other(tuple(inner))


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


def largest_number(rule: Condition, frame: Frame) -> int:
    """A bound of the numbers that `reach_of` and `kinds_of` meet."""
    most = far_apart(frame)
    match rule:
        case AllOf(parts) | AnyOf(parts):
            return max(largest_number(part, frame) for part in parts)
        case Negated(part):
            return largest_number(part, frame)
        case Linear(a, b, c):
            return (abs(a) + abs(b)) * most + abs(c)
        case SameSegment(length) | OnGrid(_, length):
            return most + 2 * length
        case InBlocks(mask):
            return 4 * (most + mask.block_size)
    return most


def far_apart(frame: Frame) -> int:
    """More than any two positions are apart, or from 0."""
    return abs(frame.q_start) + frame.q_len + frame.kv_len


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
            return Reach(inner.full.outside(whole), inner.some.outside(whole), rule, (inner,))
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


def alike(a: Condition, b: Condition, grid: Grid, offset: int, other: int) -> bool:
    """Whether two simplified conditions say the same of tiles of two offsets.

    That is but for where tiles begin.
    """
    match a, b:
        case (AllOf(mine), AllOf(others)) | (AnyOf(mine), AnyOf(others)):
            parts = len(mine) == len(others)
            return parts and all(
                alike(x, y, grid, offset, other) for x, y in zip(mine, others, strict=True)
            )
        case (Negated(mine), Negated(others)):
            return alike(mine, others, grid, offset, other)
        case (InBlocks(mine), InBlocks(others)):
            return mine == others
        case (OnGrid(), OnGrid()):
            known = _on_lane(a, grid, offset)
            return known == _on_lane(b, grid, other) and (a == b or known in (EMPTY, FULL))
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
            reach = min(radius, rows.far // size + 1)
            some = touching(low - reach, own_last + reach).where(positive)
            return some, within(own_last - reach, own + reach).where(own >= 0)
        case BlockDilated(rates):
            far = rows.far // size + 1
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
                reach = rows.far // size + 1
                reach = reach if radius is None else min(radius, reach)
                lowest = -floor_divide(-low, period) * period
                highest = floor_divide(own_last, period) * period
                seen = lowest <= highest
                some.append(touching(lowest - reach, highest + reach).where(seen))
                all_see = own >= 0 if period == 1 else single & seen
                full.append(within(own_last - reach, own + reach).where(all_see))
            return united(some), united(full)
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
                columns += [torch.where(varies, column, 0) for column in told]
        columns += [] if flags is None else [flags]
        join = torch.logical_and if isinstance(reach.rule, AllOf) else torch.logical_or
        some, full = (reduce(join, [x[i] for x in found]) for i in range(2))  # type: ignore[misc]
        return some, full, columns

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
            known = _on_lane(reach.rule, rows.grid, rows.offset)
            columns = reach.rule.signature(pairs) if known == VARIES else []
            if known != _BY_LANE:
                some = torch.full_like(q, known != EMPTY, dtype=torch.bool)
                return some, torch.full_like(some, known == FULL), columns
            return *(_inside(x, row, number) for x in (reach.some, reach.full)), columns
        case InBlocks(mask):
            size = mask.block_size
            of_query, of_key = floor_divide(q, size), floor_divide(k, size)
            columns = [q - of_query * size, k - of_key * size, of_query - of_key, q.clamp(max=0)]
            periods = [p for p, _ in mask.in_blocks()] if isinstance(mask, Hierarchical) else []
            columns += [of_query % period for period in periods if period > 1]
            return *(_inside(x, row, number) for x in (reach.some, reach.full)), columns
    raise AssertionError(f"no closed form of {reach.rule}")


def _combined(a: int, b: int, q: Tensor, k: Tensor) -> Tensor:
    """A * q + b * k."""
    if a == 0 or b == 0:
        return k * b if a == 0 else q * a
    return torch.add(q if a == 1 else q * a, k, alpha=b)


def _inside(runs: Runs, row: Tensor, number: Tensor) -> Tensor:
    begin, end = (x.index_select(1, row) for x in (runs.begin, runs.end))
    return ((number >= begin) & (number < end)).any(0)


def digest(columns: Sequence[Tensor], factors: Sequence[int]) -> Tensor:
    """One integer for each row of some columns."""
    known = columns[0].long()
    for column, factor in zip(columns[1:], factors, strict=True):
        known = torch.add(column, known, alpha=factor)
    return known
