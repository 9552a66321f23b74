"""Conditions that contain others (and, or, not, per block, per document), and custom masks.

`&`, `|` and `-` follow Kleene logic: a part that is EMPTY or FULL may decide a tile pair alone.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ground.rows import expand_counts, number_rows
from ..patterns.algebra import Frame, Mask
from ..patterns.blocks import BlockwiseMask
from .leaves import EMPTY, FULL, VARIES, Condition, Repeats, SameDocument, with_any_key
from .tiles import Axis, Origin, Spans, TilePairs, spans_of_positions

_MOST_SUB_BLOCKS = 1024  # most pairs of mask blocks looked up per pair of tiles
_QUERIES_AT_A_TIME = 64  # queries per key evaluated in one call of a custom mask
_LEAPS = (1 << 14, 1 << 10)  # sizes of query ranges that `Declared.before` may skip at once


class _Joint(Condition):
    """Base of `AllOf` and `AnyOf`: several conditions and the operations that join them."""

    extreme: ClassVar[Any]  # minimum or maximum; it joins the statuses of the parts
    join: ClassVar[Any]  # intersection or union; it joins the candidates of the parts

    def __init__(self, parts: Iterable[Condition]) -> None:
        self.parts = tuple(parts)
        self.settled = all(part.settled for part in self.parts)

    def status(self, pairs: TilePairs) -> Tensor:
        return reduce(type(self).extreme, (part.status(pairs) for part in self.parts))

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        columns = []
        for part in self.parts:  # where a part is EMPTY or FULL, its columns are 0
            varies = part.status(pairs) == VARIES
            columns.append(varies.long())
            if varies.any():
                columns += [torch.where(varies, x, 0) for x in part.signature(pairs)]
        return columns

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        spans = (part.candidates(queries, keys, origin) for part in self.parts)
        return reduce(type(self).join, spans)

    def attending(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        spans = (part.attending(queries, keys, origin) for part in self.parts)
        return reduce(type(self).join, spans)

    def future(self, stop: int) -> Repeats | None:
        return _together([part.future(stop) for part in self.parts])

    def shifted(self) -> Repeats | None:
        return _together([part.shifted() for part in self.parts])


class AllOf(_Joint):
    """Condition that all its parts hold, as for `a & b`."""

    extreme = staticmethod(torch.minimum)
    join = Spans.__and__

    def __init__(self, parts: Iterable[Condition]) -> None:
        super().__init__(parts)
        self.moving = [part for part in self.parts if not part.convex]
        self.convex = not self.moving
        # `before` asks the parts in `moving` (not convex) one after the other. With several, an
        # earlier one may exclude the query that a later one finds: then `before` is not exact.
        self.settled = self.settled and len(self.moving) <= 1

    def queries(self, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
        edges = [part.queries(k) for part in self.parts if part.convex]
        firsts = [first for first, _ in edges if first is not None]
        lasts = [last for _, last in edges if last is not None]
        first = reduce(torch.maximum, firsts) if firsts else None
        return first, reduce(torch.minimum, lasts) if lasts else None

    def future(self, stop: int) -> Repeats | None:
        futures = [part.future(stop) for part in self.parts]
        ends = [repeats for repeats in futures if repeats and repeats.empty]
        return min(ends) if ends else _together(futures)


class AnyOf(_Joint):
    """Condition that at least one of its parts holds, as for `a | b`."""

    extreme = staticmethod(torch.maximum)
    join = Spans.__or__

    def before(self, k: Tensor, x: Tensor, frame: Frame) -> Tensor:
        return reduce(torch.maximum, (part.before(k, x, frame) for part in self.parts))


@dataclass(frozen=True, eq=False)
class Negated(Condition):
    """Condition that its part does not hold, as for `Not(a)`."""

    part: Condition
    settled = False

    def status(self, pairs: TilePairs) -> Tensor:
        return FULL - self.part.status(pairs)

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        return self.part.signature(pairs)

    def attending(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        all_pairs = with_any_key(queries, keys, torch.arange(len(queries)))
        return all_pairs - self.part.attending(queries, keys, origin)

    def before(self, k: Tensor, x: Tensor, frame: Frame) -> Tensor:
        first = self.part.queries(k)[0] if self.part.convex else x
        below = torch.full_like(x, -1) if first is None else torch.minimum(first, x) - 1
        return torch.where(self.part.before(k, x, frame) == x, below, x)

    def future(self, stop: int) -> Repeats | None:
        repeats = self.part.future(stop)
        return repeats and Repeats(repeats.first, 1 if repeats.empty else repeats.period)

    def shifted(self) -> Repeats | None:
        return self.part.shifted()


@dataclass(frozen=True, eq=False)
class InBlocks(Condition):
    """Condition that a blockwise mask has the (query block, key block) of a pair of tokens."""

    mask: BlockwiseMask
    rule: Condition | None = None  # condition on block indices; None for tables and random blocks
    length: int | None = None  # number of keys; None if positions restart in each document
    # for each kv_len, the attending block pairs, which `_last_listed` fills in
    _listed: dict[int, Tensor] = field(default_factory=dict, init=False)

    def _sides(self, pairs: TilePairs) -> list[tuple[Tensor, Tensor, int]]:
        """Returns (first position, last position, mask block size): for queries, then for keys."""
        q0, q1, k0, k1 = pairs.edges()
        return [(q0, q1, self.mask.row_size), (k0, k1, self.mask.block_size)]

    def _cells(self, pairs: TilePairs) -> tuple[Tensor, Tensor] | None:
        """Returns which block pairs of the mask attend inside each pair of tiles, as bool tensors.

        Returns: two tensors, bool [block pairs, tile pairs]: whether a block pair attends, and
        whether it lies inside the tiles at all, since tiles have different numbers of blocks. None
        if a pair of tiles has more than `_MOST_SUB_BLOCKS` block pairs.
        """
        (q0, q1), (k0, k1) = ((low // n, high // n) for low, high, n in self._sides(pairs))
        if not len(q0):
            return None
        rows, columns = (max(0, int(x.max())) + 1 for x in (q1 - q0, k1 - k0))
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
            if self.rule is None:
                return torch.full_like(pairs.q.start, VARIES, dtype=torch.int8)
            blocks = [(first // size, last // size) for first, last, size in self._sides(pairs)]
            q, k = (
                Axis(step=1, residue=first * 0, start=first, stop=last + 1, last=last)
                for first, last in blocks
            )
            return self.rule.status(TilePairs.of_sequence(q, k, 0))
        holds, valid = cells
        return holds.any(0).to(torch.int8) + (holds | ~valid).all(0).to(torch.int8)

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        if (cells := self._cells(pairs)) is None:
            if not self.mask.by_distance:
                return [torch.arange(len(pairs))]
            (q, _, of_query), (k, _, size) = self._sides(pairs)
            return [q % of_query, k % size, q // of_query - k // size, q.clamp(max=0)]
        parts = cells[0].long().split(62)
        words = [(word << torch.arange(len(word))[:, None]).sum(0) for word in parts]
        return [*(first % size for first, _, size in self._sides(pairs)), *words]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        size, of_query = self.mask.block_size, self.mask.row_size
        first, last = ((x - origin.start) // of_query for x in (queries.start, queries.last))
        first = first.clamp(min=0)
        row, number = expand_counts((last - first + 1).clamp(min=0))
        index, low, high = self.mask.spans(first[row] + number, origin.kv_len[row])
        row, most = row[index], (1 << 62) // size
        low, high = low.clamp(-most, most), high.clamp(-most, most)  # so products fit in 64 bits
        begin, end = origin.start[row] + low * size, origin.start[row] + high * size + size - 1
        return spans_of_positions(queries, keys, row, begin, end)

    def attending(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        size, position = self.mask.block_size, queries.start - origin.start
        inside = torch.nonzero(position >= 0)[:, 0]
        if not len(inside):
            return with_any_key(queries, keys, inside)
        lengths = origin.kv_len[inside]
        kind, first = number_rows([position[inside] // self.mask.row_size, lengths])
        block, length = position[inside[first]] // self.mask.row_size, lengths[first]
        index, low, high = self.mask.spans(block, length)
        columns = int(length.max()) // size + 2  # one more than any block, to keep rows apart
        low, high = low.clamp(min=0), high.clamp(max=columns - 2)
        ranges = Spans(index * columns + low, index * columns + high + 1)
        count = torch.bincount(ranges.begin // columns, minlength=len(first))
        token, number = expand_counts(count[kind])
        span = (count.cumsum(0) - count)[kind[token]] + number
        row = inside[token]
        low, high = ranges.begin[span] % columns, (ranges.end[span] - 1) % columns
        begin, end = origin.start[row] + low * size, origin.start[row] + high * size + size - 1
        return spans_of_positions(queries, keys, row, begin, end)

    def before(self, k: Tensor, x: Tensor, frame: Frame) -> Tensor:
        size = self.mask.block_size
        step = self._last_listed if self.rule is None else self.rule.before
        return torch.minimum(x, step(k // size, x // size, frame) * size + (size - 1))

    def _last_listed(self, own: Tensor, block: Tensor, frame: Frame) -> Tensor:
        """Returns the last query block <= `block` that sees key block `own`.

        Negative if none does.
        """
        # `_listed` has key block * rows + query block of each attending pair, ascending.
        rows = -(-frame.kv_len // self.mask.block_size)
        if frame.kv_len not in self._listed:
            row, first, last = self.mask.spans(torch.arange(rows), frame.kv_len)
            span, number = expand_counts((last.clamp(max=rows - 1) - first + 1).clamp(min=0))
            row, column = row[span], first[span] + number
            holds = self.mask.blocks_hold(row, column, frame.kv_len)
            self._listed[frame.kv_len] = (column * rows + row)[holds].unique()
        listed = torch.nn.functional.pad(self._listed[frame.kv_len], (1, 0), value=-1)
        most = own * rows + block.clamp(max=rows - 1)
        return listed[torch.searchsorted(listed, most, right=True) - 1] - own * rows

    def future(self, stop: int) -> Repeats | None:
        blocks = -(-stop // self.mask.block_size)
        return self._in_tokens(self.rule.future(blocks) if self.rule else None)

    def shifted(self) -> Repeats | None:
        return self._in_tokens(self.rule.shifted() if self.rule else None)

    def _in_tokens(self, blocks: Repeats | None) -> Repeats | None:
        """Converts a period counted in blocks of the mask to one in tokens; None stays None."""
        size = self.mask.block_size
        return blocks and Repeats(blocks.first * size, blocks.period * size, blocks.empty)


@dataclass(frozen=True, eq=False)
class PerDocument(Condition):
    """Condition that query and key lie in one document, inside which condition `inner` holds."""

    same: SameDocument
    inner: Condition  # on positions counted from the document's start
    asks_length: bool  # whether `inner` depends on the length of the document

    @property
    def settled(self) -> bool:  # type: ignore[override]
        return self.inner.settled

    def _document(self, first: Tensor, last: Tensor, origin: Origin) -> tuple[Tensor, Origin]:
        """Returns whether `first` and `last` share a document, and where the document begins."""
        starts = self.same.starts
        number = self.same.document_of(first - origin.start)
        inside = (number == self.same.document_of(last - origin.start)) & (number < len(starts) - 1)
        place = number.clamp(0, max(0, len(starts) - 2))
        start, end = starts[place], starts[(place + 1).clamp(max=len(starts) - 1)]
        return inside & (number >= 0), Origin(origin.start + start, end - start, end - start)

    def _in_documents(self, pairs: TilePairs) -> tuple[Tensor, TilePairs]:
        """Returns which tile pairs lie in one document, and the pairs counted from its start."""
        q, k = pairs.q, pairs.k
        first, last = torch.minimum(q.start, k.start), torch.maximum(q.last, k.last)
        inside, document = self._document(first, last, pairs.origin)
        return inside, TilePairs(q, k, document)

    def status(self, pairs: TilePairs) -> Tensor:
        inside, in_document = self._in_documents(pairs)
        # Tiles that span several documents are VARIES if they share a document, else EMPTY.
        return torch.where(inside, self.inner.status(in_document), self.same.status(pairs))

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        inside, in_document = self._in_documents(pairs)
        columns = self.inner.signature(in_document)
        several = torch.where(inside, 0, 1 + torch.arange(len(inside)))
        return [several, *(torch.where(inside, column, 0) for column in columns)]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        inside, document = self._document(queries.start, queries.last, origin)
        anywhere = with_any_key(queries, keys, torch.nonzero(~inside)[:, 0])
        spans = self.inner.candidates(queries, keys, document) | anywhere
        return spans & self.same.candidates(queries, keys, origin)

    def attending(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        _, document = self._document(queries.start, queries.last, origin)
        spans = self.inner.attending(queries, keys, document)
        return spans & self.same.attending(queries, keys, origin)

    def before(self, k: Tensor, x: Tensor, frame: Frame) -> Tensor:
        begin, last = self.same.queries(k)
        k, x, lengths = k - begin, torch.minimum(x, last) - begin, last - begin + 1
        result = torch.full_like(x, -1)
        for which, document in Origin(begin, lengths, lengths).frames(frame, self.asks_length):
            which = which[x[which] >= 0]
            if len(which):
                result[which] = self.inner.before(k[which], x[which], document)
        return torch.where(result >= 0, result + begin, -1)


@dataclass(frozen=True, eq=False)
class Declared(Condition):
    """Condition of a custom mask; calls `holds` where `status` and `candidates` did not decide."""

    mask: Mask
    frame: Frame
    in_document: bool  # whether the mask applies inside documents, with positions from 0
    settled = False

    def _frames(self, origin: Origin) -> Iterable[tuple[Tensor, Frame]]:
        """Yields (tile indices, lengths for the mask): one item per distinct document length."""
        if self.in_document:
            return origin.frames(self.frame)
        return [(torch.arange(len(origin.start)), self.frame)]

    def status(self, pairs: TilePairs) -> Tensor:
        status = torch.full_like(pairs.q.start, VARIES, dtype=torch.int8)
        for which, frame in self._frames(pairs.origin):
            q0, q1, k0, k1 = pairs[which].edges()
            q1 = q1.clamp(max=frame.q_start + frame.q_len - 1)  # a tile may end past the last query
            if (own := self.mask.status(q0, q1, k0, k1, frame)) is not None:
                status[which] = own.to(torch.int8)
        return status

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        return [torch.arange(len(pairs))]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        spans = with_any_key(queries, keys, torch.arange(0))
        for which, frame in self._frames(origin):
            start = origin.start[which]
            first, last = queries.start[which] - start, queries.last[which] - start
            if (reach := self.mask.candidates(first, last, frame)) is None:
                spans = spans | with_any_key(queries, keys, which)
            else:
                low, high = (start + x for x in reach)
                spans = spans | spans_of_positions(queries, keys, which, low, high)
        return spans

    def before(self, k: Tensor, x: Tensor, frame: Frame) -> Tensor:
        result = torch.full_like(x, -1)
        chosen = torch.nonzero(x >= 0)[:, 0]
        k, x = k[chosen], x[chosen]
        step = torch.zeros_like(x)  # number of queries, counted down from x, that miss the key
        for leap in _LEAPS:
            step = torch.where(step == 0, leap * self._is_empty(k, x, leap, frame), step)
        near = torch.nonzero(step == 0)[:, 0]
        p = x[near, None] - torch.arange(_QUERIES_AT_A_TIME)
        pairs = self.mask.holds(p.clamp(min=0), k[near, None], frame).expand(p.shape)
        step[near] = torch.where(pairs.any(1), pairs.to(torch.int8).argmax(1), _QUERIES_AT_A_TIME)
        result[chosen] = (x - step).clamp(min=-1)
        return result

    def _is_empty(self, k: Tensor, x: Tensor, leap: int, frame: Frame) -> Tensor:
        """Whether a user's `candidates` or `status` show that queries (x - leap, x] miss key k."""
        empty, first = torch.zeros_like(x, dtype=torch.bool), (x - leap + 1).clamp(min=0)
        if (reach := self.mask.candidates(first, x, frame)) is not None:
            empty = (k < reach[0]) | (k > reach[1])
        if (status := self.mask.status(first, x, k, k, frame)) is not None:
            empty = empty | (status == EMPTY)
        return empty


def _together(parts: Sequence[Repeats | None]) -> Repeats | None:
    """Returns the common period of conditions, the lcm of their periods; None if one is unknown."""
    repeats = [part for part in parts if part is not None]
    if len(repeats) < len(parts):
        return None
    first = max((part.first for part in repeats), default=0)
    period = math.lcm(*(part.period for part in repeats if not part.empty))
    return Repeats(first, period, empty=all(part.empty for part in repeats))
