"""`KVCache` against one pass over the whole sequence: whole, in chunks, token by token."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.thinned import thinned
from oracles.attention_oracle import PATTERNS, Case, assert_close, inputs
from torch import Tensor

import sparsering as sr
from sparsering.distributed import simulate_ring
from sparsering.distributed.sharding import owned_ranges
from sparsering.layouts.cache import layout_cache
from sparsering.route import decision

CASE = Case(num_heads=4, num_kv_heads=2, q_len=75, kv_len=75, head_dim=8, value_dim=6)
SPLITS = ([75], [30, 17, 5, 1, 1, 1, 1, 16, 3], [1] * 75)
NEEDS_LENGTH = ("random blocks", "hierarchical")


def cache_of(pattern: sr.Pattern, case: Case = CASE, **options: Any) -> sr.KVCache:
    return sr.KVCache(
        pattern & sr.Causal(),
        case.batch,
        case.num_kv_heads,
        case.head_dim,
        num_heads=case.num_heads,
        value_dim=case.value_dim,
        **options,
    )


def whole(pattern: sr.Pattern, x: Sequence[Tensor], **options: Any) -> Any:
    return sr.attention(*x, pattern & sr.Causal(), backend="reference", **options)


def attend(cache: sr.KVCache, x: Sequence[Tensor], split: Sequence[int], **options: Any) -> Tensor:
    outs, begin = [], 0
    for n in split:
        outs.append(cache.attend(*(y[:, :, begin : begin + n] for y in x), **options))
        begin += n
    return torch.cat(outs, 2)


def drawn(case: Case = CASE, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [x.detach().to(dtype) for x in inputs(case)]


@pytest.mark.parametrize(("name", "split"), thinned(4, PATTERNS, SPLITS[:2]))
def test_a_cache_gives_what_one_pass_gives(name, split):
    pattern, x = PATTERNS[name](CASE), drawn()
    length = CASE.kv_len if name.startswith(NEEDS_LENGTH) else None
    cache = cache_of(pattern, max_length=length, page_size=16)
    assert_close(attend(cache, x, split), whole(pattern, x), 1e-12)
    assert cache.length == sum(split)


@pytest.mark.parametrize("name", thinned(2, PATTERNS))
def test_a_cache_keeps_what_is_live_and_at_most_a_page(name):
    pattern, x = PATTERNS[name](CASE), drawn(dtype=torch.float32)
    length = CASE.kv_len if name.startswith(NEEDS_LENGTH) else None
    cache = cache_of(pattern, max_length=length, page_size=16)
    heads = {"num_heads": CASE.num_heads, "num_kv_heads": CASE.num_kv_heads}
    begin, before = 0, 0
    for n in SPLITS[1]:
        cache.attend(*(y[:, :, begin : begin + n] for y in x))
        begin += n
        live = (pattern & sr.Causal()).live_keys(begin, **heads, max_length=length)
        for head, needed in enumerate(live):
            held = cache.positions(head)
            assert torch.equal(held, held.unique())
            assert torch.isin(needed, held).all()
        now = max(map(len, live))  # evicted no later than 16 / 8 tokens after they die
        assert cache.kept <= max(now, before) + 16
        before = now
        assert cache.kept == max(len(cache.positions(h)) for h in range(len(live)))


@pytest.mark.parametrize("name", ["window", "longnet", "global columns", "mixture with overlap"])
def test_token_by_token_in_float32_and_bfloat16(name):
    pattern = PATTERNS[name](CASE)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        x = drawn(dtype=dtype)
        out = attend(cache_of(pattern, page_size=32), x, SPLITS[2])
        assert out.dtype == dtype
        assert_close(out.double(), whole(pattern, [y.double() for y in x]), tolerance)


@pytest.mark.parametrize("name", ["causal", "window", "longnet", "union of steps"])
@pytest.mark.parametrize("extra", ["softcap", "sink", "distance_bias", "dropout", "scale"])
def test_extras_are_those_of_one_pass(name, extra):
    pattern, x = PATTERNS[name](CASE), drawn()
    options: dict[str, Any] = {
        "softcap": {"softcap": 1.5},
        "sink": {"sink": torch.randn(CASE.num_heads, dtype=torch.float64)},
        "distance_bias": {"distance_bias": torch.randn(4, 25, dtype=torch.float64)},
        "dropout": {"dropout_p": 0.4, "dropout_seed": 5},
        "scale": {"scale": -0.7},
    }[extra]
    out = attend(cache_of(pattern, page_size=16), x, SPLITS[1], **options)
    assert_close(out, whole(pattern, x, **options), 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("split", SPLITS[:2], ids=["prompt", "chunks"])
def test_a_sink_in_half_precision_where_some_queries_see_nothing(split, dtype):
    sink = torch.randn(CASE.num_heads)
    for pattern in (sr.Dilated(8, 2, 0), sr.LongNet((16,), (4,))):
        x = drawn(dtype=dtype)
        freed = [torch.full((4 * y.numel(),), torch.nan, dtype=dtype) for y in x]
        del freed  # what is read past the end of a result is likely to be NaN
        out = attend(cache_of(pattern, page_size=16), x, split, sink=sink)
        expected = whole(pattern, [y.double() for y in x], sink=sink)
        assert_close(out.double(), expected, torch.finfo(dtype).eps)


def test_nothing_is_laid_out_for_each_token():
    pattern = sr.LongNet((16, 64), (1, 4)) & sr.Causal()
    x = drawn(dtype=torch.float32)
    cache = cache_of(pattern, page_size=64)
    attend(cache, x, [10, 1])
    misses = layout_cache.info().misses
    attend(cache, [y[:, :, 11:] for y in x], [1] * 62)
    assert layout_cache.info().misses == misses


@pytest.mark.parametrize("steps", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_memory_of_a_window_is_flat(steps):
    torch.manual_seed(0)
    cache = sr.KVCache(sr.SlidingWindow(30), 1, 1, 4, page_size=16)
    sizes = set()
    token = torch.randn(1, 1, 1, 4)
    for number in range(steps):
        cache.attend(token, token, token)
        if number > 100:
            sizes.add(cache.nbytes)
            assert 30 <= cache.kept <= 30 + 16
    assert len(sizes) == 1


@pytest.mark.parametrize("name", ["causal", "window", "longnet", "global columns"])
def test_crop_takes_back_what_was_guessed(name):
    """Speculative decoding: some tokens are attended, and some of the last ones taken back."""
    pattern, x = PATTERNS[name](CASE), drawn()
    cache, begin, outs = cache_of(pattern, page_size=16, rollback=6), 0, []
    for n, back in ((20, 6), (5, 2), (4, 4), (6, 0), (1, 1), (16, 3), (5, 5), (6, 1), (8, 0)):
        outs.append(attend(cache, [y[:, :, begin : begin + n] for y in x], [n])[:, :, : n - back])
        cache.crop(begin + n - back)
        begin += n - back
        assert cache.length == begin
    assert_close(torch.cat(outs, 2), whole(pattern, x)[:, :, :begin], 1e-12)


def test_crop_refuses_what_is_gone_and_changes_nothing():
    x = drawn()
    cache = cache_of(sr.SlidingWindow(9), page_size=16, rollback=4)
    attend(cache, x, [40])
    for length in (35, 41, -1, 0):
        with pytest.raises(ValueError, match=r"got"):
            cache.crop(length)
    cache.crop(37)
    cache.crop(36)
    with pytest.raises(ValueError, match="length from 36 to 36, got 35"):
        cache.crop(35)
    rest = attend(cache, [y[:, :, 36:] for y in x], [39])
    assert_close(rest, whole(sr.SlidingWindow(9), x)[:, :, 36:], 1e-12)


def test_beams_reorder_repeat_and_select():
    pattern, x = sr.LongNet((8, 32), (1, 2)) & sr.Causal(), drawn()
    cache = cache_of(pattern, page_size=16)
    attend(cache, [y[:, :, :50] for y in x], [50])
    cache.repeat(3)
    cache.select(torch.tensor([5, 0, 1, 4]))
    cache.reorder([1, 2, 0, 3])  # entries 0, 0, 1, 1
    y = [z.repeat_interleave(2, 0) for z in x]
    rest = attend(cache, [z[:, :, 50:] for z in y], [20, 1, 1, 3])
    assert_close(rest, whole(pattern, y)[:, :, 50:], 1e-12)
    for call in (cache.reorder, cache.select):
        with pytest.raises(ValueError, match="integers"):
            call([0, 1, 2, 9])
    with pytest.raises(ValueError, match="index of 4 entries, got 2"):
        cache.reorder([0, 1])
    of_entries = cache_of(sr.KeyPadding((70, 60)))
    with pytest.raises(ValueError, match="repeat cannot exchange batch entries"):
        of_entries.repeat(2)


def test_selected_blocks_keep_all():
    x = drawn()
    index = torch.tensor([[0, 0], [1, 0], [1, 2], [0, 3], [4, 1]]).expand(2, 2, -1, -1)
    pattern = sr.SelectedBlocks(index.clone(), 16)
    cache = cache_of(pattern, page_size=16)
    expected = whole(pattern, x)
    assert_close(attend(cache, x, SPLITS[1][:-1]), expected[:, :, :72], 1e-12)
    assert cache.kept == 72


def test_left_padding_by_a_key_mask():
    x = drawn()
    valid = torch.ones(2, CASE.kv_len, dtype=torch.bool)
    valid[0, :13] = False
    pattern = sr.SlidingWindow(20) & sr.KeyMask(valid)
    out = attend(cache_of(pattern, page_size=16), x, SPLITS[1])
    expected = whole(pattern, x)
    assert_close(out, expected, 1e-12)
    assert not expected[0, :, :13].any()


@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
def test_backends_that_are_named(backend):
    dtype = torch.float32 if backend == "cpu" else torch.float64
    x, pattern = drawn(dtype=dtype), sr.LongNet((16, 64), (1, 4)) & sr.Causal()
    out = attend(cache_of(pattern, page_size=16), x, SPLITS[1], backend=backend)
    tolerance = 2e-6 if backend == "cpu" else 1e-12
    assert_close(out.double(), whole(pattern, [y.double() for y in x]), tolerance)


def test_a_step_compiles_once_for_all_lengths():
    from torch._dynamo.testing import CompileCounterWithBackend

    pattern, x = sr.LongNet((16, 64), (1, 4)) & sr.Causal(), drawn(dtype=torch.float32)
    cache = cache_of(pattern, page_size=16)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def step(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return 2 * cache.attend(query * 1.0, key, value, softcap=3.0)

    with torch.no_grad():
        first = cache.attend(*(y[:, :, :20] for y in x), softcap=3.0)
        outs = [2 * first]
        outs += [step(*(y[:, :, i : i + 1] for y in x)) for i in range(20, 75)]
    expected = whole(pattern, [y.double() for y in x], softcap=3.0)
    assert_close(torch.cat(outs, 2).double() / 2, expected, 2e-6)
    assert counter.frame_count == 1
    assert cache.length == 75


def test_inference_mode_and_none_take_turns():
    x, pattern = drawn(), sr.SlidingWindow(12)
    with torch.inference_mode():
        cache, outs = cache_of(pattern, page_size=16), []
    for number, n in enumerate(SPLITS[1]):
        begin = sum(SPLITS[1][:number])
        with torch.inference_mode(number % 2 == 0):
            outs.append(cache.attend(*(y[:, :, begin : begin + n] for y in x)))
    assert_close(torch.cat(outs, 2), whole(pattern, x), 1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k[..., :5], v), "head dims of query and key"),
        (lambda q, k, v: (q[..., :5], k[..., :5], v), "attend needs query, key and value"),
        (lambda q, k, v: (q[:, :2], k, v), "attend needs query, key and value"),
        (lambda q, k, v: (q[:1], k[:1], v[:1]), "attend needs query, key and value"),
        (lambda q, k, v: (q, torch.cat((k, k), 2), torch.cat((v, v), 2)), "equally many new"),
        (lambda q, k, v: (q.float(), k.float(), v.float()), "cache holds torch.float64"),
        (lambda q, k, v: (q.requires_grad_(), k, v), "keeps no gradients"),
    ],
)
def test_what_does_not_fit_is_told_and_changes_nothing(change, message):
    x, pattern = drawn(), sr.SlidingWindow(12)
    cache = cache_of(pattern, page_size=16)
    attend(cache, x, [20, 3])
    held = cache.positions(0)
    with pytest.raises(ValueError, match=message):
        cache.attend(*change(*(y[:, :, 23:27].clone() for y in x)))
    for name in ("q_start", "block_bias"):
        with pytest.raises(ValueError, match=f"attend takes no {name}"):
            cache.attend(*(y[:, :, 23:27] for y in x), **{name: 0})
    for lengths in ([1], [1, 9], [1, -1], [1, 1.0]):
        with pytest.raises(ValueError, match="lengths must be 2 ints from 0 to 4"):
            cache.attend(*(y[:, :, 23:27] for y in x), lengths=lengths)
    assert torch.equal(cache.positions(0), held)
    rest = attend(cache, [y[:, :, 23:] for y in x], [52])
    assert_close(rest, whole(pattern, x)[:, :, 23:], 1e-12)


@pytest.mark.parametrize(
    ("pattern", "length"), [(sr.RandomBlocks(0.3, 16), 60), (sr.Documents((20, 40)), None)], ids=str
)
def test_a_length_that_is_passed(pattern, length):
    x, cache = drawn(), cache_of(pattern, max_length=length)
    attend(cache, x, [50])
    with pytest.raises(ValueError, match="for 60 tokens, got 25 more after 50"):
        cache.attend(*(y[:, :, 50:] for y in x))
    assert cache.length == 50
    cache.attend(*(y[:, :, 50:60] for y in x))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: cache_of(sr.RandomBlocks(0.3, 16)), ValueError, "max_length"),
        (
            lambda: cache_of(sr.Causal(), page_size=8),
            ValueError,
            "page_size must be a multiple of 16",
        ),
        (lambda: cache_of(sr.Causal(), rollback=-1), ValueError, "rollback must be"),
        (lambda: sr.KVCache(8, 2, 1, 8), TypeError, "pattern must be"),
        (
            lambda: sr.KVCache(sr.KeyPadding((7, 5)), 3, 1, 8),
            ValueError,
            "2 batch entries, got batch_size=3",
        ),
    ],
    ids=["no length", "page", "rollback", "pattern", "batch"],
)
def test_arguments_of_a_cache_that_do_not_fit_are_told(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_cache_needs_a_kv_head():
    for num_heads in (None, 0, 2):
        with pytest.raises(ValueError, match="num_kv_heads must be at least 1, got 0"):
            sr.KVCache(sr.Causal(), 1, 0, 8, num_heads=num_heads)
    with pytest.raises(ValueError, match="num_kv_heads must be at least 1, got 0"):
        sr.SelectedCache(1, 0, 8, k=4)


def test_no_token_no_key_and_odd_strides():
    x = drawn()
    cache = cache_of(sr.SlidingWindow(9) & sr.Dilated(16, 4, 3), page_size=16)  # empty rows
    outs = [cache.attend(*(y[:, :, :0] for y in x))]
    strided = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in x]
    outs.append(attend(cache, strided, SPLITS[1]))
    expected = whole(cache.pattern, x)
    assert_close(torch.cat(outs, 2), expected, 1e-12)
    assert not expected[:, :, 0].any()


@pytest.mark.parametrize(
    ("name", "sharding"),
    thinned(
        2,
        ["causal", "window", "longnet", "global columns", "dilated window"],
        ["contiguous", "zigzag"],
    ),
)
def test_ranks_prefill_as_a_ring_and_decode_each_its_own(name, sharding):
    """Rank r keeps what is live of its shard; a step's new token is stored by one of them."""
    pattern, x, world, prompt = PATTERNS[name](CASE) & sr.Causal(), drawn(), 3, 40
    begin = [y[:, :, :prompt] for y in x]
    out = simulate_ring(*begin, pattern, world_size=world, sharding=sharding)
    expected, lse = whole(pattern, x, return_lse=True)
    assert_close(out, expected[:, :, :prompt], 1e-12)
    caches = []
    for ranges in owned_ranges(sharding, prompt, world):
        places = torch.cat([torch.arange(*one) for one in ranges] or [torch.arange(0)])
        cache = cache_of(pattern, page_size=16)
        cache.load(begin[1][:, :, places], begin[2][:, :, places], places, length=prompt)
        assert torch.isin(cache.positions(0), places).all()
        caches.append(cache)
    live = pattern.live_keys(prompt, num_heads=4, num_kv_heads=2)
    for head, needed in enumerate(live):
        held = torch.cat([cache.positions(head) for cache in caches])
        assert torch.equal(held.sort().values, needed)
    step = prompt
    for number, n in enumerate((1, 1, 3, 1, 1, 12, 1, 1, 1, 5, 1, 1)):
        new = [y[:, :, step : step + n] for y in x]
        parts = [
            cache.attend(*new, stored=number % world == rank, return_lse=True)
            for rank, cache in enumerate(caches)
        ]
        merged, merged_lse = sr.merge_attention(*zip(*parts, strict=True))
        assert_close(merged, expected[:, :, step : step + n], 1e-12)
        assert_close(merged_lse, lse[:, :, step : step + n], 1e-12)
        step += n


def test_load_refuses_what_does_not_fit():
    _, key, value = drawn()
    cache = cache_of(sr.SlidingWindow(9))
    for places in ([0, 1], list(range(75))[::-1], [*range(74), 73]):
        with pytest.raises(ValueError, match="positions must be 75 ascending ints"):
            cache.load(key, value, places)
    with pytest.raises(ValueError, match="length must be at least 75, got 70"):
        cache.load(key, value, length=70)
    cache.load(key, value)
    assert cache.length == 75
    assert cache.positions(0).tolist() == list(range(66, 75))
    with pytest.raises(ValueError, match="empty cache, got one that has seen 75 tokens"):
        cache.load(key, value)


def test_a_step_like_the_last_one_gives_the_bits_of_a_step_that_is_checked():
    pattern = sr.LongNet((16, 64), (1, 4)) & sr.Causal()
    x = drawn(dtype=torch.float32)
    quick, slow = (cache_of(pattern, page_size=16, rollback=2) for _ in range(2))
    for token in range(CASE.kv_len):
        part = [y[:, :, token : token + 1] for y in x]
        decision._decisions.clear()
        assert torch.equal(quick.attend(*part), slow.attend(*part))
        assert quick.lengths == slow.lengths
        if token % 7 == 6:
            for cache in (quick, slow):
                cache.crop(token)
                cache.attend(*part)
    for head in range(CASE.num_kv_heads):
        assert torch.equal(quick.positions(head), slow.positions(head))


def test_a_step_like_the_last_one_is_refused_where_that_would_be():
    x = drawn(dtype=torch.float32)
    cache = cache_of(sr.Causal(), max_length=4)
    part = [y[:, :, :1] for y in x]
    for _ in range(3):
        cache.attend(*part)
    with pytest.raises(ValueError, match="require them"):
        cache.attend(part[0].clone().requires_grad_(), *part[1:])
    with pytest.raises(ValueError, match="the cache holds"):
        cache.attend(*(y.double() for y in part))
    cache.attend(*part)
    with pytest.raises(ValueError, match="larger max_length"):
        cache.attend(*part)
    assert cache.length == 4


def test_many_branches_keep_what_each_of_them_visits():
    branches = [sr.SlidingWindow(n) & sr.Causal() for n in range(3, 33, 3)]
    pattern, x = sr.Mixture(tuple(branches)), drawn()
    cache = cache_of(pattern, page_size=16)
    assert_close(attend(cache, x, [40] + [1] * 35), whole(pattern, x), 1e-12)


def test_tiles_of_a_page_end_where_segments_end():
    """A window of 2,048 keys has bitmaps for its first tiles and the page, not one a segment."""
    cache = sr.KVCache(sr.Causal() & sr.SlidingWindow(2047), 1, 2, 16)
    query, key, value = torch.randn(3, 1, 2, 3001, 16)
    cache.attend(*(x[:, :, :3000] for x in (query, key, value)))
    out = cache.attend(*(x[:, :, 3000:] for x in (query, key, value)))
    (p,) = next(iter(cache._state.page.layouts.values())).passes
    tokens = (p.key_stop - p.key_start)[0]
    assert int(tokens.sum()) == 2047 + 128
    assert len(tokens) <= 20
    assert int((p.bitmap >= 0).sum()) <= 4
    whole = sr.attention(query, key, value, cache.pattern)[:, :, 3000:]
    torch.testing.assert_close(out, whole, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["cache", "selected", "compiled"])
def test_keys_that_autocast_rounds_are_told_by_that(kind):
    """A cast of the keys, which the message would advise otherwise, changes nothing."""
    cache = sr.KVCache(sr.SlidingWindow(9), 1, 2, 8)
    if kind == "selected":
        cache = sr.SelectedCache(1, 2, 8, k=2, block_size=16)
    tokens = torch.randn(3, 1, 2, 4, 8)
    wanted = cache.attend(*tokens)
    step = cache.attend
    if kind == "compiled":
        step = torch.compile(step, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match=r"holds torch.float32, got keys that autocast makes"):
            step(*tokens)
        with torch.autocast("cpu", enabled=False):
            assert cache.attend(*tokens).dtype == torch.float32
        other = sr.KVCache(sr.SlidingWindow(9), 1, 2, 8, dtype=torch.bfloat16)
        got = other.attend(*tokens)
    assert got.dtype == torch.bfloat16
    if kind == "cache":
        torch.testing.assert_close(got.float(), wanted, atol=0.05, rtol=0)
    with pytest.raises(ValueError, match=r"cast them with .to\(torch.bfloat16\)"):
        other.attend(*tokens)
