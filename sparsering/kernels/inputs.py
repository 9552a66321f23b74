"""What the compiled kernels ask of their inputs."""

import torch
from torch import Tensor


def positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """A query and a scale above 0 with the same scores, which only ever grow with the products.

    What float32 takes for 0 is 0.
    """
    if abs(scale) < torch.finfo(torch.float32).smallest_normal:
        return torch.zeros_like(query), 1.0
    return (query, scale) if scale > 0 else (-query, -scale)


def signed_gradient(grad: Tensor, scale: float) -> Tensor:
    """The gradient of the query itself from that of `positive_scale`'s."""
    if abs(scale) < torch.finfo(torch.float32).smallest_normal:
        return torch.zeros_like(grad)
    return grad if scale > 0 else -grad


def dense_rows(x: Tensor) -> Tensor:
    """The same numbers with neighbours of the last dim side by side; a copy only where needed."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
