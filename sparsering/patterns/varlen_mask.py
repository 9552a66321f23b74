"""The mask of `attention_varlen`: adjacent documents, each with its own query and key length."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..ground.arguments import freeze_lengths
from .algebra import Frame, Mask, Mixture, Pattern, Restarts, parts_of
from .keys import KeyMask
from .positions import check_inner, holds_in_documents

Lengths = tuple[int, ...] | Tensor


@dataclass(frozen=True, repr=False, eq=False)
class Varlen(Mask):
    """A pattern inside each document: positions restart, and the last query is at the last key.

    The queries of document i begin at sum(q_lengths[:i]), its keys at sum(kv_lengths[:i]). In it,
    query r has position kv_lengths[i] - q_lengths[i] + r and key c has position c. A length may be
    0. A Varlen of a mixture is a mixture.
    """

    q_lengths: Lengths
    kv_lengths: Lengths
    pattern: Mask

    def __new__(cls, q_lengths: Lengths, kv_lengths: Lengths, pattern: Pattern) -> Any:
        if isinstance(pattern, Mixture):
            return Mixture(tuple(cls(q_lengths, kv_lengths, mask) for mask in pattern.branches))
        return super().__new__(cls)

    def _validate(self) -> None:
        check_inner("Varlen", self.pattern)
        has_key_mask = any(isinstance(part, KeyMask) for part in parts_of(self.pattern))
        if self.pattern.num_batches() is not None or has_key_mask:
            raise ValueError(
                f"the pattern must be the same for all documents, got {self.pattern}; leave "
                "padding out of the documents' lengths"
            )
        freeze_lengths(self, "q_lengths", nested=False)
        freeze_lengths(self, "kv_lengths", nested=False)
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
        return self.q_lengths, self.kv_lengths  # type: ignore[return-value]

    @property
    def num_streams(self) -> int:
        return max(1, len(self.q_lengths))

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        return replace(self, pattern=self.pattern.at(batch, head, frame))

    def check(self, frame: Frame) -> None:
        sums = sum(self.q_lengths), sum(self.kv_lengths)
        if sums != (frame.q_len, frame.kv_len) or frame.q_start:
            raise ValueError(
                f"the tensors must have {sums[0]} queries and {sums[1]} keys, the sums of the "
                f"documents' lengths, and q_start=0, got {frame.q_len} queries, {frame.kv_len} "
                f"keys and q_start={frame.q_start}; change the tensors or the lengths"
            )
        super().check(frame)

    def _frames(self, frame: Frame) -> Iterator[Frame]:
        for q_len, kv_len in dict.fromkeys(zip(*self.restarts, strict=True)):
            if q_len and kv_len:
                yield frame.of_document(q_len, kv_len)

    def _components(self) -> tuple[Mask, ...]:
        return (self.pattern,)

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        q_lengths, kv_lengths = (torch.tensor(x, dtype=torch.int64) for x in self.restarts)
        return holds_in_documents(self.pattern, p, k, q_lengths, kv_lengths, frame)
