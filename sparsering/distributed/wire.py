"""Wire formats: how ranks encode rows that they send.

A row is the key and then the value of one token and kv head. With one byte per number ("fp8",
"int8"), each row ends with two float32 scales, one for the key and one for the value.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..ground.arguments import shortened
from ..kernels import rounding

FORMATS = ("bf16", "fp8", "int8")
_ROUNDED = {form.numbers: form for form in rounding.FORMATS.values()}


class Wire(NamedTuple):
    """A format in which ranks send rows of keys and values to each other."""

    numbers: torch.dtype  # dtype of the sent numbers
    dtype: torch.dtype  # dtype of the rows before encoding and after decoding

    @property
    def scaled(self) -> bool:
        return self.numbers in _ROUNDED

    @property
    def element(self) -> torch.dtype:
        """Dtype of the sent tensors: uint8 for formats with scales."""
        return torch.uint8 if self.scaled else self.numbers

    def columns(self, width: int, value_width: int) -> int:
        """Number of elements of an encoded row, each of dtype `element`."""
        return width + value_width + (8 if self.scaled else 0)  # two scales of four bytes

    def row_bytes(self, width: int, value_width: int) -> int:
        return self.columns(width, value_width) * self.element.itemsize

    def encode(self, rows: Tensor, width: int) -> Tensor:
        """Encodes rows [n, D + Dv] as the tensor [n, columns] that is sent; `width` is D."""
        if not self.scaled:
            return rows.to(self.numbers)
        parts = [_ROUNDED[self.numbers].rounded(x) for x in (rows[:, :width], rows[:, width:])]
        numbers = [part.view(torch.uint8) for part, _ in parts]
        return torch.cat((*numbers, *(scale.view(torch.uint8) for _, scale in parts)), 1)

    def decode(self, sent: Tensor, width: int, value_width: int) -> Tensor:
        """Decodes sent rows [n, columns] to keys and values [n, D + Dv], as rounded by `encode`."""
        if not self.scaled:
            return sent.to(self.dtype)
        key, value, *scales = (x.contiguous() for x in sent.split([width, value_width, 4, 4], 1))
        numbers = [part.view(self.numbers).float() for part in (key, value)]
        parts = [x * scale.view(torch.float32) for x, scale in zip(numbers, scales, strict=True)]
        return torch.cat(parts, 1).to(self.dtype)


def wire_format(compression: str | None, dtype: torch.dtype) -> Wire:
    """Returns the wire format that `compression` names; None sends rows of `dtype` unchanged."""
    if compression is None:
        return Wire(dtype, dtype)
    if not isinstance(compression, str) or compression not in FORMATS:
        raise ValueError(
            f"compression must be None, {', '.join(map(repr, FORMATS))} or 'auto', got "
            f"{shortened(repr(compression))}"
        )
    form = rounding.FORMATS.get(compression)
    numbers = torch.bfloat16 if form is None else form.numbers
    return Wire(dtype if dtype.itemsize <= numbers.itemsize else numbers, dtype)
