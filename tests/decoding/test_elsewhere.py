"""`KVCache` whose last tokens are stored by other ranks."""

import torch

import sparsering as sr


def test_positions_and_kept_are_without_tokens_that_others_store():
    cache = sr.KVCache(sr.Causal(), 1, 1, 4, page_size=16, rollback=4)
    new = torch.randn(1, 1, 1, 4)
    cache.attend(new, new, new)
    for position in range(1, 14):
        cache.attend(new, new, new, stored=position % 3 == 0)
    assert cache.positions(0).tolist() == [0, 3, 6, 9, 12]
    assert (cache.length, cache.kept) == (14, 5)
    cache.crop(11)
    assert cache.positions(0).tolist() == [0, 3, 6, 9]
    assert (cache.length, cache.kept) == (11, 4)
