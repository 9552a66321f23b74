"""T5, and families that took its bias: learnt numbers, by the distance of a key from a query."""

from collections.abc import Callable
from typing import Any


def learns_distances(module: Any) -> bool:
    """Whether a layer's bias is by distance, though training may change each of its numbers."""
    return hasattr(module, "has_relative_attention_bias")


LEARN_DISTANCES: tuple[Callable[[Any], bool], ...] = (learns_distances,)
"""Functions of an attention module."""
