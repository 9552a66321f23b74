"""Portable backend: copies the keys that each query tile visits, and multiplies them by torch."""

from .call import EXTRAS, backward, entry_mass, forward, set_workspace

__all__ = ["EXTRAS", "backward", "entry_mass", "forward", "set_workspace"]
