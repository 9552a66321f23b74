"""Times several calls in turns, so that other load on the machine slows all of them alike."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

Name = TypeVar("Name")
Run = TypeVar("Run", bound=Callable[[], object])


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Runs a call and returns the seconds it took; on a GPU, by events in the current stream."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()  # so that the next call starts on an idle GPU
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def in_turns(
    runs: Mapping[Name, Run],
    clock: Callable[[Run], float],
    *,
    most: int,
    least: int = 1,
    seconds: float = float("inf"),
    after: Callable[[Name, int], None] | None = None,
) -> dict[Name, list[float]]:
    """Runs and times several calls alternately: each once per round, so that other load hits all.

    Args:
        clock: runs a call and returns its time, in any unit.
        most, least: numbers of rounds. Between the two, a round begins if it is expected to end
            within `seconds` from the first round's begin.
        after: called after each run with its name and the number of rounds expected by then.
    """
    times: dict[Name, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    expected, number = most, 0
    while number < expected:
        for name, run in runs.items():
            times[name].append(clock(run))
            if after is not None:
                after(name, expected)
        number += 1
        took = max(time.perf_counter() - begin, 1e-9)
        expected = min(most, max(least, number, int(min(seconds / took * number, most))))
    return times
