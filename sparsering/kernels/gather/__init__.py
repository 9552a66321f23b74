"""The portable backend: gathers each query tile's keys and hands them to library kernels."""

from .call import EXTRAS, backward, entry_mass, forward, set_workspace

__all__ = ["EXTRAS", "backward", "entry_mass", "forward", "set_workspace"]
