"""Workspace that the CPU kernel announces, compared with the memory that a call allocates."""

import ctypes
from itertools import accumulate

import pytest
import torch

import sparsering as sr
from sparsering.kernels import cpu
from sparsering.kernels.problem import Problem
from sparsering.planning import memory as module
from sparsering.planning.counts import counted
from sparsering.planning.memory import CallSizes, cpu_memory, gather_memory

pytestmark = pytest.mark.skipif(bool(cpu.reasons()), reason="no compiled kernel")

PATTERNS = [
    sr.Causal(),
    sr.LongNet((128, 512), (1, 4)) & sr.Causal(),
    sr.GlobalTokens(5) | sr.SlidingWindow(20),
    sr.BlockWindow(1, 16),  # walked by key tile
]


def most_allocated(call) -> int:
    """Most bytes of torch's CPU allocator in use at once, beyond those before a call."""
    call()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiled:
        call()
    changes: list[tuple[int, int]] = []

    def read(events) -> None:
        for event in events:
            if event.name == "[memory]":
                changes.append((event.start_time_ns, event.extra_fields.alloc_size))
            read(event.children)

    read(profiled.profiler.kineto_results.experimental_event_tree())
    return max(accumulate(size for _, size in sorted(changes)))


@pytest.fixture
def every_buffer_is_a_tensor(monkeypatch):
    """Makes the profiler see buffers of a few bytes too."""
    least = ctypes.c_int64.in_dll(ctypes.CDLL(str(cpu.build())), "sparsering_least_tensor")
    monkeypatch.setattr(least, "value", 0)


@pytest.fixture
def few_pieces(monkeypatch):
    """Lets the kernel keep the sums of few pieces of tiles at a time."""
    most = ctypes.c_int64.in_dll(ctypes.CDLL(str(cpu.build())), "sparsering_bytes_of_pieces")
    monkeypatch.setattr(most, "value", 5 << 15)


@pytest.mark.usefixtures("every_buffer_is_a_tensor")
@pytest.mark.parametrize("tokens", [1024, 1000])
@pytest.mark.parametrize("head_dim", [32, 33])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_kernel_announces_the_buffers_that_it_allocates(pattern, head_dim, tokens):
    layout = pattern.layout(tokens, num_heads=4, num_kv_heads=2, block_size=64)
    query, key, value = (torch.randn(1, heads, tokens, head_dim) for heads in (4, 2, 2))
    problem = Problem(layout, query, key, value, head_dim**-0.5)
    out, lse = cpu.forward(problem)
    grads = torch.randn_like(out), torch.zeros_like(lse)
    work, call = counted(layout, cut=True), CallSizes(1, head_dim, torch.float32)
    results = 4 * (out.numel() + lse.numel())
    told = module._cpu_workspace(work, call, False)
    assert most_allocated(lambda: cpu.forward(problem)) - results == pytest.approx(told, rel=0.05)
    gradients = 4 * (query.numel() + key.numel() + value.numel() + lse.numel())
    told = module._cpu_workspace(work, call, True)
    found = most_allocated(lambda: cpu.backward(problem, out, lse, *grads)) - gradients
    assert found == pytest.approx(told, rel=0.05)


@pytest.mark.usefixtures("every_buffer_is_a_tensor", "few_pieces")
def test_few_pieces_at_a_time_are_announced():
    test_the_kernel_announces_the_buffers_that_it_allocates(PATTERNS[2], 32, 4000)


def test_without_a_compiler_the_bytes_are_those_of_gather(monkeypatch):
    monkeypatch.setattr(module, "build_failure", lambda: ("no C++ compiler found",))
    work = counted(sr.Causal().layout(512, num_heads=2))
    for backward in (False, True):
        call = CallSizes(1, 64, torch.float32)
        assert cpu_memory(work, call, backward) == gather_memory(work, call, backward)
