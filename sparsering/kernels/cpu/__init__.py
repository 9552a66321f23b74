"""The CPU backend: a C++ kernel, compiled on first use."""

from .build import build
from .call import EXTRAS, backward, forward, reasons

__all__ = ["EXTRAS", "backward", "build", "forward", "reasons"]
