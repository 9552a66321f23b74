"""Measures block shapes and block sizes of the Triton kernels on this GPU: `sparsering tune`.

It searches one coordinate at a time: for each block size, first the forward kernel, then the two
backward ones, each over the few neighbours of its default. A choice counts only if its results
agree with those of the default. The fastest are saved to disk, and every later process uses them.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...layouts.cache import layout_cache
from ...patterns.algebra import Frame, Pattern
from .. import tuned
from ..problem import Problem
from . import call, tuning
from .tuning import KERNELS, Config, config_key


def tune(
    pattern: Pattern,
    *,
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_sizes: Sequence[int] = (64, 128),
    say: Callable[[str], None] = print,
) -> Path:
    """Measures candidates and saves the fastest to disk; returns the file.

    Args:
        pattern: of a training step on `tokens` tokens, one batch entry.
        block_sizes: candidates for the pattern's block size, for calls that do not name one.
        say: receives a line of text for each measurement.

    Raises: NotImplementedError if the kernels cannot run. ValueError if the pattern does not fit.
    """
    device = torch.device("cpu" if call.interpreting() else "cuda")
    torch.manual_seed(0)
    if reasons := call.reasons():
        raise NotImplementedError(f"triton: {'; '.join(reasons)}")
    query, key, value = (
        torch.randn(1, heads, tokens, head_dim, device=device, dtype=dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    if reasons := call.reasons(query, key, value):
        raise NotImplementedError(f"triton: {'; '.join(reasons)}")
    frame = Frame.build(tokens, tokens, num_heads, num_kv_heads, 0)
    configs: dict[str, Config] = {}
    totals: dict[int, float] = {}
    for size in block_sizes:
        layout = layout_cache.layout(pattern, frame, size, device)
        runs = _runs(Problem(layout, query, key, value, head_dim**-0.5))
        expected = {name: run() for name, run in runs.items()}
        for kernel in KERNELS:
            name = "forward" if kernel == "forward" else "backward"
            best = _fastest(
                runs[name],
                expected[name],
                config_key(kernel, dtype, head_dim, size),
                list(tuning.candidates(kernel, query, head_dim, size)),
                configs,
                say,
            )
            configs |= best
        with tuning.trial(configs, query.device):
            totals[size] = sum(_milliseconds(run) for run in runs.values())
        say(f"block size {size}: {totals[size]:.3f} ms forward and backward")
    chosen = min(totals, key=lambda size: totals[size])
    sizes = {tuning.block_key(pattern.expression, query): chosen}
    return tuning.keep(configs, sizes if len(totals) > 1 else {}, query.device)


def _runs(problem: Problem) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    results = call.forward(problem)
    grads = torch.randn_like(results[0]), torch.zeros_like(results[1])
    return {
        "forward": lambda: call.forward(problem),
        "backward": lambda: call.backward(problem, *results, *grads)[:3],
    }


def _fastest(
    run: Callable[[], tuple[Tensor, ...]],
    expected: tuple[Tensor, ...],
    key: str,
    candidates: Iterable[Config],
    others: dict[str, Config],
    say: Callable[[str], None],
) -> dict[str, Config]:
    """Returns {key: fastest candidate}; `others` are the earlier choices, in use meanwhile."""
    times: dict[Config, float] = {}
    for config in candidates:
        with tuning.trial({**others, key: config}, expected[0].device):
            try:
                error = tuned.error_of(run(), expected)
                if error <= tuned.AGREEMENT[expected[0].dtype]:  # false for NaN
                    times[config] = _milliseconds(run)
                    told = f"{times[config]:.3f} ms"
                else:
                    told = f"left out, its results differ by {error:.2g}"
            except Exception as problem:  # compiler errors, or too much shared memory
                first_line = str(problem).partition("\n")[0][:80]
                told = f"left out, {type(problem).__name__}: {first_line}"
        say(f"{key} {tuple(config)}: {told}")
    if not times:
        return {}
    return {key: min(times, key=lambda config: times[config])}


def _milliseconds(run: Callable[[], object]) -> float:
    """Median time of a call in milliseconds."""
    if torch.cuda.is_available() and not call.interpreting():
        from triton.testing import do_bench

        return float(do_bench(run, return_mode="median"))
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)
