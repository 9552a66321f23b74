"""`BlockCausal((4, 9, 1))`: blocks of unlike sizes, against loops over all pairs."""

import copy
import pickle

import pytest
import torch
from oracles.attention_oracle import assert_close
from torch import Tensor

import sparsering as sr
from sparsering.distributed import simulate_ring
from sparsering.patterns.expression import parse

SIZES = (40, 3, 0, 25, 7, 1, 24)
N = sum(SIZES)


def drawn(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(2, heads, N, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]


def pairs_of(sizes: tuple[int, ...]) -> Tensor:
    block = [i for i, size in enumerate(sizes) for _ in range(size)]
    n = len(block)
    return torch.tensor([[block[k] <= block[p] for k in range(n)] for p in range(n)])


def test_it_is_a_value_as_other_patterns():
    pattern = sr.BlockCausal(SIZES)
    assert pattern == sr.BlockCausal(list(SIZES)) == sr.BlockCausal(torch.tensor(SIZES))
    assert pattern == sr.BlockCausal(block_size=SIZES) != sr.BlockCausal((N,))
    assert hash(pattern) == hash(sr.BlockCausal(torch.tensor(SIZES)))
    assert repr(pattern) == f"BlockCausal({SIZES})" and parse(repr(pattern)) == pattern
    for other in (copy.deepcopy(pattern), pickle.loads(pickle.dumps(pattern))):
        assert other == pattern
    joined = pattern & sr.SlidingWindow(9, 4)
    assert parse(repr(joined)) == joined
    assert pattern.to_dense(N)[0].equal(pairs_of(SIZES))
    assert sr.BlockCausal((8,) * 5).to_dense(40).equal(sr.BlockCausal(8).to_dense(40))
    assert type(sr.BlockCausal(8)) is sr.BlockCausal


@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_results_and_gradients(backend):
    dtype = torch.float32 if backend == "cpu" else torch.float64
    x = drawn(dtype)
    wide = [y.detach().double().requires_grad_() for y in x]
    expected = sr.attention(*wide, sr.Dense(pairs_of(SIZES)), backend="reference")
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, wide, weight)
    found = sr.attention(*x, sr.BlockCausal(SIZES), backend=backend)
    grads = torch.autograd.grad(found, x, weight.to(dtype))
    for got, exact in zip((found, *grads), (expected, *wanted), strict=True):
        assert_close(got.double(), exact, 1e-12 if backend == "gather" else 2e-5)


@pytest.mark.parametrize("world_size", [2, 3])
def test_over_ranks_and_packed(world_size):
    x = [y.detach() for y in drawn()]
    packed = sr.Packed((N // 2, N // 2), sr.BlockCausal((11, 2, 0, 37)))
    for pattern in (sr.BlockCausal(SIZES), packed, sr.BlockCausal((SIZES, (N // 2, N // 2)))):
        expected = sr.attention(*x, pattern, backend="reference")
        assert_close(simulate_ring(*x, pattern, world_size=world_size), expected, 1e-12)
    half = pairs_of((11, 2, 0, 37))
    assert packed.to_dense(N)[0].equal(torch.block_diag(half, half).bool())


def test_a_long_row_costs_its_visited_tiles():
    sizes = (100, 300, 1, 623) * 64
    n = sum(sizes)
    layout = sr.BlockCausal(sizes).layout(n, block_size=128)
    ends = torch.tensor(sizes).cumsum(0)
    assert layout.num_pairs == (torch.tensor(sizes) * ends).sum()
    last = torch.arange(128, n + 128, 128).clamp(max=n) - 1  # query of each tile
    seen = ends[torch.searchsorted(ends, last, right=True)]  # keys before this
    assert layout.num_blocks == (-(-seen // 128)).sum()


def test_a_cache_takes_whole_blocks():
    """A prefix, a state and actions, each whole; an end inside a block is told where to go."""
    x, begin = [y.detach() for y in drawn()], 0
    cache = sr.KVCache(sr.BlockCausal(SIZES), 2, 2, 8, num_heads=4)
    expected = sr.attention(*x, sr.BlockCausal(SIZES), backend="reference")
    for size in filter(None, SIZES):
        if size > 1:
            with pytest.raises(ValueError, match=f"let the call end at {begin + size} tokens"):
                cache.attend(*(y[:, :, begin : begin + size - 1] for y in x))
        block = [y[:, :, begin : begin + size] for y in x]
        for keep in (False, True):
            out = cache.attend(*block, keep=keep)
            assert_close(out, expected[:, :, begin : begin + size], 1e-12)
        begin += size


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (4, 9),
            "BlockCausal sizes must sum to the key length 100, got 13; give padding a block",
        ),
        ((0, 50, 100), "cumulative lengths: pass their differences"),
        (((100,), (99,)), "sizes of batch entry 1 must sum"),
        ([0] * 34 + [1] * 32 + [2] * 34, r"look like ids of blocks, .*unique_consecutive"),
        ((-1, 101), "at least 0, got -1"),
        ((1.5,), "must be an int, got 1.5"),
        ("ab", "block_size must be an int, got 'ab'"),
        (torch.tensor(3.0), "block_size must be an int"),
        (torch.tensor([0.5]), "must be an int|int64 tensor"),
    ],
)
def test_other_sizes_are_refused(sizes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        sr.BlockCausal(sizes).to_dense(100)
