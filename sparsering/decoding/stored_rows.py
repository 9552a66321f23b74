"""Keys and values of a cache in 8 bits: for each token and head, numbers and their scale.

A row of `width` values x becomes `width` numbers of 8 bits and a float32, its scale: the largest
|x| divided by the largest number, 127 of int8 and 448 of float8 (e4m3). The last four bytes are the
scale, so that a row is copied as a whole. A row that holds NaN or infinity becomes NaN.

The compiled kernel reads such rows as they are (kernels/cpu/stored.h). Other backends get floats.
"""

from typing import Literal

import torch
from torch import Tensor

from ..ground.arguments import shortened
from ..ground.kernel_library import kernel_operators

Store = Literal["int8", "fp8"]
_MOST = {"int8": 127.0, "fp8": 448.0}
_DTYPES = {"int8": torch.int8, "fp8": torch.uint8}
_SCALE = 4  # bytes of a float32


def checked_store(store: object) -> Store | None:
    """Returns how a cache stores rows; raises ValueError for another value."""
    if store is None or (isinstance(store, str) and store in _MOST):
        return store  # type: ignore[return-value]
    raise ValueError(
        f'store must be "int8", "fp8" or None, got {shortened(repr(store))}; None stores keys and '
        "values in their own dtype"
    )


def to_store(rows: Tensor, store: Store) -> Tensor:
    """Rounds rows [B, H, n, width] to 8 bits: int8 or uint8 [B, H, n, width + 4]."""
    kernel = kernel_operators()
    if kernel is not None and rows.device.type == "cpu" and rows.dtype != torch.float64:
        return kernel.store(rows, store == "fp8")
    x = rows.float()
    most = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    scale = torch.where(most < torch.inf, most / _MOST[store], torch.nan)
    x = torch.where(scale > 0, x / scale, 0.0).clamp(-_MOST[store], _MOST[store])
    numbers = x.round().to(torch.int8) if store == "int8" else x.to(torch.float8_e4m3fn)
    kind = _DTYPES[store]
    return torch.cat((numbers.view(kind), scale.contiguous().view(kind)), -1)


def from_store(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values of rows from `to_store`, in a dtype."""
    numbers, scale = rows[..., :-_SCALE], rows[..., -_SCALE:]
    scale = scale.clone(memory_format=torch.contiguous_format).view(torch.float32)  # aligned
    of_fp8 = rows.dtype == _DTYPES["fp8"]
    numbers = numbers.contiguous().view(torch.float8_e4m3fn) if of_fp8 else numbers
    return (numbers.float() * scale).to(dtype)


def is_in_store(rows: Tensor) -> bool:
    """Whether rows are in 8 bits, as `to_store` makes them."""
    return rows.dtype in _DTYPES.values()
