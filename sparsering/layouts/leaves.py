"""Conditions on a query and a key position, which replace masks while a layout is built.

For many tile pairs at once, a condition computes `status` (whether no, all or some pairs of
positions meet it), `signature` (integers; tile pairs with equal ones have equal bitmaps) and
`candidates` (tile pairs that may attend). Bitmaps come from `Mask.holds`. For tiles of one token,
`attending` lists exactly the pairs that attend. To compute how long keys live, `before` steps from
a query down to one that may see a key; `future` and `shifted` tell how pairs repeat in a sequence
without end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ground.once import once
from ..ground.rows import expand_counts
from ..patterns.algebra import Frame
from .tiles import Axis, Origin, Spans, TilePairs, spans_of_positions

EMPTY, VARIES, FULL = 0, 1, 2
FOREVER = 1 << 62
"""Position of the last query of a sequence without end."""


class Repeats(NamedTuple):
    """From position `first` on, the pairs that attend repeat every `period` positions."""

    first: int
    period: int
    empty: bool = False  # True if no pair attends from position `first` on


class Condition:
    """Condition on a query and a key position, counted from the sequence's or document's start."""

    convex: bool = False  # True if the queries that see a key are an interval
    moving: "Sequence[Condition]" = ()  # parts that are not convex, which `queries` ignores
    settled: bool = True  # True if `before` is exact, False if it is an upper bound

    def status(self, pairs: TilePairs) -> Tensor:
        """Returns, for each tile pair, EMPTY (no pair attends), FULL (all attend) or VARIES."""
        raise NotImplementedError

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        """Returns integers for each tile pair; VARIES pairs with equal ones have equal bitmaps."""
        raise NotImplementedError

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        """Returns all tile pairs that may attend; `origin` has the document of each query tile."""
        return with_any_key(queries, keys, torch.arange(len(queries)))

    def attending(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        """Returns exactly the pairs that attend; all tiles must have one token. For `intervals`."""
        raise NotImplementedError

    def queries(self, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns the first and last query that see each key; None for no bound. Needs `convex`."""
        raise NotImplementedError

    def before(self, k: Tensor, x: Tensor, frame: Frame) -> Tensor:
        """Upper bound of the last query <= x that sees key k (exact where `settled`).

        It is x itself if x sees k, and negative if no query <= x does. `frame` has the lengths of
        the sequence, or of the document, from whose start positions count.
        """
        first, last = self.queries(k)
        x = x if last is None else torch.minimum(x, last)
        for part in self.moving:
            x = part.before(k, x, frame)
        return x if first is None else torch.where(x >= first, x, -1)

    def future(self, stop: int) -> Repeats | None:
        """Returns how the queries that see keys below `stop` repeat; None if that is unknown."""
        return None

    def shifted(self) -> Repeats | None:
        """Returns by how much query and key may both move without a change; None if unknown."""
        return None


@dataclass(frozen=True)
class Linear(Condition):
    """Condition a * p + b * k >= c on query position p and key position k; a in (-1, 0, 1)."""

    a: int
    b: int
    c: int
    convex = True

    def status(self, pairs: TilePairs) -> Tensor:
        q0, q1, k0, k1 = pairs.edges()
        of_q, of_k = (self.a * q0, self.a * q1), (self.b * k0, self.b * k1)
        low = torch.minimum(*of_q) + torch.minimum(*of_k)
        high = torch.maximum(*of_q) + torch.maximum(*of_k)
        return (low >= self.c).to(torch.int8) + (high >= self.c)

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        q0, _, k0, _ = pairs.edges()
        return [self.a * q0 + self.b * k0]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        rows = torch.arange(len(queries))
        first, last = (self.a * (x - origin.start) for x in (queries.start, queries.last))
        room = torch.maximum(first, last) - self.c
        if self.b > 0:  # k >= origin.start - room / b
            far = rows * 0 + _end(keys)
            return spans_of_positions(queries, keys, rows, origin.start - room // self.b, far)
        if self.b < 0:  # k <= origin.start + room / -b
            return spans_of_positions(queries, keys, rows, rows * 0, origin.start + room // -self.b)
        return with_any_key(queries, keys, rows[room >= 0])

    attending = candidates  # exact for tiles of one token

    def queries(self, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self.a == 0:
            return None, torch.where(self.b * k >= self.c, FOREVER, -1)
        product = k if self.b == 1 else self.b * k
        return (self.c - product, None) if self.a > 0 else (None, product - self.c)

    def future(self, stop: int) -> Repeats:
        low, high = sorted((0, self.b * (stop - 1)))
        if self.a > 0:
            return Repeats(max(0, self.c - low), 1)
        first = max(0, high - self.c + 1) if self.a else 0
        return Repeats(first, 1, empty=self.a < 0 or high < self.c)

    def shifted(self) -> Repeats | None:
        if self.a and self.b:
            return Repeats(0, 1) if self.a + self.b == 0 else None
        # 0 or not: a condition on p or k alone (sign != 0) changes at one position
        sign = self.a + self.b
        return Repeats(max(0, self.c // sign + (sign < 0)) if sign else 0, 1)


@dataclass(frozen=True, eq=False)
class InKeys(Condition):
    """Condition that a key mask allows key k, which is where `valid` [Nk] is True."""

    valid: Tensor
    convex = True

    @once
    def below(self) -> Tensor:
        """The number of allowed keys before each key, and of all keys: int64 [Nk + 1]."""
        return pad(self.valid.cumsum(0), (1, 0))

    def status(self, pairs: TilePairs) -> Tensor:
        _, _, first, last = pairs.edges()
        most = len(self.below) - 1
        count = self.below[(last + 1).clamp(0, most)] - self.below[first.clamp(0, most)]
        return (count > 0).to(torch.int8) + (count == last - first + 1).to(torch.int8)

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        return [pairs.edges()[2]]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        first, last = ((self.below <= x).sum() - 1 for x in (0, self.below[-1] - 1))
        begin, end = origin.start + first, origin.start + last
        return spans_of_positions(queries, keys, torch.arange(len(queries)), begin, end)

    def attending(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        change = pad(self.valid.to(torch.int8), (1, 1)).diff()
        first, stop = (torch.nonzero(change == sign)[:, 0] for sign in (1, -1))
        row, number = expand_counts(torch.full((len(queries),), len(first)))
        begin, end = origin.start[row] + first[number], origin.start[row] + stop[number] - 1
        return spans_of_positions(queries, keys, row, begin, end)

    def queries(self, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return None, torch.where(self.below[k + 1] > self.below[k], FOREVER, -1)


@dataclass(frozen=True)
class Congruent(Condition):
    """Condition (p - k) % modulus == 0 on query position p and key position k."""

    modulus: int

    def status(self, pairs: TilePairs) -> Tensor:
        if pairs.q.step % self.modulus:
            return torch.full_like(pairs.q.start, VARIES, dtype=torch.int8)
        return (self.signature(pairs)[0] == 0).to(torch.int8) * FULL

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        return [(pairs.q.start - pairs.k.start) % self.modulus]

    def before(self, k: Tensor, x: Tensor, frame: Frame) -> Tensor:
        return x - _remainder(x - k, self.modulus)

    def future(self, stop: int) -> Repeats:
        return Repeats(0, self.modulus)

    def shifted(self) -> Repeats:
        return Repeats(0, 1)


@dataclass(frozen=True)
class OnGrid(Condition):
    """Condition x % segment % rate == residue; x is the query (if `of_query`) or key position."""

    of_query: bool
    segment: int
    rate: int
    residue: int

    def _place(self, pairs: TilePairs) -> tuple[Tensor, Tensor]:
        """Returns each tile's first place in its segment, and whether the tile ends there, too."""
        tile = pairs.q if self.of_query else pairs.k
        first = (tile.start - pairs.origin.start) % self.segment
        return first, first + tile.last - tile.start < self.segment

    def status(self, pairs: TilePairs) -> Tensor:
        first, inside = self._place(pairs)
        # whether all positions of a tile leave one remainder modulo `rate`
        fixed = torch.zeros_like(inside)
        if pairs.q.step % self.rate == 0:
            fixed = inside | (self.segment % self.rate == 0)
        hit = (first % self.rate == self.residue).to(torch.int8) * FULL
        return torch.where(fixed, hit, VARIES).to(torch.int8)

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        first, inside = self._place(pairs)
        return [torch.where(inside, first % self.rate, first), inside.long()]

    @property
    def convex(self) -> bool:  # type: ignore[override]
        return not self.of_query

    def queries(self, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hit = _remainder(_remainder(k, self.segment), self.rate) == self.residue
        return None, torch.where(hit, FOREVER, -1)

    def before(self, k: Tensor, x: Tensor, frame: Frame) -> Tensor:
        if not self.of_query:
            return super().before(k, x, frame)
        if self.residue >= self.segment:
            return torch.full_like(x, -1)
        # In each segment, counted from its start, end - 1 is the last position on the grid.
        end = self.segment - (self.segment - 1 - self.residue) % self.rate
        place = _remainder(x, self.segment) - self.residue
        near, far = _remainder(place, self.rate), place + (self.residue + 1 + self.segment - end)
        return x - torch.where(place >= 0, near, far)

    def future(self, stop: int) -> Repeats:
        return Repeats(0, self.segment if self.of_query else 1)

    def shifted(self) -> Repeats:
        return Repeats(0, self.segment)


@dataclass(frozen=True)
class SameSegment(Condition):
    """Condition that p // length == k // length: query and key lie in one segment."""

    length: int
    convex = True

    def status(self, pairs: TilePairs) -> Tensor:
        q0, q1, k0, k1 = (x // self.length for x in pairs.edges())
        meet = (q0 <= k1) & (k0 <= q1)
        return meet.to(torch.int8) + (meet & (q0 == q1) & (k0 == k1)).to(torch.int8)

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        q0, _, k0, _ = pairs.edges()
        return [q0 % self.length, k0 % self.length, q0 // self.length - k0 // self.length]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        first, last = ((x - origin.start) // self.length for x in (queries.start, queries.last))
        begin, end = first * self.length, (last + 1) * self.length - 1
        rows = torch.arange(len(queries))
        return spans_of_positions(queries, keys, rows, origin.start + begin, origin.start + end)

    attending = candidates  # exact for tiles of one token

    def queries(self, k: Tensor) -> tuple[Tensor, Tensor]:
        begin = k - _remainder(k, self.length)
        return begin, begin + (self.length - 1)

    def future(self, stop: int) -> Repeats:
        return Repeats(-(-stop // self.length) * self.length, 1, empty=True)

    def shifted(self) -> Repeats:
        return Repeats(0, self.length)


@dataclass(frozen=True, eq=False)
class SameDocument(Condition):
    """Condition that both positions lie in one document d: in [starts[d], starts[d + 1])."""

    starts: Tensor
    convex = True

    def document_of(self, position: Tensor) -> Tensor:
        """Returns the document index; -1 before the first one, len(starts) - 1 past the last."""
        return torch.searchsorted(self.starts, position, right=True) - 1

    def status(self, pairs: TilePairs) -> Tensor:
        q0, q1, k0, k1 = map(self.document_of, pairs.edges())
        meet = (q0 <= k1) & (k0 <= q1)
        one = meet & (q0 == q1) & (k0 == k1) & (q0 >= 0) & (q0 < len(self.starts) - 1)
        return meet.to(torch.int8) + one.to(torch.int8)

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        q0, q1, k0, k1 = map(self.document_of, pairs.edges())
        low, high = torch.maximum(q0, k0), torch.minimum(q1, k1)  # documents that both tiles touch
        begin = self.starts[low.clamp(min=0)] + pairs.origin.start
        end = self.starts[(low + 1).clamp(max=len(self.starts) - 1)] + pairs.origin.start
        sides = [
            ((edge - tile.start).clamp(min=0) + tile.step - 1) // tile.step
            for tile in (pairs.q, pairs.k)
            for edge in (begin, torch.minimum(end, tile.last + tile.step))
        ]
        # Pairs of tiles that share several documents get unique values, so they share no bitmap.
        several = torch.where(high > low, 1 + torch.arange(len(low)), 0)
        return [several, *(torch.where(high > low, 0, side) for side in sides)]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        first, last = (self.document_of(x - origin.start) for x in (queries.start, queries.last))
        most = len(self.starts) - 1
        begin = self.starts[first.clamp(0, most)] + origin.start
        end = self.starts[(last + 1).clamp(0, most)] + origin.start
        return spans_of_positions(queries, keys, torch.arange(len(queries)), begin, end - 1)

    attending = candidates  # exact for tiles of one token

    def queries(self, k: Tensor) -> tuple[Tensor, Tensor]:
        number = self.document_of(k)
        return self.starts[number], self.starts[number + 1] - 1


def with_any_key(queries: Axis, keys: Axis, rows: Tensor) -> Spans:
    """Pairs the query tiles with indices `rows` with every key tile of the same `residue`."""
    return spans_of_positions(queries, keys, rows, rows * 0, rows * 0 + _end(keys))


def _end(axis: Axis) -> int:
    return int(axis.stop.max()) if len(axis) else 0


def _remainder(x: Tensor, modulus: int) -> Tensor:
    """Returns x % modulus; a bit mask is ten times as fast as a division for powers of two."""
    return x % modulus if modulus & (modulus - 1) else x & (modulus - 1)
