"""Modules: torch's attention over a pattern, attention to selected blocks, a transformer block."""

from .multihead import MultiheadAttention, convert
from .selected_attention import SelectedAttention

__all__ = ["MultiheadAttention", "SelectedAttention", "convert"]
