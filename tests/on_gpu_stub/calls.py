"""Calls on the stub's current device, and bounds of what a steady call asks of it."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_stub import Counts, counted
from torch import Tensor

import sparsering as sr

WINDOW = sr.Causal() & sr.SlidingWindow(200)
LONGNET = sr.LongNet((256, 512), (1, 2)) & sr.Causal()


def rows(heads: int = 2, tokens: int = 512, width: int = 64, dtype=torch.bfloat16) -> Tensor:
    return torch.randn(1, heads, tokens, width, dtype=dtype, device="cuda")


def learnt(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


def functions_of(call: Callable[[], object]) -> int:
    """Counts the Python functions of the package that a call enters, after three calls like it."""
    package, entered = str(Path(sr.__file__).parent), []
    for _ in range(3):
        call()
    sys.setprofile(lambda frame, event, _: entered.append((event, frame.f_code.co_filename)))
    call()
    sys.setprofile(None)
    return sum(event == "call" and name.startswith(package) for event, name in entered)


def steady(
    call: Callable[[], object], *, triton: int, torch: int, warm: int = 2, transfers: int = 0
) -> Counts:
    """Counts a call after `warm` calls like it; at most so many launches, and the host never waits.

    Args:
        triton: most launches of Triton kernels.
        torch: most torch operators that launch.
        transfers: most copies between host and device.
    """
    for _ in range(warm):
        call()
    with counted() as counts:
        call()
    assert 1 <= counts.triton <= triton, counts
    assert counts.torch <= torch, counts
    assert not counts.compiles and not counts.syncs, counts
    assert len(counts.transfers) <= transfers, counts
    return counts
