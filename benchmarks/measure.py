"""The harness of all measurements: interleaved timing, errors, peak memory, ranks, records.

times = interleaved({"ours": call, "dense": peer}, rounds=7)  # median milliseconds
error = sampled_error(call(), query, key, value, pattern)  # raises where the output is wrong
write_record(out, "name", [{"call": name, "ms": ms, "error": error} for name, ms in ...])
"""

import ctypes
import json
import math
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as torch_multiprocessing
from torch import Tensor

from sparsering.ground.turns import in_turns
from sparsering.kernels.tuning_file import processor_name
from sparsering.patterns.algebra import Pattern

Row = dict[str, Any]
Result = TypeVar("Result")


class Budget:
    """A deadline, in seconds from now."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        """Seconds left; negative past the deadline."""
        return self._end - time.perf_counter()


def inputs_of(
    heads: int,
    length: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    kv_heads: int | None = None,
) -> list[Tensor]:
    """Draws query, key and value, [batch, heads, length, width], the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, number, length, width, generator=generator).to(dtype)
        for number in (heads, kv_heads or heads, kv_heads or heads)
    ]


def gradient_of(out: Tensor) -> Tensor:
    """Draws a gradient of `out`, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(out.shape, generator=generator).to(out.dtype)


def milliseconds(call: Callable[[], object]) -> float:
    """Runs a call and returns its time in milliseconds."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each call: one untimed round, then `rounds` rounds of all in turn."""
    times = interleaved_times(calls, rounds)
    return {name: statistics.median(values) for name, values in times.items()}


def interleaved_times(
    calls: Mapping[str, Callable[[], Result]],
    rounds: int,
    *,
    seconds: float = math.inf,
    least: int = 1,
    clock: Callable[[Callable[[], Result]], float] = milliseconds,
    warm: bool = False,
) -> dict[str, list[float]]:
    """Milliseconds of each call in each round, all calls in turn.

    Args:
        rounds: largest number of timed rounds.
        seconds: about the most time for the timed rounds, of which at least `least` run.
        clock: runs a call and returns its milliseconds.
        warm: whether all calls ran before, so that no untimed round is needed.
    """
    for call in () if warm else calls.values():
        clock(call)
    return in_turns(calls, clock, most=rounds, least=least, seconds=seconds)


def spread_of(times: Sequence[float]) -> Row:
    """Median, minimum, maximum and number of some times in milliseconds."""
    return {
        "ms": statistics.median(times), "least_ms": min(times), "most_ms": max(times),
        "rounds": len(times),
    }  # fmt: skip


def sampled_error(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    rows: int = 32,
    heads: int | None = None,
) -> float:
    """Largest error of some query rows, in all or some heads, against float64 softmax.

    Relative to the largest exact output. Raises RuntimeError if the output is all zeros or wrong.
    """
    (num_heads, q_len), (kv_heads, kv_len) = query.shape[1:3], key.shape[1:3]
    chosen = torch.linspace(0, num_heads - 1, min(heads or num_heads, num_heads)).long()
    keys, values = (x[:, chosen * kv_heads // num_heads].double() for x in (key, value))

    def exact_row(row: int) -> Tensor:
        counts = pattern.to_dense(
            1, kv_len, num_heads=num_heads, num_kv_heads=kv_heads, q_start=kv_len - q_len + row
        )
        counts = counts.expand(*counts.shape[:-3], num_heads, 1, kv_len)[..., chosen, :, :]
        score = query[:, chosen, row : row + 1].double() @ keys.mT * query.shape[-1] ** -0.5
        weight = torch.softmax(score + counts.to(score).log(), -1).nan_to_num()
        return weight @ values

    return error_of_rows(out, exact_row, min(rows, q_len), chosen)


def error_of_rows(
    out: Tensor,
    exact_row: Callable[[int], Tensor],
    rows: int,
    heads: Tensor | slice = slice(None),
) -> float:
    """Largest error of some rows of `out` [B, H, N, Dv] against `exact_row(row)` [B, heads, 1, Dv].

    Relative to the largest exact output. Raises RuntimeError if the output is all zeros or wrong.
    """
    if not out.any():
        raise RuntimeError("the timed function returned zeros")
    if not out.isfinite().all():
        raise RuntimeError("the timed function returned what is no number")
    worst = largest = 0.0
    for row in torch.linspace(0, out.shape[2] - 1, rows).long().tolist():
        exact = exact_row(row)
        worst = max(worst, float((out[:, heads, row : row + 1].double() - exact).abs().max()))
        largest = max(largest, float(exact.abs().max()))
    if not worst <= 0.02 * largest:
        raise RuntimeError(f"the timed function is wrong: error {worst / max(largest, 1e-30):.3g}")
    return worst / largest


def distance_of(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Largest difference over pairs of tensors, each relative to its largest exact number."""
    distances = [
        float((a.double() - b).abs().max() / b.abs().max())
        for a, b in zip(results, exact, strict=True)
    ]
    return float(torch.tensor(distances, dtype=torch.float64).max())  # NaN stays NaN


def peak_extra_bytes(work: Callable[..., Iterator[Any]], *arguments: object) -> int:
    """Peak resident memory of `work`, beyond its memory at its first `yield`.

    `work` is a generator function of a module and runs in a fresh process. Before its `yield` it
    makes its inputs and warms up; after it, it runs the call that is measured.
    """
    return peak_and_figures(work, *arguments)[0]


def peak_and_figures(
    work: Callable[..., Iterator[Any]], *arguments: object, start: str = "spawn"
) -> tuple[int, Any]:
    """Returns peak memory as `peak_extra_bytes`, and the value of a later `yield` of `work`.

    The peak is taken from the first `yield` to the second; the third one yields the value.
    `start`: how the process starts; "forkserver" saves the seconds of importing.

    Raises: RuntimeError if `work` fails.
    """
    context: Any = multiprocessing.get_context(start)
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measure_peak, args=(send, work, arguments))
    process.start()
    send.close()
    try:
        result: tuple[int, Any] = receive.recv()
    except EOFError:
        raise RuntimeError(f"{work.__name__}{arguments} failed; its process says why") from None
    finally:
        process.join()
    return result


def _measure_peak(
    send: Connection, work: Callable[..., Iterator[Any]], arguments: tuple[object, ...]
) -> None:
    steps = work(*arguments)
    next(steps)
    peak = peak_of(lambda: next(steps, None))
    send.send((peak, next(steps, None)))


def peak_of(call: Callable[[], object]) -> int:
    """Peak resident bytes of a call in this process, beyond those before it."""
    before = restart_peak()
    call()
    return memory("VmHWM") - before


def memory(name: str) -> int:
    """Reads a figure of this process; getrusage's peak may be that of its parent process."""
    return _bytes_in("/proc/self/status", name)


def available_bytes() -> int:
    """Memory that a process could still allocate on this machine."""
    return _bytes_in("/proc/meminfo", "MemAvailable")


def _bytes_in(path: str, name: str) -> int:
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def restart_peak() -> int:
    """Resets this process's peak, "VmHWM", and returns the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def give_back_freed() -> None:
    """Returns freed memory from the allocator to the system; reused, it would hide a peak."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def within_memory(limit: int, work: Callable[[], Result]) -> Result | None:
    """Runs `work` while the process may take `limit` more bytes; None if it runs out of memory.

    The system enforces the limit, on the memory that the process reserves (RLIMIT_DATA).
    """
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory("VmData") + limit, most))
    try:
        return work()
    except MemoryError:
        return None
    except RuntimeError as error:
        if "alloc" in str(error) or "memory" in str(error):
            return None
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def of_ranks(
    work: Callable[..., Result], world: int, *arguments: object, start: str = "spawn"
) -> Result:
    """Runs `work(rank, world, *arguments)` in `world` processes; returns the result of rank 0.

    Each process has one thread. `start`: as for `peak_and_figures`. Raises if a process fails. The
    result must be at most 64 KiB: it fills a pipe that is read after the processes end.
    """
    results = torch_multiprocessing.get_context(start).SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch_multiprocessing.start_processes(
            _rank, (world, f"file://{folder}/meet", results, work, arguments), world,
            start_method=start,
        )  # fmt: skip
    result: Result = results.get()
    return result


def _rank(
    rank: int,
    world: int,
    address: str,
    results: Any,
    work: Callable[..., object],
    arguments: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    result = work(rank, world, *arguments)
    if rank == 0:
        results.put(result)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def of_slowest(number: float, world: int) -> float:
    """Largest of the ranks' numbers; also a barrier."""
    x = torch.tensor(float(number), dtype=torch.float64)
    if world > 1:
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.item()


def slowest_milliseconds(call: Callable[[], object], world: int) -> float:
    """Milliseconds of the slowest rank; all begin together."""
    of_slowest(0.0, world)
    return of_slowest(milliseconds(call), world)


def environment() -> Row:
    """Conditions of a measurement: versions, processor, threads, commit (None without git)."""
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
