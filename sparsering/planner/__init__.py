"""Plans before a run: what a call costs, what fits, and what it costs over ranks."""

from .batch import choose_batch_size, longest_sequence

__all__ = ["choose_batch_size", "longest_sequence"]
