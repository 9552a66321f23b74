"""Portable backend: copies the keys that query tiles visit, and computes with torch's matmuls."""

from .call import EXTRAS, backward, entry_mass, forward, set_workspace
from .second_order import tangent_of_gradient_sums, tangent_sums

__all__ = [
    "EXTRAS",
    "backward",
    "entry_mass",
    "forward",
    "set_workspace",
    "tangent_of_gradient_sums",
    "tangent_sums",
]
