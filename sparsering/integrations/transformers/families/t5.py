"""T5, and families that use its bias: a learned number for each distance of a key from a query."""

from collections.abc import Callable
from typing import Any


def learns_distances(module: Any) -> bool:
    """Whether a layer's learned bias depends on distance alone, also after training."""
    return hasattr(module, "has_relative_attention_bias")


LEARN_DISTANCES: tuple[Callable[[Any], bool], ...] = (learns_distances,)
"""Functions of an attention module."""
