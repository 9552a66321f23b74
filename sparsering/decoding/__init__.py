"""Decoding: caches that keep exactly the keys that the pattern can still visit."""

from .cache import KVCache
from .selected import SelectedCache

__all__ = ["KVCache", "SelectedCache"]
