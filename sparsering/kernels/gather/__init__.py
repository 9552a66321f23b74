"""Portable backend: gathers each query tile's keys and runs library kernels on them."""

from .call import EXTRAS, backward, entry_mass, forward, set_workspace

__all__ = ["EXTRAS", "backward", "entry_mass", "forward", "set_workspace"]
