"""`KVCache` of entries that go on from lengths of their own, and steps that are part padding."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.thinned import thinned
from oracles.attention_oracle import assert_close
from torch import Tensor

import sparsering as sr

BATCH, HEADS, KV_HEADS, LENGTH = 2, 4, 2, 96
VALID = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.6
TABLE = torch.rand(BATCH, HEADS, 6, 6, generator=torch.Generator().manual_seed(2)) < 0.6
CHOSEN = torch.randint(0, 6, (BATCH, KV_HEADS, 6, 3), generator=torch.Generator().manual_seed(3))
PARTS = ((10, 40, 46), (50, 16, 30))
BACKENDS = ("reference", "gather", "cpu")

OF_ENTRIES: dict[str, sr.Pattern] = {
    "key padding": sr.SlidingWindow(30) & sr.KeyPadding((90, 70)),
    "key mask": sr.KeyMask(VALID) & sr.Causal(),
    "documents": sr.Documents(PARTS),
    "packed": sr.Packed(PARTS, sr.SlidingWindow(9) | sr.GlobalTokens(2)),
    "blocks": sr.Blocks(TABLE, 16),
    "selected blocks": sr.SelectedBlocks(CHOSEN, 16) & sr.Causal(),
    "mask_mod": sr.from_mask_mod(lambda b, h, q, k: (q - k) % (b + 2) < 2, batch_size=BATCH),
    "mixture": sr.LongNet((16, 64), (1, 4)) & sr.KeyPadding((90, 70)),
}
ALIKE: dict[str, sr.Pattern] = {
    "causal": sr.Causal(),
    "window": sr.SlidingWindow(9),
    "longnet": sr.LongNet((8, 32), (1, 2)) & sr.Causal(),
    "dilated window": sr.SlidingWindow(30, 30, 3),
}


def sequence(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = (HEADS, 8), (KV_HEADS, 8), (KV_HEADS, 6)
    return [torch.randn(BATCH, heads, LENGTH, dim, dtype=dtype) for heads, dim in shapes]


def cache_of(pattern: sr.Pattern, **options: Any) -> sr.KVCache:
    options = {"page_size": 16, "max_length": LENGTH, **options}
    pattern = pattern & sr.Causal()
    return sr.KVCache(pattern, BATCH, KV_HEADS, 8, num_heads=HEADS, value_dim=6, **options)


def padded(
    x: Sequence[Tensor], done: Sequence[int], new: Sequence[int], width: int
) -> list[Tensor]:
    """The next tokens of each entry, and 9 where a step of `width` tokens has none."""
    return [
        torch.stack(
            [
                torch.nn.functional.pad(
                    y[b, :, done[b] : done[b] + n], (0, 0, 0, width - n), value=9.0
                )
                for b, n in enumerate(new)
            ]
        )
        for y in x
    ]


def check(
    cache: sr.KVCache,
    x: Sequence[Tensor],
    steps: Sequence[tuple[Sequence[int], int]],
    tolerance: float = 1e-12,
    **options: Any,
) -> None:
    """Steps of (new tokens of each entry, tokens given) equal one pass, and 0 in padding."""
    wide, done = [y.double() for y in x], list(cache.lengths)
    pattern = cache.pattern & sr.Causal()
    out, lse = sr.attention(*wide, pattern, backend="reference", return_lse=True)
    for new, width in steps:
        got = cache.attend(*padded(x, done, new, width), lengths=new, return_lse=True, **options)
        for b, n in enumerate(new):
            rows = slice(done[b], done[b] + n)
            assert_close(got[0][b, :, :n].double(), out[b, :, rows], tolerance, f"{new}")
            assert_close(got[1][b, :, :n].double(), lse[b, :, rows], tolerance, f"{new}")
            assert not got[0][b, :, n:].any()
            assert (got[1][b, :, n:] == -torch.inf).all()
            done[b] += n
        assert cache.lengths == done


PADDED_STEPS = [([7, 7], 9), *[([1, 1], 3)] * 20, ([0, 0], 2), ([5, 5], 16), ([2, 2], 2)]
UNLIKE_STEPS = [([20, 31], 33), *[([1, 1], 1)] * 20, ([0, 7], 7), ([9, 2], 9), ([1, 1], 2)]


@pytest.mark.parametrize(("name", "backend"), thinned(3, ALIKE, BACKENDS))
def test_padding_behind_as_many_new_tokens_of_each_entry_does_not_count(name, backend):
    dtype, tolerance = (torch.float32, 3e-6) if backend == "cpu" else (torch.float64, 1e-12)
    cache, x = cache_of(ALIKE[name]), sequence(dtype)
    check(cache, x, PADDED_STEPS, tolerance, backend=backend)
    check(cache, x, [([1, 1], 1)] * 40, tolerance, backend=backend)


def test_a_sink_of_each_query_goes_with_padding():
    x, sink = sequence(), torch.randn(BATCH, HEADS, 5, dtype=torch.float64)
    cache, whole = cache_of(sr.Causal()), cache_of(sr.Causal())
    for first in (0, 20, 23):
        new = 20 if first == 0 else 3
        part = [y[:, :, first : first + new] for y in x]
        if first == 0:
            cache.attend(*part)
            whole.attend(*part)
            continue
        given = padded(x, [first] * BATCH, [new] * BATCH, 5)
        got = cache.attend(*given, lengths=[new] * BATCH, sink=sink)
        assert_close(got[:, :, :new], whole.attend(*part, sink=sink[:, :, :new]), 1e-12)
        assert not got[:, :, new:].any()


@pytest.mark.parametrize(("name", "backend"), thinned(3, {**OF_ENTRIES, **ALIKE}, BACKENDS))
def test_unlike_lengths(name, backend):
    """A ragged prompt, then tokens: each entry is a sequence of its own."""
    dtype, tolerance = (torch.float32, 3e-6) if backend == "cpu" else (torch.float64, 1e-12)
    cache = cache_of({**OF_ENTRIES, **ALIKE}[name])
    check(cache, sequence(dtype), UNLIKE_STEPS, tolerance, backend=backend)


@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_nan_in_padding_reaches_nothing(backend):
    cache, x = cache_of(sr.Causal()), sequence(torch.float32)
    for new in ([5, 0], *[[1, 1]] * 3, [0, 9], *[[1, 1]] * 3):
        part = padded(x, cache.lengths, new, 9)
        for y in part:
            for b, n in enumerate(new):
                y[b, :, n:] = torch.nan
        assert cache.attend(*part, lengths=new, backend=backend).isfinite().all()


@pytest.mark.parametrize("total", [LENGTH, None])
@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
def test_a_sink_of_each_query_of_unlike_lengths(backend, total):
    x, sink = sequence(torch.float32), torch.randn(BATCH, HEADS, 5)
    cache = cache_of(sr.SlidingWindow(20), max_length=total)
    cache.attend(*padded(x, [0, 0], [20, 31], 31), lengths=[20, 31])
    got = cache.attend(*padded(x, [20, 31], [5, 2], 5), lengths=[5, 2], sink=sink, backend=backend)
    for b, (first, n) in enumerate(((20, 5), (31, 2))):
        part = [y[b : b + 1, :, : first + n].double() for y in x]
        of_all = torch.zeros(1, HEADS, first + n, dtype=torch.float64)
        of_all[:, :, first:] = sink[b, :, :n]
        expected = sr.attention(*part, sr.SlidingWindow(20), sink=of_all, backend="reference")
        assert_close(got[b, :, :n].double(), expected[0, :, first:], 3e-6)


@pytest.mark.parametrize("first", [0, 7, 40])
@pytest.mark.parametrize(("name", "backend"), thinned(3, ALIKE, BACKENDS))
def test_a_request_joins_whatever_the_lengths(name, backend, first):
    """Caches of unlike lengths become one, which goes on as each would."""
    dtype, tolerance = (torch.float32, 3e-6) if backend == "cpu" else (torch.float64, 1e-12)
    x = sequence(dtype)
    joined, other = (cache_of(ALIKE[name], rollback=3) for _ in range(2))
    joined.select([0])
    other.select([1])
    for cache, b, done in ((joined, 0, first), (other, 1, 23)):
        for part in (slice(0, done // 2), slice(done // 2, done)):
            cache.attend(*(y[b : b + 1, :, part] for y in x), backend=backend)
    joined.join(other)
    assert joined.lengths == [first, 23] and other.lengths == [23]
    check(joined, x, [([1, 1], 1)] * 20 + [([3, 9], 9), ([1, 1], 1)], tolerance, backend=backend)
    joined.select([1])
    joined.crop(joined.length - 2)


def test_only_caches_that_were_made_alike_join():
    x = sequence()
    cache = cache_of(sr.Causal())
    cache.attend(*(y[:, :, :5] for y in x))
    before = cache.lengths, cache.nbytes
    others = [
        cache_of(sr.SlidingWindow(9)), cache_of(sr.Causal(), page_size=32),
        cache_of(sr.Causal(), rollback=1), cache_of(sr.Causal(), max_length=50),
        cache_of(sr.Causal(), dtype=torch.float32), sr.KVCache(sr.Causal(), 2, KV_HEADS, 16),
    ]  # fmt: skip
    for other in (*others, "a cache"):
        with pytest.raises(ValueError, match="join needs caches made with the same arguments"):
            cache.join(other)
    masked = cache_of(OF_ENTRIES["key mask"])
    with pytest.raises(ValueError, match="entries all follow one pattern"):
        masked.join(masked)
    chosen = sr.SelectedCache(1, 2, 8, k=2)
    with pytest.raises(ValueError, match="entries all follow one pattern"):
        chosen.join(sr.SelectedCache(1, 2, 8, k=2))
    cache.attend(*(y[:, :, 5:7] for y in x), tree=[-1, 0])
    for one, two in ((cache, cache_of(sr.Causal())), (cache_of(sr.Causal()), cache)):
        with pytest.raises(ValueError, match="join needs a cache without a draft"):
            one.join(two)
    cache.keep([])
    assert (cache.lengths, cache.nbytes) == before
    empty = cache_of(sr.Causal())
    empty.join(cache_of(sr.Causal()))
    assert empty.lengths == [0] * 4
    empty.join(cache)
    assert empty.lengths == [0] * 4 + [5, 5]
