"""Descents: the last query that pairs with a key, found by stepping downwards with arithmetic.

A mask is lowered (`lifetimes.descent`) to a few kinds of descent. Each steps from a query position
down to the next that may pair with a key. It says which keys later queries can visit at all, and
how pairs repeat: in the far future of given keys, and when both positions are shifted. No tile is
examined, so the cost depends on the number of keys, not on the number of queries.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ..patterns.algebra import Frame, Mask
from .tiles import Ranges

_LOOKED_AT = 64  # queries of a key for which a custom mask is evaluated at a time
_LEAPS = (1 << 14, 1 << 10)  # queries that a custom mask may rule out at once


class Repeats(NamedTuple):
    """From `first` on, pairs repeat every `period` positions; `empty`: there are none."""

    first: int
    period: int
    empty: bool = False


class Descent:
    """Arithmetic of one mask on keys and the queries that pair with them.

    Attributes:
        settled: whether `before` is exact; otherwise it is a bound from which to ask again.
        is_filter: whether a key that does not pair with a query pairs with none below it either.
    """

    settled: bool = True
    is_filter: bool = False

    def before(self, k: Tensor, x: Tensor) -> Tensor:
        """Upper bound of the last query <= x that pairs with key k (exact where `settled`).

        It is x itself where x pairs with k, and negative where no query does.
        """
        raise NotImplementedError

    def keys(self, first_query: int, stop: int) -> Ranges:
        """Ranges below `stop` outside of which no query at `first_query` or later visits a key."""
        return [(0, stop)]

    def future(self, stop: int) -> Repeats | None:
        """How visits to keys below `stop` repeat in the far future; None where that is unknown."""
        return None

    def shifted(self) -> Repeats | None:
        """How pairs repeat when both positions are shifted alike; None where that is unknown."""
        return None


@dataclass(frozen=True)
class Near(Descent):
    """k - right <= p <= k + left and (p - k) % dilation == 0; None: unbounded on that side."""

    left: int | None
    right: int | None
    dilation: int

    @property
    def is_filter(self) -> bool:  # type: ignore[override]
        return self.left is None and self.dilation == 1

    def before(self, k: Tensor, x: Tensor) -> Tensor:
        if self.left is not None:
            x = torch.minimum(x, k + self.left)
        x = x - _remainder(x - k, self.dilation) if self.dilation > 1 else x
        return x if self.right is None else torch.where(x >= k - self.right, x, -1)

    def keys(self, first_query: int, stop: int) -> Ranges:
        return [(0 if self.left is None else max(0, first_query - self.left), stop)]

    def future(self, stop: int) -> Repeats:
        if self.left is None:
            return Repeats(stop, self.dilation)
        return Repeats(stop + self.left, 1, empty=True)

    def shifted(self) -> Repeats:
        return Repeats(0, 1)


@dataclass(frozen=True)
class Pooled(Descent):
    """p >= k * stride + size - 1, so that every key stays live forever."""

    size: int
    stride: int
    is_filter: bool = field(default=True, init=False)

    def before(self, k: Tensor, x: Tensor) -> Tensor:
        return torch.where(x >= k * self.stride + (self.size - 1), x, -1)

    def future(self, stop: int) -> Repeats:
        return Repeats(stop * self.stride + self.size - 1, 1)


@dataclass(frozen=True)
class FirstQueries(Descent):
    """p < count."""

    count: int

    def before(self, k: Tensor, x: Tensor) -> Tensor:
        return x.clamp(max=self.count - 1)

    def keys(self, first_query: int, stop: int) -> Ranges:
        return [(0, stop)] if first_query < self.count else []

    def future(self, stop: int) -> Repeats:
        return Repeats(self.count, 1, empty=True)

    def shifted(self) -> Repeats:
        return Repeats(self.count, 1)


@dataclass(frozen=True)
class FirstKeys(Descent):
    """k < count."""

    count: int
    is_filter: bool = field(default=True, init=False)

    def before(self, k: Tensor, x: Tensor) -> Tensor:
        return torch.where(k < self.count, x, -1)

    def keys(self, first_query: int, stop: int) -> Ranges:
        return [(0, min(self.count, stop))]

    def future(self, stop: int) -> Repeats:
        return Repeats(0, 1, empty=not self.count)

    def shifted(self) -> Repeats:
        return Repeats(self.count, 1)


@dataclass(frozen=True, eq=False)
class ValidKeys(Descent):
    """valid[k]."""

    valid: Tensor
    is_filter: bool = field(default=True, init=False)

    def before(self, k: Tensor, x: Tensor) -> Tensor:
        return torch.where(self.valid[k], x, -1)


@dataclass(frozen=True)
class InSegment(Descent):
    """Both positions are in one segment, and on its grid: place % rate == residue."""

    length: int
    rate: int
    residue: int

    def before(self, k: Tensor, x: Tensor) -> Tensor:
        place = _remainder(k, self.length)
        begin = k - place
        x = torch.minimum(x, begin + (self.length - 1))
        if self.rate == 1:
            return torch.where(x >= begin, x, -1)
        begin = begin + self.residue
        x = x - _remainder(x - begin, self.rate)
        return torch.where((x >= begin) & (_remainder(place, self.rate) == self.residue), x, -1)

    def keys(self, first_query: int, stop: int) -> Ranges:
        return [(first_query // self.length * self.length, stop)]

    def future(self, stop: int) -> Repeats:
        return Repeats(-(-stop // self.length) * self.length, 1, empty=True)

    def shifted(self) -> Repeats:
        return Repeats(0, self.length)


@dataclass(frozen=True)
class NearBlocks(Descent):
    """The query's block is a multiple of `period`, up to `radius` blocks away; None: anywhere."""

    size: int
    period: int
    radius: int | None

    def before(self, k: Tensor, x: Tensor) -> Tensor:
        block, own = x // self.size, k // self.size
        if self.radius is not None:
            block = torch.minimum(block, own + self.radius)
        block = block - _remainder(block, self.period)
        found = torch.minimum(x, block * self.size + (self.size - 1))
        if self.radius is None:
            return found
        return torch.where((block >= 0) & (block >= own - self.radius), found, -1)

    def keys(self, first_query: int, stop: int) -> Ranges:
        if self.radius is None:
            return [(0, stop)]
        return [(max(0, first_query // self.size - self.radius) * self.size, stop)]

    def future(self, stop: int) -> Repeats:
        if self.radius is None:
            return Repeats(0, self.size * self.period)
        return Repeats((-(-stop // self.size) + self.radius) * self.size, 1, empty=True)

    def shifted(self) -> Repeats:
        return Repeats(0, self.size * self.period)


@dataclass(frozen=True)
class AtDistances(Descent):
    """The query's block minus the key's block is one of `distances`, which ascend."""

    size: int
    distances: tuple[int, ...]

    def before(self, k: Tensor, x: Tensor) -> Tensor:
        own, distances = k // self.size, torch.tensor(self.distances)
        at = torch.searchsorted(distances, x // self.size - own, right=True) - 1
        block = own + distances[at.clamp(min=0)]
        found = torch.minimum(x, block * self.size + (self.size - 1))
        return torch.where((at >= 0) & (block >= 0), found, -1)

    def keys(self, first_query: int, stop: int) -> Ranges:
        return [(max(0, first_query // self.size - self.distances[-1]) * self.size, stop)]

    def future(self, stop: int) -> Repeats:
        first = (-(-stop // self.size) + self.distances[-1]) * self.size
        return Repeats(first, 1, empty=True)

    def shifted(self) -> Repeats:
        return Repeats(0, self.size)


@dataclass(frozen=True, eq=False)
class ListedBlocks(Descent):
    """The pair's blocks are listed, as key block * rows + query block, ascending."""

    size: int
    rows: int
    listed: Tensor

    def before(self, k: Tensor, x: Tensor) -> Tensor:
        if not len(self.listed):
            return torch.full_like(x, -1)
        column = k // self.size * self.rows
        most = column + (x // self.size).clamp(max=self.rows - 1)
        at = torch.searchsorted(self.listed, most, right=True) - 1
        row = self.listed[at.clamp(min=0)] - column
        found = torch.minimum(x, row * self.size + (self.size - 1))
        return torch.where((at >= 0) & (row >= 0), found, -1)


@dataclass(frozen=True, eq=False)
class InDocuments(Descent):
    """Both positions are in one document, whose inner descent counts from the document's start.

    Attributes:
        starts: start of each document, then the end of the last.
        kinds: for each document, the index of its descent in `inner`.
    """

    starts: Tensor
    kinds: Tensor
    inner: tuple[Descent, ...]

    @property
    def settled(self) -> bool:  # type: ignore[override]
        return all(part.settled for part in self.inner)

    def before(self, k: Tensor, x: Tensor) -> Tensor:
        document = torch.searchsorted(self.starts[1:], k, right=True)
        begin, kind = self.starts[document], self.kinds[document]
        inside = torch.minimum(x, self.starts[document + 1] - 1) - begin
        k, found = k - begin, torch.full_like(x, -1)
        for number, descent in enumerate(self.inner):
            of_kind = torch.nonzero((kind == number) & (inside >= 0))[:, 0]
            if len(of_kind):
                found[of_kind] = descent.before(k[of_kind], inside[of_kind])
        return torch.where(found >= 0, found + begin, -1)

    def keys(self, first_query: int, stop: int) -> Ranges:
        document = int(torch.searchsorted(self.starts[1:], first_query, right=True))
        if document == len(self.kinds):
            return []
        begin, end = self.starts[document : document + 2].tolist()
        inner = self.inner[int(self.kinds[document])]
        ranges = inner.keys(first_query - begin, end - begin)
        return _joined([*((begin + low, begin + high) for low, high in ranges), (end, stop)], stop)


@dataclass(frozen=True, eq=False)
class Asked(Descent):
    """A custom mask, evaluated at some queries of each key at a time; it may rule out many."""

    mask: Mask
    frame: Frame
    settled: bool = field(default=False, init=False)

    def before(self, k: Tensor, x: Tensor) -> Tensor:
        found = torch.full_like(x, -1)
        asked = torch.nonzero(x >= 0)[:, 0]
        k, x = k[asked], x[asked]
        passed = torch.zeros_like(x)  # number of queries, from x downwards, of which none pairs
        for leap in _LEAPS:
            passed = torch.where(passed == 0, leap * self._is_empty(k, x, leap), passed)
        near = torch.nonzero(passed == 0)[:, 0]
        p = x[near, None] - torch.arange(_LOOKED_AT)
        held = self.mask.holds(p.clamp(min=0), k[near, None], self.frame).expand(p.shape)
        passed[near] = torch.where(held.any(1), held.to(torch.int8).argmax(1), _LOOKED_AT)
        found[asked] = (x - passed).clamp(min=-1)
        return found

    def _is_empty(self, k: Tensor, x: Tensor, leap: int) -> Tensor:
        """Whether the mask rules out all queries in (x - leap, x]."""
        empty, first = torch.zeros_like(x, dtype=torch.bool), (x - leap + 1).clamp(min=0)
        if (reach := self.mask.candidates(first, x, self.frame)) is not None:
            empty = (k < reach[0]) | (k > reach[1])
        if (told := self.mask.status(first, x, k, k, self.frame)) is not None:
            empty = empty | (told == 0)
        return empty


class AllOf(Descent):
    """Every part holds."""

    def __init__(self, parts: Iterable[Descent]) -> None:
        self.parts = tuple(sorted(parts, key=lambda part: part.is_filter))  # filters come last
        moving = [part for part in self.parts if not part.is_filter]
        self.settled = len(moving) <= 1 and all(part.settled for part in self.parts)
        self.is_filter = not moving

    def before(self, k: Tensor, x: Tensor) -> Tensor:
        return reduce(lambda found, part: part.before(k, found), self.parts, x)

    def keys(self, first_query: int, stop: int) -> Ranges:
        return reduce(_common, (part.keys(first_query, stop) for part in self.parts))

    def future(self, stop: int) -> Repeats | None:
        found = [part.future(stop) for part in self.parts]
        ends = [told.first for told in found if told is not None and told.empty]
        return Repeats(min(ends), 1, empty=True) if ends else _together(found)

    def shifted(self) -> Repeats | None:
        return _together([part.shifted() for part in self.parts])


class AnyOf(Descent):
    """Some part holds."""

    def __init__(self, parts: Iterable[Descent]) -> None:
        self.parts = tuple(parts)
        self.settled = all(part.settled for part in self.parts)
        self.is_filter = all(part.is_filter for part in self.parts)

    def before(self, k: Tensor, x: Tensor) -> Tensor:
        return reduce(torch.maximum, (part.before(k, x) for part in self.parts))

    def keys(self, first_query: int, stop: int) -> Ranges:
        ranges = [found for part in self.parts for found in part.keys(first_query, stop)]
        return _joined(ranges, stop)

    def future(self, stop: int) -> Repeats | None:
        return _together([part.future(stop) for part in self.parts])

    def shifted(self) -> Repeats | None:
        return _together([part.shifted() for part in self.parts])


def _together(found: list[Repeats | None]) -> Repeats | None:
    """Combines the periods of several parts; None where one is unknown."""
    known = [told for told in found if told is not None]
    if len(known) < len(found):
        return None
    first, period = max(told.first for told in known), math.lcm(*(told.period for told in known))
    return Repeats(first, period, empty=all(told.empty for told in known))


def _joined(ranges: Ranges, stop: int) -> Ranges:
    """The union of ranges, cut at `stop`."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1]:
            low, before = found.pop()
            high = max(high, before)
        found.append((low, high))
    return _common(found, [(0, stop)])


def _common(some: Ranges, others: Ranges) -> Ranges:
    """The intersection of two lists of ranges."""
    return [(max(a, c), min(b, d)) for a, b in some for c, d in others if max(a, c) < min(b, d)]


def _remainder(x: Tensor, modulus: int) -> Tensor:
    """The remainder x % modulus, by bits for powers of two: ten times as fast as a division."""
    return x % modulus if modulus & (modulus - 1) else x & (modulus - 1)
