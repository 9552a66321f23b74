"""Bytes of tensors that a call allocates, as torch's profiler records them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Bytes:
    """Bytes that a call allocates: at their peak, and those that remain at its end."""

    peak: int
    kept: int


def measure(call: Callable[[], Any]) -> Bytes:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = call()
    events = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    assert changes and result is not None
    return Bytes(peak, now)
