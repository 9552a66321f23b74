"""CPU backend: a C++ kernel, compiled on first use."""

from .build import build
from .call import (
    EXTRAS,
    backward,
    backward_in_order,
    block_shares,
    entry_mass,
    forward,
    forward_in_order,
    reasons,
)
from .second_order import (
    tangent,
    tangent_of_gradient_sums,
    tangent_of_gradients,
    tangent_sums,
)

__all__ = [
    "EXTRAS", "backward", "backward_in_order", "block_shares", "build", "entry_mass", "forward",
    "forward_in_order", "reasons", "tangent", "tangent_of_gradient_sums", "tangent_of_gradients",
    "tangent_sums",
]  # fmt: skip
