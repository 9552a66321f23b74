"""The GPU backend: Triton kernels over the tiles of a layout. Triton is imported on first use."""

from .call import EXTRAS, backward, forward, interpreting, list_reasons, reasons
from .selected import best_blocks, ranks, remember, selected_layout

__all__ = [
    "EXTRAS", "backward", "best_blocks", "forward", "interpreting", "list_reasons", "ranks",
    "reasons", "remember", "selected_layout",
]  # fmt: skip
