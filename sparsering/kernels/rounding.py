"""Rounds rows of keys and values to 8 bits, for caches and for transfers between ranks.

A row of `width` values x becomes `width` numbers of 8 bits and a float32, its scale: the largest
|x| divided by the largest number, 127 of int8 and 448 of float8 (e4m3). The last four bytes are the
scale, so that a row is copied as a whole. A row that holds NaN or infinity becomes NaN.

The compiled kernel reads such rows as they are (kernels/cpu/stored.h). Other backends get floats.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..ground.arguments import is_shape_alone, shortened
from ..ground.kernel_library import kernel_operators

Store = Literal["int8", "fp8"]
_SCALE = 4  # bytes of a float32


class Format(NamedTuple):
    """A format of 8 bits: the numbers of a row, and one float32 scale for the row."""

    numbers: torch.dtype
    largest: float  # largest number that the format can represent
    bytes: torch.dtype  # dtype of stored rows; it tells which format they have

    def rounded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rounds rows [..., width]; returns numbers [..., width], and scales float32 [..., 1]."""
        x = rows.float()
        most = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
        scale = torch.where(most < torch.inf, most / self.largest, torch.nan)
        x = torch.where(scale > 0, x / scale, 0.0).clamp(-self.largest, self.largest)
        return (x if self.numbers.is_floating_point else x.round()).to(self.numbers), scale


FORMATS = {
    "int8": Format(torch.int8, 127.0, torch.int8),
    "fp8": Format(torch.float8_e4m3fn, 448.0, torch.uint8),
}
"""All formats of 8 bits, by the names that users write, as in `store="int8"`."""


def checked_store(store: object) -> Store | None:
    """Returns the value of a `store` argument; raises ValueError if it names no format."""
    if store is None or (isinstance(store, str) and store in FORMATS):
        return store  # type: ignore[return-value]
    raise ValueError(
        f'store must be "int8", "fp8" or None, got {shortened(repr(store))}; None stores keys and '
        "values in their own dtype"
    )


def to_store(rows: Tensor, store: Store) -> Tensor:
    """Rounds rows [B, H, n, width] to 8 bits: int8 or uint8 [B, H, n, width + 4]."""
    form = FORMATS[store]
    if is_shape_alone(rows):
        return rows.new_empty(*rows.shape[:-1], rows.shape[-1] + _SCALE, dtype=form.bytes)
    kernel = kernel_operators()
    if kernel is not None and rows.device.type == "cpu" and rows.dtype != torch.float64:
        return kernel.store(rows, store == "fp8")
    numbers, scale = form.rounded(rows)
    return torch.cat((numbers.view(form.bytes), scale.contiguous().view(form.bytes)), -1)


def from_store(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts rows of 8 bits [..., width + 4] back to numbers [..., width] of a dtype."""
    numbers, scale = rows[..., :-_SCALE], rows[..., -_SCALE:]
    scale = scale.clone(memory_format=torch.contiguous_format).view(torch.float32)  # aligns them
    form = next(x for x in FORMATS.values() if x.bytes == rows.dtype)
    if form.numbers != rows.dtype:
        numbers = numbers.contiguous().view(form.numbers)
    return (numbers.float() * scale).to(dtype)


def is_in_store(rows: Tensor) -> bool:
    """Whether rows are in an 8-bit format of `to_store`, by their dtype."""
    return any(rows.dtype == form.bytes for form in FORMATS.values())
