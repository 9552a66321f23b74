"""Remembers on a cache how many tokens a model with a pattern has run, to notice dropped keys.

The keys of a cache have no positions of their own: a pattern takes key number i for token i. That
holds until somebody drops keys by hand. The number of tokens of the last call shows it: the next
call finds fewer keys. `Cache.crop` removes the last tokens, so it lowers the number too.
"""

from functools import wraps
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..name import NAME

_SEEN = "_sparsering_seen"  # attribute of a cache


def own_cache(cache: Any) -> Cache | None:
    """Returns the cache of self-attention in what a model got as `past_key_values`."""
    cache = getattr(cache, "self_attention_cache", cache)
    return cache if isinstance(cache, Cache) and not torch.compiler.is_compiling() else None


def seen_tokens(cache: Cache | None) -> int | None:
    """Returns the number of tokens after the last call; None if no call has been remembered."""
    return None if cache is None else vars(cache).get(_SEEN)


def remember_tokens(cache: Cache, count: int) -> None:
    """Stores the number of tokens that a cache has seen once the running call ends."""
    setattr(cache, _SEEN, count)


def watch_crops() -> None:
    """Patches transformers' `Cache.crop`, so that it lowers the number of tokens as well."""
    crop = Cache.crop
    if hasattr(crop, NAME):
        return

    @wraps(crop)
    def cropped(cache: Cache, *arguments: Any, **named: Any) -> None:
        if (seen := seen_tokens(cache)) is None:
            return crop(cache, *arguments, **named)
        before = cache.get_seq_length()
        crop(cache, *arguments, **named)
        remember_tokens(cache, seen + int(cache.get_seq_length() - before))

    setattr(cropped, NAME, True)
    Cache.crop = cropped
