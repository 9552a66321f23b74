"""Modules that models are built of: torch's attention over a pattern, rotary positions, a block."""

from .attention import MultiheadAttention, convert
from .selected import SelectedAttention

__all__ = ["MultiheadAttention", "SelectedAttention", "convert"]
