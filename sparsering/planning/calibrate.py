"""Measures the seconds of each kind of work on this machine, on request, and stores them in a file.

    sparsering calibrate        # a few seconds; `sr.estimate` then knows this machine

The cache folder has one file for each processor, number of threads and torch version, which is read
on first use. Importing the library and calling it never measure anything.
"""

import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..files import read_file, replace_file
from ..kernels import cpu, gather, tuning_file
from ..kernels.problem import Problem
from ..layouts.cache import layout_cache
from ..layouts.compile import default_block_size
from ..patterns.algebra import Frame, Pattern
from ..patterns.blocks import BlockWindow, RandomBlocks
from ..patterns.positions import Causal, Dilated, GlobalTokens, LongNet, SlidingWindow
from .memory import Call
from .seconds import KINDS, Rates, amounts, parts_of, seconds_by
from .work import work_of

_VERSION = 1
_MOST_BYTES = 1 << 20
_ROUNDS = 4


class Calibration(NamedTuple):
    """Rates of this machine.

    Attributes:
        rates: for each part of a call, the seconds per unit of each kind of work.
        threads: number of threads during the measurement.
        error: median of |predicted / measured - 1| over the calls of the fit.
    """

    rates: dict[str, Rates]
    threads: int
    error: float


class _Probe(NamedTuple):
    """A call to measure: pattern, tokens, query heads, kv heads, head dim."""

    pattern: Pattern
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int


def _probes() -> list[_Probe]:
    """Lists calls of about ten milliseconds each, with different proportions of work."""
    return [
        _Probe(Causal(), 128, 2, 2, 64),
        _Probe(Causal(), 2048, 4, 4, 32),
        _Probe(Causal(), 2048, 4, 2, 64),
        _Probe(Causal(), 2048, 4, 4, 128),
        _Probe(BlockWindow(2, 64), 8192, 4, 4, 32),
        _Probe(BlockWindow(4, 64), 4096, 4, 2, 128),
        _Probe(RandomBlocks(0.1, 128), 4096, 4, 4, 64),
        _Probe(SlidingWindow(300) & Causal(), 4096, 4, 4, 64),
        _Probe(GlobalTokens(16) | SlidingWindow(128, 128), 8192, 2, 2, 128),
        _Probe(Dilated(4096, 4), 8192, 4, 2, 64),
        _Probe(LongNet((512, 2048), (1, 4)) & Causal(), 8192, 4, 4, 32),
        _Probe(LongNet((1024, 4096), (1, 2)) & Causal(), 4096, 4, 4, 128),
        _Probe(SlidingWindow(64), 16384, 8, 8, 64),
        _Probe(BlockWindow(1, 64), 16384, 8, 2, 128),
    ]


def calibrated() -> Calibration | None:
    """Reads the calibration of this machine and number of threads; None without a valid file."""
    return _read(_path(), torch.get_num_threads())


def why_not() -> str:
    """Explains why there is no calibration, and what to do."""
    told = "run `sparsering calibrate`, a few seconds, for figures of this machine"
    path = _path()
    if path.exists() and calibrated() is None:
        return f"{path.name} in the cache folder cannot be read as a calibration; {told}"
    return f"this machine is not calibrated for {torch.get_num_threads()} threads; {told}"


def calibrate() -> tuple[Calibration, Path]:
    """Measures this machine with the current number of threads, and writes the rates to a file.

    Returns: the rates, and the path of the file.

    Raises: OSError if the file cannot be written.

    Cost: a few seconds on two cores, which should be idle otherwise; about 200 MB.
    """
    threads = torch.get_num_threads()
    rows: dict[str, list[tuple[list[float], float]]] = {}
    for part, amount, seconds in _measured():
        rows.setdefault(part, []).append((amount, seconds))
    rates, errors = {}, []
    for part, found in rows.items():
        rates[part] = _fitted(*zip(*found, strict=True))
        errors += [abs(seconds_by(rates[part], amount) / seconds - 1) for amount, seconds in found]
    error = statistics.median(errors)
    content = {"version": _VERSION, "threads": threads, "error": error, "rates": rates}
    path = _path()
    replace_file(path, json.dumps(content, indent=1).encode())
    _read.cache_clear()
    return Calibration(rates, threads, error), path


def _measured() -> Iterator[tuple[str, list[float], float]]:
    """Yields (part, its amounts, its seconds) for every probe."""
    backends: list[tuple[str, Any, torch.dtype]] = []
    if not cpu.reasons():
        backends = [("cpu", cpu, torch.float32), ("cpu", cpu, torch.bfloat16)]
    backends.append(("gather", gather, torch.float32))
    for name, module, dtype in backends:
        for probe in _probes() if name == "cpu" else _probes()[:10:2]:
            yield from _of_probe(name, module, dtype, probe)
            # Several threads share one kv head, which is another kind of backward pass.
            if name == "cpu" and probe.tokens > 128 and torch.get_num_threads() > 1:
                alone = probe._replace(heads=max(1, probe.heads // 2), kv_heads=1)
                yield from _of_probe(name, module, dtype, alone)


def _of_probe(
    name: str, module: Any, dtype: torch.dtype, probe: _Probe
) -> Iterator[tuple[str, list[float], float]]:
    frame = Frame.build(probe.tokens, probe.tokens, probe.heads, probe.kv_heads, 0)
    size = default_block_size(probe.pattern, probe.tokens)
    work = work_of(probe.pattern, frame, size)
    layout = layout_cache.layout(probe.pattern, frame, size, torch.device("cpu"))
    call = Call(1, probe.head_dim, dtype)
    query, key, value = (
        torch.randn(1, heads, probe.tokens, probe.head_dim).to(dtype)
        for heads in (probe.heads, probe.kv_heads, probe.kv_heads)
    )
    problem = Problem(layout, query, key, value, probe.head_dim**-0.5)
    out, lse = module.forward(problem)
    grads = torch.randn_like(out), torch.zeros_like(lse)
    parts = parts_of(name, work, call, True)
    calls: tuple[Callable[[], object], ...] = (
        lambda: module.forward(problem),
        lambda: module.backward(problem, out, lse, *grads),
    )
    for part, run in zip(parts, calls, strict=True):
        yield part, amounts(part, work, call), _seconds(run)


def _seconds(run: Callable[[], object]) -> float:
    """Fastest of several timed calls after a warm-up; the minimum excludes interference."""
    run()
    found = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def _fitted(rows: tuple[list[float], ...], seconds: tuple[float, ...]) -> Rates:
    """Fits rates >= 0 by least squares of predicted / measured - 1.

    Coordinate descent: each step finds the best rate of one kind while the others stay fixed.
    """
    of = (
        torch.tensor(rows, dtype=torch.float64)
        / torch.tensor(seconds, dtype=torch.float64)[:, None]
    )
    scale = of.norm(dim=0).clamp(min=1e-300)
    of = of / scale
    product, target = of.T @ of, of.sum(0)
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
    """Returns the path of the file for this machine and number of threads."""
    features: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    processor = features.get("cpu_name") or platform.machine()
    name = f"{processor} {torch.backends.cpu.get_cpu_capability()}"
    return tuning_file.file_of("costs", name, f"{torch.get_num_threads()}-{torch.__version__}")


@cache
def _read(path: Path, threads: int) -> Calibration | None:
    """Reads a calibration file; None if it is missing or not in `calibrate`'s format."""
    try:
        content = json.loads(read_file(path, _MOST_BYTES))
        rates = {
            str(part): {kind: _rate(of_part[kind]) for kind in KINDS}
            for part, of_part in content["rates"].items()
        }
        if content["version"] != _VERSION or content["threads"] != threads or not rates:
            return None
        return Calibration(rates, threads, _rate(content["error"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _rate(value: object) -> float:
    """Returns the value if it is a finite number >= 0; raises ValueError for any other."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"a rate must be a number, got {value!r}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"a rate must be 0 or more, got {value!r}")
    return float(value)
