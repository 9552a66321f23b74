"""Patterns that depend on the distance of a query and a key alone."""

from .algebra import And, Mixture, Or, Pattern
from .per_head import PerHead
from .positions import Causal, Full, SlidingWindow


def is_shift_invariant(pattern: Pattern) -> bool:
    """True if a pattern stays the same if all positions shift by the same amount."""
    if isinstance(pattern, And | Or | Mixture):
        return all(is_shift_invariant(mask) for mask in pattern.masks)
    if isinstance(pattern, PerHead):
        return all(map(is_shift_invariant, pattern.patterns))
    return isinstance(pattern, Causal | Full | SlidingWindow)
