"""Streams of chunks with a history (docs/streaming.md) have the rows and bits of one pass.

The definition of each mask is a loop here.
"""

import random
from itertools import accumulate, pairwise

import pytest
import torch
from oracles.attention_oracle import assert_close, attend_by_rows
from torch import Tensor

import sparsering as sr

HEADS, LENGTH = 2, 60


def chunks_of(sizes: list[int]) -> list[int]:
    """The chunk of each frame."""
    return [number for number, size in enumerate(sizes) for _ in range(size)]


def pairs_of(sizes: list[int], chunks: int | None = None, frames: int | None = None) -> Tensor:
    """Whether a frame sees another: its chunk, and a history of so many chunks or frames."""
    chunk = chunks_of(sizes)
    pairs = torch.zeros(len(chunk), len(chunk), dtype=torch.int)
    for q in range(len(chunk)):
        for k in range(len(chunk)):
            seen = chunk[k] <= chunk[q]
            seen = seen and (chunks is None or chunk[q] - chunk[k] <= chunks)
            pairs[q, k] = seen and (frames is None or q - k <= frames)
    return pairs


def drawn_sizes(draw: random.Random) -> list[int]:
    """Sizes of chunks, LENGTH in all."""
    cuts = sorted(draw.sample(range(1, LENGTH), draw.randint(1, 6)))
    return [b - a for a, b in pairwise([0, *cuts, LENGTH])]


def sound(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return list(torch.randn(3, 2, HEADS, LENGTH, 8, dtype=torch.float64).to(dtype))


def cache_of(pattern: sr.Pattern) -> sr.KVCache:
    return sr.KVCache(pattern, 2, HEADS, 8, page_size=16)


def streamed(pattern: sr.Pattern, x: list[Tensor], ends: list[int]) -> Tensor:
    """Rows of calls that end there."""
    cache, begins = cache_of(pattern), [0, *ends[:-1]]
    calls = [[y[:, :, a:b] for y in x] for a, b in zip(begins, ends, strict=True)]
    return torch.cat([cache.attend(*call) for call in calls], 2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "history"), [(4, 2), (16, 1), (5, 0), (12, 3)])
@sr.batch_invariant()
def test_chunks_of_one_size_have_the_bits_of_the_recording(size, history, dtype):
    sizes = [min(size, LENGTH - i) for i in range(0, LENGTH, size)]
    pattern = sr.BlockCausal(size) & sr.BlockWindow(history, size)
    x, ends = sound(dtype), list(accumulate(sizes))
    if LENGTH % size:
        x, ends = [y[:, :, : ends[-2]] for y in x], ends[:-1]  # the last chunk has not come
    offline = sr.attention(*x, pattern)
    pairs = pairs_of(sizes, history)[: ends[-1], : ends[-1]]
    exact, _ = attend_by_rows(*(y.double() for y in x), pairs[None, None])
    close = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2}[dtype]
    assert_close(offline.double(), exact, close)
    for some in (ends, [*ends[1::2], ends[-1]] if len(ends) % 2 else ends[1::2]):
        found = streamed(pattern, x, some)
        assert_close(found.double(), exact, close)
        assert found.equal(offline) or dtype == torch.float64  # docs/invariance.md


@pytest.mark.covering(1)
@pytest.mark.parametrize("as_data", [False, True])
@pytest.mark.parametrize("seed", range(8))
@sr.batch_invariant()
def test_chunks_of_unlike_sizes_have_the_bits_of_the_recording(seed, as_data):
    draw = random.Random(seed)
    sizes, frames = drawn_sizes(draw), draw.choice((None, 0, 7, 20))
    chunks = sr.BlockCausal(torch.tensor(sizes) if as_data else tuple(sizes))
    pattern = chunks if frames is None else chunks & sr.SlidingWindow(frames, None)
    x, ends = sound(torch.float32), list(accumulate(sizes))
    offline = sr.attention(*x, pattern)
    pairs = pairs_of(sizes, frames=frames)[None, None]
    assert_close(offline.double(), attend_by_rows(*(y.double() for y in x), pairs)[0], 3e-6)
    assert streamed(pattern, x, ends).equal(offline)


@pytest.mark.parametrize("seed", range(4))
def test_chunks_whose_sizes_come_late_are_two_parts_of_a_softmax(seed):
    draw = random.Random(seed)
    sizes, frames, x = drawn_sizes(draw), draw.choice((5, 20)), sound()
    cache = cache_of(sr.Causal() & sr.SlidingWindow(frames))
    rows, begin = [], 0
    for end in accumulate(sizes):
        part = [y[:, :, begin:end] for y in x]
        parts = [
            cache.attend(*part, keep=False, stored=False, return_lse=True),
            sr.attention(*part, sr.SlidingWindow(frames, None), return_lse=True),
        ]
        rows.append(sr.merge_attention(*zip(*parts, strict=True))[0])
        assert cache.length == begin
        cache.attend(*part)
        begin = end
    exact, _ = attend_by_rows(*x, pairs_of(sizes, frames=frames)[None, None])
    assert_close(torch.cat(rows, 2), exact, 1e-12)
