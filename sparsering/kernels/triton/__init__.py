"""The GPU backend: Triton kernels over the passes of a layout. Triton is imported on first use."""

from .call import backward, forward, interpreting, reasons

__all__ = ["backward", "forward", "interpreting", "reasons"]
