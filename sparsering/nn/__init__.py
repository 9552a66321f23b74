"""Modules: torch's attention over a pattern, attention to selected blocks, a transformer block."""

from .attention import MultiheadAttention, convert
from .selected import SelectedAttention

__all__ = ["MultiheadAttention", "SelectedAttention", "convert"]
