"""Caches of patterns that let tokens see later ones: whole calls are exact, others are errors."""

import itertools
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from oracles.attention_oracle import PATTERNS, Case, assert_close, attend_by_rows
from oracles.drawings import DRAWINGS, Drawing
from oracles.patterns_oracle import Spec, build, counts, matrix
from oracles.strategies import Scene, examples, specs
from torch import Tensor

import sparsering as sr
from sparsering.layouts.lookahead import Tokens, first_ahead, hides_later_keys, next_end

HEADS, KV_HEADS, LENGTH = 4, 2, 64
CASE = Case(2, HEADS, KV_HEADS, LENGTH, LENGTH, 8, 6)


def drawn(length: int = LENGTH, batch: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    sizes = (HEADS, 8), (KV_HEADS, 8), (KV_HEADS, 6)
    return [torch.randn(batch, heads, length, dim).to(dtype) for heads, dim in sizes]


def cache_of(pattern: sr.Pattern, **options: Any) -> sr.KVCache:
    sizes = {"num_heads": HEADS, "value_dim": 6, "page_size": 16}
    return sr.KVCache(pattern, 2, KV_HEADS, 8, **(sizes | options))


def part(x: list[Tensor], begin: int, end: int) -> list[Tensor]:
    return [y[:, :, begin:end] for y in x]


def seen(pattern: sr.Pattern, length: int = LENGTH) -> Tensor:
    """[queries, keys] whether any batch entry, head or branch has the pair."""
    pairs = pattern.to_dense(length, num_heads=HEADS, num_kv_heads=KV_HEADS) > 0
    return pairs.flatten(0, -3).any(0)


def ends_of(pattern: sr.Pattern) -> list[int]:
    """The lengths at which a call may end, by definition."""
    pairs = seen(pattern)
    return [end for end in range(1, LENGTH + 1) if not pairs[:end, end:].any()]


@pytest.mark.parametrize("backend", ["cpu", "gather", "reference"])
@pytest.mark.parametrize("name", PATTERNS)
def test_calls_that_end_well_equal_one_pass_and_others_are_errors(name, backend):
    pattern = PATTERNS[name](CASE)
    dtype = torch.float32 if backend == "cpu" else torch.float64
    x = drawn(dtype=dtype)
    wide = [y.double() for y in x]
    expected = sr.attention(*wide, pattern, backend="reference")
    cache, pairs = cache_of(pattern, max_length=LENGTH), seen(pattern)
    ends, begin, outs = ends_of(pattern), 0, []
    for size in itertools.cycle((5, 1, 16, 1, 1)):
        end = min(begin + size, LENGTH)
        if end not in ends:
            before = cache.length, cache.kept, cache.nbytes
            with pytest.raises(ValueError, match="which has not come") as error:
                cache.attend(*part(x, begin, end), backend=backend)
            assert (cache.length, cache.kept, cache.nbytes) == before
            text = str(error.value)
            query, key = map(int, re.findall(r"(?:token|key) (\d+)", text))
            assert begin <= query < end <= key and pairs[query, key]
            end = int(re.search(r"let the call end at (\d+) tokens, or write & Causal", text)[1])
            assert end == next(n for n in ends if n > begin + size - 1 or n == LENGTH)
        outs.append(cache.attend(*part(x, begin, end), backend=backend))
        begin = end
        if begin == LENGTH:
            break
    assert_close(torch.cat(outs, 2).double(), expected, 1e-12 if dtype == torch.float64 else 3e-6)


def check_cuts(pattern: sr.Pattern, pairs: Tensor, groups: int, cuts: Iterable[set[int]]) -> None:
    """Checks calls that end at each cut: the rows of one pass, or an error if a pair is ahead.

    A refused call is tried again with the tokens up to the next cut. Each call comes twice, first
    with keep=False. pairs: counts [B, Hq, N, N].
    """
    batch, heads, n, _ = pairs.shape
    x = [torch.randn(batch, h, n, 4, dtype=torch.float64) for h in (heads, groups, groups)]
    expected, _ = attend_by_rows(*x, pairs)
    for ends in cuts:
        cache = sr.KVCache(pattern, batch, groups, 4, num_heads=heads, page_size=16, max_length=n)
        for end in sorted({*ends, n}):
            begin = cache.length
            if pairs[:, :, begin:end, end:].any():
                with pytest.raises(ValueError, match="which has not come"):
                    cache.attend(*part(x, begin, end), backend="gather")
                assert cache.length == begin
                continue
            for keep in (False, True):
                out = cache.attend(*part(x, begin, end), backend="gather", keep=keep)
                assert_close(out, expected[:, :, begin:end], 1e-12)
        assert cache.length == n


SQUARE = [
    drawing
    for drawing in DRAWINGS
    if drawing.arguments.get("kv_len", drawing.arguments["q_len"]) == drawing.arguments["q_len"] > 0
    and not drawing.arguments.get("q_start")
]


@pytest.mark.parametrize("drawing", SQUARE, ids=lambda drawing: drawing.behaviour)
def test_a_drawn_row_is_cut_anywhere(drawing: Drawing):
    """All cuts of short rows, and of longer ones each single cut and each size of calls."""
    pairs, groups = matrix(drawing.picture), drawing.arguments.get("num_kv_heads")
    heads, n = drawing.arguments.get("num_heads", 1), pairs.shape[-1]
    pairs = pairs.expand(-1, heads, -1, -1)
    inner = range(1, n)
    if n <= 5:
        cuts = [set(cut) for k in range(n) for cut in itertools.combinations(inner, k)]
    else:
        cuts = [{end} for end in inner] + [set(range(size, n, size)) for size in inner[: n // 2]]
    check_cuts(build(drawing.spec), pairs, groups or heads, cuts)


@st.composite
def cut_rows(draw: st.DrawFn) -> tuple[Spec, Scene, set[int]]:
    n, batch = draw(st.integers(1, 40)), draw(st.integers(1, 2))
    heads = draw(st.sampled_from(((1, 1), (2, 1), (2, 2))))
    scene = Scene(n, n, *heads, 0, batch)
    ends = draw(st.sets(st.integers(1, n), max_size=8))
    return draw(specs(scene)), scene, ends


@examples(60, 2000, cut_rows())
def test_a_row_of_any_pattern_is_cut_anywhere(drawn_case):
    spec, scene, ends = drawn_case
    pairs = counts(spec, batch=scene.batch, **scene.arguments)
    check_cuts(build(spec), pairs, scene.num_kv_heads, [ends])


def test_block_diffusion_is_decoded_by_blocks_in_few_keys():
    """A window of whole blocks: old blocks are evicted, and the rows are those of one pass."""
    pattern = sr.BlockCausal(8) & sr.BlockWindow(2, 8)
    x, cache = drawn(200, dtype=torch.float32), cache_of(pattern)
    outs = [cache.attend(*part(x, begin, begin + 8)) for begin in range(0, 200, 8)]
    expected = sr.attention(*(y.double() for y in x), pattern, backend="reference")
    assert_close(torch.cat(outs, 2).double(), expected, 3e-6)
    assert cache.kept <= 16 + 16


def test_compiled_steps_look_ahead_too():
    pattern = sr.BlockCausal(4)
    x, cache = drawn(24, dtype=torch.float32), cache_of(pattern)
    step = torch.compile(lambda *new: cache.attend(*new), fullgraph=True, backend="eager")
    outs = [step(*part(x, begin, begin + 4)) for begin in range(0, 24, 4)]
    expected = sr.attention(*(y.double() for y in x), pattern, backend="reference")
    assert_close(torch.cat(outs, 2).double(), expected, 3e-6)
    with pytest.raises(ValueError, match=r"token 24 sees key 27, .* let the call end at 28 tokens"):
        step(*part(drawn(3, dtype=torch.float32), 0, 3))
    assert cache.length == 24


def test_entries_end_where_their_own_documents_do():
    pattern = sr.Documents(((8, 24), (16, 16)))
    x, cache = drawn(32), cache_of(pattern)
    expected = sr.attention(*x, pattern, backend="reference")
    with pytest.raises(ValueError, match=r"token 0 sees key 8, .* let the call end at 32 tokens"):
        cache.attend(*part(x, 0, 8))
    first = cache.attend(*part(x, 0, 16), lengths=[8, 16])
    assert_close(first[:1, :, :8], expected[:1, :, :8], 1e-12)
    assert_close(first[1:], expected[1:, :, :16], 1e-12)
    rest = [torch.stack((y[0, :, 8:32], torch.cat((y[1, :, 16:], y[1, :, :8]), 1))) for y in x]
    second = cache.attend(*rest, lengths=[24, 16])
    assert_close(second[:1], expected[:1, :, 8:], 1e-12)
    assert_close(second[1:, :, :16], expected[1:, :, 16:], 1e-12)


def test_a_pattern_without_an_end_says_so():
    for pattern, key in ((sr.Full(), 5), (sr.SlidingWindow(6, 2), 5)):
        with pytest.raises(ValueError, match=f"sees key {key}.*give the cache max_length, and"):
            cache_of(pattern).attend(*drawn(5))
        x, cache = drawn(12), cache_of(pattern, max_length=12)
        with pytest.raises(ValueError, match="let the call end at 12 tokens, or write & Causal"):
            cache.attend(*part(x, 0, 5))
        assert_close(cache.attend(*x), sr.attention(*x, pattern, backend="reference"), 1e-12)


def test_a_prompt_is_loaded_whole_and_blocks_are_not_cut():
    x, cache = drawn(24), cache_of(sr.BlockCausal(8), rollback=16)
    with pytest.raises(ValueError, match=r"token 8 sees key 12, .* let the call end at 16 tokens"):
        cache.load(*part(x[1:], 0, 12))
    cache.load(*part(x[1:], 0, 16))
    cache.attend(*part(x, 16, 24))
    with pytest.raises(ValueError, match=r"key 20, which token 16 has seen, .* crop to 24"):
        cache.crop(20)
    assert cache.length == 24
    cache.crop(16)
    expected = sr.attention(*x, sr.BlockCausal(8), backend="reference")
    assert_close(cache.attend(*part(x, 16, 24)), expected[:, :, 16:], 1e-12)


ENDLESS = [
    *(sr.BlockCausal(8), sr.SlidingWindow(6, 2), sr.SlidingWindow(9, 6, 3), sr.Dilated(16, 3, 1)),
    *(sr.LongNet((8, 32), (1, 4)), sr.GlobalTokens(3), sr.SlidingWindow(None, 2)),
    *(sr.BlockWindow(1, 8), sr.BlockDilated((2,), 4), sr.Causal() - sr.SlidingWindow(4, 0)),
    sr.SlidingWindow(5, 1) | sr.BlockCausal(16),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("pattern", ENDLESS, ids=str)
@pytest.mark.parametrize("begin", [0, 13, 1 << 20])
@pytest.mark.parametrize("n", [20, 1, 3, 300])
def test_a_sequence_without_end(pattern, begin, n):
    """The first key ahead, by the definition of the pairs near the call's end."""
    tokens, shown = Tokens(None, HEADS, KV_HEADS), 160
    frame = tokens.frame
    end = begin + n
    query, key = torch.arange(begin, end)[:, None], torch.arange(end, end + shown)
    masks = {x.at(0, h, frame) for x in pattern.branches for h in range(HEADS)}
    pairs = torch.stack([x.holds(query, key, frame).expand(n, shown) for x in masks]).any(0)
    found = first_ahead(pattern, begin, end, tokens)
    assert bool(found) == bool(pairs.any())
    if found:
        assert pairs[found[0] - begin, found[1] - end]
        assert not pairs[:, : found[1] - end].any()
        later = next_end(pattern, begin, end, tokens)
        assert later is None or later > found[1]


def test_causality_is_read_from_the_parts():
    window, table = sr.SlidingWindow(6, 0), sr.Dense(torch.ones(4, 4).tril().bool())
    for pattern in (window, window & sr.Full(), window | sr.Causal(), sr.Causal() + window):
        assert hides_later_keys(pattern)
        assert hides_later_keys(sr.Packed((4, 4), pattern))
    assert hides_later_keys(sr.Tree((3, 1), (-1, 0), sr.Causal() | window))
    for pattern in (window | sr.Full(), sr.Full() + window, table):
        assert not hides_later_keys(pattern)
    assert not hides_later_keys(sr.Full() - window)
    assert not hides_later_keys(sr.Tree((3, 1), (-1, 0), sr.Full()))


def test_a_mask_of_your_own_is_asked_for_later_keys():
    causal = sr.from_mask_mod(lambda b, h, q, k: (q >= k) & ((q - k) % 3 < 2))
    x, cache = drawn(20), cache_of(causal, max_length=LENGTH)
    outs = [cache.attend(*part(x, begin, begin + 1)) for begin in range(20)]
    assert_close(torch.cat(outs, 2), sr.attention(*x, causal, backend="reference"), 1e-12)
    ahead = sr.from_mask_mod(lambda b, h, q, k: (q >= k) | (k == 50))
    with pytest.raises(ValueError, match=r"token 0 sees key 50, .* end at 51 tokens"):
        cache_of(ahead, max_length=LENGTH).attend(*drawn(7))
