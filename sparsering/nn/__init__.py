"""Attention modules: torch's `MultiheadAttention` with a pattern, and `SelectedAttention`."""

from .multihead import MultiheadAttention, convert
from .selected_attention import SelectedAttention

__all__ = ["MultiheadAttention", "SelectedAttention", "convert"]
