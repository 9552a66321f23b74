"""The recipes of docs/grids.md against their papers' definitions, which are loops here."""

from itertools import product
from math import floor, log2, prod
from typing import Any

import pytest
import torch
from helpers.pages import ROOT, blocks
from oracles.attention_oracle import assert_close, dense_attention
from test_films import pairs_of
from torch import Tensor

import sparsering as sr
from sparsering.selection import pool_blocks, select_blocks

PAGE = blocks((ROOT / "docs" / "grids.md").read_text(encoding="utf-8"))
NAMES = ("sliding_tiles", "radial", "shrinking", "VideoSparseAttention", "joint")


def recipes() -> dict[str, Any]:
    """The functions and the class of the page, without the calls behind them."""
    names = {"sr": sr, "torch": torch, "pool_blocks": pool_blocks, "select_blocks": select_blocks}
    found: dict[str, Any] = dict(names)
    for block in PAGE:
        for part in block.code.split("\n\n\n"):
            if part.startswith(tuple(f"{kind} {x}(" for kind in ("def", "class") for x in NAMES)):
                exec(part, found)
    return {name: found[name] for name in NAMES}


RECIPES = recipes()


def in_tiles(pairs: Tensor, shape: tuple[int, ...], tile: Any) -> Tensor:
    """Pairs of row-major order in the order of tiles."""
    order = sr.GridTiles(shape, tile).order
    return pairs[order][:, order]


def wrong_pairs(pattern: sr.Pattern, pairs: Tensor) -> int:
    return int((pattern.to_dense(len(pairs))[0].bool() != pairs).sum())


@pytest.mark.parametrize(
    ("counts", "tile", "window"),
    [
        ((3, 4, 5), (2, 2, 2), (3, 1, 3)),
        ((4, 3, 3), (3, 1, 2), (3, 3, 1)),
        ((2, 5, 3), (2, 3, 1), (1, 5, 3)),
        ((7, 5), (2, 3), (5, 3)),
        ((2, 4, 3), (2, 2, 3), (2, 4, 1)),  # whole dims, of even numbers of tiles
    ],
)
def test_sliding_tiles_have_the_pairs_of_the_paper(counts, tile, window):
    def seen(query, key):
        """Whether a tile is in the window around another, whose middle is moved inwards."""
        middles = (
            min(max(q, w // 2), n - 1 - w // 2)
            for q, n, w in zip(query, counts, window, strict=True)
        )
        whole = [w == n for n, w in zip(counts, window, strict=True)]
        near = zip(whole, middles, key, window, strict=True)
        return all(all_of or abs(m - k) <= w // 2 for all_of, m, k, w in near)

    numbers = list(product(*map(range, counts)))
    active = torch.tensor([[seen(q, k) for k in numbers] for q in numbers])
    size = prod(tile)
    pairs = active.repeat_interleave(size, 0).repeat_interleave(size, 1)
    shape = tuple(n * side for n, side in zip(counts, tile, strict=True))
    assert wrong_pairs(RECIPES["sliding_tiles"](shape, tile, window), pairs) == 0


@pytest.mark.parametrize(
    ("frames", "tokens"), [(1, 3), (2, 1), (5, 4), (12, 6), (20, 3), (9, 16), (33, 5), (18, 1)]
)
def test_radial_has_the_pairs_of_the_paper(frames, tokens):
    pairs = torch.zeros(frames, tokens, frames, tokens, dtype=torch.bool)
    for i, k, j, m in product(range(frames), range(tokens), range(frames), range(tokens)):
        group = 2 ** floor(log2(max(abs(i - j), 1)))
        window = group <= tokens and abs(k - m) + 1 <= tokens / group
        line = abs(i - j) % -(-group // tokens) == 0 and k == m
        pairs[i, k, j, m] = window or line or j == 0
    n = frames * tokens
    assert wrong_pairs(RECIPES["radial"](frames, tokens), pairs.view(n, n)) == 0


@pytest.mark.parametrize(("shape", "tile"), [((8, 6, 4), 2), ((17, 4, 8), (3, 2, 4))])
def test_shrinking_windows_are_a_union(shape, tile):
    frames, height, width = shape
    pairs = torch.zeros(prod(shape), prod(shape), dtype=torch.bool)
    for long, part in ((3, 1), (7, 2), (15, 4), (31, 8)):
        if long < 2 * frames:
            window = (min(frames, long), max(1, height // part), max(1, width // part))
            pairs |= pairs_of(shape, window)
    pattern = RECIPES["shrinking"](*shape, tile)
    assert wrong_pairs(pattern, in_tiles(pairs, shape, tile)) == 0


def test_the_film_of_the_page_is_causal_in_time():
    (code,) = (x.code for x in PAGE if "page_size=frame" in x.code)
    names: dict[str, Any] = {"sr": sr, "torch": torch}
    exec(code, names)
    shape = (6, 8, 8)
    pairs = pairs_of(shape, (3, 5, 5), causal=(True, False, False))
    assert wrong_pairs(names["film"], in_tiles(pairs, shape, (1, 4, 4))) == 0


def dense_vsa(layer: torch.nn.Module, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """VSA over row-major tokens [1, N, width], tile of queries after tile of queries."""
    heads, width = layer.heads, x.shape[2]
    dim = width // heads
    points = list(product(*map(range, shape)))
    members: dict[tuple[int, ...], list[int]] = {}
    for number, point in enumerate(points):
        members.setdefault(tuple(c // 4 for c in point), []).append(number)
    rows = [torch.tensor(own) for own in members.values()]
    qkv, gates = layer.qkv(x)[0], layer.gates(x)[0]
    mixed = torch.zeros_like(x[0])
    for head in range(heads):
        own = slice(head * dim, (head + 1) * dim)
        query, key, value = (part[:, own] for part in qkv.split(width, 1))
        coarse_gate, fine_gate = (part[:, own] for part in gates.split(width, 1))
        means = [torch.stack([part[r].mean(0) for r in rows]) for part in (query, key, value)]
        weight = (means[0] @ means[1].T / dim**0.5).softmax(1)
        for number, r in enumerate(rows):
            best = weight[number].argsort(descending=True)[: layer.k].tolist()
            seen = torch.cat([rows[tile] for tile in best])
            fine = (query[r] @ key[seen].T / dim**0.5).softmax(1) @ value[seen]
            both = coarse_gate[r] * (weight[number] @ means[2]) + fine_gate[r] * fine
            mixed = mixed.index_put((r[:, None], torch.arange(width)[own]), both)
    return layer.out(mixed)[None]


def test_vsa_is_that_of_its_definition():
    shape = (8, 4, 12)
    tiles = sr.GridTiles(shape, 4)
    layer = RECIPES["VideoSparseAttention"](16, heads=2, k=2).double()
    x = torch.randn(1, tiles.tokens, 16, dtype=torch.float64, requires_grad=True)
    out = tiles.restore(layer(tiles.arrange(x, 1)), 1)
    exact = dense_vsa(layer, x, shape)
    assert_close(out, exact, 1e-12)
    sent, inputs = torch.randn_like(out), (x, *layer.parameters())
    ours, theirs = (
        torch.autograd.grad(part, inputs, sent, retain_graph=True) for part in (out, exact)
    )
    for own, right in zip(ours, theirs, strict=True):
        assert_close(own, right, 1e-11)


@pytest.mark.parametrize("words", [1, 10, 90])
@pytest.mark.parametrize("first", [True, False])
def test_text_beside_a_film_is_one_softmax(words, first):
    shape, n = (3, 4, 6), 72
    pairs = torch.ones(words + n, words + n, dtype=torch.int32)
    begin = 0 if first else n
    film_at = slice(words, None) if first else slice(n)
    pairs[film_at, film_at] = pairs_of(shape, (3, 3, 3)).int()
    parts = [
        torch.randn(3, 1, 2, count, 8, dtype=torch.float64, requires_grad=True)
        for count in (words, n)
    ]
    of_words, of_film = RECIPES["joint"](*parts, sr.Neighbourhood(shape, window=3))
    tokens = torch.cat(parts if first else parts[::-1], 3)
    exact = dense_attention(*tokens, pairs[None, None])[0]
    assert_close(of_words, exact[:, :, begin : begin + words], 1e-12)
    assert_close(of_film, exact[:, :, film_at], 1e-12)
    sent = torch.randn_like(exact)
    whole = torch.cat((of_words, of_film) if first else (of_film, of_words), 2)
    ours, theirs = (torch.autograd.grad(x, parts, sent, retain_graph=True) for x in (whole, exact))
    for own, right in zip(ours, theirs, strict=True):
        assert_close(own, right, 1e-11)


def test_padding_of_a_text_is_left_out():
    shape, valid = (3, 4, 6), torch.arange(10) < 7
    text, film = (torch.randn(3, 1, 2, n, 8, dtype=torch.float64) for n in (10, 72))
    pattern = sr.Neighbourhood(shape, window=3)
    padded = RECIPES["joint"](text, film, pattern, sr.KeyMask(valid))[1]
    assert_close(padded, RECIPES["joint"](text[:, :, :, :7], film, pattern)[1], 1e-12)
