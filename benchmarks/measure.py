"""Honest timing: interleaved medians, errors against float64, peak memory, and the record of it."""

import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsering.kernels.tuned import processor_name
from sparsering.patterns.algebra import Pattern

Row = dict[str, object]


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each call: one untimed round, then `rounds` rounds of all in turn."""
    times = interleaved_times(calls, rounds)
    return {name: statistics.median(values) for name, values in times.items()}


def interleaved_times(
    calls: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each call in each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def sampled_error(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, rows: int = 32
) -> float:
    """Largest error of some query rows against float64 softmax by definition.

    Relative to the largest exact output. Raises where the output is all zeros or wrong.
    """
    q_len, kv_len, heads = query.shape[2], key.shape[2], query.shape[1]
    group = heads // key.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (key, value))

    def exact_row(row: int) -> Tensor:
        counts = pattern.to_dense(
            1, kv_len, num_heads=heads, num_kv_heads=key.shape[1], q_start=kv_len - q_len + row
        )
        score = query[:, :, row : row + 1].double() @ keys.mT * query.shape[-1] ** -0.5
        weight = torch.softmax(score + counts.to(score).log(), -1).nan_to_num()
        return weight @ values

    return error_of_rows(out, exact_row, rows)


def error_of_rows(out: Tensor, exact_row: Callable[[int], Tensor], rows: int) -> float:
    """Largest error of some rows of `out` [B, H, N, Dv] against `exact_row(row)` [B, H, 1, Dv].

    Relative to the largest exact output. Raises where the output is all zeros or wrong.
    """
    if not out.any():
        raise RuntimeError("the timed function returned zeros")
    if not out.isfinite().all():
        raise RuntimeError("the timed function returned what is no number")
    worst = largest = 0.0
    for row in torch.linspace(0, out.shape[2] - 1, rows).long().tolist():
        exact = exact_row(row)
        worst = max(worst, float((out[:, :, row : row + 1].double() - exact).abs().max()))
        largest = max(largest, float(exact.abs().max()))
    if worst > 0.02 * largest:
        raise RuntimeError(f"the timed function is wrong: error {worst / largest:.3g}")
    return worst / largest


def peak_extra_bytes(work: Callable[..., Iterator[Any]], *arguments: object) -> int:
    """Peak resident memory of `work` beyond what its generator form holds at its first `yield`.

    `work` is a generator function in a module, run in a fresh process: up to its `yield` it makes
    its inputs and warms up, after it comes the call that is measured.
    """
    return peak_and_figures(work, *arguments)[0]


def peak_and_figures(
    work: Callable[..., Iterator[Any]], *arguments: object, start: str = "spawn"
) -> tuple[int, Any]:
    """Peak memory as `peak_extra_bytes`, up to a second `yield`; and what a third one yields.

    `start`: how its process starts; "forkserver" spares the seconds of importing.

    Raises: RuntimeError where `work` does.
    """
    context: Any = multiprocessing.get_context(start)
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measure_peak, args=(send, work, arguments))
    process.start()
    send.close()
    try:
        found: tuple[int, Any] = receive.recv()
    except EOFError:
        raise RuntimeError(f"{work.__name__}{arguments} failed; its process says why") from None
    finally:
        process.join()
    return found


def _measure_peak(
    send: Connection, work: Callable[..., Iterator[Any]], arguments: tuple[object, ...]
) -> None:
    steps = work(*arguments)
    next(steps)
    before = memory("VmRSS")
    next(steps, None)
    peak = memory("VmHWM") - before
    send.send((peak, next(steps, None)))


def memory(name: str) -> int:
    """A figure of this process alone; getrusage's peak may be that of the one it was started by."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def restart_peak() -> int:
    """Has this process's peak, "VmHWM", begin anew; returns the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def of_slowest(number: float, world: int) -> float:
    """The largest of the ranks' numbers; all have arrived when it returns."""
    x = torch.tensor(float(number), dtype=torch.float64)
    if world > 1:
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.item()


def environment() -> Row:
    """What a figure depends on: versions, processor, threads, commit (None without a history)."""
    commit = _git("rev-parse", "HEAD") or None
    sources = ":(top,exclude)benchmarks/records"
    changes = ("status", "--porcelain", "--untracked-files=no", "--", sources)
    return {
        "commit": commit,
        "uncommitted_changes": bool(_git(*changes)) if commit else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "load_average": os.getloadavg()[0],
    }


def write_record(out: Path, name: str, rows: list[Row]) -> Path:
    """Writes one comparison's rows and environment to `out/name.json`, and prints them."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    path.write_text(
        json.dumps({"name": name, "environment": environment(), "rows": rows}, indent=1)
    )
    print(f"{name} -> {path}")
    for row in rows:
        print("  " + "  ".join(f"{key}={_short(value)}" for key, value in row.items()))
    return path


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    command = ("git", "-C", str(Path(__file__).parent), *arguments)
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""
