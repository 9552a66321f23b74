"""Refuses calls of a cache in which a token would see a key that the cache does not have yet.

A cache computes the result of a token once, so all keys that the token sees must come in the same
call or earlier. `BlockCausal(8)`, for example, is decoded in whole blocks.
"""

from typing import Any

from ..ground.arguments import shortened
from ..layouts.lookahead import (
    PAGE,
    Tokens,
    first_ahead,
    hides_later_keys,
    is_causal_page,
    next_end,
)
from .cache_state import CacheState


class LaterKeys:
    """Checks that no token of a call sees a key that comes later; remembers what it has checked."""

    def __init__(self, state: CacheState) -> None:
        self.pattern = state.pattern
        self.never = hides_later_keys(state.pattern)
        # (page of positions, batch entry or 0) of calls whose tokens see no later key
        self.causal_pages: set[tuple[int, int]] = set()

    def check_call(self, state: CacheState, new: list[int]) -> None:
        """Raises ValueError if one of `new[i]` more tokens of entry i sees a key after them."""
        if self.never:
            return
        calls: dict[Any, int] = {}  # distinct (length, new tokens, entry): each is checked once
        by_entry, known = self.pattern.num_batches() is not None, self.causal_pages
        for entry, call in enumerate(zip(state.lengths, new, strict=True)):
            calls.setdefault((*call, entry) if by_entry else (*call, 0), entry)
        for (begin, n, key), entry in calls.items():
            end = begin + n
            pages = {(begin // PAGE, key), (max(begin, end - 1) // PAGE, key)}
            if n == 0 or (pages <= known and n <= PAGE):
                continue
            tokens = _tokens(state, entry)
            if not (pair := first_ahead(self.pattern, begin, end, tokens)):
                known |= {x for x in pages if is_causal_page(self.pattern, x[0], tokens)}
                continue
            way_out = "give the cache max_length, and let the call end there"
            if (later := self._next_end(state, entry, begin, end)) is not None:
                way_out = f"let the call end at {later} tokens"
            raise ValueError(
                f"token {pair[0]} sees key {pair[1]}, which has not come: the call ends at {end} "
                f"tokens; {way_out}, or write & Causal() to leave out later keys, in "
                f"{shortened(str(self.pattern))}"
            )

    def check_crop(self, state: CacheState, length: int) -> None:
        """Raises ValueError if a token below `length` has seen a key that would be removed."""
        if self.never or length >= max(state.lengths, default=0):
            return
        for entry in range(len(state.lengths)):
            tokens = _tokens(state, entry)
            if pair := first_ahead(self.pattern, 0, length, tokens):
                later = next_end(self.pattern, 0, length, tokens)
                raise ValueError(
                    f"crop would remove key {pair[1]}, which token {pair[0]} has seen, got length "
                    f"{length}; crop to {later}, and give the tokens from there on again"
                )

    def _next_end(self, state: CacheState, entry: int, begin: int, end: int) -> int | None:
        """Returns the first length from `end` on at which a call may end, or None; for errors.

        It holds for all entries if they are equally long, else for this entry.
        """
        alike, least = len(set(state.lengths)) == 1, end
        while True:
            for number in range(len(state.lengths)) if alike else [entry]:
                later = next_end(self.pattern, begin, end, _tokens(state, number))
                if later is None:
                    return None
                end = max(end, later)
            if end == least:
                return end
            least = end


def _tokens(state: CacheState, entry: int) -> Tokens:
    """Returns the `Tokens` (lengths, heads, entry) that `first_ahead` and `next_end` take."""
    entry = entry if state.pattern.num_batches() is not None else 0
    return Tokens(state.total, state.heads, state.kv_heads, entry)
