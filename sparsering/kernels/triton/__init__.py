"""The GPU backend: Triton kernels over the tiles of a layout. Triton is imported on first use."""

from .call import (
    EXTRAS,
    backward,
    backward_in_order,
    forward,
    forward_in_order,
    interpreting,
    list_reasons,
    reasons,
)  # fmt: skip
from .key_lists import list_keys
from .lists import ready_lists
from .selected import best_blocks, ranks, remember, selected_layout

__all__ = [
    "EXTRAS", "backward", "backward_in_order", "best_blocks", "forward", "forward_in_order",
    "interpreting", "list_keys", "list_reasons", "ranks", "ready_lists", "reasons", "remember",
    "selected_layout",
]  # fmt: skip
