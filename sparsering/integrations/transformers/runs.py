"""`SameRun` and `InRuns`: masks of a model's documents and chunks, given as a tensor of indices.

A run is a range of tokens with equal indices: a document or chunk. The operator gets the tensor,
also under torch.compile, and replaces `SameRun` by `Documents` and `InRuns` by `Packed`.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...patterns.algebra import Frame, Mask, Mixture, Pattern
from ...patterns.blocks import TensorMask
from ...patterns.expression import add_constructor
from ...patterns.positions import Documents, Packed


@dataclass(frozen=True, repr=False, eq=False)
class SameRun(TensorMask):
    """Lets a query see the keys of its own run, that is, document or chunk."""

    ids: Tensor  # int64 [B or 1, Nk]; a new run begins where neighbours differ
    dtype: ClassVar[torch.dtype] = torch.int64
    table_dims: ClassVar[tuple[int, ...]] = (2,)

    def lengths_of(self, batch: int) -> tuple[int, ...]:
        ids = self.ids[batch if len(self.ids) > 1 else 0].cpu()
        return tuple(ids.unique_consecutive(return_counts=True)[1].tolist())

    def num_batches(self) -> int | None:
        return len(self.ids) if len(self.ids) != 1 else None

    def check(self, frame: Frame) -> None:
        if self.ids.shape[1] != frame.kv_len:
            raise ValueError(
                f"{type(self).__name__} must number the runs of {frame.kv_len} keys, got shape "
                f"{tuple(self.ids.shape)}; slice it to that length"
            )

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        return Documents(self.lengths_of(batch))


@dataclass(frozen=True, repr=False, eq=False)
class InRuns(SameRun):
    """Applies a pattern within each run of consecutive tokens; positions restart at 0 in each."""

    pattern: Mask

    def __new__(cls, ids: Tensor, pattern: Pattern) -> Any:
        if isinstance(pattern, Mixture):
            return Mixture(tuple(cls(ids, mask) for mask in pattern.branches))
        return super().__new__(cls)

    def num_tables(self, frame: Frame) -> int:
        return self.pattern.num_tables(frame)

    def check(self, frame: Frame) -> None:
        super().check(frame)
        self.pattern.check(frame)

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        return Packed(self.lengths_of(batch), self.pattern.at(batch, head, frame))


add_constructor("SameRun", SameRun)
add_constructor("InRuns", InRuns)


def common_runs(*ids: Tensor) -> Tensor:
    """Returns run indices [B or 1, Nk]; a run begins where any of the ids [B or 1, Nk] changes."""
    starts = reduce(torch.logical_or, (x[:, 1:] != x[:, :-1] for x in ids))
    return torch.nn.functional.pad(starts, (1, 0)).cumsum(1)


def several_runs(*ids: Tensor) -> Tensor | None:
    """Returns `common_runs(*ids)`; None without ids or, outside torch.compile, for a single run."""
    if not ids:
        return None
    runs = common_runs(*ids)
    return runs if torch.compiler.is_compiling() or bool(runs[:, -1:].any()) else None
