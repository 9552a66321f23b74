"""CPU backend: a C++ kernel, compiled on first use."""

from .build import build
from .call import EXTRAS, adds_in_order, backward, block_shares, entry_mass, forward, reasons

__all__ = [
    "EXTRAS", "adds_in_order", "backward", "block_shares", "build", "entry_mass", "forward",
    "reasons",
]  # fmt: skip
