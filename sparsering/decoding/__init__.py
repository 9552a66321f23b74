"""Decoding: a cache that keeps exactly what the pattern can still see."""

from .cache import KVCache
from .selected import SelectedCache

__all__ = ["KVCache", "SelectedCache"]
