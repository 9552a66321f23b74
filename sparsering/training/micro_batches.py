"""Micro-batches: equal parts of a step's windows, computed one after another to fit in memory."""

from collections.abc import Callable

import torch

from ..ground.arguments import index_of, shortened
from ..ground.out_of_memory import ran_out_of_memory, return_memory
from ..planning.comparison import peak_of
from ..planning.fit import gpu_memory, memory_here, usable


def largest_part(windows: int, most: float, of_ranks: int = 1) -> int:
    """Returns the largest micro-batch: an equal part of `windows`, at most `most` on each rank.

    `of_ranks` is the number of groups of ranks that share the windows equally.
    """
    own = windows // of_ranks
    return of_ranks * max(n for n in range(1, own + 1) if own % n == 0 and n <= max(1, most))


def checked_part(size: object, windows: int, of_ranks: int, source: str) -> int:
    """Returns a micro-batch as int.

    Raises: ValueError unless it divides `windows` and is a multiple of `of_ranks`.
    """
    part = index_of(size)
    if part is None or part < 1 or windows % part or part % of_ranks:
        raise ValueError(
            f"{source} must divide the batch size, {windows}, and be a multiple of the {of_ranks} "
            f"groups of processes, got {shortened(repr(size))}; pass --micro-batch auto"
        )
    return part


def windows_that_fit(
    one_window: Callable[[], object], device: torch.device, rank: int | None = None
) -> float:
    """Estimates how many windows fit in free memory from what a call with one window needs.

    `rank` is that of this process if others take part in the call. If memory runs out they wait for
    it, and only its end can tell them; so it raises a MemoryError then.
    """
    try:
        peak = peak_of(one_window, device)
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        if rank is not None:
            raise MemoryError(
                f"memory ran out on rank {rank} with a single window; pass --checkpoint-layers, a "
                "smaller --context, or a larger --sequence-parallel"
            ) from error
        return 1  # not even one fits: the step itself will raise an error that says so
    free = (gpu_memory if device.type == "cuda" else memory_here)(free=True)
    return usable(free) / max(1, peak)


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Allocates AdamW's two states before its first step, with zeros.

    If memory runs out here, no weight is changed yet; AdamW would already have updated some.
    """
    for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
        if not (state := optimizer.state[weight]):
            moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            state |= {"step": torch.zeros((), device=weight.device), **moments}


def forget_failure(optimizer: torch.optim.Optimizer) -> None:
    """Frees memory after a step ran out of it: the gradients, and what torch's cache holds."""
    optimizer.zero_grad()
    return_memory()
