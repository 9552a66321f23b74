"""Conditions as arithmetic takes them: simplified, and what is known of them before any tile.

All of it is of a few integers: no tensor is made here.
"""

from functools import reduce
from typing import Any

from ...patterns.algebra import Frame
from ...patterns.blocks import BlockDilated, BlockWindow, Hierarchical
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
from ..tiles import Grid

BY_LANE = 3  # beside EMPTY, VARIES and FULL: the residue of a lane tells
_MOST_RUNS = 64  # of a row, that a condition may ask for


def simplified(
    rule: Condition, frame: Frame, grid: Grid, offset: int, negate: bool = False
) -> Condition:
    """The same on a frame's tiles, by fewer leaves: nots at leaves, nested ands and ors joined.

    Leaves that hold everywhere, or nowhere, and those that are said again, are left out.
    """
    known: int | None = None
    match rule:
        case Negated(part):
            return simplified(part, frame, grid, offset, not negate)
        case AllOf(parts) | AnyOf(parts):
            kind, other = (AllOf, AnyOf) if isinstance(rule, AllOf) != negate else (AnyOf, AllOf)
            found: dict[Condition, None] = {}
            for part in (simplified(x, frame, grid, offset, negate) for x in parts):
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
        case Congruent() | OnGrid():
            known = on_lane(rule, grid, offset)
        case SameSegment(length) if frame.q_start >= 0:
            known = FULL if max(frame.q_start + frame.q_len, frame.kv_len) <= length else None
    if known in (EMPTY, FULL):
        return _ALWAYS if (known == FULL) != negate else _NEVER
    return Negated(rule) if negate else rule


_ALWAYS, _NEVER = Linear(0, 0, 0), Linear(0, 0, 1)


def _without(part: Condition, known: dict[Condition, None], kind: Any, other: Any) -> Condition:
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
            some, full = zip(*of_parts, strict=True)
            if isinstance(rule, AnyOf):
                return sum(some), sum(full)
            return reduce(int.__mul__, some), reduce(int.__mul__, full)
        case Negated(part):
            inner = num_runs(part, grid, offset)
            return None if inner is None else (inner[1] + 1, inner[0] + 1)
        case Linear() | SameSegment():
            return 1, 1
        case Congruent() | OnGrid():
            known = on_lane(rule, grid, offset)
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


def on_lane(rule: Congruent | OnGrid, grid: Grid, offset: int) -> int | None:
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
                return BY_LANE
            if grid.segment % rate == 0:
                return FULL if offset % rate == residue else EMPTY
    return None


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
            known = on_lane(a, grid, offset)
            return known == on_lane(b, grid, other) and (a == b or known in (EMPTY, FULL))
    return a == b
