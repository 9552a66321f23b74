"""The portable backend: gathers each query tile's keys and hands them to library kernels."""

from .call import backward, forward, set_workspace

__all__ = ["backward", "forward", "set_workspace"]
