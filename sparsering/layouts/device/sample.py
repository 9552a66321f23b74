"""Some rows of tiles that tell of all the others, where what rows see moves along with them.

On tiles at equal distances, a condition holds of a pair of tiles by its row, by its key tile or by
how far they are apart. Its edges are then lines; between the rows at which lines cross, the row
`period` further on sees the same, moved: counts grow evenly, and no new kind of cells appears.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...patterns.algebra import Frame
from ..conditions import (
    EMPTY,
    FULL,
    AllOf,
    AnyOf,
    Condition,
    Congruent,
    Linear,
    Negated,
    OnGrid,
    SameSegment,
)
from ..tiles import Grid
from .axes import Lanes
from .rules import on_lane
from .runs import Runs

_LEAST_ROWS = 512  # below, all are as cheap
_MOST_PERIOD = 64
_NEAR = 3  # tiles about a line within which a condition may vary, and one to spare


@dataclass(frozen=True, eq=False)
class Sample:
    """Rows, and how the others follow from them.

    Attributes:
        rows: numbers of rows, ascending.
        weight: [rows], how many rows each stands for, as a sum of counts takes them.
        first, last, times: of rows `period` apart that are left out but for the outer two: where in
            `rows` those are, and how many rows they stand for.
    """

    rows: Tensor
    weight: Tensor
    first: Tensor
    last: Tensor
    times: Tensor
    period: int

    def total(self, counts: Tensor) -> int:
        """The sum over all rows, of counts [rows] of these."""
        return int((self.weight * counts).sum())

    def most_of_keys(self, some: Runs, key_tiles: int) -> int:
        """At least as many rows as see any one key tile."""
        of_keys = torch.zeros(key_tiles + 1, dtype=torch.float64)

        def add(begin: Tensor, end: Tensor, times: Tensor) -> None:
            for edge, sign in ((begin, 1), (end, -1)):
                of_keys.index_add_(0, edge.reshape(-1), (sign * times).double().reshape(-1))

        add(some.begin, some.end, (self.weight == 1).expand_as(some.begin))
        edges = [x[:, which] for which in (self.first, self.last) for x in (some.begin, some.end)]
        begin, end = torch.minimum(edges[0], edges[2]), torch.maximum(edges[1], edges[3])
        longest = torch.maximum(edges[1] - edges[0], edges[3] - edges[2])
        moves = (edges[2] - edges[0]).abs() * 2 >= self.times * self.period
        times = torch.where(moves, longest // self.period + 2, self.times)
        add(begin, end, torch.minimum(times, self.times) * (longest > 0))
        return int(of_keys.cumsum(0).max())


def sampled(
    rule: Condition, grid: Grid, offset: int, lanes: Lanes, frame: Frame, rows: int
) -> Sample | None:
    """The rows that tell of all `rows`; None where they do not move alike, or all are few."""
    spacing = lanes.spacing
    if rows < _LEAST_ROWS or grid.residues > 1 or not spacing or not lanes.tiles:
        return None
    lines = _Lines.of(rule, grid, offset, spacing)
    if lines is None:
        return None
    low = frame.q_start // spacing  # the tile that the first row is
    edges = {low, low + rows - 1, *lines.rows}
    near = {x + d for x in edges for d in range(-_NEAR, _NEAR + 1)}
    keys = {0, int(lanes.live), *lines.keys}
    for x in (key + apart for key in keys for apart in (0, *lines.apart)):
        near |= {x + d for d in range(-2 * _NEAR, 2 * _NEAR + 1)}
    period = lines.period
    if period > 1:
        for key in keys:
            begin = (key - _NEAR) // period * period - _NEAR
            near |= set(range(begin, (key + _NEAR) // period * period + period + _NEAR + 1))
    listed = sorted(x - low for x in near if 0 <= x - low < rows)
    found: list[tuple[int, float]] = []
    pairs: list[tuple[int, int, int]] = []
    for row, following in zip(listed, [*listed[1:], listed[-1] + 1], strict=True):
        found.append((row, 1.0))
        between = following - row - 1
        if between <= 2 * period:
            found += [(x, 1.0) for x in range(row + 1, following)]
            continue
        times = [(between - r - 1) // period + 1 for r in range(period)]
        start, size = row + 1, len(found)
        found += [(start + r, times[r] / 2) for r in range(period)]
        ends = sorted((start + r + (times[r] - 1) * period, times[r], r) for r in range(period))
        pairs += [(size + r, size + period + i, n) for i, (_, n, r) in enumerate(ends)]
        found += [(x, n / 2) for x, n, _ in ends]
    if 2 * len(found) > rows:
        return None
    number, weight = zip(*found, strict=True)
    first, last, times_of = torch.tensor(pairs, dtype=torch.int64).view(-1, 3).unbind(1)
    numbers = torch.tensor(number), torch.tensor(weight, dtype=torch.float64)
    return Sample(*numbers, first, last, times_of, period)


@dataclass(frozen=True)
class _Lines:
    """Where a condition changes, in tiles: at rows, at keys, at distances; segments of as many."""

    rows: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()
    apart: tuple[int, ...] = ()
    period: int = 1

    @classmethod
    def of(cls, rule: Condition, grid: Grid, offset: int, spacing: int) -> "_Lines | None":
        match rule:
            case Negated(part):
                return cls.of(part, grid, offset, spacing)
            case AllOf(parts) | AnyOf(parts):
                joined: _Lines | None = cls()
                for part in parts:
                    found = cls.of(part, grid, offset, spacing)
                    joined = None if joined is None or found is None else joined.joined(found)
                return joined
            case Linear(0, 0, _):
                return cls()
            case Linear(a, 0, c):
                return cls(rows=(c // a // spacing,))
            case Linear(0, b, c):
                return cls(keys=(c // b // spacing,))
            case Linear(a, b, c) if a == -b:
                return cls(apart=(c // a // spacing,))
            case SameSegment(length) if length % spacing == 0:
                period = length // spacing
                return cls(period=period) if period <= _MOST_PERIOD else None
            case Congruent() | OnGrid() if on_lane(rule, grid, offset) in (EMPTY, FULL):
                return cls()
        return None

    def joined(self, other: "_Lines") -> "_Lines | None":
        period = max(self.period, other.period)
        if period % self.period or period % other.period:
            return None
        lines = self.rows + other.rows, self.keys + other.keys, self.apart + other.apart
        return _Lines(*lines, period)
