"""A shallow copy of a cache goes on alone, as a deep copy does: `copy.copy` forks a prompt."""

import copy

import pytest
import torch

import sparsering as sr
from sparsering.selection import BlockSummaries, block_scores

UNLIKE = sr.PerHead([sr.SlidingWindow(9), sr.Causal()])
KINDS = {
    "even": lambda: sr.KVCache(sr.Causal(), 2, 2, 8, page_size=16),
    "unlike heads": lambda: sr.KVCache(UNLIKE & sr.Causal(), 2, 2, 8, page_size=16),
    "int8": lambda: sr.KVCache(sr.Causal(), 2, 2, 8, page_size=16, store="int8"),
    "selected": lambda: sr.SelectedCache(2, 2, 8, k=3, block_size=4, page_size=16),
}


@pytest.mark.parametrize("prompt", [0, 5, 37])
@pytest.mark.parametrize("kind", KINDS)
def test_neither_a_cache_nor_its_shallow_copy_sees_the_other_go_on(kind, prompt):
    first, alone = KINDS[kind](), [KINDS[kind](), KINDS[kind]()]
    start = torch.randn(3, 2, 2, prompt, 8)
    for cache in (first, *alone):
        cache.attend(*start)
    second = copy.copy(first)
    assert type(second) is type(first)
    for _ in range(40):  # over several pages
        for cache, twin in zip((first, second), alone, strict=True):
            new = torch.randn(3, 2, 2, 1, 8)
            assert cache.attend(*new).equal(twin.attend(*new))
    second.select([1])
    assert (first.lengths, second.lengths) == ([prompt + 40] * 2, [prompt + 40])


def test_a_compiled_step_of_a_shallow_copy_is_its_own():
    x = torch.randn(3, 1, 1, 9, 4)
    first = sr.KVCache(sr.Causal(), 1, 1, 4)
    first.attend(*x[..., :5, :])
    second = copy.copy(first)
    torch.ops.sparsering.cached_attention(*x[..., 5:9, :], second._clock)
    assert (first.length, second.length) == (5, 9)


def test_a_shallow_copy_of_a_draft_is_refused_with_the_way_out():
    cache = sr.KVCache(sr.Causal(), 1, 1, 4, rollback=4)
    cache.attend(*torch.randn(3, 1, 1, 2, 4), tree=[-1, 0])
    with pytest.raises(ValueError, match=r"a copy needs a cache without a draft.* call keep"):
        copy.copy(cache)


def test_a_shallow_copy_of_block_summaries_has_blocks_of_its_own():
    start, own, other = torch.randn(1, 1, 25, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 8)
    first = BlockSummaries(4)
    first.scores(start[:, :, :21], start[:, :, :21])
    first.scores(start[:, :, -1:], start)  # leaves room in the buffer
    second = copy.copy(first)
    keys = [torch.cat((start, x), 2) for x in (own, other)]
    for summaries, key in zip((first, second, first), (*keys, keys[0]), strict=True):
        found = summaries.scores(key[:, :, -1:], key)
        assert (found - block_scores(key, key, 4)[:, :, -1:]).abs().max() < 1e-5
