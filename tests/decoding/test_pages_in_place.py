"""A cache on a CPU has room for more pages: where heads keep their latest rows, none is copied."""

import copy
from itertools import pairwise

import pytest
import torch

import sparsering as sr

HEADS, WIDTH, PAGE = 2, 8, 16
PATTERNS = {
    "causal": sr.Causal(),
    "a window": sr.Causal() & sr.SlidingWindow(255),
    "chunks": sr.ChunkedCausal(128),
}


def inputs(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 2, HEADS, n, WIDTH, generator=generator).unbind()


def part(tensors, begin, end):
    return tuple(x[:, :, begin:end] for x in tensors)


def made(name, **rest):
    return sr.KVCache(PATTERNS[name], 2, HEADS, WIDTH, page_size=PAGE, **rest)


def places(cache):
    held = cache._state.keys, cache._state.values
    return [x.rows.untyped_storage().data_ptr() for x in held]


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("steps", [(1,), (3, 1, 7)])
@sr.batch_invariant()
def test_rows_have_the_bits_of_one_call(name, steps):
    n, prompt = 700, 300
    tensors, cache = inputs(n), made(name)
    wanted = sr.attention(*tensors, PATTERNS[name])
    rows, begin, seen = [cache.attend(*part(tensors, 0, prompt))], prompt, []
    while begin < n:
        end = min(n, begin + steps[len(rows) % len(steps)])
        rows.append(cache.attend(*part(tensors, begin, end)))
        seen.append(places(cache))
        begin = end
    assert torch.equal(torch.cat(rows, 2), wanted)
    moves = sum(one != other for one, other in pairwise(seen))
    if steps == (1,):  # a chunk that does not fit into its page copies what it attends to
        assert moves == {"causal": 7, "a window": 12, "chunks": 25}[name]  # of 25 pages


@pytest.mark.parametrize("name", PATTERNS)
def test_memory_is_that_of_live_rows_and_an_eighth(name):
    tensors, cache = inputs(1200), made(name)
    cache.attend(*part(tensors, 0, 1000))
    for i in range(1000, 1200):
        cache.attend(*part(tensors, i, i + 1))
        kept = cache.kept
        # an eighth has the page and pages that slid; beside it are half a page of rounding, and a
        # page in which all rows are dead; positions and last queries are int64
        most = 9 * kept / 8 + 1.5 * PAGE
        assert cache.nbytes <= 2 * 2 * HEADS * most * WIDTH * 4 + 2 * HEADS * kept * 8


def test_what_a_dropped_call_wrote_is_in_no_later_page():
    """NaN in a slot of a key that no query sees would spread."""
    tensors, cache = inputs(500), made("causal")
    wanted = sr.attention(*tensors, sr.Causal())
    cache.attend(*part(tensors, 0, 400))
    before = places(cache)
    for begin in range(400, 440, 4):
        bad = [torch.full_like(x[:, :, :8], torch.nan) for x in tensors]
        cache.attend(*bad, keep=False)
        out = cache.attend(*part(tensors, begin, begin + 4))
        assert torch.equal(out, wanted[:, :, begin : begin + 4])
    assert places(cache) == before  # two pages later the rows lie where they lay


def test_entries_that_part_have_rows_of_their_own():
    tensors, cache = inputs(520), made("causal")
    cache.attend(*part(tensors, 0, 400))
    cache.repeat(2)
    pairs = [x.repeat_interleave(2, 0) for x in tensors]
    other = inputs(520, seed=1)
    for x, y in zip(pairs, other, strict=True):
        x[1::2, :, 400:] = y[:, :, 400:]
    wanted = sr.attention(*pairs, sr.Causal())
    for i in range(400, 520):
        out = cache.attend(*part(pairs, i, i + 1))
        assert torch.equal(out, wanted[:, :, i : i + 1])


@pytest.mark.parametrize("back", [5, 20, 45])
def test_crop_goes_back_over_pages_that_slid(back):
    tensors, cache = inputs(560), made("causal", rollback=64)
    wanted = sr.attention(*tensors, sr.Causal())
    cache.attend(*part(tensors, 0, 400))
    for _ in range(60):
        cache.attend(*(torch.full_like(x[:, :, :1], 3.0) for x in tensors))
    cache.crop(460 - back)
    cache.crop(400)
    for i in range(400, 560):
        out = cache.attend(*part(tensors, i, i + 1))
        assert torch.equal(out, wanted[:, :, i : i + 1])


def test_a_copy_goes_on_alone():
    tensors, cache = inputs(500), made("a window")
    wanted = sr.attention(*tensors, PATTERNS["a window"])
    cache.attend(*part(tensors, 0, 440))
    other = copy.deepcopy(cache)
    for i in range(440, 500):
        cache.attend(*(torch.ones_like(x[:, :, :1]) for x in tensors))
        assert torch.equal(other.attend(*part(tensors, i, i + 1)), wanted[:, :, i : i + 1])


def test_keys_in_the_middle_are_evicted():
    """A sink before the window stays, and what lies between is dropped: rows must move."""
    pattern = sr.Causal() & (sr.SlidingWindow(255) | sr.GlobalTokens(4, rows=False))
    tensors = inputs(500)
    wanted = sr.attention(*tensors, pattern)
    cache = sr.KVCache(pattern, 2, HEADS, WIDTH, page_size=PAGE)
    cache.attend(*part(tensors, 0, 400))
    for i in range(400, 500):
        out = cache.attend(*part(tensors, i, i + 1))
        assert torch.equal(out, wanted[:, :, i : i + 1])
    assert cache._state.keys.older == (259,) * HEADS
