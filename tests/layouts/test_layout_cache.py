"""The layout cache: what it shares, what it drops, and what threads ask of it."""

import sys
import threading
from itertools import count
from time import sleep
from types import FrameType
from typing import Any

import pytest
import torch

import sparsering as sr
from sparsering.ground.once import bytes_held
from sparsering.layouts.cache import LayoutCache

pytestmark = pytest.mark.usefixtures("empty_cache")


def bytes_of(layout: sr.BlockLayout) -> int:
    """Bytes that the cache counts for a layout that it has just built."""
    return next(x.size for x in sr.layout_cache._entries.values() if x.value is layout)


def test_cache_counts_hits_and_misses_and_returns_what_it_holds() -> None:
    info = sr.layout_cache.info()
    assert (info.hits, info.misses, info.entries, info.bytes) == (0, 0, 0, 0)
    first = sr.SlidingWindow(40).layout(256, block_size=32)
    info = sr.layout_cache.info()
    assert (info.hits, info.misses, info.entries) == (0, 1, 1)
    assert 0 < info.bytes <= info.limit
    second = sr.SlidingWindow(40).layout(256, block_size=32)
    after = sr.layout_cache.info()
    assert second is first
    assert (after.hits, after.misses, after.entries, after.bytes) == (1, 1, 1, info.bytes)


def test_info_is_a_snapshot() -> None:
    before = sr.layout_cache.info()
    sr.Causal().layout(64, block_size=16)
    assert (before.misses, before.entries, before.bytes) == (0, 0, 0)


def test_default_limit_is_256_mb() -> None:
    assert sr.layout_cache.info().limit in (256 * 10**6, 256 * 2**20)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sr.Causal() & sr.Documents((40, 24)),
        lambda: sr.LongNet((16, 64), (1, 2)),
        lambda: sr.Blocks(torch.tril(torch.ones(4, 4, dtype=torch.bool)), 16),
        lambda: sr.Dense(torch.tril(torch.ones(64, 64, dtype=torch.bool))),
        lambda: sr.KeyPadding((60, 20)) & sr.Causal(),
        lambda: sr.Packed((40, 24), sr.Causal() + sr.SlidingWindow(4)),
        lambda: sr.RandomBlocks(0.5, 16, seed=3),
    ],
)
def test_patterns_equal_by_value_share_a_layout(make: Any) -> None:
    first = make().layout(64, block_size=16)
    misses = sr.layout_cache.info().misses
    assert make().layout(64, block_size=16) is first
    assert sr.layout_cache.info().misses == misses
    assert sr.layout_cache.info().hits >= 1


def test_longnet_and_the_sum_of_its_branches_share_a_layout() -> None:
    total = sr.Dilated(16, 1) + sr.Dilated(64, 2)
    first = sr.LongNet((16, 64), (1, 2)).layout(64, num_heads=2, block_size=16)
    assert total.layout(64, num_heads=2, block_size=16) is first


def test_defaults_and_the_same_values_given_share_a_layout() -> None:
    first = sr.Causal().layout(64, 80)
    again = sr.Causal().layout(
        64, 80, num_heads=1, num_kv_heads=1, q_start=16, block_size=128, device=torch.device("cpu")
    )
    assert again is first


@pytest.mark.parametrize(
    "arguments",
    [
        {"q_len": 63},
        {"kv_len": 80},
        {"num_heads": 4, "num_kv_heads": 4},
        {"num_kv_heads": 1},
        {"q_start": 1},
        {"block_size": 32},
    ],
)
def test_every_argument_is_part_of_the_key(arguments: dict[str, Any]) -> None:
    pattern = sr.Dilated(32, 2) & sr.Causal()
    asked = {"q_len": 64, "kv_len": 64, "num_heads": 2, "num_kv_heads": 2, "block_size": 16}
    first = pattern.layout(**asked)
    of_heads = pattern.to_dense(64, 64, num_heads=2, num_kv_heads=2).to(torch.int64)[None]
    assert torch.equal(first.to_dense().expand_as(of_heads), of_heads)
    changed = asked | arguments
    other = pattern.layout(**changed)
    assert other.block_size == changed.pop("block_size")
    expected = pattern.to_dense(**changed).to(torch.int64)[None]
    assert torch.equal(
        other.to_dense().to(torch.int64).expand(1, changed["num_heads"], -1, -1),
        expected.expand(1, changed["num_heads"], -1, -1),
    )
    tiles = {tuple(entry[2:]) for entry in other.entries().tolist()}
    assert max(max(tile) for tile in tiles) <= asked["block_size"] or "block_size" in arguments


def test_the_device_is_part_of_the_key() -> None:
    for device in ("cpu", "meta", "cpu"):
        layout = sr.Causal().layout(64, block_size=16, device=device)
        assert layout.passes[0].row_ptr.device == torch.device(device)


def test_clear_empties_the_cache_and_keeps_the_limit() -> None:
    sr.layout_cache.set_limit(10**6)
    first = sr.Causal().layout(64, block_size=16)
    assert sr.Causal().layout(64, block_size=16) is first
    sr.layout_cache.clear()
    info = sr.layout_cache.info()
    assert (info.hits, info.misses, info.entries, info.bytes) == (0, 0, 0, 0)
    assert info.limit == 10**6
    again = sr.Causal().layout(64, block_size=16)
    assert again is not first
    assert sr.layout_cache.info().misses == 1


def test_layout_larger_than_the_limit_is_returned_but_not_kept() -> None:
    expected = sr.Causal().layout(256, block_size=16)
    limit = bytes_of(expected) // 4
    sr.layout_cache.clear()
    sr.layout_cache.set_limit(limit)
    for asked in (1, 2):
        layout = sr.Causal().layout(256, block_size=16)
        assert torch.equal(layout.to_dense(), expected.to_dense())
        info = sr.layout_cache.info()
        assert (info.hits, info.misses, info.entries, info.bytes) == (0, asked, 0, 0)


def test_a_layout_too_large_to_keep_does_not_drive_out_the_others() -> None:
    small = sr.Causal().layout(32, block_size=16)
    sr.layout_cache.set_limit(bytes_of(sr.Causal().layout(1024, block_size=16)))
    kept = sr.Causal().layout(32, block_size=16)
    sr.Causal().layout(2048, block_size=16)
    hits = sr.layout_cache.info().hits
    assert sr.Causal().layout(32, block_size=16) is kept
    assert sr.layout_cache.info().hits == hits + 1
    assert torch.equal(kept.to_dense(), small.to_dense())


def test_eviction_drops_the_least_recently_used_and_keeps_to_the_limit() -> None:
    one = bytes_of(sr.SlidingWindow(100).layout(512, block_size=16))
    sr.layout_cache.clear()
    limit = 4 * one
    sr.layout_cache.set_limit(limit)
    favourite = sr.SlidingWindow(100).layout(512, block_size=16)
    for left in range(101, 121):  # the same number of tiles and bytes, or nearly
        sr.SlidingWindow(left).layout(512, block_size=16)
        assert sr.SlidingWindow(100).layout(512, block_size=16) is favourite
        info = sr.layout_cache.info()
        assert info.bytes <= limit
        assert info.entries >= 2
    assert info.entries <= 5
    misses = info.misses
    sr.SlidingWindow(101).layout(512, block_size=16)  # driven out long ago
    assert sr.layout_cache.info().misses == misses + 1


def test_bytes_stay_true_and_within_the_limit_while_layouts_are_used() -> None:
    limit = 3 * bytes_of(sr.Causal().layout(512, block_size=16))
    sr.layout_cache.set_limit(limit)
    for length in range(400, 512, 16):
        layout = sr.Causal().layout(length, block_size=16)
        layout.entries()
        layout.to_dense()
        _ = (str(layout), layout.num_pairs, layout.density, layout.nbytes, layout.passes)
        assert sr.layout_cache.info().bytes <= limit


def test_lower_limit_evicts_at_once_and_zero_keeps_nothing() -> None:
    for length in range(64, 640, 64):
        sr.Causal().layout(length, block_size=16)
    before = sr.layout_cache.info()
    assert before.entries == 9
    sr.layout_cache.set_limit(before.bytes // 2)
    half = sr.layout_cache.info()
    assert 0 < half.entries < before.entries
    assert 0 < half.bytes <= half.limit == before.bytes // 2
    sr.layout_cache.set_limit(0)
    assert (sr.layout_cache.info().entries, sr.layout_cache.info().bytes) == (0, 0)
    assert sr.Causal().layout(64, block_size=16).num_pairs == 64 * 65 // 2
    assert sr.layout_cache.info().entries == 0


def test_a_pattern_that_raises_is_not_kept() -> None:
    for _ in range(2):
        with pytest.raises(ValueError):
            sr.Documents((3, 4)).layout(8, block_size=16)
    assert sr.layout_cache.info().entries == 0
    assert sr.Documents((3, 4)).layout(7, block_size=16).num_pairs == 9 + 16


def in_threads(count: int, work: Any) -> list[Any]:
    """Results of `work(number)` in threads that start together; their exceptions are raised."""
    barrier = threading.Barrier(count)
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            barrier.wait(timeout=30)
            results[number] = work(number)
        except BaseException as error:  # shown by the test below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
    if errors:
        raise errors[0]
    return results


def test_threads_that_ask_for_one_layout_build_it_once() -> None:
    for attempt in range(5):
        sr.layout_cache.clear()
        window = 2000 + attempt
        layouts = in_threads(8, lambda _, w=window: sr.SlidingWindow(w).layout(2**16))
        assert all(layout is layouts[0] for layout in layouts)
        info = sr.layout_cache.info()
        assert (info.hits, info.misses, info.entries) == (7, 1, 1)


def test_threads_that_ask_for_different_layouts_get_their_own() -> None:
    sr.layout_cache.set_limit(3 * sr.SlidingWindow(9).layout(200, block_size=16).nbytes)
    sr.layout_cache.clear()

    def many(number: int) -> list[int]:
        return [
            sr.SlidingWindow((number + turn) % 6).layout(200, block_size=16).num_pairs
            for turn in range(60)
        ]

    expected = [200 * (left + 1) - left * (left + 1) // 2 for left in range(6)]
    for number, pairs in enumerate(in_threads(6, many)):
        assert pairs == [expected[(number + turn) % 6] for turn in range(60)]
    info = sr.layout_cache.info()
    assert info.hits + info.misses == 6 * 60
    assert info.bytes <= info.limit


def test_threads_all_get_the_error_of_a_pattern_that_cannot_be_built() -> None:
    def fails(_: int) -> str:
        with pytest.raises(ValueError) as caught:
            sr.Documents((2**15,)).layout(2**16)
        return str(caught.value)

    messages = in_threads(6, fails)
    assert all(str(2**15) in message and str(2**16) in message for message in messages)
    assert sr.layout_cache.info().entries == 0


def test_a_thing_that_was_dropped_while_threads_waited_for_it_is_not_built_twice() -> None:
    """One that comes after the build has ended, but before the waiting ones ran, begins another."""
    cache, under_way, most = LayoutCache(limit=0), [0], [0]

    def build() -> bytes:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        sleep(0.002)
        under_way[0] -= 1
        return bytes(1000)

    def ask(number: int) -> None:
        for _ in range(10):
            assert cache.keep("key", build) == bytes(1000)

    in_threads(8, ask)
    assert most[0] == 1
    info = cache.info()
    assert (info.entries, info.bytes) == (0, 0)


def test_bytes_stay_true_whatever_threads_do() -> None:
    """Builds, limits, clearing, counting and calls, eight threads at a time."""
    sr.layout_cache.clear()
    one = bytes_of(sr.Causal().layout(64, block_size=16))
    query = torch.randn(1, 1, 64, 8)
    expected = [sr.attention(query, query, query, sr.SlidingWindow(n)) for n in range(4)]

    def work(number: int) -> None:
        for turn in range(24):
            kind = (number + turn) % 8
            if kind == 0:
                sr.layout_cache.set_limit((turn * 7919) % (4 * one))
            elif kind == 1 and turn % 3 == 0:
                sr.layout_cache.clear()
            elif kind == 2:
                info = sr.layout_cache.info()
                assert 0 <= info.bytes <= info.limit
            elif kind == 3:
                sr.SlidingWindow(turn % 4).layout(64, num_heads=1)
            elif kind == 4:
                sr.layout_cache.invalidate(sr.SlidingWindow(turn % 4))
            else:
                out = sr.attention(query, query, query, sr.SlidingWindow(turn % 4))
                torch.testing.assert_close(out, expected[turn % 4], atol=0, rtol=0)

    switches = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        in_threads(8, work)
    finally:
        sys.setswitchinterval(switches)
    info, sizes = sr.layout_cache.info(), [x.size for x in sr.layout_cache._entries.values()]
    assert (info.entries, info.bytes) == (len(sizes), sum(sizes)) and not sr.layout_cache._building
    sr.layout_cache.set_limit(0)
    assert (sr.layout_cache.info().entries, sr.layout_cache.info().bytes) == (0, 0)


class Interrupt(BaseException):
    """Is caught nowhere, like KeyboardInterrupt."""


def test_an_interrupt_after_any_call_leaves_a_cache_that_answers() -> None:
    """Later calls must not wait for a build that was cut short."""
    for number in count(1):
        cache = LayoutCache(100)
        cache.keep("old", lambda: b"0" * 80)
        if not interrupted(cache, number):
            break
        values: list[bytes] = []
        ask = threading.Thread(
            target=lambda: values.append(cache.keep("new", lambda: b"1" * 60)),  # noqa: B023
            daemon=True,
        )
        ask.start()
        ask.join(10)
        assert values == [b"1" * 60], f"no answer after an interrupt at call {number}"
        info = cache.info()
        assert info.bytes == sum(x.size for x in cache._entries.values()) <= info.limit
    assert number > 20


def interrupted(cache: LayoutCache, number: int) -> bool:
    """Builds a value; an error comes where Python handles signals, as the number says.

    That is at the beginning of a Python function, and after each call.
    """
    calls = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        own = frame.f_globals["__name__"] == "sparsering.layouts.cache"
        if own and event in ("call", "return", "c_return"):
            calls += 1
            if calls == number:
                raise Interrupt

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        cache.keep("new", lambda: b"1" * 60)
    except Interrupt:
        return True
    finally:
        sys.setprofile(before)
    return False


@pytest.mark.parametrize("limit", [-1, "a", 1.5])
def test_a_limit_that_is_no_number_of_bytes_leaves_the_cache_as_it_was(limit: Any) -> None:
    before = sr.layout_cache.info().limit
    with pytest.raises((TypeError, ValueError), match="limit must be"):
        sr.layout_cache.set_limit(limit)
    assert sr.layout_cache.info().limit == before


def test_a_layout_that_has_grown_is_measured_when_the_next_one_is_kept():
    """Training that selects anew at each step would hold every transpose otherwise."""
    sr.layout_cache.clear()
    first = sr.Causal().layout(2048, block_size=16)
    small = sr.SlidingWindow(15).layout(64, block_size=16)
    limit = bytes_of(first) + bytes_of(small)
    sr.layout_cache.clear()
    sr.layout_cache.set_limit(limit)
    first = sr.Causal().layout(2048, block_size=16)
    _ = [p.transpose for p in first.passes]
    assert bytes_held(first) > limit
    sr.SlidingWindow(15).layout(64, block_size=16)
    assert sr.Causal().layout(2048, block_size=16) is not first


def test_a_miss_measures_no_entry_but_the_new_one_and_the_latest(monkeypatch) -> None:
    measured = []

    def measure(value: object) -> int:
        measured.append(value)
        return bytes_held(value)

    monkeypatch.setattr("sparsering.layouts.cache.bytes_held", measure)
    for left in range(40):
        sr.SlidingWindow(left).layout(32, block_size=16)
    assert len(measured) == 40 + 39


def test_small_layouts_count_the_objects_that_hold_them() -> None:
    """A layout of 32 tokens has a few hundred bytes of tables, but some fifteen tensors."""
    layout = sr.SlidingWindow(9).layout(32, block_size=16)
    tensors = [x for p in layout.passes for x in p.tensors()]
    assert bytes_of(layout) > layout.nbytes + 500 * len(tensors)


def test_cheap_layouts_that_no_later_step_uses_are_dropped(monkeypatch) -> None:
    """Documents of each training step: their tables would lie between the steps' tensors."""
    monkeypatch.setattr("sparsering.layouts.cache._CHEAP_SECONDS", 60.0)
    used = sr.Causal().layout(64)
    for left in range(400):
        sr.SlidingWindow(left).layout(64)
        assert sr.Causal().layout(64) is used
    info = sr.layout_cache.info()
    assert 82 <= info.entries <= 130 and (info.misses, info.hits) == (401, 400)
    monkeypatch.setattr("sparsering.layouts.cache._CHEAP_SECONDS", 0.0)
    for left in range(400, 600):  # these took long to build, and stay
        sr.SlidingWindow(left).layout(64)
    assert 200 <= sr.layout_cache.info().entries <= 203
    sr.layout_cache.clear()
    assert not sr.layout_cache._cheap
