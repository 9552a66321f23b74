"""Document lengths from ids, positions or cumulative lengths, which data pipelines hold."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..ground.arguments import INTEGERS, checked_integer, is_traced, kind_of

_TO_BE_SURE = 8  # from more tokens on, lengths that rise by 0 or 1 from 0 on are refused as ids


@dataclass(frozen=True, eq=False)
class LengthsFrom:
    """Numbers that say the document lengths of a `Documents` or `Packed`, and how they do.

    An operator gets the numbers as a tensor, so that they are data of compiled functions.
    """

    form: str  # one of `FORMS`
    numbers: Tensor  # [N] or [B, N]; cumulative lengths [n + 1]
    most: int | None = None  # largest number of documents in a row; the others are empty

    @classmethod
    def checked(cls, form: str, numbers: Any, most: int | None = None) -> "LengthsFrom":
        """Returns a copy of the numbers for a pattern; ValueError names what is wrong."""
        by_token = form != "cu_seqlens"
        fits = isinstance(numbers, Tensor) and numbers.dtype in INTEGERS
        if not fits or numbers.dim() not in ((1, 2) if by_token else (1,)):
            shape = "[N] or [B, N], a number per token" if by_token else "[n + 1]"
            raise ValueError(
                f"from_{form} needs an int32 or int64 tensor {shape}, got {kind_of(numbers)}; "
                "torch.as_tensor(...) of ints makes one"
            )
        if most is not None:
            most = checked_integer(f"from_{form} most", most, 0)
        numbers = numbers.detach()
        if is_traced(numbers):
            return cls(form, numbers.to(torch.int64, copy=True), most)
        return cls(form, numbers.to("cpu", torch.int64, copy=True), most)

    @property
    def num_batches(self) -> int | None:
        return len(self.numbers) if self.numbers.dim() == 2 else None

    def spelled(self, name: str) -> str:
        """Returns the text of an operator's pattern, whose tensor of this name has the numbers."""
        return f"lengths_from_{self.form}({name}, {self.most})"

    def lengths(self) -> tuple[Any, ...]:
        """Returns the lengths of documents: a tuple for all batch entries, or one for each."""
        numbers = self.numbers.cpu()
        if self.form == "cu_seqlens":
            return self._differences(numbers)
        rows = numbers if numbers.dim() == 2 else numbers[None]
        before = rows[:, :-1] if self.form == "ids" else rows[:, :-1] + 1
        begins = rows[:, 1:] != before  # [B, N - 1] whether a document begins at token 1, 2, ...
        found = [self._runs(row, begin) for row, begin in enumerate(begins)]
        return tuple(found) if numbers.dim() == 2 else found[0]

    def _runs(self, row: int, begins: Tensor) -> tuple[int, ...]:
        count = self.numbers.shape[-1]
        edges = torch.nonzero(begins)[:, 0] + 1
        edges = torch.nn.functional.pad(edges, (1, 0))
        ends = torch.cat((edges[1:], edges.new_tensor([count])))
        lengths = tuple((ends - edges).tolist()) if count else ()
        if self.most is None:
            return lengths
        if len(lengths) > self.most:
            of = f" {row}" if self.numbers.dim() == 2 else ""
            raise ValueError(
                f"from_{self.form} takes at most {self.most} documents in a row, got "
                f"{len(lengths)} in row{of}; give a larger most"
            )
        return (*lengths, *(0,) * (self.most - len(lengths)))

    def _differences(self, ends: Tensor) -> tuple[int, ...]:
        lengths = ends.diff()
        if not len(ends) or int(ends[0]) != 0 or bool((lengths < 0).any()):
            shown = ends[:9].tolist()
            raise ValueError(
                "from_cu_seqlens needs cumulative lengths: 0, then the end of each document, "
                f"ascending, got {shown}{'...' * (len(ends) > 9)}; lengths themselves go to "
                "Documents(lengths)"
            )
        return tuple(lengths.tolist())


def lengths_from(form: str) -> Any:
    """Returns the constructor that `LengthsFrom.spelled` writes."""
    return lambda numbers, most=None: LengthsFrom.checked(form, numbers, most)


FORMS = {f"lengths_from_{form}": lengths_from(form) for form in ("ids", "positions", "cu_seqlens")}
"""Constructors in the text of an operator's pattern, by name."""


def looks_like_ids(lengths: tuple[int, ...]) -> bool:
    """Whether lengths, as many as tokens, are 0, 0, ..., 1, 1, ..., 2: surely ids of documents."""
    steps = {b - a for a, b in pairwise(lengths)}
    return len(lengths) > _TO_BE_SURE and lengths[0] == 0 and steps == {0, 1}
