"""Caches of tokens that have a shape and no numbers: on the meta device, or of FakeTensorMode."""

from contextlib import nullcontext
from copy import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sparsering as sr

SCOPES = {
    "fake": FakeTensorMode,
    "meta": lambda: torch.device("meta"),
    "a meta device in the call": nullcontext,
}
PATTERNS = {
    "window": sr.SlidingWindow(20),
    "heads": sr.PerHead((sr.SlidingWindow(5), sr.SlidingWindow(40))),
    "longnet": sr.LongNet((16, 32), (1, 2)) & sr.Causal(),
}


def steps(pattern, device=None, store=None):
    """Yields (shapes of the result, lengths, kept, positions of each head) after each step."""
    cache = sr.KVCache(pattern, 2, 2, 16, num_heads=4, page_size=16, rollback=3, store=store)

    def attend(n, **options):
        query, key, value = (torch.zeros(2, h, n, 16, device=device) for h in (4, 2, 2))
        out, lse = cache.attend(query, key, value, return_lse=True, **options)
        assert device is None or out.device == lse.device == torch.device(device)
        return tuple(out.shape), tuple(lse.shape), lse.dtype

    def now(result=None):
        return result, cache.lengths, cache.kept, [cache.positions(h) for h in (0, 1)]

    yield now(attend(50))
    for n in (1,) * 20 + (3, 3):
        yield now(attend(n))
    cache.crop(cache.length - 2)
    yield now()
    attend(4, keep=False)
    yield now(attend(4, lengths=[4, 1]))
    cache.reorder([1, 0])
    yield now(attend(2))
    other = copy(cache)
    cache.select([1])
    cache.repeat(2)
    yield now(attend(17))
    cache.join(other)
    yield now()


@pytest.mark.parametrize("store", [None, "int8"])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_cache_keeps_as_many_keys_as_with_numbers(pattern, scope, store):
    wanted = list(steps(PATTERNS[pattern], store=store))
    with SCOPES[scope]():
        device = "meta" if scope == "a meta device in the call" else None
        found = list(steps(PATTERNS[pattern], device, store))
    assert len(found) == len(wanted) == 28
    for one, two in zip(found, wanted, strict=True):  # the mode is over: positions are numbers
        assert one[:-1] == two[:-1]
        assert [x.tolist() for x in one[-1]] == [x.tolist() for x in two[-1]]


@pytest.mark.parametrize("scope", ["fake", "meta"])
def test_positions_of_keys_are_numbers_whatever_mode_is_on(scope):
    pattern = sr.SlidingWindow(3)
    wanted = [x.tolist() for x in pattern.live_keys(64)], pattern.cache_bound()
    with SCOPES[scope]():
        found, bound = pattern.live_keys(64), pattern.cache_bound()
    assert ([x.tolist() for x in found], bound) == wanted == ([[61, 62, 63]], 3)


def test_a_prompt_is_loaded_by_its_shape():
    cache = sr.KVCache(sr.SlidingWindow(20), 1, 2, 16)
    cache.load(*torch.zeros(2, 1, 2, 50, 16, device="meta"))
    assert (cache.lengths, cache.kept) == ([50], 20)


def test_a_selection_needs_numbers():
    cache = sr.SelectedCache(1, 2, 16, k=2)
    with pytest.raises(ValueError, match="expected tensors with numbers"):
        cache.attend(*torch.zeros(3, 1, 2, 50, 16, device="meta"))
