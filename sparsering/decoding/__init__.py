"""Decoding: a cache that keeps exactly what the pattern can still see."""

from .cache import KVCache

__all__ = ["KVCache"]
