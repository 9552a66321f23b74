"""Measures which block size, and which config of each Triton kernel, is fastest: `sparsering tune`.

For each block size, it first picks a config for the forward kernel, then for the two backward
kernels. Then it compares the block sizes. A candidate counts only if its results agree with the
first candidate's. `attention` never measures, so its results do not depend on timings.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from ..ground.progress import Progress, progress
from ..ground.turns import in_turns, timed
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
    ping_pong: bool = False,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Measures candidates and saves the fastest to disk; returns the file.

    Args:
        backend: "cpu" or "triton".
        pattern: pattern of the measured calls, which have `tokens` tokens and one batch entry.
        block_sizes: candidates; the fastest becomes the pattern's default. On "triton", a single
            candidate is not saved, only the configs are.
        ping_pong: also measure `ping_pong_kernel`, on Hopper; a fault of it could hang the GPU.
        say: receives a line of text for each measurement; default prints it.

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
    choices = 1 + (len(block_sizes) * len(configs.KERNELS) if backend == "triton" else 0)
    with progress("tune", choices * _MOST_ROUNDS, "call") as work:
        turns = _Turns(device, work, say or work.say, choices)
        for size in block_sizes:
            layout = layout_cache.layout(pattern, frame, size, device)
            problem = Problem(
                layout=layout, query=query, key=key, value=value, scale=head_dim**-0.5
            )
            if backend == "triton":
                _choose_configs(problem, grad, chosen, turns, ping_pong=ping_pong)
            steps[size] = partial(_forward_and_backward, kernel, problem, grad)
        with configs.trial(chosen, device) if chosen else nullcontext():
            best = turns.fastest("block size", steps)
    sizes = {} if chosen and len(steps) == 1 else {pattern.expression: best}
    return measured.keep(chosen, sizes, query)


def _forward_and_backward(kernel: ModuleType, problem: Problem, grad: Tensor) -> tuple[Tensor, ...]:
    """Runs a backend once; returns out and the gradients of query, key and value."""
    out, lse = kernel.forward(problem)
    return out, *kernel.backward(problem, out, lse, grad, torch.zeros_like(lse))[:3]


def _choose_configs(
    problem: Problem,
    grad: Tensor,
    chosen: dict[str, Config],
    turns: "_Turns",
    *,
    ping_pong: bool,
) -> None:
    """Finds the fastest config of each Triton kernel at one block size, and adds it to `chosen`."""
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
        candidates = configs.candidates(kernel, query, *shape, ping_pong=ping_pong)
        runs = {config: partial(run, kernel, key, config) for config in candidates}
        chosen[key] = turns.fastest(key, runs)


@dataclass
class _Turns:
    """Measures several choices one after another (block sizes, configs) and shows progress."""

    device: torch.device
    work: Progress
    say: Callable[[str], None]
    choices_left: int

    def fastest(self, title: str, runs: Mapping[_Choice, Run]) -> _Choice:
        """Returns the fastest choice whose results agree with those of the first choice."""
        first = next(iter(runs))
        expected, correct = runs[first](), {first: runs[first]}
        for choice, run in list(runs.items())[1:]:
            try:
                error = error_of(run(), expected)
            except Exception as problem:  # the compiler fails, or shared memory is too small
                first_line = str(problem).partition("\n")[0][:80]
                reason = f"{type(problem).__name__}: {first_line}"
                self.say(f"{title} {choice}: left out, {reason}")
                continue
            if error <= AGREEMENT[expected[0].dtype]:  # False if the error is NaN
                correct[choice] = run
            else:
                self.say(f"{title} {choice}: left out, its results differ by {error:.2g}")
        times = self.milliseconds(title, correct)
        for choice, milliseconds in times.items():
            self.say(f"{title} {choice}: {milliseconds:.3f} ms")
        return min(times, key=times.__getitem__)

    def milliseconds(self, title: str, runs: Mapping[_Choice, Run]) -> dict[_Choice, float]:
        """Returns the median milliseconds of each run; runs take turns for a few seconds."""
        before = self.work.done

        def after(choice: _Choice, rounds: int) -> None:
            self.work.expect(before + rounds * len(runs) * self.choices_left)
            self.work.advance(note=f"{title} {choice}")

        times = in_turns(
            runs,
            partial(timed, device=self.device),
            most=_MOST_ROUNDS,
            least=_LEAST_ROUNDS,
            seconds=_SECONDS,
            after=after,
        )
        self.choices_left -= 1
        return {choice: 1e3 * statistics.median(found) for choice, found in times.items()}


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
