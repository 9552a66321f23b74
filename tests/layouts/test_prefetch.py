"""Layouts built ahead: what a call then asks for is there, built once, by a thread that ends."""

import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest
import torch
from helpers.forked import run
from oracles.every_pattern import INDICES, NAMES, one_of_each

import sparsering as sr
from sparsering.layouts import cache as cache_module
from sparsering.layouts.cache import LayoutCache, layout_cache

_SECONDS = 60.0  # a bound of waits that should end at once


@pytest.fixture(autouse=True)
def emptied():
    layout_cache.clear()
    yield
    layout_cache.clear()


def called(pattern, q_len, kv_len, heads, kv_heads, **options):
    """How often a call, forward and backward, found what it asked for, and how often not."""
    batch = pattern.num_batches() or 1
    shapes = (batch, heads, q_len, 16), (batch, kv_heads, kv_len, 16), (batch, kv_heads, kv_len, 16)
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    before = layout_cache.info()
    out = sr.attention(*leaves, pattern, **options)
    out.sum().backward()
    after = layout_cache.info()
    return after.hits - before.hits, after.misses - before.misses


@pytest.mark.parametrize("backend", (None, "gather"))  # without a name, cpu
@pytest.mark.parametrize("index", INDICES, ids=NAMES)
def test_a_call_finds_what_was_built_ahead(index, backend):
    pattern = one_of_each()[index]
    tokens = 2 if isinstance(pattern, sr.Dense) else 7
    layout = layout_cache.prefetch(pattern, tokens, num_heads=4, num_kv_heads=2).result(_SECONDS)
    assert layout_cache.info().misses == 1
    hits, misses = called(one_of_each()[index], tokens, tokens, 4, 2, backend=backend)
    assert misses == 0
    assert hits >= 1
    assert all("transpose" in vars(p) for p in layout.passes)


@pytest.mark.parametrize(
    ("pattern", "given", "asked"),
    [
        (sr.Causal(), (40, 90), {}),
        (sr.Causal(), (40, 90), {"q_start": 3}),
        (sr.SlidingWindow(40), (700, 700), {}),  # whose blocks are smaller than others'
        (sr.LongNet((32, 64), (1, 2)) & sr.Causal(), (90, 90), {"block_size": 32}),
        (sr.RandomBlocks(0.3, 16, seed=5), (64, 64), {"block_size": 16}),
    ],
)
def test_the_arguments_of_a_call_name_its_layout(pattern, given, asked):
    layout_cache.prefetch(pattern, *given, num_heads=2, **asked).result(_SECONDS)
    hits, misses = called(pattern, *given, 2, 2, **asked)
    assert misses == 0
    assert hits >= 1


def test_selected_blocks_of_the_host_are_built_ahead():
    indices = torch.tensor([[0, -1], [1, 0], [2, 0], [3, 1]])
    pattern = sr.SelectedBlocks(indices, 16, 16) & sr.Causal()
    layout_cache.prefetch(pattern, 64, num_heads=2).result(_SECONDS)
    assert called(pattern, 64, 64, 2, 2)[1] == 0


def test_another_number_of_heads_is_another_layout():
    layout_cache.prefetch(sr.Causal(), 64, num_heads=2).result(_SECONDS)
    assert called(sr.Causal(), 64, 64, 4, 4)[1] == 1


def test_without_a_backward_no_transposes_are_built():
    layout = layout_cache.prefetch(sr.Causal(), 64, num_heads=2, backward=False).result(_SECONDS)
    assert not any("transpose" in vars(p) for p in layout.passes)


def test_what_is_built_ahead_is_what_the_call_would_build():
    pattern = sr.RandomBlocks(0.3, 16, seed=5) & sr.Causal()
    layout = layout_cache.prefetch(pattern, 256, num_heads=3).result(_SECONDS)
    layout_cache.clear()
    expected = pattern.layout(256, num_heads=3)
    assert layout is not expected
    assert torch.equal(layout.to_dense(), expected.to_dense())
    for p, q in zip(layout.passes, expected.passes, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(p.transpose, q.transpose, strict=True))


class Held:
    """Builds that wait until they are let go, counted."""

    def __init__(self, monkeypatch):
        self.begun, self.go, self.count = threading.Event(), threading.Event(), 0
        build = cache_module.build_layout

        def held(*arguments):
            self.count += 1
            self.begun.set()
            assert self.go.wait(_SECONDS)
            return build(*arguments)

        monkeypatch.setattr(cache_module, "build_layout", held)


def test_a_call_waits_for_what_is_under_way(monkeypatch):
    held = Held(monkeypatch)
    future = layout_cache.prefetch(sr.Causal(), 64, num_heads=2)
    assert held.begun.wait(_SECONDS)
    found = []
    call = threading.Thread(target=lambda: found.append(sr.Causal().layout(64, num_heads=2)))
    call.start()
    call.join(0.05)
    assert call.is_alive()
    held.go.set()
    call.join(_SECONDS)
    assert found == [future.result(_SECONDS)]
    assert held.count == 1


def test_no_more_wait_than_are_let(monkeypatch):
    cache = LayoutCache()
    held = Held(monkeypatch)
    first = cache.prefetch(sr.Causal(), 8, num_heads=1)
    assert held.begun.wait(_SECONDS)
    most = cache_module._MOST_WAITING
    futures = [cache.prefetch(sr.Causal(), 16 + i, num_heads=1) for i in range(most + 2)]
    assert [future.cancelled() for future in futures] == most * [False] + 2 * [True]
    with pytest.raises(CancelledError):
        futures[-1].result(_SECONDS)
    assert futures[3].cancel()  # a user may, too
    held.go.set()
    assert first.result(_SECONDS).frame.q_len == 8
    assert futures[most - 1].result(_SECONDS).frame.q_len == 16 + most - 1
    assert cache.info().misses == most  # the first and those that waited, but the one
    assert not cache.prefetch(sr.Causal(), 8, num_heads=1).cancelled()  # there is room again


def test_several_threads_may_ask():
    cache = LayoutCache()
    futures = []

    def ask(first):
        for i in range(8):
            futures.append(cache.prefetch(sr.Causal(), first + i, num_heads=1))

    threads = [threading.Thread(target=ask, args=(first,)) for first in (10, 14, 18)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for future in futures:
        future.result(_SECONDS)
    assert cache.info().misses == 16


@pytest.mark.parametrize(
    ("pattern", "arguments", "told"),
    [
        (sr.Documents((3, 4)), {"q_len": 9}, "Documents"),
        (sr.Causal(), {"q_len": 9, "num_heads": 3, "num_kv_heads": 2}, "multiple of num_kv_heads"),
        (sr.Causal(), {"q_len": 9, "block_size": 24}, "block_size must be"),
        (sr.Causal(), {"q_len": -1}, "q_len must be at least 0"),
        (sr.KeyMask(torch.ones(9, dtype=torch.bool)), {"q_len": 8}, "KeyMask"),
        (sr.Causal(), {"q_len": 1, "kv_len": 90}, "one query"),
    ],
)
def test_what_does_not_fit_is_said_at_once(pattern, arguments, told):
    with pytest.raises(ValueError, match=told):
        layout_cache.prefetch(pattern, **{"num_heads": 1, **arguments})


def test_what_is_no_pattern_is_said_at_once():
    with pytest.raises(TypeError, match="got str"):
        layout_cache.prefetch("Causal()", 8, num_heads=1)


def test_a_build_that_fails_tells_its_future_and_the_call(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("no memory")

    monkeypatch.setattr(cache_module, "build_layout", fail)
    future = layout_cache.prefetch(sr.Causal(), 8, num_heads=1)
    with pytest.raises(RuntimeError, match="no memory"):
        future.result(_SECONDS)
    with pytest.raises(RuntimeError, match="no memory"):
        sr.Causal().layout(8)
    monkeypatch.undo()
    again = layout_cache.prefetch(sr.Causal(), 8, num_heads=1)  # the thread lives on
    assert again.result(_SECONDS).frame.q_len == 8


def test_at_the_end_nothing_further_is_begun(monkeypatch):
    cache, held = LayoutCache(), Held(monkeypatch)
    futures = [cache.prefetch(sr.Causal(), 8 + i, num_heads=1) for i in range(4)]
    assert held.begun.wait(_SECONDS)
    end = threading.Thread(target=cache._ahead._end)
    end.start()
    with pytest.raises(CancelledError):
        futures[1].result(_SECONDS)
    assert end.is_alive()  # it waits for what is under way
    held.go.set()
    end.join(_SECONDS)
    assert [future.cancelled() for future in futures] == [False, True, True, True]
    assert cache.prefetch(sr.Causal(), 8, num_heads=1).cancelled()
    assert held.count == 1


_ENDING = """
import threading, time
import torch
import sparsering as sr
from sparsering.layouts import cache as module
{import_ring}

module._SECONDS_AT_EXIT = 0.5
begun, caught = threading.Event(), []

def endless(*arguments, **options):
    begun.set()
    while True:
        try:
            torch.ones(1000).sort()
        except BaseException:
            caught.append(1)
            if len(caught) > 1:  # a build may catch what breaks it off, once
                raise

module.build_layout = endless
for tokens in range(16, 48):
    {ask}
assert begun.wait(60)
print("end", flush=True)
"""


@pytest.mark.slow  # processes that import torch
@pytest.mark.parametrize(
    ("import_ring", "ask"),
    [
        ("", "sr.layout_cache.prefetch(sr.Causal(), tokens, num_heads=1)"),
        (
            "from sparsering.distributed import prefetch",
            "prefetch(sr.Causal(), tokens, num_heads=1)",
        ),
    ],
)
def test_a_process_ends_though_a_build_is_under_way(import_ring, ask):
    code = _ENDING.format(import_ring=import_ring, ask=ask)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_where_no_thread_can_be_started_nothing_waits(monkeypatch):
    """As at the interpreter's end, or at a limit of threads; the call builds what it needs."""
    cache = LayoutCache()

    def fail(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert cache.prefetch(sr.Causal(), 8, num_heads=1).cancelled()
    monkeypatch.undo()
    assert cache.prefetch(sr.Causal(), 8, num_heads=1).result(_SECONDS).frame.q_len == 8


_FORKED = """
import os, threading, warnings
import sparsering as sr
from sparsering.layouts import cache as module

warnings.simplefilter("ignore")  # that forking with threads is what this is about
begun, go, build = threading.Event(), threading.Event(), module.build_layout

def held(*arguments):
    begun.set()
    assert go.wait(60)
    return build(*arguments)

module.build_layout = held
future = sr.layout_cache.prefetch(sr.Causal(), 64, num_heads=1)
assert begun.wait(60)
if (child := os.fork()) == 0:
    go.set()
    sr.Causal().layout(64)  # which the parent's thread builds, not this process's
    sr.layout_cache.prefetch(sr.Causal(), 65, num_heads=1).result(60)
    os._exit(0)
go.set()
future.result(60)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_has_a_thread_and_locks_of_its_own():
    done = run(_FORKED)
    assert done.stdout.strip() == "0", done.stderr
