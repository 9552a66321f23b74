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


@pytest.mark.parametrize("backend", ["gather", "cpu"])
@pytest.mark.parametrize("length", [20, 31])  # the guesses stay within a page, or end it
def test_nan_of_guesses_that_are_taken_back_reaches_nothing(length, backend):
    x = torch.randn(1, 1, 48, 4)
    cache = sr.KVCache(sr.Causal(), 1, 1, 4, rollback=20, page_size=16)
    cache.attend(*[x[:, :, :length]] * 3, backend=backend)
    outs = [cache.attend(*[x[:, :, length : length + 1]] * 3, backend=backend)]
    guess = torch.full((1, 1, 15, 4), torch.nan)
    cache.attend(guess, guess, guess, backend=backend)
    cache.crop(length + 1)
    for token in range(length + 1, 48):
        outs.append(cache.attend(*[x[:, :, token : token + 1]] * 3, backend=backend))
    expected = sr.attention(*[x.double()] * 3, sr.Causal(), backend="reference")[:, :, length:]
    assert (torch.cat(outs, 2) - expected).abs().max() <= 3e-6
