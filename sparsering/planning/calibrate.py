"""Measures the seconds of each kind of work on this machine, on request, and stores them in a file.

    sparsering calibrate        # a few seconds; `sr.estimate` then uses the measured rates

The cache folder has a file for each processor, number of threads and torch version. `estimate`
reads it and never measures anything.
"""

import json
import platform
import statistics
import timeit
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..files import read_file, replace_file
from ..kernels import cpu, gather, tuning_file
from ..kernels.problem import Problem
from ..layouts.cache import layout_cache
from ..layouts.compile import default_block_size
from ..patterns.algebra import Frame, Pattern
from ..patterns.arguments import checked_number
from ..patterns.blocks import BlockWindow, RandomBlocks
from ..patterns.positions import Causal, Dilated, GlobalTokens, LongNet, SlidingWindow
from .memory import Call
from .seconds import KINDS, Rates, amounts, parts_of, seconds_by
from .work import work_of

_VERSION = 1
_MOST_BYTES = 1 << 20
_ROUNDS = 4


class Calibration(NamedTuple):
    """Measured rates: seconds per amount of each kind of work, for this machine."""

    rates: dict[str, Rates]  # by part of a call, such as "cpu float32 forward"
    threads: int  # number of threads during the measurement
    error: float  # median of |predicted / measured - 1| over the measured calls


_Probe = tuple[Pattern, int, int, int, int]
"""A call to measure: pattern, tokens, query heads, kv heads, head dim."""

# Calls of about ten milliseconds each, with different mixes of work, so that rates can be fitted.
_PROBES: tuple[_Probe, ...] = (
    (Causal(), 128, 2, 2, 64),
    (Causal(), 2048, 4, 4, 32),
    (Causal(), 2048, 4, 2, 64),
    (Causal(), 2048, 4, 4, 128),
    (BlockWindow(2, 64), 8192, 4, 4, 32),
    (BlockWindow(4, 64), 4096, 4, 2, 128),
    (RandomBlocks(0.1, 128), 4096, 4, 4, 64),
    (SlidingWindow(300) & Causal(), 4096, 4, 4, 64),
    (GlobalTokens(16) | SlidingWindow(128, 128), 8192, 2, 2, 128),
    (Dilated(4096, 4), 8192, 4, 2, 64),
    (LongNet((512, 2048), (1, 4)) & Causal(), 8192, 4, 4, 32),
    (LongNet((1024, 4096), (1, 2)) & Causal(), 4096, 4, 4, 128),
    (SlidingWindow(64), 16384, 8, 8, 64),
    (BlockWindow(1, 64), 16384, 8, 2, 128),
)


def calibrated() -> Calibration | None:
    """Reads the calibration of this machine and number of threads; None if no valid file exists."""
    return _read(_path(), torch.get_num_threads())


def why_not() -> str:
    """Explains why `calibrated` returns None, and what to do."""
    way_out = "run `sparsering calibrate`, a few seconds, for figures of this machine"
    path = _path()
    if path.exists() and calibrated() is None:
        return f"{path.name} in the cache folder cannot be read as a calibration; {way_out}"
    return f"this machine is not calibrated for {torch.get_num_threads()} threads; {way_out}"


def calibrate() -> tuple[Calibration, Path]:
    """Measures this machine with the current number of threads, and writes the rates to a file.

    Returns: the rates, and the path of the file. Raises: OSError if the file cannot be written.

    Cost: a few seconds on two cores, which should be idle otherwise; about 200 MB.
    """
    threads = torch.get_num_threads()
    rows: dict[str, list[tuple[list[float], float]]] = {}
    for part, amount, seconds in _measured():
        rows.setdefault(part, []).append((amount, seconds))
    rates, errors = {}, []
    for part, calls in rows.items():
        rates[part] = _fitted(*zip(*calls, strict=True))
        errors += [abs(seconds_by(rates[part], amount) / seconds - 1) for amount, seconds in calls]
    error = statistics.median(errors)
    content = {"version": _VERSION, "threads": threads, "error": error, "rates": rates}
    path = _path()
    replace_file(path, json.dumps(content, indent=1).encode())
    _read.cache_clear()
    return Calibration(rates, threads, error), path


def _measured() -> Iterator[tuple[str, list[float], float]]:
    for probe in _PROBES[:10:2]:
        yield from _measured_call("gather", gather, torch.float32, probe)
    if cpu.reasons():
        return
    for dtype in (torch.float32, torch.bfloat16):
        for probe in _PROBES:
            yield from _measured_call("cpu", cpu, dtype, probe)
            pattern, tokens, heads, _, head_dim = probe
            # With one kv head for all threads, the backward pass is split by tiles: measure it too.
            if tokens > 128 and torch.get_num_threads() > 1:
                one_kv_head = pattern, tokens, max(1, heads // 2), 1, head_dim
                yield from _measured_call("cpu", cpu, dtype, one_kv_head)


def _measured_call(
    name: str, backend: Any, dtype: torch.dtype, probe: _Probe
) -> Iterator[tuple[str, list[float], float]]:
    pattern, tokens, heads, kv_heads, head_dim = probe
    frame = Frame.build(tokens, tokens, heads, kv_heads, 0)
    size = default_block_size(pattern, tokens)
    work, call = work_of(pattern, frame, size), Call(1, head_dim, dtype)
    layout = layout_cache.layout(pattern, frame, size, torch.device("cpu"))
    sizes = heads, kv_heads, kv_heads
    query, key, value = (torch.randn(1, num, tokens, head_dim).to(dtype) for num in sizes)
    problem = Problem(layout, query, key, value, head_dim**-0.5)
    out, lse = backend.forward(problem)
    grads = torch.randn_like(out), torch.zeros_like(lse)
    runs = partial(backend.forward, problem), partial(backend.backward, problem, out, lse, *grads)
    for part, run in zip(parts_of(name, work, call, True), runs, strict=True):
        seconds = timeit.repeat(run, number=1, repeat=1 + _ROUNDS)
        yield part, amounts(part, work, call), min(seconds[1:])  # the first run warms up


def _fitted(rows: tuple[list[float], ...], seconds: tuple[float, ...]) -> Rates:
    """Fits rates >= 0 by least squares of predicted / measured - 1, with coordinate descent."""
    share = torch.tensor(rows, dtype=torch.float64)
    share = share / torch.tensor(seconds, dtype=torch.float64)[:, None]
    scale = share.norm(dim=0).clamp(min=1e-300)
    share = share / scale
    product, target = share.T @ share, share.sum(0)
    product = product + 1e-4 * torch.eye(len(KINDS), dtype=torch.float64)
    rate = torch.zeros(len(KINDS), dtype=torch.float64)
    for _ in range(2000):
        before = rate.clone()
        for i in range(len(KINDS)):
            rest = target[i] - product[i] @ rate + product[i, i] * rate[i]
            rate[i] = (rest / product[i, i]).clamp(min=0)
        if (rate - before).abs().max() < 1e-12:
            break
    return dict(zip(KINDS, (rate / scale).tolist(), strict=True))


def _path() -> Path:
    features: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    processor = features.get("cpu_name") or platform.machine()
    name = f"{processor} {torch.backends.cpu.get_cpu_capability()}"
    return tuning_file.file_of("costs", name, f"{torch.get_num_threads()}-{torch.__version__}")


@cache
def _read(path: Path, threads: int) -> Calibration | None:
    try:
        content = json.loads(read_file(path, _MOST_BYTES))
        rates = {
            str(part): {kind: checked_number("rate", kinds[kind], 0) for kind in KINDS}
            for part, kinds in content["rates"].items()
        }
        if content["version"] != _VERSION or content["threads"] != threads or not rates:
            return None
        return Calibration(rates, threads, checked_number("error", content["error"], 0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
