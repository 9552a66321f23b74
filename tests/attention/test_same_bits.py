"""Repeated calls give the same bits, and any workspace gives the same result."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from each_backend import assert_is_the_reference, attend, reference
from helpers.thinned import slow_except, thinned
from oracles.attention_oracle import (
    PATTERNS,
    Case,
    assert_same_attention,
    gradients,
    inputs,
    workspace,
)

import sparsering as sr

SIZES = [  # length, block size, workspace, repetitions
    *((130, 32, 20_000, 1), (200, 32, 20_000, 2)),
    *((600, 128, 64 << 20, 2), (900, 32, 64 << 20, 20)),
]


@pytest.mark.usefixtures("each_cpu_backend")
@pytest.mark.parametrize(
    ("size", "num_threads", "dtype"),
    slow_except(
        [(SIZES[0], 1, torch.float32), (SIZES[0], 2, torch.bfloat16)],
        SIZES,
        [1, 2],
        [torch.float32, torch.bfloat16],
    ),
)
def test_same_bits_at_every_repetition(size, num_threads, dtype, threads):
    length, block_size, limit, repetitions = size
    torch.set_num_threads(num_threads)
    case = Case(1, 4, 2, length, length, 32, 32)
    pattern = sr.LongNet((64, 256, 512), (1, 2, 4)) + (sr.Causal() & sr.SlidingWindow(100))
    args = inputs(case, dtype)
    with workspace(limit):
        first = attend(*args, pattern, block_size=block_size)
        grads = gradients(first, args)
        for _ in range(repetitions):
            sr.layout_cache.clear()
            again = attend(*args, pattern, block_size=block_size)
            for a, b in zip((*again, *gradients(again, args)), (*first, *grads), strict=True):
                assert torch.equal(a, b)


def test_bits_do_not_depend_on_what_memory_held_before(each_backend):
    length = 24 if each_backend == "triton" else 130
    args = inputs(Case(1, 2, 1, length, length), torch.float32)
    pattern = sr.LongNet((16, 64), (1, 2)) & sr.Causal()
    first = attend(*args, pattern)
    grads = gradients(first, args)
    for fill in (math.nan, math.inf, 1e30):
        blocks = [torch.full((size,), fill) for size in (1 << 8, 1 << 12, 1 << 16) * 20]
        del blocks
        again = attend(*args, pattern)
        for a, b in zip((*again, *gradients(again, args)), (*first, *grads), strict=True):
            assert torch.equal(a, b)


@pytest.mark.usefixtures("each_cpu_backend")
def test_threads_of_one_process_do_not_disturb_each_other():
    args = inputs(Case(1, 2, 2, 200, 200), torch.float32, requires_grad=False)
    patterns = [PATTERNS[name](Case(1, 2, 2)) for name in ("causal", "longnet", "dilated window")]
    expected = [attend(*args, pattern)[0] for pattern in patterns]
    sr.layout_cache.clear()

    def work(worker: int) -> list[bool]:
        same = []
        for turn in range(12):
            number = (worker + turn) % 3
            same.append(torch.equal(attend(*args, patterns[number])[0], expected[number]))
            if turn % 5 == worker:
                sr.layout_cache.clear()
        return same

    with ThreadPoolExecutor(4) as pool:
        assert all(all(same) for same in pool.map(work, range(4)))


@pytest.mark.parametrize(
    ("name", "limit"),
    thinned(
        4,
        ["full", "longnet", "mixture under masks", "blocks of each batch entry"],
        [1, 1000, 10_000, 100_000, 1 << 30],
    ),
)
def test_any_workspace_gives_the_same_result_within_rounding(name, limit):
    case = Case(2, 4, 2, 140, 140, 8, 6)
    with workspace(limit):
        assert_is_the_reference(PATTERNS[name](case), case)


@pytest.mark.parametrize(
    ("each_cpu_backend", "dtype", "limit"),
    [
        ("gather", torch.float64, 1),
        ("gather", torch.float32, 64 << 20),
        ("cpu", torch.float32, 64 << 20),
    ],
    indirect=["each_cpu_backend"],
)
@pytest.mark.usefixtures("each_cpu_backend")
def test_a_list_of_keys_longer_than_one_piece_is_merged(dtype, limit):
    case = Case(1, 2, 1, 20, 5000, 8, 8, 128)
    args = inputs(case, dtype)
    pattern = sr.Causal() + sr.Dilated(5000, 2)
    with workspace(limit):
        got = attend(*args, pattern, block_size=128)
        bounds = (1e-12, 1e-10) if dtype == torch.float64 else (2e-6, 1e-5)
        assert_same_attention(got, reference(*args, pattern), args, None, *bounds)


def test_set_workspace_returns_the_old_limit_and_refuses_none():
    old = sr.set_workspace(12345)
    assert sr.set_workspace(old) == 12345
    for limit in (0, -1):
        with pytest.raises(ValueError, match=rf"limit must be at least 1, got {limit}"):
            sr.set_workspace(limit)
    assert sr.set_workspace(old) == old
