"""Document lengths from ids, positions or cumulative lengths, which data pipelines hold."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..ground.arguments import INTEGERS, checked_integer, is_traced, kind_of

_TO_BE_SURE = 8  # up to so many tokens, lengths such as 0, 0, 1, 1, 2 are not taken for ids


@dataclass(frozen=True, eq=False)
class LengthsFrom:
    """Document lengths that a `Documents` or `Packed` got as ids, positions or cumulative lengths.

    An operator gets the numbers as a tensor, so that a compiled function serves other lengths too.
    """

    form: str  # what the numbers are: "ids", "positions" or "cu_seqlens"
    numbers: Tensor  # [N] or [B, N], one per token; [n + 1] for cumulative lengths
    most: int | None = None  # rows are padded to so many documents by empty ones, if given

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
        """Returns these lengths as a pattern's text has them, such as lengths_from_ids(t0, 8).

        `name` is the name of the tensor that has the numbers, such as "t0".
        """
        return f"lengths_from_{self.form}({name}, {self.most})"

    def lengths(self) -> tuple[Any, ...]:
        """Returns document lengths: one tuple of ints for all batch entries, or one per entry."""
        numbers = self.numbers.cpu()
        if self.form == "cu_seqlens":
            return self._differences(numbers)
        rows = numbers if numbers.dim() == 2 else numbers[None]
        before = rows[:, :-1] if self.form == "ids" else rows[:, :-1] + 1
        begins = rows[:, 1:] != before  # [B, N - 1] whether a document begins at token 1, 2, ...
        found = [self._runs(row, begin) for row, begin in enumerate(begins)]
        return tuple(found) if numbers.dim() == 2 else found[0]

    def _runs(self, row: int, begins: Tensor) -> tuple[int, ...]:
        """Returns the document lengths of a row, from bool [N - 1] of where documents begin.

        An item is True if a document begins at the next token. `row` is the row's number for the
        error; documents of length 0 pad the result to `most`.
        """
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
        """Returns document lengths from cumulative lengths [n + 1], which must ascend from 0."""
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
    """Returns the function that `parse` calls to read the text of `LengthsFrom.spelled`."""
    return lambda numbers, most=None: LengthsFrom.checked(form, numbers, most)


FORMS = {f"lengths_from_{form}": lengths_from(form) for form in ("ids", "positions", "cu_seqlens")}
"""Constructors that `parse` accepts in an operator's text, by name."""


def looks_like_ids(lengths: tuple[int, ...]) -> bool:
    """Whether over 8 lengths start at 0 and then stay or rise by 1, as ids of documents do."""
    steps = {b - a for a, b in pairwise(lengths)}
    return len(lengths) > _TO_BE_SURE and lengths[0] == 0 and steps == {0, 1}
