"""One pattern over many ranks: ring attention that moves only the keys that are needed."""

from .plan import RingPlan

__all__ = ["RingPlan"]
