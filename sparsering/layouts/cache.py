"""The cache of layouts; a layout is found again if its pattern, lengths and device are equal."""

import os
import threading
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch.profiler import record_function

from ..ground.arguments import checked_integer, shortened
from ..ground.keywords import class_with_hints, inner
from ..ground.once import bytes_held, one_thread, unseen
from ..ground.streams import capturing
from ..patterns.algebra import Frame, Pattern
from ..patterns.selected import selections_of
from .compile import build_layout, checked_block_size
from .layout import BlockLayout

# A value that took less than `_CHEAP_SECONDS` to build is dropped if it is not used during the
# next `_IDLE_BUILDS` builds. If small tables stayed, they would lie between the large tensors of
# training steps and fragment memory, which then grows by far more than the tables hold.
_CHEAP_SECONDS, _IDLE_BUILDS = 0.005, 80


class CacheInfo(NamedTuple):
    """Hits and misses since the last `clear`, number and bytes of cached values, limit in bytes."""

    hits: int
    misses: int
    entries: int
    bytes: int
    limit: int


Value = TypeVar("Value")


class _Build:
    """A build in progress: its thread holds the lock `turn`, and others wait there for `value`."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.value: Any = None


@dataclass(slots=True, eq=False)
class _CachedValue:
    value: Any
    size: int  # bytes
    used: int  # number of misses of the cache at the last use


@class_with_hints
class LayoutCache:
    """Least-recently-used cache of layouts and other values built from patterns, keyed by value.

    `info()` returns its counts, `set_limit(bytes)` bounds the bytes of its values,
    `invalidate(pattern)` and `clear()` drop entries. It is thread-safe.
    """

    def __init__(self, limit: int = 256 << 20) -> None:
        self._lock = threading.Lock()
        self._building: dict[Hashable, _Build] = {}
        self._entries: OrderedDict[Hashable, _CachedValue] = OrderedDict()
        self._cheap: deque[Hashable] = deque()  # keys whose values are dropped when idle
        self._limit = limit
        self._hits = self._misses = self._bytes = 0
        self._warned = False

    def __repr__(self) -> str:
        return f"<LayoutCache {self.info()}>"

    @inner
    def layout(
        self, pattern: Pattern, frame: Frame, block_size: int, device: torch.device
    ) -> BlockLayout:
        """Returns the cached layout, or builds it; threads that need one layout wait for one build.

        Some layouts are never cached: those of patterns with tensors on a GPU, because comparing
        tensors waits for the GPU; those of a selection for a single query, because no other call
        needs them; and those built while a CUDA graph is captured, because their tables are empty
        until it runs.
        """
        block_size = checked_block_size(block_size)
        key, reusable = (pattern, frame, block_size, device), _is_reusable(pattern, frame)
        if reusable:
            with self._lock:
                layout: BlockLayout | None = self._find(key)
            if layout is not None:
                return layout.ready()
        build = partial(build_layout, *key)
        if not reusable or capturing(device):
            return build()
        return self.keep(key, lambda: build().shared(device)).ready()

    @inner
    def keep(self, key: Hashable, build: Callable[[], Value]) -> Value:
        """Returns the value cached under a key, or builds and caches it; threads share one build.

        Threads that ask during a build wait for its value, even if it is too large for the cache.
        If the build fails or is interrupted, the waiting threads try one after the other.
        """
        with self._lock:
            if (value := self._find(key)) is not None:
                return value
            shared = self._building.setdefault(key, _Build())
        with shared.turn:  # `with` frees the waiting threads even if the build raises
            try:
                if shared.value is None:
                    begin = time.perf_counter()
                    with one_thread(), unseen(key), record_function("sparsering::layout"):
                        shared.value = build()
                    self._add(key, shared.value, time.perf_counter() - begin < _CHEAP_SECONDS)
                else:
                    with self._lock:
                        self._hits += 1
                value = shared.value
            finally:
                with self._lock:
                    if self._building.get(key) is shared:
                        del self._building[key]
        return value

    def _add(self, key: Hashable, value: Any, cheap: bool) -> None:
        """Counts a miss and stores a newly built value; `cheap` says that it was fast to build.

        Drops values that are quick to rebuild and long unused, then others until the cache is
        within its limit.
        """
        with self._lock:
            self._misses += 1
            if self._entries:  # the latest value may have grown: backward adds a transposed table
                latest = next(reversed(self._entries))
                self._put(latest, self._entries[latest].value)
            self._put(key, value)
            if cheap:
                self._cheap.append(key)
            # check at most four idle values per miss, so that a miss stays fast
            for _ in range(min(4, len(self._cheap))):
                oldest = self._cheap.popleft()
                if (entry := self._entries.get(oldest)) is None:
                    continue
                if self._misses - entry.used > _IDLE_BUILDS:
                    self._drop(oldest)
                else:
                    self._cheap.append(oldest)
            self._shrink()

    def _warn_of_rebuilding(self, key: Any, size: int) -> None:
        """Warns once if a layout on a GPU exceeds the limit, since each call builds it again."""
        devices = (x.type for x in key if isinstance(x, torch.device))
        if self._warned or all(kind == "cpu" for kind in devices):
            return
        self._warned = True
        warnings.warn(
            f"a layout of {size >> 20} MiB is not kept, since layout_cache has a limit of "
            f"{self._limit >> 20} MiB: each call builds it again; call "
            f"layout_cache.set_limit({2 * size})",
            stacklevel=2,
        )

    def _put(self, key: Hashable, value: Any, used: int | None = None) -> None:
        """Stores a value and its size in bytes; a value larger than the limit is dropped."""
        if (size := bytes_held((key, value))) > self._limit:
            self._drop(key)
            self._warn_of_rebuilding(key, size)
            return
        if (earlier := self._entries.get(key)) is not None:
            self._bytes -= earlier.size
            used = earlier.used
        self._entries[key] = _CachedValue(value, size, self._misses if used is None else used)
        self._bytes += size

    def _drop(self, key: Hashable) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._bytes -= entry.size

    def info(self) -> CacheInfo:
        """Returns the counts; measures sizes again, since a layout grows when it is transposed."""
        with self._lock:
            self._measure()
            return CacheInfo(
                hits=self._hits,
                misses=self._misses,
                entries=len(self._entries),
                bytes=self._bytes,
                limit=self._limit,
            )

    def clear(self) -> None:
        """Drops every entry and resets the counts."""
        with self._lock:
            self._entries.clear()
            self._cheap.clear()
            self._hits = self._misses = self._bytes = 0

    def invalidate(self, pattern: Pattern) -> int:
        """Drops the entries of one pattern; returns how many it dropped."""
        with self._lock:
            stale = [key for key in self._entries if pattern in key]  # type: ignore[operator]
            for key in stale:
                self._drop(key)
            return len(stale)

    def set_limit(self, limit: int) -> None:
        """Sets the most bytes to cache, and drops the least recently used entries beyond it."""
        limit = checked_integer("limit", limit, 0)
        with self._lock:
            self._limit = limit
            self._measure()

    def _find(self, key: Hashable) -> Any:
        """Returns the cached value of a key and counts a hit, or None. The caller holds `_lock`."""
        if (entry := self._entries.get(key)) is None:
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        entry.used = self._misses
        return entry.value

    def _shrink(self) -> None:
        """Drops the least recently used values until the bytes held are within the limit."""
        while self._bytes > self._limit:
            self._drop(next(iter(self._entries)))

    def _measure(self) -> None:
        """Measures all values again, since layouts grow after they are stored; drops old ones."""
        entries = list(self._entries.items())
        self._entries.clear()
        self._bytes = 0
        for key, entry in entries:
            self._put(key, entry.value, entry.used)
        self._shrink()

    def _renew(self) -> None:
        """Replaces the locks in a forked process, since a parent's thread may have held them."""
        self._lock, self._building = threading.Lock(), {}


def _is_reusable(pattern: Pattern, frame: Frame) -> bool:
    """Whether a layout may be asked for again, so that it is worth caching.

    False if no later call can need it, or if a lookup would have to wait for a GPU.
    """
    if not pattern.tensors:
        return True
    once = frame.q_len == 1 and selections_of(pattern)
    return not once and all(x.device.type == "cpu" for x in pattern.tensors)


def place_of(device: torch.device | str) -> torch.device:
    """Returns the device with its index, such as cuda:0; ValueError if this machine has none."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, ValueError, OverflowError, AssertionError) as error:
        raise ValueError(
            f"device must be one that this torch and machine have, got {shortened(repr(device))} "
            f"({shortened(str(error).splitlines()[0])}); leave it out for the CPU"
        ) from None


layout_cache = LayoutCache()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=layout_cache._renew)
