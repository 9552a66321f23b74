"""A step that raises anywhere leaves the cache as it was, or as it is after the step."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsering as sr

LENGTH, FIRST = 60, 36
PATTERN = sr.LongNet((8, 32), (1, 2)) & sr.Causal()
X = [torch.randn(2, h, LENGTH, 4, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2)]
X[2] = X[2] + 1


def cached(parts: tuple[int, ...]) -> sr.KVCache:
    cache = sr.KVCache(PATTERN, 2, 2, 4, num_heads=4, page_size=16, rollback=4)
    return fed(cache, parts)


def selecting(parts: tuple[int, ...]) -> sr.KVCache:
    made = sr.SelectedCache(2, 2, 4, 3, block_size=8, num_heads=4, page_size=16, rollback=20)
    return fed(made, parts)


def fed(cache: sr.KVCache, parts: tuple[int, ...]) -> sr.KVCache:
    for n in parts:
        step(cache, n)
    return cache


def step(cache: sr.KVCache, n: int, **options: Any) -> Tensor:
    first = cache.length
    return cache.attend(*(x[: len(cache.lengths), :, first : first + n] for x in X), **options)


def state(cache: sr.KVCache) -> Any:
    """Returns the visible state of a cache: its length, its keys, and its next output."""
    entries = range(len(cache.lengths))
    held = [cache.positions(head, entry).tolist() for head in range(2) for entry in entries]
    seen = cache.lengths, cache.kept, held
    part = [x[: len(cache.lengths)] for x in X]
    outs = [cache.attend(*(x[:, :, FIRST - n : FIRST] for x in part)).tolist() for n in (1, 3, 15)]
    return seen, outs, cache.lengths


class Raised(BaseException):
    """An error that nothing catches, as KeyboardInterrupt."""


@contextmanager
def raising_at(line: int) -> Iterator[list[int]]:
    """Raises at the line of that number of those that the cache's modules run."""
    count = [0]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("sparsering.decoding", "sparsering.selection.summaries")):
            return None if event == "call" else trace
        if event == "line":
            count[0] += 1
            if count[0] == line:
                raise Raised
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


CASES: dict[str, tuple[Callable[..., sr.KVCache], tuple[int, ...], Callable[..., Any]]] = {
    "prompt": (cached, (), lambda c: step(c, 20)),
    "part of a prompt": (cached, (20, 3), lambda c: step(c, 20)),
    "tokens of a page": (cached, (20, 3), lambda c: step(c, 3)),
    "token like the last one": (cached, (20, 1, 1), lambda c: step(c, 1)),
    "end of a page": (cached, (20, 15), lambda c: step(c, 1)),
    "unlike lengths": (cached, (20, 3), lambda c: step(c, 5, lengths=[5, 2])),
    "not stored": (cached, (20, 3), lambda c: step(c, 2, stored=False)),
    "not kept": (cached, (20, 3), lambda c: step(c, 3, keep=False)),
    "not kept, past a page": (cached, (20, 3), lambda c: step(c, 16, keep=False)),
    "selected not kept": (selecting, (20, 3), lambda c: step(c, 3, keep=False)),
    "crop of a page": (cached, (20, 3, 4), lambda c: c.crop(24)),
    "crop past a page": (cached, (20, 3), lambda c: c.crop(19)),
    "reorder": (cached, (20, 3), lambda c: c.reorder([1, 0])),
    "select": (cached, (20, 3), lambda c: c.select([1])),
    "repeat": (cached, (20, 3), lambda c: (c.select([0]), c.repeat(2))),
    "load": (cached, (), lambda c: c.load(X[1][:, :, :20], X[2][:, :, :20])),
    "selected prompt": (selecting, (), lambda c: step(c, 20)),
    "selected token": (selecting, (20, 3), lambda c: step(c, 1)),
    "selected end of a page": (selecting, (20, 10), lambda c: step(c, 7)),
    "selected crop": (selecting, (20, 3), lambda c: c.crop(21)),
    "selected crop past a page": (selecting, (20, 3), lambda c: c.crop(14)),
    "selected reorder": (selecting, (20, 3), lambda c: c.reorder([1, 0])),
    "selected select": (selecting, (20, 3), lambda c: c.select([1])),
}


@pytest.mark.parametrize("points", [12, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_what_raises_anywhere_is_done_whole_or_not_at_all(name, points):
    make, parts, call = CASES[name]
    call(make(parts))  # so that layouts are there, or the first call would run more lines
    cache = make(parts)
    allowed = [state(make(parts))]
    if name == "repeat":  # two calls
        cache.select([0])
        allowed.append(state(cache))
        cache = make(parts)
    with raising_at(-1) as count:
        call(cache)
    allowed.append(state(cache))
    lines = range(1, count[0] + 1)
    for line in lines[:: 1 + len(lines) // points]:
        cache = make(parts)
        with raising_at(line), pytest.raises(Raised):
            call(cache)
        assert state(cache) in allowed, f"raised at line {line} of {len(lines)}"
    assert len(lines) > 5
