"""A softmax of float64 that stays in float64.

It has a module of its own: torch.compile looks for the globals of a function in the module of its
name, and several folders have a `conftest`.
"""

import torch
from torch import Tensor

softmax = torch.nn.functional.softmax


def in_full(
    x: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, **_: object
) -> Tensor:
    return softmax(x, dim=dim, dtype=None if x.dtype == torch.float64 else dtype)
