"""`Neighbourhood`: errors, equality, cost of layouts, caches, and attention on each backend.

Its pairs are compared with NATTEN's own rule in tests/patterns and in the fuzzer.
"""

import itertools
import pickle

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


# windows, strides and causal dims; the last has the order of tiles that the grid does not fill
RULES = [
    {"shape": (40,), "window": 6, "stride": 4, "dilation": 2},
    {"shape": (7, 9), "window": (4, 3), "stride": (2, 3), "causal": (True, False)},
    {"shape": (5, 6, 7), "window": (2, 3, 3), "causal": (True, False, False), "tile": (2, 4, 3)},
    {"shape": (9, 14), "window": 3, "dilation": (2, 3), "stride": 2, "tile": (4, 4)},
]


def dense(shape, radius, dilation):
    tokens = torch.Size(shape).numel()
    return counts(("Neighbourhood", shape, radius, dilation), tokens)[0, 0]


def dense_of(rule):
    """The pairs of keyword arguments by NATTEN's rule in plain Python."""
    defaults = {"dilation": 1, "window": None, "stride": 1, "causal": False, "tile": None}
    numbers = (rule.get(name, default) for name, default in defaults.items())
    spec = ("Neighbourhood", rule["shape"], None, *numbers)
    return counts(spec, torch.Size(rule["shape"]).numel())[0, 0]


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


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS[:3])
def test_windows_strides_and_tiles_are_exact(rule, backend):
    pattern, mask = sr.Neighbourhood(**rule), dense_of(rule)
    tokens = len(mask)
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, tokens, 16)
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected, _ = attend_by_rows(*exact, mask)
    out = sr.attention(*leaves, pattern, backend=backend)
    sent = torch.randn(shape, generator=generator)
    got = [out, *torch.autograd.grad(out, leaves, sent)]
    wanted = [expected, *torch.autograd.grad(expected, exact, sent.double())]
    for a, b in zip(got, wanted, strict=True):
        assert_close(a.double(), b, 1e-5)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_last_query_under_every_rule_is_exact(rule):
    mask = dense_of(rule).bool()
    number = torch.arange(len(mask))
    last = torch.where(mask, number[:, None], -1).amax(0)
    assert torch.equal(last_visits(sr.Neighbourhood(**rule), 0, len(mask))[0], last)


def test_tiles_have_the_pairs_of_row_major_order():
    options = {"shape": (6, 5, 7), "window": (4, 3, 5), "stride": (2, 1, 3)}
    tiles = sr.GridTiles(options["shape"], (4, 2, 3))
    rows = sr.Neighbourhood(**options).to_dense(210)[0]
    in_tiles = sr.Neighbourhood(**options, tile=(4, 2, 3)).to_dense(210)[0]
    assert torch.equal(in_tiles, rows[tiles.order][:, tiles.order])


def test_a_film_in_tiles_is_computed_frame_by_frame_in_a_cache():
    shape, tile = (6, 6, 5), (1, 3, 2)
    film = sr.Neighbourhood(shape, window=(2, 3, 3), causal=(True, False, False), tile=tile)
    query, key, value = torch.randn(3, 1, 2, 180, 16, generator=torch.Generator().manual_seed(0))
    cache = sr.KVCache(film, 1, 2, 16, page_size=16)
    frames = [x.split(30, 2) for x in (query, key, value)]
    outs = [cache.attend(*frame) for frame in zip(*frames, strict=True)]
    assert_close(torch.cat(outs, 2), sr.attention(query, key, value, film), 1e-5)
    assert all(int(x.min()) >= 120 for x in film.live_keys(150))


def test_tiles_cost_what_is_visited():
    pattern = sr.Neighbourhood((64, 64, 64), 3, tile=4)
    layout = pattern.layout(1 << 18)
    assert layout.block_size == 64
    assert layout.num_blocks == 46**3  # 3 tiles in each dim, 2 at both ends: 16 * 3 - 2
    rows = sr.Neighbourhood((24, 24, 24), 3).layout(24**3, block_size=64)
    in_tiles = sr.Neighbourhood((24, 24, 24), 3, tile=4).layout(24**3)
    assert in_tiles.num_blocks <= 0.63 * rows.num_blocks
    # a window of 11 over 125 tokens, which no tile of the layout crosses
    rows = sr.Neighbourhood((16, 64, 64), 5).layout(1 << 16, block_size=64)
    in_tiles = sr.Neighbourhood((16, 64, 64), 5, tile=5).layout(1 << 16)
    assert in_tiles.block_size == 128
    assert in_tiles.num_blocks * 125**2 < 0.5 * rows.num_blocks * 64**2


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


def test_grid_tiles_arrange_and_restore():
    tiles = sr.GridTiles((3, 5), (2, 4))
    assert tiles.order.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 4, 9, 10, 11, 12, 13, 14]
    x = torch.randn(2, 15, 4, requires_grad=True)
    arranged = tiles.arrange(x, dim=1)
    assert torch.equal(arranged, x[:, tiles.order])
    assert torch.equal(tiles.restore(arranged, dim=-2), x)
    sent = torch.randn(2, 15, 4)
    (gradient,) = torch.autograd.grad(arranged, x, sent)
    assert torch.equal(gradient, tiles.restore(sent, dim=1))
    assert tiles == sr.GridTiles([3, 5], (2, 4)) != sr.GridTiles((3, 5), (2, 5))
    assert hash(tiles) == hash(sr.GridTiles((3, 5), (2, 4)))
    assert sr.GridTiles((3, 5), 9).tile == (3, 5)
    with pytest.raises(ValueError, match=r"expected 15 tokens in dim 2.*got a tensor \(2, 15, 4\)"):
        tiles.arrange(x)
    with pytest.raises(ValueError, match="GridTiles tile must be at least 1"):
        sr.GridTiles((3, 5), (2, 0))


def test_equal_neighbourhoods_are_one_value():
    pattern = sr.Neighbourhood((8, 9), 2)
    assert pattern == sr.Neighbourhood([8, 9], (2, 2), (1, 1))
    assert pattern == sr.Neighbourhood(torch.tensor([8, 9]), torch.tensor(2))
    assert repr(pattern) == "Neighbourhood((8, 9), 2)"
    assert repr(sr.Neighbourhood((8, 10), (1, 2), 2)) == "Neighbourhood((8, 10), (1, 2), 2)"
    assert sr.parse(repr(pattern)) == pattern == build(("Neighbourhood", (8, 9), 2))
    assert pattern == sr.Neighbourhood((8, 9), window=(5, 5)) == sr.parse(pattern.expression)
    assert pattern == sr.Neighbourhood((8, 9), 2, tile=(1, 4))  # tiles of a line: row-major order
    assert pattern == sr.Neighbourhood((8, 9), 2, tile=(3, 20))  # tiles of whole lines, too
    even = sr.Neighbourhood((8, 9), window=(4, 3), stride=(2, 1), causal=(True, False), tile=(2, 3))
    text = "Neighbourhood((8, 9), window=(4, 3), stride=(2, 1), causal=(True, False), tile=(2, 3))"
    assert repr(even) == text
    assert sr.parse(text) == even == pickle.loads(pickle.dumps(even))
    assert even != sr.Neighbourhood((8, 9), window=(4, 3), stride=(2, 1), causal=(True, False))
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
        (((8, 4), 2), "got 4 in dim 1 for a window of 5 and dilation 1"),
        (((8, 8), 1, (2, 3)), "got 8 in dim 1 for a window of 3 and dilation 3"),
        (((8, 8),), "needs one of radius and window, got neither"),
    ],
)
def test_grids_that_no_window_fits_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sr.Neighbourhood(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"radius": 1, "window": 3}, "needs one of radius and window, got 1 and 3; radius=r"),
        ({"window": 0}, "Neighbourhood window must be at least 1"),
        ({"window": (3, 9)}, "got 8 in dim 1 for a window of 9 and dilation 1"),
        ({"window": (3, 2), "stride": (1, 3)}, "at most the window, got 3 in dim 1 for a window"),
        ({"window": 3, "stride": 0}, "Neighbourhood stride must be at least 1"),
        ({"window": 3, "causal": (True,)}, "causal must be a bool, or one for each of 2 dims"),
        ({"window": 3, "causal": 1}, "causal must be a bool, or one for each of 2 dims, got 1"),
        ({"window": 3, "tile": (2, 0)}, "Neighbourhood tile must be at least 1"),
        ({"window": 3, "tile": (2, 2, 2)}, "tile must be an int, or one for each of 2 dims, got 3"),
    ],
)
def test_windows_strides_and_tiles_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sr.Neighbourhood((8, 8), **options)


def test_a_causal_window_may_be_wider_than_its_dim():
    pattern = sr.Neighbourhood((4, 3), window=(9, 3), causal=(True, False))
    assert torch.equal(pattern.to_dense(12), sr.BlockCausal(3).to_dense(12))


def test_another_number_of_keys_is_refused():
    with pytest.raises(ValueError, match=r"of shape \(8, 8\) is for 64 tokens, got 60 keys"):
        sr.Neighbourhood((8, 8), 1).layout(60)
    with pytest.raises(ValueError, match=r"is for 64 tokens, got 3[04] keys"):
        sr.Packed((30, 34), sr.Neighbourhood((8, 8), 1)).layout(64)
    with pytest.raises(TypeError, match="Neighbourhood radius must be an int"):
        sr.Neighbourhood((8, 8), 1.5)
