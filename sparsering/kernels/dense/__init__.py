"""The backend `reference`: dense attention over all pairs, by a pattern's definition."""

from .call import EXTRAS, run

__all__ = ["EXTRAS", "run"]
