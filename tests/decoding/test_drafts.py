"""Drafts: each guessed token has the result of its own path, and `keep` leaves one path alone."""

import copy
import pickle

import pytest
import torch
from oracles.attention_oracle import assert_close

import sparsering as sr

TREES = {
    "a chain": [-1, 0, 1, 2, 3],
    "siblings": [-1, -1, -1, -1],
    "three levels": [-1, 0, 0, 1, 1, 2, -1, 6, 3, 3],
    "one": [-1],
}
PATTERNS = {
    "causal": sr.Causal(),
    "window": sr.SlidingWindow(9),
    "window and sinks": sr.SlidingWindow(5) | sr.GlobalTokens(2, rows=False),
    "longnet": sr.LongNet((8, 64), (1, 4)),
    "dilated heads": sr.Dilated(16, 2),
    "strided window": sr.SlidingWindow(12, 0, 3),
    "blocks": sr.RandomBlocks(0.5, 16),
    "documents": sr.Documents((20, 30, 110)),
    "documents of each entry": sr.Documents(((20, 30, 110), (50, 70, 40))),
    "packed": sr.Packed((25, 135), sr.SlidingWindow(7)),
    "key mask": sr.KeyMask(torch.arange(160) % 3 > 0) & sr.SlidingWindow(40),
    "table": sr.Blocks(torch.rand(10, 10, generator=torch.Generator().manual_seed(1)) < 0.6, 16),
}
HEADS, KV_HEADS, TOTAL = 4, 2, 160


def rows(n: int, seed: int, dtype=torch.float64) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    sizes = ((HEADS, 8), (KV_HEADS, 8), (KV_HEADS, 6))
    return [
        torch.randn(2, h, n, d, generator=draw, dtype=torch.float64).to(dtype) for h, d in sizes
    ]


def cache_of(pattern: sr.Pattern, **options) -> sr.KVCache:
    sizes = {"num_heads": HEADS, "value_dim": 6, "max_length": TOTAL, "page_size": 32}
    return sr.KVCache(pattern & sr.Causal(), 2, KV_HEADS, 8, **(sizes | options))


def path_to(tree: list[int], token: int) -> list[int]:
    path = [token]
    while tree[path[0]] >= 0:
        path.insert(0, tree[path[0]])
    return path


def fed(cache: sr.KVCache, length: int, dtype=torch.float64) -> sr.KVCache:
    prompt = rows(length, 0, dtype)
    for first in range(0, length, 23):
        cache.attend(*(x[:, :, first : min(first + 23, length)] for x in prompt))
    return cache


def expected_of(cache: sr.KVCache, tree: list[int], new, **options):
    """Feeds each token's path to a copy of the cache; returns the last rows."""
    outs, lses = [], []
    for token in range(len(tree)):
        path, alone = path_to(tree, token), copy.deepcopy(cache)
        own = {name: x[:, :, path] if name == "rows" else x for name, x in options.items()}
        if (sink := own.pop("rows", None)) is not None:
            own["sink"] = sink
        out, lse = alone.attend(*(x[:, :, path] for x in new), return_lse=True, **own)
        outs.append(out[:, :, -1:])
        lses.append(lse[:, :, -1:])
    return torch.cat(outs, 2), torch.cat(lses, 2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("length", [0, 31, 77])
def test_each_token_sees_its_own_path_and_keep_leaves_one(name, length):
    pattern = PATTERNS[name]
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "max_length": TOTAL}
    for number, (what, tree) in enumerate(TREES.items()):
        cache = fed(cache_of(pattern), length)
        new, before = rows(len(tree), number + 1), (cache.length, cache.kept)
        exact = expected_of(cache, tree, new)
        got = cache.attend(*new, tree=tree, return_lse=True)
        for a, b in zip(got, exact, strict=True):
            assert_close(a, b, 1e-12, what)
        assert (cache.length, cache.kept) == before
        path = path_to(tree, len(tree) - 1)
        cache.keep(path)
        alone = fed(cache_of(pattern), length)
        alone.attend(*(x[:, :, path] for x in new))
        assert cache.length == alone.length == length + len(path)
        after = rows(60, 9)
        for first in range(0, 60, 7):
            few = [x[:, :, first : first + 7] for x in after]
            assert_close(cache.attend(*few), alone.attend(*few), 1e-12, f"after {what}")
        for head, live in enumerate(pattern.live_keys(cache.length, **sizes)):
            assert set(live.tolist()) <= set(cache.positions(head).tolist())


EXTRAS = {
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0},
    "sink": {"sink": torch.tensor([0.5, -1.0, 2.0, -torch.inf])},
    "a sink of each row": {"rows": torch.randn(2, HEADS, 10, 1, dtype=torch.float64)},
    "distances": {"distance_bias": torch.linspace(-1, 2, 4 * 31).view(4, 31).double()},
    "all": {
        "softcap": 3.0,
        "sink": torch.tensor([0.5, -1.0, 2.0, -torch.inf]),
        "distance_bias": torch.linspace(-1, 2, 4 * 31).view(4, 31).double(),
    },
}


@pytest.mark.parametrize(
    ("extra", "backend"),
    [
        pytest.param(extra, backend, marks=pytest.mark.slow if interpreted else ())
        for extra in EXTRAS
        for backend in ("cpu", "gather", "reference", "triton")
        for interpreted in [backend == "triton" and extra != "softcap"]
    ],
)
def test_options_hold_at_depths(extra, backend):
    tree, dtype = TREES["three levels"], torch.float64 if backend != "cpu" else torch.float32
    dtype = torch.float32 if backend == "triton" else dtype
    name = "window and sinks" if extra != "all" else "longnet"
    options = {
        key: x.to(dtype) if isinstance(x, torch.Tensor) else x for key, x in EXTRAS[extra].items()
    }
    cache, new = fed(cache_of(PATTERNS[name]), 45, dtype), rows(len(tree), 3, dtype)
    if "rows" in options:
        options["rows"] = options["rows"][..., 0]
    exact = expected_of(cache, tree, new, backend=backend, **options)
    if "rows" in options:
        options["sink"] = options.pop("rows")
    got = cache.attend(*new, tree=tree, return_lse=True, backend=backend, **options)
    for a, b in zip(got, exact, strict=True):
        assert_close(a, b, 1e-12 if dtype == torch.float64 else 3e-6, extra)


def test_dropout_counts_new_tokens_as_they_come():
    cache, tree, length = fed(cache_of(PATTERNS["window"]), 45), TREES["three levels"], 45
    new, prompt = rows(len(tree), 3), rows(45, 0)
    whole = [torch.cat(pair, 2) for pair in zip(prompt, new, strict=True)]
    parents = (-1, *(parent + 1 for parent in tree))
    pattern = sr.Tree((length, *(1,) * len(tree)), parents, PATTERNS["window"] & sr.Causal())
    options = {"dropout_p": 0.4, "dropout_seed": 5}
    exact = sr.attention(new[0], *whole[1:], pattern, backend="reference", **options)
    assert_close(cache.attend(*new, tree=tree, **options), exact, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_a_draft_of_more_than_a_tile(dtype):
    tree = [-1, *(int(x) for x in torch.arange(1, 200) * 7 % 150 % torch.arange(1, 200))]
    cache, exact = (
        fed(cache_of(sr.Causal(), max_length=None), 60, x) for x in (dtype, torch.float64)
    )
    new = [x.to(dtype) for x in rows(200, 1)]
    got = cache.attend(*new, tree=tree)
    want = exact.attend(*(x.double() for x in new), tree=tree)
    assert_close(got.double(), want, 2e-2)
    alone = expected_of(
        fed(cache_of(sr.Causal(), max_length=None), 60), tree, [x.double() for x in new]
    )
    assert_close(want, alone[0], 1e-12)


@pytest.mark.parametrize(
    "options",
    [{}, {"backend": "reference"}, EXTRAS["distances"], EXTRAS["all"] | {"backend": "reference"}],
    ids=["walks", "reference", "distances", "all by reference"],
)
def test_entries_of_unequal_lengths_have_their_own_depths(options):
    tree, new, prompt = TREES["three levels"], rows(10, 4), rows(50, 0)
    for pattern in (sr.SlidingWindow(9), PATTERNS["longnet"]):
        cache = cache_of(pattern)
        cache.attend(*prompt, lengths=[50, 33])
        got = cache.attend(*new, tree=tree, **options)
        cache.keep([0, 1, 4])
        then = cache.attend(*rows(3, 6))
        for entry, length in enumerate((50, 33)):
            alone = cache_of(pattern)
            one = [x[entry : entry + 1].expand(2, -1, -1, -1) for x in new]
            alone.attend(*(x[entry : entry + 1, :, :length].expand(2, -1, -1, -1) for x in prompt))
            assert_close(got[entry], alone.attend(*one, tree=tree, **options)[0], 1e-12)
            alone.keep([0, 1, 4])
            last = alone.attend(*(x[entry : entry + 1].expand(2, -1, -1, -1) for x in rows(3, 6)))
            assert_close(then[entry], last[0], 1e-12)


def test_rollback_goes_back_behind_a_kept_path():
    tree, new = TREES["three levels"], rows(10, 4)
    cache, alone = (fed(cache_of(sr.SlidingWindow(9), rollback=8), 40) for _ in range(2))
    cache.attend(*new, tree=tree)
    cache.keep([0, 1, 3, 8])
    alone.attend(*(x[:, :, :2] for x in (y[:, :, [0, 1]] for y in new)))
    cache.crop(42)
    few = rows(3, 8)
    assert_close(cache.attend(*few), alone.attend(*few), 1e-12)


def test_a_cache_with_a_draft_takes_nothing_else():
    cache, tree = fed(cache_of(sr.SlidingWindow(9)), 30), [-1, 0, 0]
    expected = copy.deepcopy(cache).attend(*rows(1, 7))
    cache.attend(*rows(3, 1), tree=tree)
    for refused in (
        lambda: cache.attend(*rows(1, 7)),
        lambda: cache.attend(*rows(3, 1), tree=tree),
        lambda: cache.crop(30),
        lambda: cache.reorder([0, 1]),
        lambda: cache.repeat(2),
        lambda: cache.select([0]),
        lambda: cache.load(*rows(3, 1)[1:]),
        lambda: pickle.dumps(cache),
        lambda: copy.deepcopy(cache),
        lambda: cache.keep([1]),
        lambda: cache.keep([0, 0]),
        lambda: cache.keep([0, 3]),
    ):
        with pytest.raises(ValueError, match=r"call keep\(path\) first|path"):
            refused()
    cache.keep([])
    assert_close(cache.attend(*rows(1, 7)), expected, 1e-12)
    with pytest.raises(ValueError, match=r"call attend\(tree=\) first"):
        cache.keep([])


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ([-1, 1, 0], "got parent 1 of token 1"),
        ([-1, 0, -2], "got parent -2 of token 2"),
        ([-1, 0], "each of the 3 new tokens, got 2"),
    ],
)
def test_what_is_no_draft(tree, told):
    cache = fed(cache_of(sr.SlidingWindow(9)), 30)
    with pytest.raises(ValueError, match=told):
        cache.attend(*rows(3, 1), tree=tree)
    assert cache.length == 30
    cache.attend(*rows(3, 1), tree=[-1, -1, -1])


def test_what_takes_no_draft():
    chain = [-1, 0, 1]
    full = fed(cache_of(sr.RandomBlocks(0.5, 16), max_length=32), 30)
    with pytest.raises(ValueError, match="for 32 tokens, got a draft of depth 3 after 30"):
        full.attend(*rows(3, 1), tree=chain)
    full.attend(*rows(3, 1), tree=[-1, 0, 0])  # three tokens, but no deeper than two
    tree = cache_of(sr.Tree((20, 140), (-1, 0)))
    with pytest.raises(ValueError, match="whose pattern has no Tree"):
        tree.attend(*rows(3, 1), tree=chain)
    with pytest.raises(ValueError, match=r"tree= needs stored=True, keep=True and no lengths"):
        cache_of(sr.Causal()).attend(*rows(3, 1), tree=chain, lengths=[3, 3])
    selected = sr.SelectedCache(2, KV_HEADS, 8, k=4, num_heads=HEADS, value_dim=6)
    with pytest.raises(ValueError, match="no tree"):
        selected.attend(*rows(3, 1), tree=chain)
