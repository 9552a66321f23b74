"""Tests the memory of a rank while it computes: it does not grow with the number of ranks."""

import pytest
import torch
from helpers.ring_workers import Workers, groups
from helpers.tensor_bytes import measure
from torch import Tensor

import sparsering as sr
from benchmarks.measure import memory, restart_peak
from sparsering.distributed import RingPlan, ring_attention

SHARD, HEADS, WIDTH = 4096, 2, 64
PATTERNS = {
    "causal": (sr.Causal(), "zigzag"),
    "window": (sr.SlidingWindow(1000) & sr.Causal(), "contiguous"),
    "longnet": (sr.LongNet((1024, 1 << 20), (1, 16)), "contiguous"),
    "global rows": (sr.SlidingWindow(100) | sr.GlobalTokens(400), "contiguous"),
}


def peak(rank: int, world: int, name: str) -> int:
    """Resident bytes of a forward and backward pass beyond its inputs, once layouts are made."""
    pattern, sharding = PATTERNS[name]
    own = [torch.randn(1, HEADS, SHARD, WIDTH, requires_grad=True) for _ in range(3)]
    options = {"group": groups[world], "sharding": sharding}
    for _ in range(2):
        before = restart_peak()
        ring_attention(*own, pattern, **options).sum().backward()
        extra = memory("VmHWM") - before
    return extra


@pytest.mark.slow
def test_memory_of_a_rank_is_flat_in_the_number_of_ranks(monkeypatch):
    for variable in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.setenv(variable, "65536")  # what is freed goes back to the system
    workers = Workers(8, forked=False)
    try:
        for name in PATTERNS:
            peaks = {world: max(workers.run(peak, world, name, world=world)) for world in (4, 8)}
            further = 4 * 2 * SHARD * HEADS * WIDTH * 4  # keys and values of four more ranks
            assert peaks[8] < 1.2 * peaks[4] + 4e6, (name, peaks)
            assert peaks[8] - peaks[4] < further / 2, (name, peaks)
    finally:
        workers.close()


SOME, LISTED = 256, 8  # tokens of a rank; keys of each query


def listing(rank: int, world: int, far: int) -> tuple[int, int]:
    """(peak bytes of tensors, received bytes) of a layer that lists `far` keys of rank 0."""
    torch.manual_seed(rank)
    own = [torch.randn(1, HEADS, SOME, WIDTH, requires_grad=True) for _ in range(3)]
    place = torch.arange(SOME)[:, None]
    numbers = rank * SOME + torch.randint(0, SOME, (SOME, LISTED)).clamp(max=place)
    numbers[:, 0] = place[:, 0] % far
    table = sr.SelectedBlocks(numbers[None], 1, 1, first_row=rank * SOME)
    options = {"group": groups[world], "backend": "cpu"}

    def call() -> list[Tensor]:
        out = ring_attention(*own, table & sr.Causal(), **options)
        return [out, *torch.autograd.grad(out.sum(), own)]

    call()
    peak = measure(call).peak
    return peak, ring_attention.last_traffic().received_bytes


def test_a_rank_that_lists_keys_has_tensors_of_its_own_and_of_listed_tokens_alone():
    """The row is 2, 4 and 8 times as long as a rank's part of it."""
    workers = Workers(8)
    row = 2 * HEADS * WIDTH * 4  # bytes of a key and a value
    try:
        peaks, owner = {}, {}
        for world in (2, 4, 8):
            for far in (8, 128):
                found = workers.run(listing, world, far, world=world)
                assert [x[1] for x in found] == [0] + [far * row] * (world - 1)
                owner[world, far], *others = (x[0] for x in found)
                peaks[world, far] = max(others)
        for far in (8, 128):  # of the 6 * SOME further keys none may be here
            assert peaks[8, far] - peaks[2, far] < row * SOME / 16, peaks
        for world in (2, 4, 8):
            assert peaks[world, 128] - peaks[world, 8] < 4 * (128 - 8) * row, peaks
            assert peaks[world, 8] < 4 * SOME * row, peaks
            # The owner gets the gradients of all ranks that list its keys in one round.
            assert owner[world, 128] - owner[2, 128] <= (world - 2) * 128 * row, owner
    finally:
        workers.close()


def plan_of(name: str, world: int) -> tuple[int, int]:
    """(bytes of a plan, peak resident bytes of building it) for 2^20 tokens."""
    RingPlan.build(sr.Causal() & sr.SlidingWindow(10), 1 << 20, world)  # imports and warms up
    before = restart_peak()
    plan = RingPlan.build(PLANS[name], 1 << 20, world)
    tensors = (x for runs in plan.needs for x in (runs.number, runs.start, runs.last))
    return sum(x.nbytes for x in tensors), memory("VmHWM") - before


def plan_in_worker(rank: int, name: str) -> tuple[int, int]:
    return plan_of(name, 64)


PLANS = {
    "full": sr.Full(),
    "causal": sr.Causal(),
    "window": sr.SlidingWindow(4096) & sr.Causal(),
    "longnet": sr.LongNet((2048, 32768, 1 << 20), (1, 4, 16)) & sr.Causal(),
    "documents": sr.Documents((10_000,) * 104 + ((1 << 20) - 1_040_000,)) & sr.Causal(),
    "window and global": sr.SlidingWindow(512, 512) | sr.GlobalTokens(64),
    "dilated window": sr.SlidingWindow(4096, 0, 8) | sr.GlobalTokens(16, rows=False),
    "block window": sr.BlockWindow(8, 128),
    "block dilated": sr.BlockDilated((1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048), 128),
    "hierarchical": sr.Hierarchical(((128, 1024), (1024, 16384), (65536, None)), 128),
    "random blocks": sr.RandomBlocks(0.005, 128),
}


def test_building_a_plan_for_a_million_tokens_over_64_ranks_takes_little_memory():
    worker = Workers(1)
    try:
        for name in PLANS:
            ((nbytes, extra),) = worker.run(plan_in_worker, name)
            assert nbytes < 64e6 and extra < 64e6, (name, nbytes, extra)
    finally:
        worker.close()
