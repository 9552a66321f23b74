"""`Neighbourhood`: errors, equality, cost of layouts, caches, and attention on each backend.

Its pairs are compared with NATTEN's own rule in tests/patterns and in the fuzzer.
"""

import itertools

import pytest
import torch
from helpers.thinned import slow_except
from oracles.attention_oracle import assert_close, attend_by_rows
from oracles.patterns_oracle import build, counts

import sparsering as sr
from sparsering.layouts.lifetimes import last_visits

GRIDS = [
    ((60,), 4, 3),
    ((9, 14), (2, 3), (1, 2)),
    ((5, 6, 7), (1, 0, 2), (1, 4, 1)),
    ((40, 3), (2, 1), (3, 1)),
]


def dense(shape, radius, dilation):
    tokens = torch.Size(shape).numel()
    return counts(("Neighbourhood", shape, radius, dilation), tokens)[0, 0]


BACKENDS = ["reference", "gather", "cpu", "triton"]
INTERPRETED = [(GRIDS[0], "triton"), (GRIDS[1], "triton")]  # others take the interpreter seconds
FAST = [*itertools.product(GRIDS, BACKENDS[:3]), *INTERPRETED]


@pytest.mark.parametrize(("grid", "backend"), slow_except(FAST, GRIDS, BACKENDS))
def test_attention_and_gradients_are_exact(grid, backend):
    pattern, mask = sr.Neighbourhood(*grid), dense(*grid)
    tokens = len(mask)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, tokens, 16), *[(1, 2, tokens, 16)] * 2]
    leaves = [torch.randn(x, generator=generator).requires_grad_() for x in shapes]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected, _ = attend_by_rows(*exact, mask)
    out = sr.attention(*leaves, pattern, backend=backend, block_size=16)
    sent = torch.randn(out.shape, generator=generator)
    got = [out, *torch.autograd.grad(out, leaves, sent)]
    wanted = [expected, *torch.autograd.grad(expected, exact, sent.double())]
    for a, b in zip(got, wanted, strict=True):
        assert_close(a.double(), b, 1e-5)


@pytest.mark.parametrize("grid", GRIDS)
def test_the_last_query_of_each_key_is_exact(grid):
    mask = dense(*grid).bool()
    number = torch.arange(len(mask))
    for pattern, pairs in (
        (sr.Neighbourhood(*grid), mask),
        (sr.Neighbourhood(*grid) & sr.Causal(), mask & (number <= number[:, None])),
        (sr.Full() - sr.Neighbourhood(*grid), ~mask),
    ):
        last = torch.where(pairs, number[:, None], -1).amax(0)
        assert torch.equal(last_visits(pattern, 0, len(mask))[0], last)


def test_a_cache_draws_a_grid_token_by_token():
    shape = (6, 9)
    pattern = sr.Neighbourhood(shape, (2, 1)) & sr.Causal()
    query, key, value = torch.randn(3, 1, 2, 54, 16, generator=torch.Generator().manual_seed(0))
    cache = sr.KVCache(pattern, 1, 2, 16, page_size=16)
    rows = [cache.attend(*(x[:, :, i : i + 1] for x in (query, key, value))) for i in range(54)]
    assert_close(torch.cat(rows, 2), sr.attention(query, key, value, pattern), 1e-5)


@pytest.mark.parametrize(("shape", "radius"), [((1024, 1024), 6), ((64, 64, 64), (1, 3, 2))])
def test_layouts_of_large_grids_cost_what_is_visited(shape, radius):
    pattern, tokens = sr.Neighbourhood(shape, radius), torch.Size(shape).numel()
    layout = pattern.layout(tokens, block_size=128)
    radii = radius if isinstance(radius, tuple) else (radius,) * len(shape)
    widths = [2 * r + 1 for r in radii]
    assert layout.num_pairs == tokens * torch.Size(widths).numel()
    lines = torch.Size(widths[:-1]).numel()  # of keys, for a line of queries
    assert layout.num_blocks <= tokens // 128 * lines * 4
    assert layout.nbytes < 4e6


def test_equal_neighbourhoods_are_one_value():
    pattern = sr.Neighbourhood((8, 9), 2)
    assert pattern == sr.Neighbourhood([8, 9], (2, 2), (1, 1))
    assert pattern == sr.Neighbourhood(torch.tensor([8, 9]), torch.tensor(2))
    assert repr(pattern) == "Neighbourhood((8, 9), 2)"
    assert repr(sr.Neighbourhood((8, 10), (1, 2), 2)) == "Neighbourhood((8, 10), (1, 2), 2)"
    assert sr.parse(repr(pattern)) == pattern == build(("Neighbourhood", (8, 9), 2))
    images = sr.Packed((72, 72), pattern).to_dense(144)[0]
    assert torch.equal(images[:72, :72], pattern.to_dense(72)[0])
    assert torch.equal(images[72:, 72:], pattern.to_dense(72)[0]) and not images[72:, :72].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), 1), r"shape must have the tokens of each dim of a grid, got \(\)"),
        (((4, 0), 0), "shape must be at least 1|at least 1"),
        (((8, 8), -1), "Neighbourhood radius must be at least 0"),
        (((8, 8), 1, 0), "Neighbourhood dilation must be at least 1"),
        (((8, 8), (1, 2, 3)), r"radius must be an int, or one for each of 2 dims, got 3"),
        (((8, 4), 2), "got 4 in dim 1 for radius 2 and dilation 1"),
        (((8, 8), 1, (2, 3)), "got 8 in dim 1 for radius 1 and dilation 3"),
    ],
)
def test_grids_that_no_window_fits_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sr.Neighbourhood(*arguments)


def test_another_number_of_keys_is_refused():
    with pytest.raises(ValueError, match=r"of shape \(8, 8\) is for 64 tokens, got 60 keys"):
        sr.Neighbourhood((8, 8), 1).layout(60)
    with pytest.raises(ValueError, match=r"is for 64 tokens, got 3[04] keys"):
        sr.Packed((30, 34), sr.Neighbourhood((8, 8), 1)).layout(64)
    with pytest.raises(TypeError, match="Neighbourhood radius must be an int"):
        sr.Neighbourhood((8, 8), 1.5)
