"""Rows of unequal length laid end to end: which row each place belongs to, and where in it."""

import torch
from torch import Tensor


def expand_counts(count: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows with `count[i]` places each, laid end to end: (row, number within the row)."""
    row = torch.arange(len(count), device=count.device).repeat_interleave(count)
    first = count.cumsum(0) - count
    return row, torch.arange(len(row), device=count.device) - first[row]
