"""Fills uninitialised memory, so that no test passes by what it holds by chance.

The module has a name of its own: code that torch.compile has compiled looks modules up by name, and
the last of several files named `conftest` takes the name.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`allocate`, its floating memory filled with NaN and its integers with their largest value."""

    @functools.wraps(allocate)
    def allocate_and_fill(*args, **kwargs) -> Tensor:
        out = allocate(*args, **kwargs)
        if out.layout is not torch.strided or out.dtype is torch.bool:
            return out
        is_integer = not (out.is_floating_point() or out.is_complex())
        # `no_grad` would be a node of a program that torch.export traces
        out.detach().fill_(torch.iinfo(out.dtype).max if is_integer else float("nan"))
        return out

    return allocate_and_fill
