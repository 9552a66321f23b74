"""Drafts: a step that verifies a tree of 64 guesses, beside 64 plain tokens after the same keys.

In a model, the first layer lays out a new tree, and the other layers share its tables: a row each.
The error is of the draft's longest path, beside plain tokens in float64.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import sparsering as sr

from ..measure import Row, distance_of, interleaved_times, spread_of

HEADS, WIDTH, GUESSES = 8, 64, 64
PATTERNS = {
    "Causal()": sr.Causal(),
    "SlidingWindow(4095)": sr.SlidingWindow(4095),
    "LongNet((2048, 8192), (1, 4))": sr.LongNet((2048, 8192), (1, 4)),
}


def drafts(quick: bool) -> list[Row]:
    """Measures the steps for each pattern; `quick` takes few keys."""
    torch.manual_seed(0)
    tokens, rounds, rows = 512 if quick else 16384, 3 if quick else 15, list[Row]()
    for name, pattern in PATTERNS.items():
        prompt = [torch.randn(1, HEADS, tokens, WIDTH) for _ in range(3)]
        new = [torch.randn(1, HEADS, GUESSES, WIDTH) for _ in range(3)]
        cache = sr.KVCache(pattern & sr.Causal(), 1, HEADS, WIDTH, rollback=GUESSES)
        cache.attend(*prompt)
        numbers = itertools.count()
        calls: dict[str, Callable[[], object]] = {
            "plain tokens": partial(chunk, copy.deepcopy(cache), new),  # it crops
            "draft, first layer": partial(draft, cache, new, numbers),
            "draft, other layers": partial(draft, cache, new, itertools.repeat(-1)),
        }
        error = error_of(pattern, prompt, new)
        for way, times in interleaved_times(calls, rounds).items():
            rows.append({
                "pattern": name, "way": way, "cached": tokens, "new": GUESSES, "heads": HEADS,
                "head_dim": WIDTH, **spread_of(times), "error": error,
            })  # fmt: skip
    return rows


def tree_of(seed: int) -> list[int]:
    """Draws a tree of guesses, in which each token has at most a few below it."""
    generator = torch.Generator().manual_seed(seed + 1)
    return [i - 1 - int(torch.randint(min(i, 3) + 1, (1,), generator=generator))
            for i in range(GUESSES)]  # fmt: skip


def chunk(cache: sr.KVCache, new: list[Tensor]) -> None:
    """Attends with plain tokens, and removes them."""
    length = cache.length
    cache.attend(*new)
    cache.crop(length)


def draft(cache: sr.KVCache, new: list[Tensor], seeds: Iterator[int]) -> None:
    """Attends with the next tree, and drops it."""
    cache.attend(*new, tree=tree_of(next(seeds)))
    cache.keep([])


def error_of(pattern: sr.Pattern, prompt: list[Tensor], new: list[Tensor]) -> float:
    """Distance of the draft's results on its longest path from plain tokens in float64."""
    tree = tree_of(-1)
    paths: dict[int, list[int]] = {-1: []}
    for token, parent in enumerate(tree):
        paths[token] = [*paths[parent], token]
    path = max(paths.values(), key=len)
    cache, exact = (sr.KVCache(pattern & sr.Causal(), 1, HEADS, WIDTH) for _ in range(2))
    cache.attend(*prompt)
    exact.attend(*(x.double() for x in prompt))
    out = copy.deepcopy(cache).attend(*new, tree=tree)
    return distance_of([out[:, :, path]], [exact.attend(*(x[:, :, path].double() for x in new))])
