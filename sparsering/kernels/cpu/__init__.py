"""The CPU backend: a C++ kernel, compiled on first use."""

from .build import build
from .call import backward, forward, reasons

__all__ = ["backward", "build", "forward", "reasons"]
