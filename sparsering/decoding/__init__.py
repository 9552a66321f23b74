"""Decoding: caches that store exactly the keys that later queries of the pattern can visit."""

from .kv_cache import KVCache
from .selected_cache import SelectedCache

__all__ = ["KVCache", "SelectedCache"]
