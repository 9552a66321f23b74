"""The mask of `attention_varlen`: documents end to end, each with its own query and key count."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .algebra import Frame, Mask, Mixture, Pattern, Restarts
from .arguments import freeze_integers
from .keys import KeyMask
from .positions import laid_inside


@dataclass(frozen=True, repr=False, eq=False)
class Varlen(Mask):
    """A pattern inside each document: positions restart, and the last query is at the last key.

    The query rows of document i begin at sum(q_lengths[:i]), its keys at sum(kv_lengths[:i]). Its
    query row r has position kv_lengths[i] - q_lengths[i] + r, its key c has position c. Either
    length may be 0. Varlen of a mixture is a mixture.
    """

    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    pattern: Mask

    def __new__(
        cls, q_lengths: tuple[int, ...], kv_lengths: tuple[int, ...], pattern: Pattern
    ) -> Any:  # a mixture gives a Mixture of Varlen
        if isinstance(pattern, Mixture):
            return Mixture(tuple(cls(q_lengths, kv_lengths, mask) for mask in pattern.branches))
        return super().__new__(cls)

    def _validate(self) -> None:
        if not isinstance(self.pattern, Mask):
            raise TypeError(
                "Varlen needs a pattern to lay in each document, got "
                f"{type(self.pattern).__name__}; Causal() is one"
            )
        if self.pattern.num_batches() is not None or _has_key_mask(self.pattern):
            raise ValueError(
                "a pattern laid in documents must be the same for all of them, got "
                f"{self.pattern}; leave padding out of the documents' lengths"
            )
        freeze_integers(self, "q_lengths", 0)
        freeze_integers(self, "kv_lengths", 0)
        if len(self.q_lengths) != len(self.kv_lengths):
            raise ValueError(
                "Varlen needs as many query lengths as key lengths, got "
                f"{len(self.q_lengths)} and {len(self.kv_lengths)}; a length may be 0"
            )

    @property
    def own_length(self) -> int:
        return sum(self.kv_lengths)

    @property
    def restarts(self) -> Restarts:
        return self.q_lengths, self.kv_lengths

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        return replace(self, pattern=self.pattern.at(batch, head, frame))

    def check(self, frame: Frame) -> None:
        sums = sum(self.q_lengths), sum(self.kv_lengths)
        if sums != (frame.q_len, frame.kv_len) or frame.q_start:
            raise ValueError(
                f"documents of {sums[0]} queries and {sums[1]} keys need as many, and q_start=0, "
                f"got {frame.q_len}, {frame.kv_len} and q_start={frame.q_start}; the last "
                "cumulative lengths are those of the tensors"
            )
        distinct = dict.fromkeys(zip(self.q_lengths, self.kv_lengths, strict=True))
        for q_len, kv_len in distinct:
            if q_len and kv_len:
                self.pattern.check(document_frame(q_len, kv_len, frame))

    def _made_of(self) -> tuple[Mask, ...]:
        return (self.pattern,)

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        if not any(self.kv_lengths):
            return (p != p) | (k != k)
        lengths = [torch.tensor(x, dtype=torch.int64) for x in self.restarts]
        ends = [x.cumsum(0) for x in lengths]
        of_p, of_k = (
            torch.searchsorted(end, x, right=True) for end, x in zip(ends, (p, k), strict=True)
        )
        inside = (of_p == of_k) & (p >= 0) & (k >= 0) & (k < frame.kv_len)
        most = len(lengths[0]) - 1
        of_p, of_k = of_p.clamp(max=most), of_k.clamp(max=most)
        first_query = ends[0] - lengths[1]  # the row that would be at position 0
        pairs = list(zip(*self.restarts, strict=True))
        kind_of = {pair: number for number, pair in enumerate(pairs)}
        return laid_inside(
            self.pattern,
            inside,
            p - first_query[of_p],
            k - (ends[1] - lengths[1])[of_k],
            torch.tensor([kind_of[pair] for pair in pairs])[of_k],
            lambda number: document_frame(*pairs[number], frame),
        )

    def candidates(self, q_first: Tensor, q_last: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
        q_ends, kv_ends = (
            torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0) for lengths in self.restarts
        )
        first, last = (
            torch.searchsorted(q_ends, x.clamp(0, max(0, frame.q_len - 1)), right=True)
            for x in (q_first, q_last)
        )
        most = len(kv_ends) - 1
        return kv_ends[first.clamp(1) - 1], kv_ends[last.clamp(max=most)] - 1


def document_frame(q_len: int, kv_len: int, frame: Frame) -> Frame:
    """The frame of a document as a whole sequence, with its last query at its last key."""
    return frame._replace(q_len=q_len, kv_len=kv_len, q_start=kv_len - q_len)


def _has_key_mask(mask: Mask) -> bool:
    return isinstance(mask, KeyMask) or any(map(_has_key_mask, mask._made_of()))
