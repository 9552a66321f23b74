"""Conditions on whole tiles: three-valued, without evaluating a mask pair by pair.

A mask is lowered (`lowering`) to a few kinds of condition on (query position, key position). Each
kind computes three things for many pairs of tiles at once. `status`: no pair holds, all hold, or it
varies. `signature`: integers; two varying pairs of tiles with equal signatures hold at the same
cells. `candidates`: the pairs of tiles where any pair may hold. And, or and not combine conditions
by Kleene logic. The cells always come from the mask's own definition (`Mask.holds`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..patterns.algebra import Frame, Mask
from ..patterns.blocks import BlockwiseMask
from ..rows import expand_counts
from .tiles import Axis, Origin, Spans, TilePairs, spans_of_positions

EMPTY, VARIES, FULL = 0, 1, 2
# Where a pair of tiles spans more mask blocks than this, its cells are evaluated instead.
_MOST_SUB_BLOCKS = 1024


class Condition:
    """Condition on p - origin.start and k - origin.start, p a query and k a key position."""

    def status(self, pairs: TilePairs) -> Tensor:
        """EMPTY, VARIES or FULL for each pair of tiles."""
        raise NotImplementedError

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        """Integer columns; VARIES tile pairs of one step with equal columns have equal cells."""
        raise NotImplementedError

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        """A superset of the pairs of tiles that are not EMPTY; `origin` is per query tile."""
        return _with_any_key(queries, keys, torch.arange(len(queries)))


@dataclass(frozen=True)
class Linear(Condition):
    """a * p + b * k >= c."""

    a: int
    b: int
    c: int

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
            most = origin.start + room // -self.b
            return spans_of_positions(queries, keys, rows, rows * 0, most)
        return _with_any_key(queries, keys, rows[room >= 0])


@dataclass(frozen=True, eq=False)
class InKeys(Condition):
    """valid[k]; `before[k]` counts the valid keys below k, [kv_len + 1]."""

    before: Tensor

    @classmethod
    def of(cls, valid: Tensor) -> "InKeys":
        return cls(torch.nn.functional.pad(valid.cumsum(0), (1, 0)))

    def status(self, pairs: TilePairs) -> Tensor:
        _, _, first, last = pairs.edges()
        most = len(self.before) - 1
        held = self.before[(last + 1).clamp(0, most)] - self.before[first.clamp(0, most)]
        return (held > 0).to(torch.int8) + (held == last - first + 1).to(torch.int8)

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        return [pairs.edges()[2]]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        """Tiles between the first and the last valid key; holes are rarely whole tiles."""
        valid = torch.nonzero(self.before.diff())[:, 0]
        rows = torch.arange(len(queries))
        if not len(valid):
            return _with_any_key(queries, keys, rows[:0])
        begin, end = origin.start + valid[0], origin.start + valid[-1]
        return spans_of_positions(queries, keys, rows, begin, end)


@dataclass(frozen=True)
class Congruent(Condition):
    """(p - k) % modulus == 0."""

    modulus: int

    def status(self, pairs: TilePairs) -> Tensor:
        if pairs.q.step % self.modulus:
            return torch.full_like(pairs.q.start, VARIES, dtype=torch.int8)
        return (self.signature(pairs)[0] == 0).to(torch.int8) * FULL

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        return [(pairs.q.start - pairs.k.start) % self.modulus]


@dataclass(frozen=True)
class OnGrid(Condition):
    """x % segment % rate == residue, x the query (`of_query`) or the key position."""

    of_query: bool
    segment: int
    rate: int
    residue: int

    def _place(self, pairs: TilePairs) -> tuple[Tensor, Tensor]:
        """Place of a tile's first position in its segment, and whether the tile ends there too."""
        tile = pairs.q if self.of_query else pairs.k
        first = (tile.start - pairs.origin.start) % self.segment
        return first, first + tile.last - tile.start < self.segment

    def status(self, pairs: TilePairs) -> Tensor:
        first, inside = self._place(pairs)
        fixed = torch.zeros_like(inside)  # whether all positions share the first one's residue
        if pairs.q.step % self.rate == 0:
            fixed = inside | (self.segment % self.rate == 0)
        hit = (first % self.rate == self.residue).to(torch.int8) * FULL
        return torch.where(fixed, hit, VARIES).to(torch.int8)

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        first, inside = self._place(pairs)
        return [torch.where(inside, first % self.rate, first), inside.long()]


@dataclass(frozen=True)
class SameSegment(Condition):
    """p and k lie in one of the segments of equal length that begin at 0."""

    length: int

    def status(self, pairs: TilePairs) -> Tensor:
        q0, q1, k0, k1 = (x // self.length for x in pairs.edges())
        meet = (q0 <= k1) & (k0 <= q1)
        one = meet & (q0 == q1) & (k0 == k1)
        return meet.to(torch.int8) + one.to(torch.int8)

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        q0, _, k0, _ = pairs.edges()
        apart = q0 // self.length - k0 // self.length
        return [q0 % self.length, k0 % self.length, apart]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        first, last = ((x - origin.start) // self.length for x in (queries.start, queries.last))
        begin, end = first * self.length, (last + 1) * self.length - 1
        rows = torch.arange(len(queries))
        return spans_of_positions(queries, keys, rows, origin.start + begin, origin.start + end)


@dataclass(frozen=True, eq=False)
class SameDocument(Condition):
    """p and k lie in one document; document d holds [starts[d], starts[d + 1])."""

    starts: Tensor

    def document_of(self, position: Tensor) -> Tensor:
        """Document number; -1 before the first document, len(starts) - 1 past the last."""
        return torch.searchsorted(self.starts, position, right=True) - 1

    def _documents(self, pairs: TilePairs) -> tuple[Tensor, ...]:
        return tuple(self.document_of(x) for x in pairs.edges())

    def status(self, pairs: TilePairs) -> Tensor:
        q0, q1, k0, k1 = self._documents(pairs)
        meet = (q0 <= k1) & (k0 <= q1)
        one = meet & (q0 == q1) & (k0 == k1) & (q0 >= 0) & (q0 < len(self.starts) - 1)
        return meet.to(torch.int8) + one.to(torch.int8)

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        """Rows and columns of the one document that both tiles touch.

        Pairs of tiles that touch several common documents get a unique number instead.
        """
        q0, q1, k0, k1 = self._documents(pairs)
        low, high = torch.maximum(q0, k0), torch.minimum(q1, k1)
        begin = self.starts[low.clamp(min=0)] + pairs.origin.start
        end = self.starts[(low + 1).clamp(max=len(self.starts) - 1)] + pairs.origin.start
        sides = [
            ((edge - tile.start).clamp(min=0) + tile.step - 1) // tile.step
            for tile in (pairs.q, pairs.k)
            for edge in (begin, torch.minimum(end, tile.last + tile.step))
        ]
        several = torch.where(high > low, 1 + torch.arange(len(low)), 0)
        return [several, *(torch.where(high > low, 0, side) for side in sides)]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        first, last = (self.document_of(x - origin.start) for x in (queries.start, queries.last))
        most = len(self.starts) - 1
        begin = self.starts[first.clamp(0, most)] + origin.start
        end = self.starts[(last + 1).clamp(0, most)] + origin.start
        return spans_of_positions(queries, keys, torch.arange(len(queries)), begin, end - 1)


@dataclass(frozen=True, eq=False)
class InBlocks(Condition):
    """A blockwise mask, looked up for every pair of mask blocks that a pair of tiles spans."""

    mask: BlockwiseMask

    def _sides(self, pairs: TilePairs) -> list[tuple[Tensor, Tensor, int]]:
        """First and last position of queries and of keys, and the size of their blocks."""
        q0, q1, k0, k1 = pairs.edges()
        return [(q0, q1, self.mask.row_size), (k0, k1, self.mask.block_size)]

    def _cells(self, pairs: TilePairs) -> tuple[Tensor, Tensor] | None:
        """(holds, valid) of each pair's mask blocks, [sub-blocks, pairs]; None if too many."""
        (q0, q1), (k0, k1) = (
            (first // size, last // size) for first, last, size in self._sides(pairs)
        )
        if not len(q0):
            return None
        rows, columns = (max(0, int(x.max())) + 1 for x in (q1 - q0, k1 - k0))  # tiles may be empty
        if rows * columns > _MOST_SUB_BLOCKS:
            return None
        at = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        q_block, k_block = q0 + at[:, :1], k0 + at[:, 1:]
        valid = (q_block <= q1) & (k_block <= k1)
        kv_len = pairs.origin.kv_len
        holds = self.mask.blocks_hold(q_block.clamp(min=0), k_block.clamp(min=0), kv_len)
        return holds & (q_block >= 0) & valid, valid

    def status(self, pairs: TilePairs) -> Tensor:
        if (cells := self._cells(pairs)) is None:
            return torch.full_like(pairs.q.start, VARIES, dtype=torch.int8)
        holds, valid = cells
        return holds.any(0).to(torch.int8) + (holds | ~valid).all(0).to(torch.int8)

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        if (cells := self._cells(pairs)) is None:
            if not self.mask.by_distance:
                return [torch.arange(len(pairs))]
            (q, _, of_query), (k, _, size) = self._sides(pairs)
            return [q % of_query, k % size, q // of_query - k // size, q.clamp(max=0)]
        words = [
            (word.long() << torch.arange(len(word))[:, None]).sum(0) for word in cells[0].split(62)
        ]
        return [*(first % size for first, _, size in self._sides(pairs)), *words]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        size, of_query = self.mask.block_size, self.mask.row_size
        first, last = ((x - origin.start) // of_query for x in (queries.start, queries.last))
        first = first.clamp(min=0)
        row, number = expand_counts((last - first + 1).clamp(min=0))
        index, low, high = self.mask.spans(first[row] + number, origin.kv_len[row])
        row, most = row[index], (1 << 62) // size
        low, high = low.clamp(-most, most), high.clamp(-most, most)  # products then fit in 64 bits
        begin, end = origin.start[row] + low * size, origin.start[row] + high * size + size - 1
        return spans_of_positions(queries, keys, row, begin, end)


@dataclass(frozen=True, eq=False)
class Declared(Condition):
    """A custom mask, by its own `Mask.status` and `Mask.candidates` where it defines them.

    Attributes:
        in_document: whether each origin is a document, which is a whole sequence to the mask.
    """

    mask: Mask
    frame: Frame
    in_document: bool

    def _frames(self, origin: Origin) -> Iterable[tuple[Tensor, Frame]]:
        """(tile indices, frame) for each distinct frame: the sequence, or a length of document."""
        if self.in_document:
            return origin.frames(self.frame)
        return [(torch.arange(len(origin.start)), self.frame)]

    def status(self, pairs: TilePairs) -> Tensor:
        status = torch.full_like(pairs.q.start, VARIES, dtype=torch.int8)
        for which, frame in self._frames(pairs.origin):
            told = self.mask.status(*pairs[which].edges(), frame)
            if told is not None:
                status[which] = told.to(torch.int8)
        return status

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        return [torch.arange(len(pairs))]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        found = _with_any_key(queries, keys, torch.arange(0))
        for which, frame in self._frames(origin):
            start = origin.start[which]
            first, last = queries.start[which] - start, queries.last[which] - start
            reach = self.mask.candidates(first, last, frame)
            if reach is None:
                found = found | _with_any_key(queries, keys, which)
            else:
                low, high = (start + x for x in reach)
                found = found | spans_of_positions(queries, keys, which, low, high)
        return found


@dataclass(frozen=True, eq=False)
class PerDocument(Condition):
    """`inner`, with positions counted from the start of the document that holds both tiles."""

    same: SameDocument
    inner: Condition

    def _document(self, first: Tensor, last: Tensor, origin: Origin) -> tuple[Tensor, Origin]:
        """Whether first and last are in one document, and that document as an origin."""
        starts = self.same.starts
        number = self.same.document_of(first - origin.start)
        inside = (number == self.same.document_of(last - origin.start)) & (number < len(starts) - 1)
        place = number.clamp(0, max(0, len(starts) - 2))
        start, end = starts[place], starts[(place + 1).clamp(max=len(starts) - 1)]
        return inside & (number >= 0), Origin(origin.start + start, end - start, end - start)

    def _in_documents(self, pairs: TilePairs) -> tuple[Tensor, TilePairs]:
        q, k = pairs.q, pairs.k
        first, last = torch.minimum(q.start, k.start), torch.maximum(q.last, k.last)
        inside, document = self._document(first, last, pairs.origin)
        return inside, TilePairs(q, k, document)

    def status(self, pairs: TilePairs) -> Tensor:
        inside, in_document = self._in_documents(pairs)
        # Tiles that reach over several documents are VARIES if they share one of them, else EMPTY.
        return torch.where(inside, self.inner.status(in_document), self.same.status(pairs))

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        inside, in_document = self._in_documents(pairs)
        columns = self.inner.signature(in_document)
        several = torch.where(inside, 0, 1 + torch.arange(len(inside)))
        return [several, *(torch.where(inside, column, 0) for column in columns)]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        inside, document = self._document(queries.start, queries.last, origin)
        anywhere = _with_any_key(queries, keys, torch.nonzero(~inside)[:, 0])
        found = self.inner.candidates(queries, keys, document) | anywhere
        return found & self.same.candidates(queries, keys, origin)


@dataclass(frozen=True, eq=False)
class _Joint(Condition):
    """Several conditions joined; a part that does not vary adds nothing to the signature."""

    parts: tuple[Condition, ...]
    extreme: ClassVar[Any]  # joins the statuses of the parts
    join: ClassVar[Any]  # joins the candidates of the parts

    def status(self, pairs: TilePairs) -> Tensor:
        return reduce(type(self).extreme, (part.status(pairs) for part in self.parts))

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        columns = []
        for part in self.parts:
            varies = part.status(pairs) == VARIES
            columns.append(varies.long())
            if varies.any():
                columns += [torch.where(varies, x, 0) for x in part.signature(pairs)]
        return columns

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        spans = (part.candidates(queries, keys, origin) for part in self.parts)
        return reduce(type(self).join, spans)


class AllOf(_Joint):
    """Every part holds."""

    extreme = staticmethod(torch.minimum)
    join = Spans.__and__


class AnyOf(_Joint):
    """Some part holds."""

    extreme = staticmethod(torch.maximum)
    join = Spans.__or__


@dataclass(frozen=True, eq=False)
class Negated(Condition):
    """The part does not hold."""

    part: Condition

    def status(self, pairs: TilePairs) -> Tensor:
        return FULL - self.part.status(pairs)

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        return self.part.signature(pairs)


def _with_any_key(queries: Axis, keys: Axis, rows: Tensor) -> Spans:
    """Pairs of the given query tiles with all key tiles of their residue."""
    return spans_of_positions(queries, keys, rows, rows * 0, rows * 0 + _end(keys))


def _end(axis: Axis) -> int:
    return int(axis.stop.max()) if len(axis) else 0
