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

__all__ = [
    "EXTRAS", "backward", "backward_in_order", "block_shares", "build", "entry_mass", "forward",
    "forward_in_order", "reasons",
]  # fmt: skip
