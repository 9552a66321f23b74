"""Films and grids of docs/coming-from.md against NATTEN's rule in plain Python: no wrong pair."""

from itertools import product

import pytest
import torch
from helpers.pages import ROOT, blocks

import sparsering as sr

BLOCKS = blocks((ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8"))


def of_page(start: str) -> dict:
    """Runs the page's block that contains some words, and returns its names."""
    (code,) = (x.code for x in BLOCKS if start in x.code)
    names = {"sr": sr, "torch": torch, "pixels": torch.randn(3, 1, 4, 384, 8)}
    exec(code, names)
    return names


def keys_of(i, size, kernel, causal=False, dilation=1, stride=1):
    """Returns the coordinates that coordinate i of a dim sees."""
    own = [j for j in range(size) if j % dilation == i % dilation]
    at = own.index(i)
    if causal:
        return own[max(0, at - kernel + 1) : at + 1]
    leader = min(at // stride * stride + stride // 2, len(own) - 1)
    first = min(max(leader - kernel // 2, 0), len(own) - kernel)
    return own[first : first + kernel]


def pairs_of(shape, kernel, **options):
    """Returns the bool matrix of a grid's pairs; options are tuples, one value for each dim."""
    dims = [
        [
            keys_of(i, size, kernel[dim], **{name: x[dim] for name, x in options.items()})
            for i in range(size)
        ]
        for dim, size in enumerate(shape)
    ]
    numbers = {point: n for n, point in enumerate(product(*map(range, shape)))}
    pairs = torch.zeros(len(numbers), len(numbers), dtype=torch.bool)
    for query, n in numbers.items():
        seen = product(*(dims[dim][i] for dim, i in enumerate(query)))
        pairs[n, [numbers[key] for key in seen]] = True
    return pairs


def wrong_pairs(pattern, pairs):
    return int((pattern.to_dense(len(pairs))[0].bool() != pairs).sum())


def test_the_film_of_the_page_is_causal_in_time():
    names = of_page("film = sr")
    pairs = pairs_of((13, 16, 16), (5, 7, 7), causal=(True, False, False))
    assert pairs.sum() == 689_920
    assert wrong_pairs(names["film"], pairs) == 0
    frame, near = 256, sr.Neighbourhood((13, 16, 16), (4, 3, 3))  # the same by other masks
    assert wrong_pairs(near & sr.BlockCausal(frame) & sr.BlockWindow(4, frame), pairs) == 0
    assert wrong_pairs(near & sr.Causal(), pairs) > 0  # of the own frame it hides later tokens


@pytest.mark.parametrize(
    ("shape", "kernel", "dilation"),
    [
        ((12, 4, 6), (4, 3, 3), (1, 1, 1)),  # an even kernel
        ((3, 4, 6), (4, 3, 3), (1, 1, 1)),  # more frames than there are
        ((14, 4, 4), (4, 3, 3), (2, 1, 1)),
        ((15, 3, 6), (3, 3, 3), (2, 1, 2)),
        ((12, 5), (3, 5), (1, 1)),
    ],
    ids=str,
)
def test_films_of_other_sizes(shape, kernel, dilation):
    causal = (True, *(False for _ in shape[1:]))
    pairs = pairs_of(shape, kernel, causal=causal, dilation=dilation)
    film = sr.Neighbourhood(shape, window=kernel, dilation=dilation, causal=causal)
    assert wrong_pairs(film, pairs) == 0


def test_one_dim():
    for k, d in ((5, 1), (4, 2), (7, 3)):
        pairs = pairs_of((40,), (k,), causal=(True,), dilation=(d,))
        assert wrong_pairs(sr.SlidingWindow((k - 1) * d, 0, d), pairs) == 0


def test_a_film_is_computed_frame_by_frame_in_a_cache():
    film = of_page("film = sr")["film"]
    query, key, value = torch.randn(3, 1, 2, 13 * 256, 8, dtype=torch.float64)
    pairs = pairs_of((13, 16, 16), (5, 7, 7), causal=(True, False, False))
    scores = (query @ key.mT / 8**0.5).masked_fill(~pairs, -torch.inf)
    cache = sr.KVCache(film, 1, 2, 8, dtype=torch.float64)
    outs = [
        cache.attend(*(x[:, :, i : i + 256] for x in (query, key, value)))
        for i in range(0, 13 * 256, 256)
    ]
    torch.testing.assert_close(torch.cat(outs, 2), scores.softmax(-1) @ value)


def test_even_kernels_and_strides():
    names = of_page("image = sr")
    pairs = pairs_of((16, 24), (7, 4), dilation=(2, 1), stride=(1, 2))
    assert wrong_pairs(names["image"], pairs) == 0
    for kernel, stride in (((3, 5), (1, 1)), ((6, 4), (1, 3)), ((4, 7), (4, 2)), ((2, 9), (2, 5))):
        pairs = pairs_of((9, 10), kernel, stride=stride)
        pattern = sr.Neighbourhood((9, 10), window=kernel, stride=stride)
        assert wrong_pairs(pattern, pairs) == 0
    assert wrong_pairs(sr.Neighbourhood((9, 10), (1, 2)), pairs_of((9, 10), (3, 5))) == 0


def test_the_tiles_of_the_page_have_the_pairs_of_rows():
    names = of_page("tiles = sr.GridTiles")
    rows = sr.attention(*names["volume"], sr.Neighbourhood((8, 16, 16), 3))
    torch.testing.assert_close(names["out"], rows, atol=1e-5, rtol=1e-5)
