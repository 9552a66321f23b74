"""A cache of heads that keep unlike numbers of keys: each holds its own, through every change."""

import copy
import pickle
from functools import cache

import pytest
import torch

import sparsering as sr
from sparsering.decoding.held_rows import HeldRows

STREAMING = sr.Causal() & (sr.SlidingWindow(15) | sr.GlobalTokens(4, rows=False))
PATTERNS = {
    "half see all": sr.PerHead((sr.Causal(), STREAMING, STREAMING, sr.Causal())),
    "four lengths": sr.PerHead(tuple(sr.Causal() & sr.SlidingWindow(n) for n in (0, 130, 7, 40))),
    "a mixture in one head": sr.PerHead(
        (
            STREAMING,
            sr.LongNet((16, 64), (1, 2)) & sr.Causal(),
            sr.Causal(),
            sr.Causal() & sr.SlidingWindow(40, 0, 3),
        )
    ),
}
CASES = pytest.mark.parametrize("name", PATTERNS)
N = 330


def inputs(batch=2, n=N, heads=8, seed=0):
    torch.manual_seed(seed)
    return torch.randn(batch, heads, n, 16), *torch.randn(2, batch, 4, n, 16)


def part(tensors, begin, end):
    return [x[:, :, begin:end] for x in tensors]


def expected(tensors, pattern):
    q, k, v = (x.double() for x in tensors)
    return sr.attention(q, k, v, pattern, backend="reference").float()


@cache
def whole(name, batch=2, n=N, seed=0):
    """The results of one pass over `inputs`, shared by all tests."""
    return expected(inputs(batch, n, seed=seed), PATTERNS[name])


def assert_close(actual, wanted):
    torch.testing.assert_close(actual, wanted, rtol=0, atol=3e-6)


def made(name, batch=2, **options):
    return sr.KVCache(PATTERNS[name], batch, 4, 16, num_heads=8, page_size=16, **options)


def live_bytes(cache):
    """Bytes of the live keys and values, and of their positions and last queries."""
    branches = len(cache.pattern.branches)
    batch = len(cache.lengths)
    live = [len(x) for x in cache.pattern.live_keys(cache.length, num_heads=8, num_kv_heads=4)]
    return sum(live) * (batch * 2 * 16 * 4 + 8 * (1 + branches))


@pytest.mark.covering(1, keep=[{"name": "four lengths", "sizes": (1,), "backend": "cpu"}])
@CASES
@pytest.mark.parametrize("sizes", [(1,), (16,), (5, 1, 40), (N,)], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_results_and_bytes_in_parts_of_any_size(name, sizes, backend):
    tensors, cache, done = inputs(), made(name), 0
    wanted, turn = whole(name), 0
    page = 4 * 16 * 2 * (2 * 16 * 4 + 16)  # of each of four heads: 16 tokens, and 16 dead ones
    while done < N:
        end = min(N, done + sizes[turn % len(sizes)])
        out = cache.attend(*part(tensors, done, end), backend=backend)
        assert_close(out, wanted[:, :, done:end])
        done, turn = end, turn + 1
        assert cache.nbytes <= live_bytes(cache) + 2 * page
    for head, keys in enumerate(PATTERNS[name].live_keys(N, num_heads=8, num_kv_heads=4)):
        assert set(keys.tolist()) <= set(cache.positions(head).tolist())


def test_a_short_head_holds_no_rows_of_a_long_one():
    """Half of the heads see 20 keys: the cache holds little more than half of all keys."""
    n = 4000
    q, k, v = inputs(1, n)
    cache = sr.KVCache(PATTERNS["half see all"], 1, 4, 16, num_heads=8, page_size=16)
    cache.attend(q, k, v)
    live = 2 * n + 2 * 20
    assert cache.nbytes <= live * (2 * 16 * 4 + 16) + 4 * 16 * 2 * 16 * 4
    assert cache.kept == n
    assert [len(cache.positions(head)) for head in range(4)] == [n, 19, 19, n]


@CASES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(name, dtype):
    tensors = [x.to(dtype) for x in inputs()]
    cache = made(name)
    out = [cache.attend(*part(tensors, 0, 200)).float()]
    out += [cache.attend(*part(tensors, i, i + 1)).float() for i in range(200, 260)]
    wanted = expected([x.float() for x in tensors], PATTERNS[name])[:, :, :260]
    atol = 3e-6 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(torch.cat(out, 2), wanted, rtol=0, atol=atol)


def step_on(cache, tensors, begin, end):
    return torch.cat([cache.attend(*part(tensors, i, i + 1)) for i in range(begin, end)], 2)


@CASES
def test_crop_goes_back(name):
    tensors = inputs()
    wanted, cache = whole(name), made(name, rollback=40)
    cache.attend(*part(tensors, 0, 250))
    step_on(cache, inputs(seed=1), 250, 285)
    cache.crop(247)
    assert_close(step_on(cache, tensors, 247, 300), wanted[:, :, 247:300])


@CASES
def test_entries_are_reordered_repeated_selected(name):
    tensors, cache = inputs(3), made(name, 3)
    wanted = whole(name, 3)
    cache.attend(*part(tensors, 0, 200))
    cache.reorder([2, 0, 0])
    cache.select([0, 2])
    cache.repeat(2)
    index = torch.tensor([2, 2, 0, 0])
    moved = [x[index] for x in tensors]
    assert_close(step_on(cache, moved, 200, 240), wanted[index][:, :, 200:240])


@pytest.mark.covering(1)
@CASES
@pytest.mark.parametrize("length", [0, 90, 300])
def test_caches_join(name, length):
    one, two = inputs(2), inputs(1, seed=3)
    first, second = made(name), made(name, 1)
    first.attend(*part(one, 0, 200))
    if length:
        second.attend(*part(two, 0, length))
    first.join(second)
    wanted, joined = whole(name), whole(name, 1, seed=3)
    for i in range(20):
        step = [
            torch.cat((x[:, :, 200 + i : 201 + i], y[:, :, length + i : length + i + 1]))
            for x, y in zip(one, two, strict=True)
        ]
        out = first.attend(*step)
        assert_close(out[:2], wanted[:, :, 200 + i : 201 + i])
        assert_close(out[2:], joined[:, :, length + i : length + i + 1])


@CASES
def test_entries_of_unlike_lengths(name):
    tensors, cache = inputs(), made(name)
    wanted = whole(name)
    cache.attend(*part(tensors, 0, 150), lengths=[150, 60])
    at = [150, 60]
    for _ in range(40):
        step = [torch.stack([x[b, :, at[b] : at[b] + 1] for b in range(2)]) for x in tensors]
        out = cache.attend(*step)
        for b in range(2):
            assert_close(out[b], wanted[b, :, at[b] : at[b] + 1])
            at[b] += 1


@CASES
def test_copies_and_pickles_go_on_alone(name):
    tensors, cache = inputs(), made(name)
    wanted = whole(name)
    cache.attend(*part(tensors, 0, 200))
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert_close(step_on(other, tensors, 200, 230), wanted[:, :, 200:230])
    assert_close(step_on(cache, tensors, 200, 230), wanted[:, :, 200:230])


@CASES
@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_a_draft_sees_what_its_path_would(name, backend):
    tensors, cache = inputs(), made(name)
    wanted = whole(name)
    cache.attend(*part(tensors, 0, 200))
    for begin in range(200, 260, 3):
        out = cache.attend(*part(tensors, begin, begin + 3), tree=(-1, 0, 1), backend=backend)
        assert_close(out, wanted[:, :, begin : begin + 3])
        cache.keep([0, 1, 2])


@CASES
def test_keys_of_other_ranks_are_hidden(name):
    """The two halves of the tokens are held by two caches; their results merge."""
    tensors, caches = inputs(), [made(name), made(name)]
    wanted = whole(name)
    for i, begin in enumerate(range(0, 300, 10)):
        steps = [
            cache.attend(*part(tensors, begin, begin + 10), stored=i % 2 == r, return_lse=True)
            for r, cache in enumerate(caches)
        ]
        outs, lses = zip(*steps, strict=True)
        assert_close(sr.merge_attention(outs, lses)[0], wanted[:, :, begin : begin + 10])


@CASES
def test_a_call_that_is_not_kept_changes_nothing(name):
    tensors, cache = inputs(), made(name)
    wanted = whole(name)
    cache.attend(*part(tensors, 0, 200))
    for begin in range(200, 240, 4):
        before = cache.nbytes, cache.kept, cache.length
        cache.attend(*part(inputs(seed=4), begin, begin + 4), keep=False)
        assert (cache.nbytes, cache.kept, cache.length) == before
        assert_close(
            cache.attend(*part(tensors, begin, begin + 4)), wanted[:, :, begin : begin + 4]
        )


def test_heads_of_one_length_lie_side_by_side():
    """Even heads keep the form that has a dim of heads: nothing is added for them."""
    cache = sr.KVCache(STREAMING, 1, 4, 16, page_size=16)
    q, k, v = torch.randn(3, 1, 4, 100, 16)
    cache.attend(q, k, v)
    held = cache._state.keys
    assert held.rows.shape == (1, 4, 19 + 16, 16)
    assert held.by_head is held.rows


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_other_backends_read_each_heads_own_slots(backend):
    tensors, cache = inputs(1, 60), made("half see all", 1)
    wanted = expected(tensors, PATTERNS["half see all"])
    assert_close(cache.attend(*part(tensors, 0, 50), backend=backend), wanted[:, :, :50])
    assert not cache._state.keys.are_even
    for i in range(50, 54):
        out = cache.attend(*part(tensors, i, i + 1), backend=backend)
        assert_close(out, wanted[:, :, i : i + 1])


@pytest.mark.parametrize("before", [(5, 5), (5, 2), None], ids=["even", "unlike", "no rows yet"])
@pytest.mark.parametrize("after", [(4, 4), (4, 1)], ids=["to even", "to unlike"])
@pytest.mark.parametrize("entries", [1, 2])
@pytest.mark.parametrize("new", [0, 3])
def test_a_gpu_gathers_what_the_cpu_does(before, after, entries, new):
    """Both ways on CPU tensors: all heads in few launches, and head by head."""
    if before is None and not new:
        return
    torch.manual_seed(0)
    page, count = 4, 3 if before else 0
    held = HeldRows.empty()
    if before is not None:
        zeros = HeldRows.zeros(HeldRows(torch.empty(2, 1, 1, 6), (1,), page), before, 2)
        held = HeldRows(torch.randn_like(zeros.rows), before, page)
    rows = torch.randn(2, 2, new, 6) if new else None
    slots = torch.full((entries, 2, max(after)), -1)
    for entry in range(entries):
        for head, number in enumerate(after):
            older = before[head] if before else 0
            widest = max(before) if before else 0
            seen = [*range(older), *range(widest, widest + count + new)]
            number = min(number, len(seen)) - (entry == 1 and head == 0)
            chosen = torch.tensor(seen)[torch.randperm(len(seen))[:number].sort().values]
            slots[entry, head, :number] = chosen
    wanted = held.gathered(slots, count, rows, page)
    other = HeldRows(torch.full_like(wanted.rows, torch.nan), wanted.older, page)
    held._gather(slots, count, rows, other)
    assert torch.equal(other.rows, wanted.rows)
