"""The GPU backend: Triton kernels over the passes of a layout. Triton is imported on first use."""

from .call import EXTRAS, backward, forward, interpreting, reasons

__all__ = ["EXTRAS", "backward", "forward", "interpreting", "reasons"]
