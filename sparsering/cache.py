"""Building layouts, and the cache of them: pure functions of values, kept by value."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from .algebra import Frame, Pattern
from .compile import CompiledPass, compile_passes
from .layout import BlockLayout, Pass
from .selected import selected_layout
from .tiles import Axis

BLOCK_SIZES = range(16, 257, 16)


def build_layout(
    pattern: Pattern, frame: Frame, block_size: int, device: torch.device
) -> BlockLayout:
    """Compiles without the cache. Raises ValueError where the pattern does not fit or the block
    size is not legal.
    """
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be a multiple of 16 from 16 to 256, got {block_size}")
    pattern.check(frame)
    if (selected := selected_layout(pattern, frame, block_size)) is not None:
        return replace(selected, passes=tuple(p.to(device) for p in selected.passes))
    compiled = (
        compile_passes(pattern, frame, block_size)
        if frame.num_heads and pattern.num_batches() != 0
        else []
    )
    passes = tuple(assemble(c, frame, block_size).to(device) for c in compiled)
    pairs = sum(c.num_pairs for c in compiled)
    return BlockLayout(frame, block_size, passes, pairs)


def assemble(compiled: CompiledPass, frame: Frame, block_size: int) -> Pass:
    """Stacks the tables of a compiled pass; shorter ones are padded."""
    tables = compiled.tables
    longest = max(len(t.key_tile) for row in tables for t in row)

    def stack(name: str, length: int) -> Tensor:
        padded = torch.zeros(len(tables), len(tables[0]), length, dtype=torch.int32)
        for b, row in enumerate(tables):
            for h, table in enumerate(row):
                values: Tensor = getattr(table, name)
                padded[b, h, : len(values)] = values
        return padded

    queries, keys = compiled.queries, compiled.keys
    return Pass(
        step=queries[0].step,
        query_start=torch.stack([axis.start for axis in queries]) - frame.q_start,
        query_stop=torch.stack([axis.stop for axis in queries]) - frame.q_start,
        key_start=torch.stack([axis.start for axis in keys]),
        key_stop=torch.stack([axis.stop for axis in keys]),
        row_ptr=stack("row_ptr", len(queries[0]) + 1),
        key_tile=stack("key_tile", longest),
        mask=stack("mask", longest),
        bitmaps=compiled.bitmaps,
        covers=(
            _cover(queries, block_size, frame.q_len),
            _cover(keys, block_size, frame.kv_len),
        ),
        longest=(
            max((_most(t.row_ptr.diff()) for row in tables for t in row), default=0),
            max((_most(t.key_tile.bincount()) for row in tables for t in row), default=0),
        ),
    )


def _cover(axes: list[Axis], block_size: int, length: int) -> bool:
    """Whether the tiles of every axis hold `length` positions."""
    return all(int(axis.count.clamp(0, block_size).sum()) == length for axis in axes)


def _most(counts: Tensor) -> int:
    return int(counts.max()) if len(counts) else 0


class CacheInfo(NamedTuple):
    """Counts since the last `clear`, and what is held now."""

    hits: int
    misses: int
    entries: int
    bytes: int
    limit: int


class Sized(Protocol):
    """What tells how many bytes it holds."""

    @property
    def nbytes(self) -> int: ...


Kept = TypeVar("Kept", bound=Sized)


class LayoutCache:
    """Least-recently-used layouts by value of (pattern, frame, block size, device), and what else
    is built of patterns; thread-safe, bounded in bytes.
    """

    def __init__(self, limit: int = 256 << 20) -> None:
        self._lock = threading.Lock()
        self._building: dict[Hashable, threading.Lock] = {}
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()  # with bytes
        self._limit, self._held = limit, 0
        self._hits = self._misses = 0

    def layout(
        self, pattern: Pattern, frame: Frame, block_size: int, device: torch.device
    ) -> BlockLayout:
        """The cached layout, or a new one; threads that ask for the same one wait for a single
        build.

        Patterns that hold device tensors are built anew: comparing them would wait for the device.
        """
        if any(tensor.device.type != "cpu" for tensor in pattern.tensors):
            return build_layout(pattern, frame, block_size, device)
        key = (pattern, frame, block_size, device)
        return self.keep(key, lambda: build_layout(pattern, frame, block_size, device))

    def keep(self, key: Hashable, build: Callable[[], Kept]) -> Kept:
        """What `build` makes, which has `nbytes`, kept by a key; built once, also among threads."""
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
                    self._kept[key] = (made, made.nbytes)
                    self._held += made.nbytes
                    self._shrink()
                return made
            finally:
                with self._lock:
                    self._building.pop(key, None)

    def info(self) -> CacheInfo:
        """The counts. Layouts grow when their transposes are built: they are measured anew here."""
        with self._lock:
            for key, (layout, _) in self._kept.items():
                self._kept[key] = (layout, layout.nbytes)
            self._held = sum(nbytes for _, nbytes in self._kept.values())
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
        with self._lock:
            self._limit = limit
            self._shrink()

    def _find(self, key: Hashable) -> Any:
        with self._lock:
            if key not in self._kept:
                return None
            self._hits += 1
            self._kept.move_to_end(key)
            return self._kept[key][0]

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


layout_cache = LayoutCache()
