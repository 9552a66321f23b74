"""Blocks chosen by content: score, select, attend exactly, merge, train the scorer."""

from .loss import selection_loss
from .refiner import PatternRefiner
from .schedule import GatedSchedule, Schedule
from .scorer import BlockScorer

__all__ = [
    "BlockScorer",
    "GatedSchedule",
    "PatternRefiner",
    "Schedule",
    "selection_loss",
]
