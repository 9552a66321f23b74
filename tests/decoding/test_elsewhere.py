"""`KVCache` whose last tokens are stored by other ranks."""

import pytest
import torch
from attention_oracle import assert_close

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


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, of sparse tensors and FlexAttention
@pytest.mark.parametrize("backend", ["cpu", "gather", "reference", "sdpa", "flex", "torch_sparse"])
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
