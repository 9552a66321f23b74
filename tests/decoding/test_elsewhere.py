"""`KVCache` whose last tokens are stored by other ranks."""

import pytest
import torch
from oracles.attention_oracle import assert_close

import sparsering as sr


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("backend", ["cpu", "gather", "reference"])
def test_no_backend_sees_keys_that_others_store(backend):
    x = torch.randn(3, 2, 2, 60, 8)
    cache = sr.KVCache(sr.SlidingWindow(30), 2, 2, 8, page_size=16)
    stored = torch.ones(60, dtype=torch.bool)
    outs = []
    for first, stop in ((0, 20), (20, 24), (24, 25), (25, 28), (28, 32), (32, 50), (50, 60)):
        here = first in (0, 24, 50)
        stored[first:stop] = here
        part = x[..., first:stop, :]
        try:
            outs.append(cache.attend(*part, stored=here, backend=backend))
        except (NotImplementedError, ImportError) as reason:
            pytest.skip(str(reason))
    pattern = sr.SlidingWindow(30) & sr.KeyMask(stored)
    expected = sr.attention(*x.double(), pattern, backend="reference")
    assert_close(torch.cat(outs, 2).double(), expected, 3e-6)


@pytest.mark.parametrize("lengths", [None, [1, 0]])  # in the page, and over spans
def test_the_mask_of_stored_keys_is_copied_without_waiting(monkeypatch, lengths):
    masks = []

    def copied(x, device):
        masks.append(x) if x.dtype == torch.bool else None
        return x.to(device)

    monkeypatch.setattr("sparsering.decoding.steps.moved", copied)
    cache, x = sr.KVCache(sr.Causal(), 2, 1, 8, page_size=16), torch.randn(3, 2, 1, 20, 8)
    cache.attend(*x)
    cache.attend(*x[..., :1, :], stored=False)
    masks.clear()
    cache.attend(*x[..., :1, :], lengths=lengths)
    assert len(masks) == 1
