"""What a `KVCache` holds: never more than is live, and a page."""

import pytest
import torch

import sparsering as sr


@pytest.mark.parametrize("pattern", [sr.Dilated(16, 4, 1), sr.KeyMask(torch.arange(200) % 5 == 0)])
def test_rollback_beyond_the_first_token_keeps_no_key_that_nobody_visits(pattern):
    cache = sr.KVCache(pattern, 1, 1, 4, rollback=300, page_size=16)
    for length in (64, 96, 97, 112, 120):
        new = torch.randn(1, 1, length - cache.length, 4)
        cache.attend(new, new, new)
        visited = (pattern & sr.Causal()).to_dense(length, 200, q_start=0).any(0).any(0)
        held = cache.positions(0)
        assert cache.kept <= int(visited[:length].sum()) + 16
        assert visited[held[held < length - 16]].all()
