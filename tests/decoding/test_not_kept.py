"""`attend(..., keep=False)`: rows of one pass from tokens that leave no trace in the cache."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles.attention_oracle import assert_close
from torch import Tensor

import sparsering as sr

LENGTH = 70
PATTERNS = {
    "window": sr.SlidingWindow(9),
    "causal": sr.Causal(),
    "blocks": sr.BlockCausal(4),
    "blocks in a window": sr.BlockCausal(4) & sr.BlockWindow(3, 4),
    "longnet": sr.LongNet((8, 32), (1, 2)) & sr.Causal(),
    "random": sr.RandomBlocks(0.4, 8) & sr.Causal(),
    "documents of each entry": sr.Packed(((30, 40), (52, 18)), sr.Causal()),
}
STEPS = (20, 4, 4, 4, 4, 8, 16, 4)  # calls may end behind these, for every pattern


def drawn(length: int = LENGTH, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (4, 8), (2, 8), (2, 6)
    return [
        torch.randn(2, heads, length, dim, generator=generator, dtype=torch.float64)
        for heads, dim in sizes
    ]


def part(x: list[Tensor], begin: int, end: int) -> list[Tensor]:
    return [y[:, :, begin:end] for y in x]


def cache_of(pattern: sr.Pattern, **options: Any) -> sr.KVCache:
    sizes = {"num_heads": 4, "value_dim": 6, "page_size": 16, "max_length": LENGTH}
    return sr.KVCache(pattern, 2, 2, 8, **(sizes | options))


def selecting(**options: Any) -> sr.SelectedCache:
    sizes = {"num_heads": 4, "value_dim": 6, "page_size": 16, "block_size": 8}
    return sr.SelectedCache(2, 2, 8, 3, **(sizes | options))


def state(cache: sr.KVCache) -> Any:
    held = [cache.positions(h, b).tolist() for h in range(2) for b in range(len(cache.lengths))]
    return cache.lengths, cache.length, cache.kept, cache.nbytes, held, repr(cache)


def with_trial(x: list[Tensor], trial: list[Tensor], begin: int) -> list[Tensor]:
    """The tokens so far, and behind them the tokens that are tried."""
    return [torch.cat((y[:, :, :begin], z), 2) for y, z in zip(x, trial, strict=True)]


@pytest.mark.covering(1, keep=[{"name": "window", "backend": "gather"}])
@pytest.mark.parametrize("backend", ["cpu", "gather", "reference"])
@pytest.mark.parametrize("name", PATTERNS)
def test_calls_that_are_not_kept_leave_no_trace(name, backend):
    """Their rows are those of one pass; later results have the bits of a cache without them."""
    pattern, x, begin = PATTERNS[name], drawn(), 0
    if backend == "cpu":
        x = [y.float() for y in x]
    cache, twin = cache_of(pattern, rollback=8), cache_of(pattern, rollback=8)
    close = 3e-6 if backend == "cpu" else 1e-12
    for step in STEPS:
        before = state(cache)
        for number in range(3):
            trial = [y.to(x[0].dtype) for y in drawn(step, 1 + number)]
            found = cache.attend(*trial, keep=False, backend=backend)
            assert state(cache) == before
            # rows behind the trial see it too, and are of no interest
            whole = [torch.cat((y, z[:, :, begin + step :]), 2).double()
                     for y, z in zip(with_trial(x, trial, begin), x, strict=True)]  # fmt: skip
            expected = sr.attention(*whole, pattern, backend="reference")
            assert_close(found.double(), expected[:, :, begin : begin + step], close)
        end = begin + step
        caches = cache, twin
        out, same = (y.attend(*part(x, begin, end), backend=backend) for y in caches)
        assert out.equal(same) and state(cache) == state(twin)
        begin = end


def test_lengths_and_options():
    pattern = sr.BlockCausal(4)
    x, trial = drawn(), drawn(8, 1)
    options: dict[str, Any] = {
        "softcap": 2.0,
        "distance_bias": torch.randn(4, 9, dtype=torch.float64),
        "sink": torch.randn(4, dtype=torch.float64),
        "dropout_p": 0.4,
        "dropout_seed": 3,
        "scale": 0.3,
        "block_size": 32,
    }
    cache, twin = cache_of(pattern), cache_of(pattern)
    for y in (cache, twin):
        y.attend(*part(x, 0, 24), lengths=[24, 12], **options)
    before = state(cache)
    rest = {**options, "lengths": torch.tensor([4, 8]), "return_lse": True}
    found = cache.attend(*trial, keep=False, **rest)
    assert state(cache) == before
    for out, same in zip(found, twin.attend(*trial, **rest), strict=True):
        assert out.equal(same)
    sizes: Any = torch.tensor([4, 8])
    again = cache.attend(*trial, lengths=sizes, return_lse=True, **options)
    for out, same in zip(again, found, strict=True):
        assert out.equal(same)
    assert cache.lengths == [28, 20]


def test_nan_and_infinity_are_forgotten():
    """Values that were tried in the page's slots do not reach later rows, although masked."""
    x, cache, twin = drawn(), cache_of(sr.Causal()), cache_of(sr.Causal())
    for y in (cache, twin):
        y.attend(*part(x, 0, 20))
    cache.attend(*(torch.full_like(y[:, :, :9], torch.nan) for y in x), keep=False)
    for begin, end in ((20, 21), (21, 25)):
        out, same = (y.attend(*part(x, begin, end)) for y in (cache, twin))
        assert out.equal(same) and out.isfinite().all()


def test_ranks_score_tokens_that_none_keeps():
    x, pattern = drawn(), sr.Causal()
    caches = cache_of(pattern), cache_of(pattern)
    for rank, cache in enumerate(caches):
        own = torch.arange(20 * rank, 20 * rank + 20)
        cache.load(x[1][:, :, own], x[2][:, :, own], own, length=40)
    before = [state(cache) for cache in caches]
    for _ in range(2):
        parts = [
            cache.attend(*part(x, 40, 45), stored=rank == 0, return_lse=True, keep=False)
            for rank, cache in enumerate(caches)
        ]
        out, _ = sr.merge_attention(*zip(*parts, strict=True))
        expected = sr.attention(*part(x, 0, 45), pattern, backend="reference")
        assert_close(out, expected[:, :, 40:], 1e-12)
        assert [state(cache) for cache in caches] == before


@pytest.mark.parametrize("make", [selecting, lambda: cache_of(sr.BlockCausal(4))])
def test_compiled_steps_too(make: Callable[[], sr.KVCache]):
    """One graph for steps that are kept, another for those that are not, at any length."""
    x, graphs = drawn(), []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    cache, twin = make(), make()
    torch._dynamo.reset()
    kept = torch.compile(lambda *new: cache.attend(*new), fullgraph=True, backend=count)
    tried = torch.compile(
        lambda *new: cache.attend(*new, keep=False), fullgraph=True, backend=count
    )
    for begin in range(0, LENGTH - 4, 4):
        before = state(cache)
        for seed in (1, 2):
            trial = drawn(4, seed)
            found = tried(*trial)
            assert state(cache) == before
            assert found.equal(copy.deepcopy(twin).attend(*trial))
        out = kept(*part(x, begin, begin + 4))
        assert out.equal(twin.attend(*part(x, begin, begin + 4))) and state(cache) == state(twin)
    assert len(graphs) == 2


def test_lengths_of_compiled_steps_are_data():
    """A tensor of lengths is an input of the graph: one graph for all numbers of tokens."""
    x, graphs = drawn(), []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    cache, twin = cache_of(sr.Causal()), cache_of(sr.Causal())
    torch._dynamo.reset()
    step = torch.compile(
        lambda *new, **options: cache.attend(*new, **options), fullgraph=True, backend=count
    )
    for lengths in ([5, 3], [1, 5], [0, 2], [4, 4]):
        new = part(x, 0, 5)
        found = step(*new, lengths=torch.tensor(lengths), keep=False)
        same = copy.deepcopy(twin).attend(*new, lengths=lengths)
        assert found.equal(same) and cache.lengths == twin.lengths
        step(*new, lengths=torch.tensor(lengths), keep=True)
        twin.attend(*new, lengths=lengths)
    assert len(graphs) == 2 and cache.lengths == [10, 14] and state(cache) == state(twin)
    assert step(*part(x, 0, 5), lengths=[2, 3], keep=True).equal(
        twin.attend(*part(x, 0, 5), lengths=[2, 3])
    )


def test_a_selected_cache_forgets_its_summaries():
    x, begin = drawn(), 0
    cache, twin = selecting(rollback=8), selecting(rollback=8)
    for step in (20, 1, 1, 9, 16, 3, 20):
        before = state(cache)
        for seed in (1, 2):
            trial = drawn(step, seed)
            found = cache.attend(*trial, keep=False)
            assert state(cache) == before
            assert found.equal(copy.deepcopy(twin).attend(*trial))
        out, same = (y.attend(*part(x, begin, begin + step)) for y in (cache, twin))
        assert out.equal(same) and state(cache) == state(twin)
        begin += step


def test_misuse_is_refused():
    x, cache = drawn(), cache_of(sr.BlockCausal(4) & sr.Causal())
    cache.attend(*part(x, 0, 8))
    before = state(cache)
    with pytest.raises(ValueError, match=r"tree= needs .*keep=True.*keep\(\[\]\) afterwards"):
        cache.attend(*part(x, 8, 10), tree=[-1, 0], keep=False)
    with pytest.raises((ValueError, TypeError), match="keep"):
        cache.attend(*part(x, 8, 10), keep="no")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="for 70 tokens, got 63 more after 8"):
        cache.attend(*part(x, 0, 63), keep=False)
    ahead = cache_of(sr.BlockCausal(4))
    with pytest.raises(ValueError, match=r"token 0 sees key 3, .* let the call end at 4 tokens"):
        ahead.attend(*part(x, 0, 3), keep=False)
    assert state(cache) == before and ahead.length == 0
