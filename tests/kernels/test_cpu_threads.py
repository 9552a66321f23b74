"""Calls of the CPU kernel from eight threads at once give the bits of the same calls one by one.

`make test-tsan` runs this file with the kernel compiled for ThreadSanitizer; the threads then call
for `SPARSERING_SECONDS` and each race inside the kernel ends the run with its two stacks. It sees a
race only where both accesses are the kernel's: what Python and torch do is not instrumented.
"""

import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles.attention_oracle import PATTERNS, Case, inputs
from torch import Tensor

import sparsering as sr
from sparsering.kernels.cpu import call
from sparsering.selection import block_mass, block_scores

THREADS = 8
SECONDS = float(os.environ.get("SPARSERING_SECONDS", "0"))
CASE = Case(num_heads=4, num_kv_heads=2, q_len=150, kv_len=150, head_dim=32, value_dim=24)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = ("causal", "longnet", "mixture under masks", "key padding", "blocks of each batch entry")

Work = Callable[[], tuple[Tensor, ...]]
SHARED = {dtype: inputs(CASE, dtype, requires_grad=False) for dtype in DTYPES}  # by all threads


def trains(pattern: sr.Pattern, dtype: torch.dtype, **options: Any) -> Work:
    """Forward and backward on tensors that all threads read."""

    def work() -> tuple[Tensor, ...]:
        given = {k: x.requires_grad_() if isinstance(x, Tensor) else x for k, x in options.items()}
        leaves = [x.detach().requires_grad_() for x in SHARED[dtype]]
        out, lse = sr.attention(*leaves, pattern, backend="cpu", return_lse=True, **given)
        wrt = [*leaves, *(x for x in given.values() if isinstance(x, Tensor))]
        total = out.float().square().sum() + lse[lse.isfinite()].sum()
        return out.detach(), lse.detach(), *torch.autograd.grad(total, wrt)

    return work


def decodes(pattern: sr.Pattern, dtype: torch.dtype) -> Work:
    """A prompt and some steps, in a cache of the thread's own."""

    def work() -> tuple[Tensor, ...]:
        query, key, value = SHARED[dtype]
        cache = sr.KVCache(
            pattern & sr.Causal(),
            2,
            2,
            CASE.head_dim,
            num_heads=4,
            value_dim=CASE.value_dim,
            page_size=16,
        )
        ends = (0, 40, *range(41, 49), 50, 59)
        with torch.no_grad():
            parts = [
                cache.attend(*(x[:, :, begin:end] for x in (query, key, value)))
                for begin, end in itertools.pairwise(ends)
            ]
        return (torch.cat(parts, 2),)

    return work


def chooses(rows: int, dtype: torch.dtype) -> Work:
    """Attention to chosen blocks, walked by key tile, and the mass of each of them."""
    generator = torch.Generator().manual_seed(rows)
    indices = torch.randint(-1, 5, (2, 2, -(-CASE.q_len // rows), 3), generator=generator)
    pattern = sr.SelectedBlocks(indices, 32, query_block=rows)
    train = trains(pattern, dtype, slot_bias=torch.randn(indices.shape, generator=generator))

    def work() -> tuple[Tensor, ...]:
        query, key, _ = SHARED[dtype]
        return *train(), block_mass(query, key, pattern)

    return work


def scores(method: str, dtype: torch.dtype) -> Work:
    query, key, _ = SHARED[dtype]
    return lambda: (block_scores(query, key, 16, query_block=8, method=method),)


def all_work() -> list[Work]:
    work = [trains(PATTERNS[name](CASE), dtype) for name in NAMES for dtype in DTYPES]
    extras = {
        "softcap": 0.7,
        "distance_bias": torch.randn(4, 2 * 17 + 1),
        "sink": torch.randn(4),
        "dropout_p": 0.3,
        "dropout_seed": 11,
    }
    work += [trains(sr.Causal(), dtype, block_size=16, **extras) for dtype in DTYPES]
    patterns = (sr.SlidingWindow(20), sr.LongNet((16, 64), (1, 2)))
    work += [decodes(pattern, dtype) for pattern in patterns for dtype in DTYPES]
    work += [chooses(rows, dtype) for rows in (1, 8) for dtype in DTYPES[:2]]
    return work + [scores(method, DTYPES[0]) for method in ("mean", "sub", "gauss", "bounds")]


def disturbs(rng: random.Random) -> None:
    """Layouts are dropped, or found anew, while others call."""
    if rng.randrange(2):
        sr.layout_cache.clear()
    else:
        sr.layout_cache.set_limit(rng.choice((0, 10_000, 1 << 28)))


@pytest.mark.parametrize("sweep", [pytest.param("by head", marks=pytest.mark.slow), "by tile"])
@pytest.mark.usefixtures("threads")
def test_calls_of_eight_threads_do_not_disturb_each_other(sweep, monkeypatch):
    torch.set_num_threads(2)
    monkeypatch.setattr(call, "_MOST_REPEATED_WORK", float("inf") if sweep == "by head" else 0)
    work = all_work()
    expected = [each() for each in work]
    limit = sr.layout_cache.info().limit
    sr.layout_cache.clear()
    begin, end = threading.Barrier(THREADS), time.monotonic() + SECONDS
    failures: list[BaseException] = []

    def run(number: int) -> None:
        rng = random.Random(number)
        try:
            begin.wait()
            while True:  # all ask for one layout, then each for some other
                for at in (0, *rng.sample(range(len(work)), len(work) // 3)):
                    if rng.random() < 0.2:
                        disturbs(rng)
                    for got, alone in zip(work[at](), expected[at], strict=True):
                        assert torch.equal(got, alone), at
                if time.monotonic() > end or failures:
                    return
        except BaseException as error:
            failures.append(error)

    started = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    sr.layout_cache.set_limit(limit)
    sr.layout_cache.clear()
    if failures:
        raise failures[0]
