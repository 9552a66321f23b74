"""Modules that models are built of: torch's attention over a pattern, rotary positions, a block."""

from .attention import MultiheadAttention, convert

__all__ = ["MultiheadAttention", "convert"]
