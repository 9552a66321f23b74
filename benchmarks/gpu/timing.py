"""Timing of interleaved calls (median and spread), and checks of their results."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import sparsering as sr
from sparsering.kernels.triton.launch import Launch

from ..measure import Row, interleaved_times, milliseconds, sampled_error, spread_of
from .device import GPU, STUB, refuse, sized, spin_up, synchronize

ROUNDS = 5
_MS_OF_A_TURN = 50

Call = Callable[[], Tensor | tuple[Tensor, ...]]


def taken(calls: dict[str, Call], rounds: int = ROUNDS) -> dict[str, Row]:
    """Times calls in turn; each turn is the median of many runs, measured by CUDA events.

    The L2 cache is emptied before each run, so that small inputs come from memory too. Calls of
    20 ms and more run once a turn.
    """
    times = interleaved_times(calls, sized(rounds, 2), clock=_turn, warm=True)
    return {name: spread_of(values) for name, values in times.items()}


def _turn(call: Call) -> float:
    if not GPU:
        return milliseconds(call)
    from triton.testing import do_bench

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    synchronize()
    once = float(begin.elapsed_time(end))
    if once >= 20:
        return once
    return float(do_bench(call, warmup=10, rep=_MS_OF_A_TURN, return_mode="median"))


@contextlib.contextmanager
def watching(watch: Callable[[Callable[[], None], Launch, Any], None]) -> Iterator[None]:
    """Hands each launch of ours in the block to `watch(run, launch, of_call)`, which calls `run`.

    `of_call`: the tensors of the launch.
    """
    run = Launch.run
    Launch.run = lambda launch, of_call: watch(lambda: run(launch, of_call), launch, of_call)
    try:
        yield
    finally:
        Launch.run = run


def replayed(calls: Sequence[Call], rounds: int = ROUNDS) -> Row:
    """Times a call without its overhead on the host: a CUDA graph of all `calls`, replayed.

    `calls` differ only in their inputs, which together exceed the L2 cache.
    """
    if not GPU:
        return spread_of([_turn(call) for call in calls])
    for call in calls:
        call()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        synchronize()
        times.append(begin.elapsed_time(end) / 10 / len(calls))
    return spread_of(times)


def on_the_host(call: Call, calls: int = 200, rounds: int = 15) -> Row:
    """Host milliseconds of a call that launches tiny work on the GPU and does not wait for it."""
    calls, rounds = sized((calls, rounds), (2, 2))
    for _ in range(min(20, calls)):
        call()
    times = []
    for _ in range(rounds):
        synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(1e3 * (time.perf_counter() - begin) / calls)
    synchronize()
    return spread_of(times)


def prepared(
    calls: dict[str, Call], prepare: Callable[[str, Call], Call]
) -> tuple[dict[str, Call], list[Row]]:
    """Checks and warms up calls by `prepare`; also returns a row for each peer that cannot run.

    `prepare` checks a call's result and returns the call to time. An error of ours raises.
    """
    spin_up()
    running, failed = {}, []
    for name, call in calls.items():
        try:
            running[name] = prepare(name, call)
            running[name]()
            synchronize()
        except Exception as error:  # a failing peer is reported, not hidden
            running.pop(name, None)
            if name.startswith("ours"):
                raise
            failed.append({"backend": name, "failed": f"{type(error).__name__}: {error}"[:200]})
    return running, failed


def with_gradients(call: Callable[[], Tensor], args: Sequence[Tensor], grad: Tensor) -> Call:
    """Builds a call that runs forward and returns the gradients of query, key and value."""
    for x in args:
        x.requires_grad_()
    return lambda: torch.autograd.grad(call(), list(args), grad)


def relative(got: Tensor, exact: Tensor) -> float:
    """Relative error: norm of the difference over the norm of `exact`."""
    got, exact = got.detach().double(), exact.detach()
    return float((got - exact).norm() / exact.norm().clamp(min=1e-30))


def largest(errors: Sequence[float], bound: float, what: str) -> float:
    """Returns the largest error. Raises RuntimeError if it exceeds the bound or is NaN."""
    worst = float(torch.tensor(errors, dtype=torch.float64).max())
    if not worst <= bound:
        refuse(f"{what} is wrong: errors {[f'{x:.3g}' for x in errors]}")
    return worst


def error_of_rows(
    out: Tensor, args: Sequence[Tensor], pattern: sr.Pattern, rows: int = 8, heads: int = 2
) -> float:
    """Computes `sampled_error` of some rows and heads."""
    query, key, value = args
    try:
        return sampled_error(out, query, key, value, pattern, rows, heads)
    except RuntimeError as error:
        if not (STUB and "the timed function" in str(error)):
            raise
        return math.nan


def exact_gradients(
    args: Sequence[Tensor], pattern: sr.Pattern, block: int, grad: Tensor
) -> list[Tensor]:
    """Computes out and the three gradients of the first head in float64, by their formulas.

    [1, 1, N, D] each, a part of the queries at a time. The pattern must be of whole blocks and one
    pass.
    """
    q, k, v = (x[0, 0].detach().double() for x in args)
    g = grad[0, 0].double()
    heads, length = args[0].shape[1:3]
    layout = pattern.layout(length, num_heads=heads, block_size=block)
    row, key, mask, _ = layout.table(layout.passes[0], 0, 0)
    assert len(layout.passes) == 1 and bool((mask < 0).all()) and length % block == 0
    visited = torch.zeros(length // block, length // block, dtype=torch.bool)
    visited[row, key] = True
    visited = visited.to(g.device)
    scale = q.shape[1] ** -0.5
    out, dq, dk, dv = (torch.zeros_like(x) for x in (v, q, k, v))
    for tiles in torch.arange(length // block, device=g.device).split(max(1, 2048 // block)):
        some = slice(int(tiles[0]) * block, (int(tiles[-1]) + 1) * block)
        visible = visited[tiles].repeat_interleave(block, 0).repeat_interleave(block, 1)
        p = (q[some] @ k.mT * scale).masked_fill_(~visible, -torch.inf).softmax(-1)
        out[some] = p @ v
        ds = g[some] @ v.mT
        ds = (ds - (out[some] * g[some]).sum(-1, keepdim=True)).mul_(p).mul_(scale)
        dq[some] = ds @ k
        dk += ds.mT @ q[some]
        dv += p.mT @ g[some]
    return [x[None, None] for x in (out, dq, dk, dv)]


def error_of_gradients(
    out: Tensor, grads: Sequence[Tensor], args: Sequence[Tensor], grad: Tensor
) -> float:
    """Largest error of two identities of gradients that hold for any pattern, over all heads.

    If every query sees a key: `sum_k dV_k = sum_q dO_q`, `sum dQ Q = sum dK K`.
    """
    dq, dk, dv = (x.detach() for x in grads)
    query, key, _ = (x.detach() for x in args)
    for x in (out, *grads):
        if not bool(x.isfinite().all()):
            refuse("a gradient is no number")
    if not all(bool(x.any()) for x in grads):
        refuse("a gradient is all zeros")
    group = query.shape[1] // key.shape[1]

    def of_kv_heads(x: Tensor) -> Tensor:
        return x.unflatten(1, (key.shape[1], group)).sum(2)

    sums = of_kv_heads(torch.stack([g.double().sum(0) for g in grad[0]])[None])
    values = torch.stack([g.double().sum(0) for g in dv[0]])[None]
    by_query = of_kv_heads(torch.stack([_dot(*x) for x in zip(dq[0], query[0], strict=True)])[None])
    by_key = torch.stack([_dot(*x) for x in zip(dk[0], key[0], strict=True)])[None]
    errors = [relative(values, sums), relative(by_key, by_query)]
    return largest(errors, 0.05, "the sums over gradients")


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() * b.double()).sum()
