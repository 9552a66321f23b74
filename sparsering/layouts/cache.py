"""The cache of layouts: pure functions of values, kept by value."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch

from ..patterns.algebra import Frame, Pattern
from ..patterns.arguments import checked_integer
from ..patterns.selected import selections_of
from .compile import build_layout
from .layout import BlockLayout


class CacheInfo(NamedTuple):
    """Counts since the last `clear`, and what is held now."""

    hits: int
    misses: int
    entries: int
    bytes: int
    limit: int


Kept = TypeVar("Kept")


class LayoutCache:
    """Least-recently-used layouts, and what else is built of patterns, by value.

    `info()` counts, `set_limit(bytes)` bounds, `invalidate(pattern)` and `clear()` empty it.

    Thread-safe, and bounded in bytes: those that a thing says it has by `nbytes`.
    """

    def __init__(self, limit: int = 256 << 20) -> None:
        self._lock = threading.Lock()
        self._building: dict[Hashable, threading.Lock] = {}
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()  # with bytes
        self._limit, self._held = limit, 0
        self._hits = self._misses = 0

    def __repr__(self) -> str:
        return f"<LayoutCache {self.info()}>"

    def layout(
        self, pattern: Pattern, frame: Frame, block_size: int, device: torch.device
    ) -> BlockLayout:
        """The cached layout, or a new one; threads that ask for the same wait for one build.

        Patterns that hold device tensors are built anew: comparing them would wait for the device;
        so is what a single query selects, which no other will.
        """
        if pattern.tensors:
            once = frame.q_len == 1 and selections_of(pattern)
            if once or any(x.device.type != "cpu" for x in pattern.tensors):
                return build_layout(pattern, frame, block_size, device)
        key = (pattern, frame, block_size, device)
        return self.keep(key, lambda: build_layout(pattern, frame, block_size, device))

    def keep(self, key: Hashable, build: Callable[[], Kept]) -> Kept:
        """What `build` makes, kept by a key; built once, also among threads."""
        if (found := self._find(key)) is not None:
            return found
        with self._lock:
            building = self._building.setdefault(key, threading.Lock())
        with building:
            if (found := self._find(key)) is not None:
                return found
            try:
                made = build()
                with self._lock:
                    self._misses += 1
                    if self._kept:  # the one before has grown since, by what its backward asked for
                        self._measure(next(reversed(self._kept)))
                    self._kept[key] = (made, 0)
                    self._measure(key)
                    self._shrink()
                return made
            finally:
                with self._lock:
                    self._building.pop(key, None)

    def _measure(self, key: Hashable) -> None:
        kept, before = self._kept[key]
        self._kept[key] = kept, _nbytes(kept)
        self._held += self._kept[key][1] - before

    def info(self) -> CacheInfo:
        """The counts. Layouts grow when their transposes are built: they are measured anew here."""
        with self._lock:
            for key in self._kept:
                self._measure(key)
            self._shrink()
            return CacheInfo(self._hits, self._misses, len(self._kept), self._held, self._limit)

    def clear(self) -> None:
        """Drops every layout and resets the counts."""
        with self._lock:
            self._kept.clear()
            self._hits = self._misses = self._held = 0

    def invalidate(self, pattern: Pattern) -> int:
        """Drops what was built of one pattern; returns how many things there were."""
        with self._lock:
            stale = [key for key in self._kept if pattern in key]  # type: ignore[operator]
            for key in stale:
                self._drop(key)
            return len(stale)

    def set_limit(self, limit: int) -> None:
        """Sets the most bytes to hold, dropping the least recently used layouts beyond it."""
        checked_integer("limit", limit, 0)
        with self._lock:
            self._limit = limit
            self._shrink()

    def _find(self, key: Hashable) -> Any:
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._hits += 1
            self._kept.move_to_end(key)
            return found[0]

    def _drop(self, key: Hashable) -> None:
        self._held -= self._kept.pop(key)[1]

    def _shrink(self) -> None:
        """Drops what does not fit: a layout beyond the limit by itself, else the oldest ones."""
        if self._held <= self._limit:
            return
        for key in [key for key, (_, nbytes) in self._kept.items() if nbytes > self._limit]:
            self._drop(key)
        while self._held > self._limit:
            self._drop(next(iter(self._kept)))


def _nbytes(made: object) -> int:
    return int(getattr(made, "nbytes", sys.getsizeof(made)))


layout_cache = LayoutCache()
