"""What a mask says about whole tiles: three-valued, without looking at its pairs one by one.

A mask is lowered to a few kinds of condition on (query position, key position). Each kind knows,
for many pairs of tiles
at once: `status` (no pair holds, all hold, or it varies), `signature` (integers such that two
varying pairs of tiles with equal signatures hold at the same cells) and `candidates` (the pairs of
tiles where any pair may hold). And, or and not combine them by Kleene logic. The cells themselves
are always taken from the mask's own definition (`Mask.holds`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .algebra import And, Frame, Mask, Or
from .block_patterns import BlockMask
from .patterns import Causal, Dilated, Documents, Full, GlobalTokens, Packed, SlidingWindow
from .ragged import expand_counts
from .tiles import Axis, Spans, spans_of_positions

EMPTY, VARIES, FULL = 0, 1, 2
_MOST_SUB_BLOCKS = (
    1024  # beyond this many mask blocks per pair of tiles, the cells are evaluated instead
)


@dataclass(frozen=True)
class Not(Mask):
    """The complement; only for taking from a pass what an earlier pass has."""

    mask: Mask

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return ~self.mask.holds(p, k, frame)

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        return Not(self.mask.at(batch, head, frame))

    def num_batches(self) -> int | None:
        return self.mask.num_batches()

    def num_tables(self, frame: Frame) -> int:
        return self.mask.num_tables(frame)


class Origin(NamedTuple):
    """Where positions are counted from and the keys there are: per tile, its document's start and
    length.
    """

    start: Tensor
    kv_len: Tensor

    @classmethod
    def of_sequence(cls, tiles: int, kv_len: int) -> "Origin":
        """Positions of the whole sequence, for as many tiles."""
        return cls(torch.zeros(tiles, dtype=torch.int64), torch.full((tiles,), kv_len))


class Condition:
    """One kind of condition, on p - origin.start and k - origin.start."""

    def status(self, q: Axis, k: Axis, origin: Origin) -> Tensor:
        """EMPTY, VARIES or FULL for each pair (q[i], k[i]) of tiles."""
        raise NotImplementedError

    def signature(self, q: Axis, k: Axis, origin: Origin) -> list[Tensor]:
        """Integer columns that fix the cells of pairs of equal step, for pairs whose status is
        VARIES.
        """
        raise NotImplementedError

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        """A superset of the pairs of tiles that are not EMPTY; `origin` is per query tile."""
        rows = torch.arange(len(queries))
        return spans_of_positions(queries, keys, rows, rows * 0, rows * 0 + _end(keys))


@dataclass(frozen=True)
class Linear(Condition):
    """a * p + b * k >= c."""

    a: int
    b: int
    c: int

    def status(self, q: Axis, k: Axis, origin: Origin) -> Tensor:
        shift = (self.a + self.b) * origin.start
        low = self._value(q.start, q.last, k.start, k.last, torch.minimum) - shift
        high = self._value(q.start, q.last, k.start, k.last, torch.maximum) - shift
        return (low >= self.c).to(torch.int8) + (high >= self.c)

    def _value(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor, extreme: object) -> Tensor:
        return extreme(self.a * q0, self.a * q1) + extreme(self.b * k0, self.b * k1)  # type: ignore[operator]

    def signature(self, q: Axis, k: Axis, origin: Origin) -> list[Tensor]:
        return [self.a * (q.start - origin.start) + self.b * (k.start - origin.start)]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        rows = torch.arange(len(queries))
        far = rows * 0 + _end(keys)
        room = (
            torch.maximum(
                self.a * (queries.start - origin.start), self.a * (queries.last - origin.start)
            )
            - self.c
        )
        if self.b > 0:  # k >= origin.start - room
            return spans_of_positions(queries, keys, rows, origin.start - room, far)
        if self.b < 0:  # k <= origin.start + room
            return spans_of_positions(queries, keys, rows, rows * 0, origin.start + room)
        return spans_of_positions(
            queries, keys, rows[room >= 0], rows[room >= 0] * 0, far[room >= 0]
        )


@dataclass(frozen=True)
class Congruent(Condition):
    """(p - k) % modulus == 0."""

    modulus: int

    def status(self, q: Axis, k: Axis, origin: Origin) -> Tensor:
        if q.step % self.modulus:
            return torch.full_like(q.start, VARIES, dtype=torch.int8)
        return ((q.start - k.start) % self.modulus == 0).to(torch.int8) * FULL

    def signature(self, q: Axis, k: Axis, origin: Origin) -> list[Tensor]:
        return [(q.start - k.start) % self.modulus]


@dataclass(frozen=True)
class OnGrid(Condition):
    """x % segment % rate == residue, x the query (`of_query`) or the key position."""

    of_query: bool
    segment: int
    rate: int
    residue: int

    def _place(self, q: Axis, k: Axis, origin: Origin) -> tuple[Tensor, Tensor, Tensor]:
        tile = q if self.of_query else k
        first = (tile.start - origin.start) % self.segment
        return tile.step + 0 * first, first, first + tile.last - tile.start < self.segment

    def status(self, q: Axis, k: Axis, origin: Origin) -> Tensor:
        step, first, inside = self._place(q, k, origin)
        fixed = inside & (step % self.rate == 0)  # every position has the first one's residue
        if self.segment % self.rate == 0:
            fixed = fixed | (step % self.rate == 0)
        hit = (first % self.rate == self.residue).to(torch.int8) * FULL
        return torch.where(fixed, hit, VARIES).to(torch.int8)

    def signature(self, q: Axis, k: Axis, origin: Origin) -> list[Tensor]:
        _, first, inside = self._place(q, k, origin)
        return [torch.where(inside, first % self.rate, first), inside.long()]


@dataclass(frozen=True, eq=False)
class SameGroup(Condition):
    """p and k lie in one group; group g holds [starts[g], starts[g + 1]), the last one is closed
    by `starts[-1]`.
    """

    starts: Tensor

    def _group(self, position: Tensor) -> Tensor:
        return torch.searchsorted(self.starts, position, right=True) - 1

    def _groups(self, q: Axis, k: Axis, origin: Origin) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return tuple(self._group(x - origin.start) for x in (q.start, q.last, k.start, k.last))  # type: ignore[return-value]

    def status(self, q: Axis, k: Axis, origin: Origin) -> Tensor:
        q0, q1, k0, k1 = self._groups(q, k, origin)
        meet = (q0 <= k1) & (k0 <= q1)
        one = meet & (q0 == q1) & (k0 == k1) & (q0 >= 0) & (q0 < len(self.starts) - 1)
        return meet.to(torch.int8) + one.to(torch.int8)

    def signature(self, q: Axis, k: Axis, origin: Origin) -> list[Tensor]:
        """Which rows and columns the one group that both touch spans; a number of its own where
        they share several.
        """
        q0, q1, k0, k1 = self._groups(q, k, origin)
        low, high = torch.maximum(q0, k0), torch.minimum(q1, k1)
        begin = self.starts[low.clamp(min=0)] + origin.start
        end = self.starts[(low + 1).clamp(max=len(self.starts) - 1)] + origin.start
        sides = [
            ((edge - tile.start).clamp(min=0) + tile.step - 1) // tile.step
            for tile in (q, k)
            for edge in (begin, torch.minimum(end, tile.last + tile.step))
        ]
        several = torch.where(high > low, 1 + torch.arange(len(low)), 0)
        return [several, *(torch.where(high > low, 0, side) for side in sides)]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        first, last = (
            self._group(queries.start - origin.start),
            self._group(queries.last - origin.start),
        )
        begin = self.starts[first.clamp(0, len(self.starts) - 1)] + origin.start
        end = self.starts[(last + 1).clamp(0, len(self.starts) - 1)] + origin.start
        return spans_of_positions(queries, keys, torch.arange(len(queries)), begin, end - 1)


@dataclass(frozen=True, eq=False)
class InBlocks(Condition):
    """A block mask: looked up at every pair of its blocks that a pair of tiles spans."""

    mask: BlockMask

    def _blocks(self, tile: Axis, origin: Origin) -> tuple[Tensor, Tensor]:
        size = self.mask.block_size
        return (tile.start - origin.start) // size, (tile.last - origin.start) // size

    def _cells(self, q: Axis, k: Axis, origin: Origin) -> tuple[Tensor, Tensor] | None:
        """(holds, valid) of each pair's mask blocks, [sub-blocks, pairs]; None where they are too
        many to list.
        """
        (q0, q1), (k0, k1) = self._blocks(q, origin), self._blocks(k, origin)
        if not len(q0):
            return None
        rows, columns = int((q1 - q0).max()) + 1, int((k1 - k0).max()) + 1
        if rows * columns > _MOST_SUB_BLOCKS:
            return None
        at = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        q_block, k_block = q0 + at[:, :1], k0 + at[:, 1:]
        valid = (q_block <= q1) & (k_block <= k1)
        holds = self.mask.blocks_hold(q_block.clamp(min=0), k_block.clamp(min=0), origin.kv_len)
        return holds & (q_block >= 0) & valid, valid

    def status(self, q: Axis, k: Axis, origin: Origin) -> Tensor:
        cells = self._cells(q, k, origin)
        if cells is None:
            return torch.full_like(q.start, VARIES, dtype=torch.int8)
        holds, valid = cells
        return holds.any(0).to(torch.int8) + (holds | ~valid).all(0).to(torch.int8)

    def signature(self, q: Axis, k: Axis, origin: Origin) -> list[Tensor]:
        cells = self._cells(q, k, origin)
        if cells is None:
            return [torch.arange(len(q))]
        size, holds = self.mask.block_size, cells[0]
        words = [
            (word.long() << torch.arange(len(word))[:, None]).sum(0) for word in holds.split(62)
        ]
        return [(q.start - origin.start) % size, (k.start - origin.start) % size, *words]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        first, last = self._blocks(queries, origin)
        first = first.clamp(min=0)
        count = (last - first + 1).clamp(min=0)
        row, number = expand_counts(count)
        block = first[row] + number
        index, low, high = self.mask.spans(block, origin.kv_len[row])
        size, row = self.mask.block_size, row[index]
        return spans_of_positions(
            queries,
            keys,
            row,
            origin.start[row] + low * size,
            origin.start[row] + high * size + size - 1,
        )


@dataclass(frozen=True, eq=False)
class InCells(Condition):
    """A mask that nothing is known of but its cells."""

    def status(self, q: Axis, k: Axis, origin: Origin) -> Tensor:
        return torch.full_like(q.start, VARIES, dtype=torch.int8)

    def signature(self, q: Axis, k: Axis, origin: Origin) -> list[Tensor]:
        return [torch.arange(len(q))]


@dataclass(frozen=True, eq=False)
class PerDocument(Condition):
    """`inner`, with positions counted from the start of the document that holds both tiles."""

    same: SameGroup
    inner: Condition

    def _inside(self, first: Tensor, last: Tensor, origin: Origin) -> tuple[Tensor, Origin]:
        """Whether first and last are in one document, and that document as an origin."""
        starts = self.same.starts
        group = self.same._group(first - origin.start)
        inside = (group == self.same._group(last - origin.start)) & (group < len(starts) - 1)
        group = group.clamp(0, max(0, len(starts) - 2))
        start, end = starts[group], starts[(group + 1).clamp(max=len(starts) - 1)]
        return inside & (group >= 0), Origin(origin.start + start, end - start)

    def _pairs_inside(self, q: Axis, k: Axis, origin: Origin) -> tuple[Tensor, Origin]:
        return self._inside(torch.minimum(q.start, k.start), torch.maximum(q.last, k.last), origin)

    def status(self, q: Axis, k: Axis, origin: Origin) -> Tensor:
        inside, document = self._pairs_inside(q, k, origin)
        crossing = self.same.status(q, k, origin).clamp(max=VARIES)
        return torch.where(inside, self.inner.status(q, k, document), crossing)

    def signature(self, q: Axis, k: Axis, origin: Origin) -> list[Tensor]:
        inside, document = self._pairs_inside(q, k, origin)
        columns = self.inner.signature(q, k, document)
        several = torch.where(inside, 0, 1 + torch.arange(len(inside)))
        return [several, *(torch.where(inside, column, 0) for column in columns)]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        inside, document = self._inside(queries.start, queries.last, origin)
        crossing = torch.nonzero(~inside)[:, 0]
        anywhere = spans_of_positions(
            queries, keys, crossing, crossing * 0, crossing * 0 + _end(keys)
        )
        found = self.inner.candidates(queries, keys, document) | anywhere
        return found & self.same.candidates(queries, keys, origin)


@dataclass(frozen=True, eq=False)
class _Joint(Condition):
    """Several conditions joined; a part whose status does not vary adds nothing to the
    signature.
    """

    parts: tuple[Condition, ...]

    def signature(self, q: Axis, k: Axis, origin: Origin) -> list[Tensor]:
        columns = []
        for part in self.parts:
            varies = part.status(q, k, origin) == VARIES
            columns.append(varies.long())
            if varies.any():
                columns += [torch.where(varies, x, 0) for x in part.signature(q, k, origin)]
        return columns


class All(_Joint):
    """Every part holds."""

    def status(self, q: Axis, k: Axis, origin: Origin) -> Tensor:
        status = self.parts[0].status(q, k, origin)
        for part in self.parts[1:]:
            status = torch.minimum(status, part.status(q, k, origin))
        return status

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        spans = self.parts[0].candidates(queries, keys, origin)
        for part in self.parts[1:]:
            spans = spans & part.candidates(queries, keys, origin)
        return spans


class Any(_Joint):
    """Some part holds."""

    def status(self, q: Axis, k: Axis, origin: Origin) -> Tensor:
        status = self.parts[0].status(q, k, origin)
        for part in self.parts[1:]:
            status = torch.maximum(status, part.status(q, k, origin))
        return status

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        spans = self.parts[0].candidates(queries, keys, origin)
        for part in self.parts[1:]:
            spans = spans | part.candidates(queries, keys, origin)
        return spans


@dataclass(frozen=True, eq=False)
class Negated(Condition):
    """The part does not hold."""

    part: Condition

    def status(self, q: Axis, k: Axis, origin: Origin) -> Tensor:
        return FULL - self.part.status(q, k, origin)

    def signature(self, q: Axis, k: Axis, origin: Origin) -> list[Tensor]:
        return self.part.signature(q, k, origin)


def condition(mask: Mask, frame: Frame) -> Condition:
    """Lowers a mask that is free of heads and batch (`Mask.at`)."""
    match mask:
        case Full():
            return Linear(0, 0, 0)
        case Causal():
            return Linear(1, -1, 0)
        case SlidingWindow(left, right, dilation):
            parts: list[Condition] = [Congruent(dilation)] if dilation > 1 else []
            parts += [] if left is None else [Linear(-1, 1, -left)]
            parts += [] if right is None else [Linear(1, -1, -right)]
            return All(tuple(parts)) if parts else Linear(0, 0, 0)
        case GlobalTokens(count, rows, columns):
            parts = [All((Linear(1, 0, 0), Linear(-1, 0, 1 - count)))] if rows else []
            parts += [Linear(0, -1, 1 - count)] if columns else []
            return Any(tuple(parts)) if parts else Linear(0, 0, 1)
        case Dilated(length, rate, _):
            end = max(frame.kv_len, frame.q_start + frame.q_len, 1)
            length_here = min(length, end)
            same = SameGroup(torch.arange(0, end + length_here, length_here))
            residue = mask.offset_of(0, 1)
            grids = [OnGrid(of_query, length, rate, residue) for of_query in (True, False)]
            return All((same, *grids)) if rate > 1 else same
        case Documents():
            return SameGroup(_starts(mask))
        case Packed():
            return PerDocument(SameGroup(_starts(mask.documents)), condition(mask.pattern, frame))
        case And(masks):
            return All(tuple(condition(part, frame) for part in masks))
        case Or(masks):
            return Any(tuple(condition(part, frame) for part in masks))
        case Not(part):
            return Negated(condition(part, frame))
        case BlockMask():
            return InBlocks(mask)
    return InCells()


def _starts(documents: Documents) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int64), documents.ends()))


def _end(axis: Axis) -> int:
    return int(axis.stop.max()) if len(axis) else 0
