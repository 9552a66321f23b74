"""Measures which block size, and which config of each Triton kernel, is fastest: `sparsering tune`.

For each block size, it first picks a config for the forward kernel, then for the two backward
kernels. Then it compares the block sizes. A candidate counts only if its results agree with the
first candidate's. `attention` never measures, so its results do not depend on timings.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from ..layouts.cache import layout_cache
from ..patterns.algebra import Frame, Pattern
from .cpu import call as cpu
from .problem import Problem
from .triton import call as triton
from .triton import configs
from .triton.configs import Config

Run = Callable[[], tuple[Tensor, ...]]
_Choice = TypeVar("_Choice", int, Config)

_BACKENDS = {"cpu": (cpu, cpu.measured), "triton": (triton, configs.measured)}
_SECONDS, _LEAST_ROUNDS, _MOST_ROUNDS = 3.0, 3, 40

AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest relative error that results of a candidate may have, by dtype."""


def tune(
    backend: str,
    pattern: Pattern,
    *,
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_sizes: Sequence[int],
    say: Callable[[str], None] = print,
) -> Path:
    """Measures candidates and saves the fastest to disk; returns the file.

    Args:
        backend: "cpu" or "triton".
        pattern: pattern of the measured calls, which have `tokens` tokens and one batch entry.
        block_sizes: candidates; the fastest becomes the pattern's default. On "triton", a single
            candidate is not saved, only the configs are.
        say: receives a line of text for each measurement.

    Raises: NotImplementedError if the kernels cannot run; ValueError for a pattern's other length.
    """
    kernel, measured = _BACKENDS[backend]
    if reasons := kernel.reasons():
        raise NotImplementedError(f"{backend}: {'; '.join(reasons)}")
    device = torch.device("cuda" if backend == "triton" and not triton.interpreting() else "cpu")
    torch.manual_seed(0)
    query, key, value, grad = (
        torch.randn(1, heads, tokens, head_dim, device=device, dtype=dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    )
    if reasons := kernel.reasons(query, key, value):
        raise NotImplementedError(f"{backend}: {'; '.join(reasons)}")
    frame = Frame.build(tokens, tokens, num_heads, num_kv_heads, 0)
    chosen: dict[str, Config] = {}
    steps: dict[int, Run] = {}
    for size in block_sizes:
        layout = layout_cache.layout(pattern, frame, size, device)
        problem = Problem(layout, query, key, value, head_dim**-0.5)
        if backend == "triton":
            _choose_configs(problem, grad, chosen, say)
        steps[size] = partial(_forward_and_backward, kernel, problem, grad)
    with configs.trial(chosen, device) if chosen else nullcontext():
        best = _fastest("block size", steps, device, say)
    sizes = {} if chosen and len(steps) == 1 else {pattern.expression: best}
    return measured.keep(chosen, sizes, query)


def _forward_and_backward(kernel: ModuleType, problem: Problem, grad: Tensor) -> tuple[Tensor, ...]:
    out, lse = kernel.forward(problem)
    return out, *kernel.backward(problem, out, lse, grad, torch.zeros_like(lse))[:3]


def _choose_configs(
    problem: Problem, grad: Tensor, chosen: dict[str, Config], say: Callable[[str], None]
) -> None:
    query, size = problem.query, problem.layout.block_size
    out, lse = triton.forward(problem)
    no_grad = torch.zeros_like(lse)

    def run(kernel: str, key: str, config: Config) -> tuple[Tensor, ...]:
        with configs.trial({**chosen, key: config}, query.device):
            if kernel == "forward":
                return triton.forward(problem)
            return tuple(triton.backward(problem, out, lse, grad, no_grad)[:3])

    for kernel in configs.KERNELS:
        shape = query.shape[3], size, triton.packed_rows(kernel, problem)
        key = configs.config_key(kernel, query.dtype, *shape)
        candidates = configs.candidates(kernel, query, *shape)
        runs = {config: partial(run, kernel, key, config) for config in candidates}
        chosen[key] = _fastest(key, runs, query.device, say)


def _fastest(
    title: str, runs: Mapping[_Choice, Run], device: torch.device, say: Callable[[str], None]
) -> _Choice:
    """Returns the fastest choice whose results agree with those of the first choice."""
    first = next(iter(runs))
    expected, correct = runs[first](), {first: runs[first]}
    for choice, run in list(runs.items())[1:]:
        try:
            error = error_of(run(), expected)
        except Exception as problem:  # the compiler fails, or shared memory is too small
            first_line = str(problem).partition("\n")[0][:80]
            say(f"{title} {choice}: left out, {type(problem).__name__}: {first_line}")
            continue
        if error <= AGREEMENT[expected[0].dtype]:  # False if the error is NaN
            correct[choice] = run
        else:
            say(f"{title} {choice}: left out, its results differ by {error:.2g}")
    times = _milliseconds(correct, device)
    for choice, milliseconds in times.items():
        say(f"{title} {choice}: {milliseconds:.3f} ms")
    return min(times, key=times.__getitem__)


def _milliseconds(runs: Mapping[_Choice, Run], device: torch.device) -> dict[_Choice, float]:
    """Returns the median milliseconds of each run; runs take turns for a few seconds."""
    times: dict[_Choice, list[float]] = {choice: [] for choice in runs}
    begin = time.perf_counter()
    for number in range(_MOST_ROUNDS):
        if number >= _LEAST_ROUNDS and time.perf_counter() - begin > _SECONDS:
            break
        for choice, run in runs.items():
            times[choice].append(_milliseconds_of(run, device))
    return {choice: statistics.median(measured) for choice, measured in times.items()}


def _milliseconds_of(run: Run, device: torch.device) -> float:
    """Runs once and returns the milliseconds; on a GPU, those between two events in its stream."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()  # so that the next run starts on an idle GPU
        return start.elapsed_time(end)
    begin = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begin)


def error_of(results: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Returns the largest relative error, by norms; infinite if not the same numbers are finite."""
    errors = []
    for a, b in zip(results, expected, strict=True):
        finite = b.isfinite()
        if not torch.equal(a.isfinite(), finite):
            return torch.inf
        difference = (a.float() - b.float())[finite].norm()
        errors.append(float(difference / b.float()[finite].norm().clamp(min=1e-30)))
    return max(errors)
