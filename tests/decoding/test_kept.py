"""A `KVCache` holds at most its live keys and one page."""

import copy
import pickle

import pytest
import torch

import sparsering as sr


@pytest.mark.parametrize("pattern", [sr.Dilated(16, 4, 1), sr.KeyMask(torch.arange(200) % 5 == 0)])
def test_rollback_beyond_the_first_token_keeps_no_key_that_nobody_visits(pattern):
    cache = sr.KVCache(pattern & sr.Causal(), 1, 1, 4, rollback=300, page_size=16)
    for length in (64, 96, 97, 112, 120):
        new = torch.randn(1, 1, length - cache.length, 4)
        cache.attend(new, new, new)
        visited = (pattern & sr.Causal()).to_dense(length, 200, q_start=0).any(0).any(0)
        held = cache.positions(0)
        assert cache.kept <= int(visited[:length].sum()) + 16
        assert visited[held[held < length - 16]].all()


@pytest.mark.parametrize("backend", ["gather", "cpu"])
@pytest.mark.parametrize("guesses", [9, 15])  # they stay within a page of 16 tokens, or end it
@pytest.mark.parametrize("length", [20, 31])
def test_nan_of_guesses_that_are_taken_back_reaches_nothing(length, guesses, backend):
    x = torch.randn(1, 1, 48, 4)
    cache = sr.KVCache(sr.Causal(), 1, 1, 4, rollback=20, page_size=16)
    cache.attend(*[x[:, :, :length]] * 3, backend=backend)
    outs = [cache.attend(*[x[:, :, length : length + 1]] * 3, backend=backend)]
    guess = torch.full((1, 1, guesses, 4), torch.nan)
    cache.attend(guess, guess, guess, backend=backend)
    cache.crop(length + 1)
    for token in range(length + 1, 48):
        outs.append(cache.attend(*[x[:, :, token : token + 1]] * 3, backend=backend))
    expected = sr.attention(*[x.double()] * 3, sr.Causal(), backend="reference")[:, :, length:]
    assert (torch.cat(outs, 2) - expected).abs().max() <= 3e-6


def test_tokens_that_another_rank_stores_are_not_held():
    cache = sr.KVCache(sr.Causal(), 1, 2, 4, page_size=16)
    for number, n in enumerate((20, 1, 2, 1, 20)):
        new = torch.randn(1, 2, n, 4)
        cache.attend(new, new, new, stored=number % 2 == 0)
        mine = [*range(20), 21, 22, *range(24, 44)]
        expected = [position for position in mine if position < cache.length]
        assert cache.positions(1).tolist() == expected
        assert cache.kept == len(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("selects", [False, True])
def test_what_changes_a_cache_in_inference_mode_leaves_it_usable_outside(selects, dtype):
    one, options = torch.randn(1, 1, 60, 4, dtype=dtype), {"rollback": 30, "page_size": 16}
    cache = sr.KVCache(sr.Causal(), 2, 1, 4, **options)
    if selects:
        cache = sr.SelectedCache(2, 1, 4, 60, block_size=8, **options)
    cache.attend(*[one[:, :, :35].expand(2, -1, -1, -1)] * 3)
    for call in (
        lambda: cache.crop(30),
        lambda: cache.reorder([0, 1]),
        lambda: cache.repeat(2),
        lambda: cache.select([0, 2]),
        lambda: cache.crop(cache.length - 1),
    ):
        with torch.inference_mode():
            call()
        for _ in range(2):
            first, x = cache.length, one.expand(len(cache.lengths), -1, -1, -1)
            out = cache.attend(*[x[:, :, first : first + 1]] * 3)
            expected = sr.attention(*[x[:, :, : first + 1].double()] * 3, sr.Causal())
            assert (out - expected[:, :, first:]).abs().max() <= 3e-6


def test_a_selected_entry_is_not_cropped_to_where_its_keys_are_gone():
    x, pattern = torch.randn(2, 1, 120, 4, dtype=torch.float64), sr.SlidingWindow(9)
    cache = sr.KVCache(pattern, 2, 1, 4, rollback=10, page_size=16)
    cache.attend(*[x[:, :, :100]] * 3, lengths=[100, 50])
    cache.select([0])
    cache.crop(95)
    with pytest.raises(ValueError, match="length from 90 to 95, got 89"):
        cache.crop(89)
    cache.crop(90)
    out = cache.attend(*[x[:1, :, 90:]] * 3)
    assert (out - sr.attention(*[x[:1]] * 3, pattern)[:, :, 90:]).abs().max() <= 1e-12


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_compiled_step_of_a_copy_is_its_own(copied):
    x = torch.randn(3, 1, 1, 9, 4)
    first = sr.KVCache(sr.Causal(), 1, 1, 4)
    first.attend(*x[..., :5, :])
    second = copied(first)
    step = torch.ops.sparsering.cached_attention  # what a compiled graph calls
    out = step(*x[..., 5:9, :], second._clock)
    assert (first.length, second.length) == (5, 9)
    whole = sr.attention(*x, sr.Causal(), backend="reference")
    assert (out - whole[:, :, 5:]).abs().max() < 1e-6


@pytest.mark.parametrize("nothing", [[], torch.tensor([]), torch.tensor([], dtype=torch.int64)])
def test_an_index_of_nothing_may_be_of_any_dtype(nothing):
    cache = sr.KVCache(sr.Causal(), 2, 1, 4)
    cache.load(*torch.randn(2, 2, 1, 0, 4), nothing, length=3)
    assert (cache.length, cache.kept) == (3, 0)
    cache.select(nothing)
    assert cache.lengths == []


@pytest.mark.filterwarnings("ignore")  # of torch's own kernels
@pytest.mark.parametrize("backend", ["cpu", "gather", "reference"])
def test_a_step_of_an_entry_that_holds_no_key_gives_zeros(backend):
    listed = torch.tensor([[[[0], [3], [-1]]], [[[4], [2], [0]]]])  # row 2 of entry 0 lists nothing
    pattern = sr.SelectedBlocks(listed, 2, query_block=1) & sr.Causal()
    cache = sr.KVCache(pattern, 2, 1, 8, page_size=16)
    x = torch.randn(3, 2, 1, 3, 8)
    cache.attend(*x[..., :2, :], backend=backend)
    assert not cache.attend(*x[..., 2:, :], lengths=[1, 0], backend=backend).any()
