"""Values that are computed once: on one thread, without a lock; and the bytes that they hold."""

import threading

import pytest
import torch
from helpers.forked import run

import sparsering as sr
from sparsering.ground.once import bytes_held, once

# OpenMP starts its second thread in the first parallel region of a process.
_COUNT = """
import os, torch, sparsering as sr
torch.set_num_threads(2)
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
{work}
print(threads() - before)
"""
_LAYOUTS = """
for length in (4096, 100_000):
    for pattern in (
        sr.Causal(), sr.SlidingWindow(200) | sr.GlobalTokens(4), sr.LongNet((512, 2048), (1, 4)),
        sr.Documents((length // 2,) * 2) & sr.Causal(),
        sr.SlidingWindow(6) | sr.SlidingWindow(40, 40, 4),
        sr.Packed((length // 4,) * 4, sr.SlidingWindow(64)), sr.RandomBlocks(0.1, 64),
        sr.Tree((length // 2, length // 4, length // 4), (-1, 0, 0)), sr.KeyPadding((length - 9,)),
    ):
        layout = pattern.layout(length, num_heads=2)
        _ = [(p.transposed_bitmaps, p.transpose) for p in layout.passes]
        _ = layout.first_entry, layout.density
    sr.SlidingWindow(200).live_keys(length)
"""
_PLANS = """
from sparsering.distributed import RingPlan
for pattern in (
    sr.Causal(), sr.SlidingWindow(900) | sr.GlobalTokens(8), sr.LongNet((2048, 8192), (1, 4)),
):
    plan = RingPlan.build(pattern, 40_000, 8, num_heads=2, sharding="auto")
    _ = plan.tokens_received(3), plan.load(3), plan.rounds
sr.estimate(sr.SlidingWindow(300), tokens=50_000, num_heads=2, head_dim=64, machine="H100", ranks=4)
"""


@pytest.mark.parametrize(
    ("work", "regions"),
    [
        ("torch.arange(9).repeat_interleave(2 * torch.ones(9).long())", True),
        (_LAYOUTS, False),
        (_PLANS, False),
    ],
    ids=["a parallel region is counted", "layouts", "plans"],
)
def test_tables_open_no_parallel_region(work: str, regions: bool) -> None:
    done = run(_COUNT.format(work=work))
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 0) == regions


def test_one_thread_holds_in_its_block_and_in_its_thread_alone() -> None:
    code = """
import threading, torch
from sparsering.ground.once import one_thread
torch.set_num_threads(3)
seen = []
with one_thread():
    with one_thread():
        seen.append(torch.get_num_threads())
    seen.append(torch.get_num_threads())
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
try:
    with one_thread():
        raise ValueError
except ValueError:
    seen.append(torch.get_num_threads())
print(seen)
"""
    assert run(code).stdout.split() == ["[1,", "1,", "3,", "3]"]


def test_a_value_is_computed_once_and_threads_share_the_first_one() -> None:
    started = threading.Barrier(2)

    class Slow:
        @once
        def value(self) -> object:
            """Is documented."""
            started.wait(10)
            return object()

    slow, seen = Slow(), []
    threads = [threading.Thread(target=lambda: seen.append(slow.value)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen[0] is seen[1] is slow.value and Slow.value.__doc__ == "Is documented."


def test_children_that_fork_while_another_thread_builds_layouts_do_not_hang() -> None:
    code = """
import os, signal, threading, torch, sparsering as sr
torch.set_num_threads(1)
x = torch.randn(1, 1, 512, 8)
def other(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        pattern = sr.Dense(torch.rand(512, 512, generator=generator) < 0.5)
        sr.attention(x, x, x, pattern, block_size=16, backend="gather")
        sr.Tree((200, 156, 156), (-1, 0, 0)).layout(512)
for i in range(4): threading.Thread(target=other, args=(i,), daemon=True).start()
hung = 0
for _ in range(20):
    threading.Event().wait(0.05)
    if not (pid := os.fork()):
        signal.alarm(20)
        y = x[:, :, :64]
        sr.attention(y, y, y, sr.Tree((40, 24), (-1, 0)), backend="gather")
        os._exit(0)
    hung += os.waitpid(pid, 0)[1] != 0
print(hung, flush=True)
os._exit(0)
"""
    assert run(code).stdout == "0\n"


def test_bytes_held_count_shared_data_once() -> None:
    x = torch.zeros(1000)
    alone = bytes_held(x)
    assert 4000 + 200 < alone < 4000 + 1500
    assert bytes_held((x, x[:10])) < 2 * alone - 2000
    layout = sr.Causal().layout(1024)
    assert bytes_held(layout) > layout.nbytes
    loop: list[object] = [x]
    loop.append(loop)
    assert alone < bytes_held(loop) < alone + 200
