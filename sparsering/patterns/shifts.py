"""Patterns in which only the distance of a query and a key decides whether they pair."""

from .algebra import And, Mixture, Or, Pattern
from .per_head import PerHead
from .positions import Causal, Full, SlidingWindow


def is_shift_invariant(pattern: Pattern) -> bool:
    """Whether a pattern stays as it is when all positions move by the same amount.

    It returns False for classes that it does not know, even if they would qualify.
    """
    if isinstance(pattern, And | Or | Mixture):
        return all(is_shift_invariant(mask) for mask in pattern.masks)
    if isinstance(pattern, PerHead):
        return all(map(is_shift_invariant, pattern.patterns))
    return isinstance(pattern, Causal | Full | SlidingWindow)
