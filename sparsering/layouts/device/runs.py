"""Sets of key tiles for each query tile, as a few runs of numbers, in tensors of known shape.

No operation reads a tensor. Where a row has fewer runs than there is room for, some are empty.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_FEW = 5  # runs that are sorted by comparing them one by one


class Runs(NamedTuple):
    """Half-open runs, [runs, rows].

    Attributes:
        begin, end: of each run; end >= begin.
        ascending: whether no run begins before the end of the one above it, empty ones included.
    """

    begin: Tensor
    end: Tensor
    ascending: bool = True

    @classmethod
    def of(cls, begin: Tensor, end: Tensor) -> "Runs":
        """One run for each row; empty where end <= begin."""
        return cls(begin[None], torch.maximum(begin, end)[None])

    @classmethod
    def none(cls, rows: Tensor) -> "Runs":
        """No run, for as many rows."""
        empty = rows[None][:0]
        return cls(empty, empty)

    def where(self, row: Tensor) -> "Runs":
        """Those of some rows alone."""
        return Runs(self.begin, torch.where(row, self.end, self.begin), self.ascending)

    def __and__(self, other: "Runs") -> "Runs":
        begin = torch.maximum(self.begin[:, None], other.begin).flatten(0, 1)
        end = torch.minimum(self.end[:, None], other.end).flatten(0, 1)
        ascending = self.ascending and other.ascending
        alone = len(self.begin) == 1 or len(other.begin) == 1
        return Runs(begin, torch.maximum(begin, end), ascending and alone)

    def sorted(self) -> "Runs":
        """The same set by ascending runs."""
        if self.ascending or len(self.begin) < 2:
            return self._replace(ascending=True)
        if len(self.begin) <= _FEW:
            return self._exchanged().disjoint()
        keys = ((self.begin.long() << 32) | self.end).sort(dim=0).values
        begin, end = (x.to(self.begin.dtype) for x in (keys >> 32, keys & 0xFFFFFFFF))
        return Runs(begin, end).disjoint()

    def _exchanged(self) -> "Runs":
        """By their beginnings, each run compared with those beside it."""
        begins, ends = list(self.begin), list(self.end)
        for stop in range(len(begins) - 1, 0, -1):
            for i in range(stop):
                (low, high), (first, second) = begins[i : i + 2], ends[i : i + 2]
                right = low <= high
                begins[i : i + 2] = torch.minimum(low, high), torch.maximum(low, high)
                ends[i : i + 2] = (
                    torch.where(right, first, second), torch.where(right, second, first),
                )  # fmt: skip
        return Runs(torch.stack(begins), torch.stack(ends))

    def disjoint(self) -> "Runs":
        """Of runs in the order of their beginnings, each without what earlier ones have."""
        if len(self.begin) > _FEW:
            before = torch.nn.functional.pad(self.end.cummax(0).values[:-1], (0, 0, 1, 0))
            begin = torch.maximum(self.begin, before)
            return Runs(begin, torch.maximum(self.end, begin))
        begins, ends = [self.begin[0]], [self.end[0]]
        for begin, end in zip(self.begin[1:], self.end[1:], strict=True):
            begins.append(torch.maximum(begin, ends[-1]))
            ends.append(torch.maximum(end, ends[-1]))
        return Runs(torch.stack(begins), torch.stack(ends))

    def outside(self, whole: "Runs") -> "Runs":
        """The complement in one run for each row."""
        runs = self.sorted()
        begin = torch.cat((whole.begin, runs.end))
        return Runs(begin, torch.maximum(torch.cat((runs.begin, whole.end)), begin))

    def used(self) -> tuple[int, ...]:
        """Which runs are not empty in all rows, the first if all are: for the host alone."""
        held = (self.end > self.begin).any(1).tolist()
        return tuple(i for i, kept in enumerate(held) if kept) or tuple(range(len(held)))[:1]

    def kept(self, which: tuple[int, ...]) -> "Runs":
        """Some of the runs."""
        if len(which) == len(self.begin):
            return self
        begin, end = (torch.stack([x[i] for i in which]) for x in (self.begin, self.end))
        return Runs(begin, end, self.ascending)

    def counts(self) -> Tensor:
        """[rows, runs] how many numbers each run has."""
        return (self.end - self.begin).T


def united(parts: Sequence[Runs]) -> Runs:
    """The union."""
    if len(parts) == 1:
        return parts[0]
    begin, end = (torch.cat([getattr(x, name) for x in parts]) for name in ("begin", "end"))
    return Runs(begin, end, False).sorted()


def expanded(runs: Runs, total: int) -> tuple[Tensor, Tensor]:
    """Every number of every run, row by row: (which run of the [rows, runs], number).

    `total`: how many there are.
    """
    count = runs.counts().reshape(-1)
    before = runs.begin.T.reshape(-1) - (count.cumsum(0, dtype=count.dtype) - count)
    index = torch.repeat_interleave(count, output_size=total)
    place = torch.arange(total, device=index.device, dtype=count.dtype)
    return index, before.index_select(0, index) + place
