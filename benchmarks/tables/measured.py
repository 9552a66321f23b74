"""Measures the calls of a table: errors first, then interleaved times, then peak memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from sparsering.functional import attention
from sparsering.kernels.backends import BACKENDS
from sparsering.patterns.algebra import Pattern
from sparsering.patterns.positions import Causal, Full
from sparsering.patterns.selected import SelectedBlocks
from sparsering.selection import BlockScorer, block_scores, select_blocks

from ..comparisons.cases import dense
from ..measure import (
    Row,
    distance_of,
    give_back_freed,
    gradient_of,
    inputs_of,
    interleaved_times,
    peak_and_figures,
    sampled_error,
    spread_of,
)

DENSE = "dense SDPA"
CHOSEN_BLOCKS = 16
CALLS = 6  # calls of a case: error check, one untimed and three timed rounds, peak memory


@dataclass(frozen=True)
class Case:
    """One call, which becomes a row of a table.

    Attributes:
        call: its name, unique in its table.
        backend: one of ours, or `DENSE`, torch's own attention to all pairs.
        block_size: block size of the layout; None for the backend's choice.
        backward: whether to compute gradients of query, key and value too.
        chooses: scores by which the call selects key blocks, "sub" (means of parts) or "scorer"
            (learned projections); None if it attends to `pattern`.
    """

    call: str
    pattern: Pattern
    tokens: int
    backend: str = field(default_factory=lambda: own_backend())
    heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    block_size: int | None = 64
    backward: bool = False
    chooses: str | None = None

    def inputs(self) -> list[Tensor]:
        """Draws query, key and value, [1, heads, tokens, head_dim], the same at every call."""
        return inputs_of(self.heads, self.tokens, self.head_dim, getattr(torch, self.dtype))


def own_backend() -> str:
    """Backend that the tables call ours: the C++ kernel, or `gather` without a compiler."""
    return "gather" if BACKENDS["cpu"].reasons() else "cpu"


def rows_of(
    cases: Sequence[Case], seconds: float, *, rows: int = 16, least: int = 3, most: int = 15
) -> list[Row]:
    """Measures calls in turn; wrong results raise before anything is timed.

    Args:
        cases: calls that take turns; calls of one shape and dtype get the same inputs.
        seconds: time for the timed rounds; from `least` to `most` rounds run.
        rows: query rows whose error against float64 is computed.

    Raises: RuntimeError if a call returns zeros, NaN, infinity or wrong results.
    """
    if not cases:
        return []
    inputs: dict[tuple[object, ...], list[Tensor]] = {}
    calls: dict[str, Callable[[], object]] = {}
    results: list[Row] = []
    for case in cases:
        shape = case.tokens, case.heads, case.head_dim, case.dtype
        x = inputs.setdefault(shape, case.inputs() if shape not in inputs else [])
        results.append(_described(case, x, rows))
        calls[case.call] = _gradients(case, x) if case.backward else call_of(case, x)
    times = interleaved_times(calls, most, seconds=seconds, least=least)
    for case, row in zip(cases, results, strict=True):
        row |= spread_of(times[case.call])
        flops = 4 * (3.5 if case.backward else 1) * case.heads * case.head_dim
        row["gflops"] = flops * row["pairs"] / row["ms"] / 1e6
    calls.clear()  # frees memory for the processes that follow
    inputs.clear()
    del x
    for case, row in zip(cases, results, strict=True):
        row["peak_bytes"] = peak_bytes(case)
    return results


def left_out(case: Case, reason: str) -> Row:
    """Builds the row of a call that was not measured, with the reason."""
    return {
        "call": case.call, "backend": case.backend, "pattern": case.pattern.normal_text,
        "tokens": case.tokens, "heads": case.heads, "dtype": case.dtype, "left_out": reason,
    }  # fmt: skip


def call_of(case: Case, inputs: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Builds the forward call of a case on its inputs."""
    query, key, value = inputs
    if case.backend == DENSE:
        return dense(inputs, causal=case.pattern == Causal())
    if case.chooses is None:
        return lambda: attention(
            query, key, value, case.pattern, block_size=case.block_size, backend=case.backend
        )
    return lambda: attention(
        query, key, value, chosen_pattern(case, query, key), backend=case.backend
    )


def chosen_pattern(case: Case, query: Tensor, key: Tensor) -> Pattern:
    """Selects blocks by the case's scores and returns them as a causal pattern."""
    size = case.block_size or 64
    with torch.no_grad():
        if case.chooses == "scorer":
            scores = _scorer(case.head_dim, case.heads, size).to(query.dtype)(query, key)
        else:
            scores = block_scores(query, key, size, query_block=size, method="sub")
    chosen = select_blocks(scores, CHOSEN_BLOCKS, block_size=size, query_block=size)
    return SelectedBlocks(chosen, size, size) & Causal()


@cache
def _scorer(head_dim: int, heads: int, size: int) -> BlockScorer:
    """Builds an untrained scorer; training does not change its cost."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BlockScorer(head_dim, heads, size, query_block=size)


def _described(case: Case, inputs: Sequence[Tensor], rows: int) -> Row:
    """Checks the output of a call and returns its row without times. Raises if it is wrong."""
    query, key, value = inputs
    pattern = case.pattern if case.chooses is None else chosen_pattern(case, query, key)
    layout = pattern.layout(case.tokens, num_heads=case.heads, block_size=case.block_size or 128)
    error = sampled_error(call_of(case, inputs)(), query, key, value, pattern, rows)
    if case.backward:
        error = max(error, _gradient_error(case, inputs))
    return {
        "call": case.call, "backend": case.backend,
        "case": "forward+backward" if case.backward else "forward",
        "pattern": case.pattern.normal_text,
        "dtype": case.dtype, "tokens": case.tokens, "batch": 1, "heads": case.heads,
        "head_dim": case.head_dim, "block_size": case.block_size, "pairs": layout.num_pairs,
        "density": layout.num_pairs / case.tokens**2, "error": error,
    }  # fmt: skip


def _gradients(case: Case, inputs: Sequence[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    call, grad = call_of(case, leaves), gradient_of(inputs[0])
    return lambda: torch.autograd.grad(call(), leaves, grad)


def _gradient_error(case: Case, inputs: Sequence[Tensor]) -> float:
    """Largest error of the first head's gradients against float64. Raises if they are wrong."""
    exact = [x[:, :1].double().requires_grad_() for x in inputs]
    out = attention(exact[0], exact[1], exact[2], case.pattern, backend="reference")
    expected = torch.autograd.grad(out, exact, gradient_of(inputs[0])[:, :1].double())
    error = distance_of([x[:, :1] for x in _gradients(case, inputs)()], expected)
    if not error < 0.05:
        raise RuntimeError(f"the timed gradients are wrong: error {error:.3g}")
    return error


def peak_bytes(case: Case) -> int:
    """Peak memory of one call beyond its inputs, in a new process; includes layout and result."""
    return in_new_process(_once, case, torch.get_num_threads())[0]


def in_new_process(work: Callable[..., Iterator[Any]], *arguments: object) -> tuple[int, Any]:
    """Runs `peak_and_figures` in a forked process, which has torch already imported."""
    get_context("forkserver").set_forkserver_preload(["torch", "benchmarks.tables"])
    return peak_and_figures(work, *arguments, start="forkserver")


def _once(case: Case, threads: int) -> Iterator[None]:
    torch.set_num_threads(threads)
    warm_up(case)
    inputs = [x.requires_grad_(case.backward) for x in case.inputs()]
    grad = gradient_of(inputs[0]) if case.backward else inputs[0]
    give_back_freed()
    yield
    out = call_of(case, inputs)()
    if case.backward:
        torch.autograd.grad(out, inputs, grad)


def warm_up(case: Case) -> None:
    """Starts threads and loads kernels: costs that a process pays once, at any length."""
    few = Case("", Full(), 256, case.backend, 1, case.head_dim, case.dtype)
    inputs = [x.requires_grad_(case.backward) for x in few.inputs()]
    out = call_of(few, inputs)()
    if case.backward:
        torch.autograd.grad(out.sum(), inputs)
