"""Measures block sizes of the compiled kernel on this processor: `sparsering tune` without a GPU.

A size counts only if its results agree with those of the first size. The fastest is stored on disk,
and later processes use it for calls that name no block size. A call never measures anything, so its
results do not depend on the timing of a run.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ...layouts.cache import layout_cache
from ...patterns.algebra import Frame, Pattern
from .. import tuned
from ..problem import Problem
from . import call

_SECONDS, _LEAST_ROUNDS, _MOST_ROUNDS = 3.0, 3, 40


def tune(
    pattern: Pattern,
    *,
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_sizes: Sequence[int] = (32, 64, 128),
    say: Callable[[str], None] = print,
) -> Path:
    """Measures block sizes and stores the fastest; returns the file.

    Args:
        pattern: pattern of a training step on `tokens` tokens, one batch entry.
        block_sizes: candidates for the pattern's default block size.
        say: called with a line of text for each measurement.

    Raises: NotImplementedError if the kernel cannot run; ValueError if the pattern does not fit.
    """
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, tokens, head_dim, dtype=dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    if reasons := call.reasons(query, key, value):
        raise NotImplementedError(f"cpu: {'; '.join(reasons)}")
    frame = Frame.build(tokens, tokens, num_heads, num_kv_heads, 0)
    runs: dict[int, Callable[[], tuple[Tensor, ...]]] = {}
    expected: tuple[Tensor, ...] | None = None
    for size in block_sizes:
        layout = layout_cache.layout(pattern, frame, size, query.device)
        run = _step(Problem(layout, query, key, value, head_dim**-0.5))
        found = run()
        expected = found if expected is None else expected
        error = tuned.error_of(found, expected)
        if error <= tuned.AGREEMENT[dtype]:  # False for NaN
            runs[size] = run
        else:
            say(f"block size {size}: left out, its results differ by {error:.2g}")
    times = _milliseconds(runs)
    for size, milliseconds in times.items():
        say(f"block size {size}: {milliseconds:.3f} ms forward and backward")
    return keep(pattern.expression, query, min(times, key=lambda size: times[size]))


def _step(problem: Problem) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a function that runs forward and backward, like a training step."""
    shape = (*problem.query.shape[:3], problem.value.shape[3])
    seeded = torch.Generator().manual_seed(0)
    grad_out = torch.randn(shape, dtype=problem.query.dtype, generator=seeded)

    def run() -> tuple[Tensor, ...]:
        out, lse = call.forward(problem)
        found = call.backward(problem, out, lse, grad_out, torch.zeros_like(lse))
        return out, found.query, found.key, found.value

    return run


def _milliseconds(runs: Mapping[int, Callable[[], object]]) -> dict[int, float]:
    """Returns the median milliseconds of each call; calls take turns for a few seconds."""
    times: dict[int, list[float]] = {size: [] for size in runs}
    begin = time.perf_counter()
    for number in range(_MOST_ROUNDS):
        if number >= _LEAST_ROUNDS and time.perf_counter() - begin > _SECONDS:
            break
        for size, run in runs.items():
            start = time.perf_counter()
            run()
            times[size].append(1e3 * (time.perf_counter() - start))
    return {size: statistics.median(found) for size, found in times.items()}


def block_size(expression: str, like: Tensor) -> int | None:
    """Returns the measured block size of a pattern on tensors like this one, or None."""
    sizes = _tuned()["block_sizes"]
    return sizes.get(tuned.block_key(expression, like)) if sizes else None


def keep(expression: str, like: Tensor, size: int) -> Path:
    """Adds a measured block size to those on disk; returns the file."""
    key = tuned.block_key(expression, like)
    path = tuned.add(_path(), {}, {key: size})
    _tuned.cache_clear()
    return path


def _path() -> Path:
    used = torch.backends.cpu.get_cpu_capability()  # may be less than the processor supports
    return tuned.file_of("cpu", f"{tuned.processor_name()} {used}", torch.__version__)


@cache
def _tuned() -> tuned.Choices:
    """Returns the measured choices for this processor; the file is read once."""
    return tuned.read(_path())
