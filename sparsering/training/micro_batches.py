"""Micro-batches: a step's windows in parts that fit in memory, halved where memory runs out."""

from collections.abc import Callable

import torch

from ..ground.arguments import index_of, shortened
from ..ground.out_of_memory import ran_out_of_memory, return_memory
from ..planning.comparison import peak_of
from ..planning.fit import gpu_memory, memory_here, usable


def largest_part(windows: int, most: float, of_ranks: int = 1) -> int:
    """Returns the size of the largest equal parts of `windows`, at most `most` on each rank."""
    own = windows // of_ranks
    return of_ranks * max(n for n in range(1, own + 1) if own % n == 0 and n <= max(1, most))


def checked_part(size: object, windows: int, of_ranks: int, source: str) -> int:
    """Returns a micro-batch; ValueError if it is no equal part of `windows`, the same on ranks."""
    part = index_of(size)
    if part is None or part < 1 or windows % part or part % of_ranks:
        raise ValueError(
            f"{source} must divide the batch size, {windows}, and be a multiple of the {of_ranks} "
            f"groups of processes, got {shortened(repr(size))}; pass --micro-batch auto"
        )
    return part


def windows_that_fit(one_window: Callable[[], object], device: torch.device) -> float:
    """Returns how many windows fit in the memory that is free, by the peak of a call with one."""
    try:
        peak = peak_of(one_window, device)
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        return 1  # the step itself then says that not even one fits
    free = (gpu_memory if device.type == "cuda" else memory_here)(free=True)
    return usable(free) / max(1, peak)


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Allocates AdamW's state: its first step would do so when some weights are updated already."""
    for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
        if not (state := optimizer.state[weight]):
            moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            state |= {"step": torch.zeros((), device=weight.device), **moments}


def forget_failure(optimizer: torch.optim.Optimizer) -> None:
    """Drops what a step that ran out of memory has left: gradients, and memory that torch keeps."""
    optimizer.zero_grad()
    return_memory()
