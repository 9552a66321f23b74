"""Decoding: caches that keep exactly the keys that the pattern can still visit."""

from .kv_cache import KVCache
from .selected_cache import SelectedCache

__all__ = ["KVCache", "SelectedCache"]
