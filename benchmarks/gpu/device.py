"""The measured device: a GPU, or in a rehearsal the CPU (TRITON_INTERPRET=1) or a stub of a GPU.

GPU features (graphs, events, memory statistics, errors on waits) are wrapped here. Each has a
substitute without a GPU, so that a rehearsal runs every part to its end. On the stub
(`tests/gpu_stub`) calls take a GPU's path to each launch, but kernels write nothing: wrong results
are accepted there.
"""

import contextlib
import functools
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsering.kernels import triton

GPU = torch.cuda.is_available() and not triton.interpreting()
STUB = GPU and torch.cuda.get_device_name().startswith("stub of")
DEVICE = "cuda" if GPU else "cpu"
HALF = torch.bfloat16 if GPU else torch.float32  # the interpreter gets bfloat16 products wrong

Size = TypeVar("Size")


def sized(on_gpu: Size, rehearsed: Size) -> Size:
    """Returns the size for a GPU, or the size for a rehearsal."""
    return on_gpu if GPU and not STUB else rehearsed


def refuse(fault: str) -> None:
    """Raises RuntimeError for a wrong result; returns on the stub, whose kernels write nothing."""
    if not STUB:
        raise RuntimeError(fault)


def inputs(
    heads: int,
    length: int,
    width: int,
    dtype: torch.dtype = HALF,
    kv_heads: int | None = None,
    seed: int = 0,
) -> list[Tensor]:
    """Draws query, key and value of one batch entry, the same at every call."""
    place = "cpu" if STUB else DEVICE
    generator = torch.Generator(place).manual_seed(seed)
    own = (heads, kv_heads or heads, kv_heads or heads)
    return [
        torch.randn(1, h, length, width, generator=generator, device=place, dtype=dtype).to(DEVICE)
        for h in own
    ]


def synchronize() -> None:
    """Waits for the GPU; raises errors of earlier launches."""
    if GPU:
        torch.cuda.synchronize()


def is_alive() -> bool:
    """Whether the GPU still works: after an illegal access every later call fails."""
    try:
        synchronize()
        return float(torch.ones(8, device=DEVICE).sum()) == 8.0
    except RuntimeError:
        return False


def free_memory() -> int | None:
    """Free bytes of the GPU's memory; None without a GPU."""
    return torch.cuda.mem_get_info()[0] if GPU else None


@contextlib.contextmanager
def waits_are_errors() -> Iterator[None]:
    """Makes every wait for the GPU raise inside the block."""
    if not GPU:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills torch's uninitialized tensors with NaN inside the block, to expose unwritten results.

    This covers allocations from Python only. For those of compiled code, freed memory is filled
    with NaN before.
    """
    if GPU:
        room = min(sized(1 << 30, 1 << 16), torch.cuda.mem_get_info()[0] // 4)
        del_later = [torch.full((room // 4,), torch.nan, device=DEVICE)]
        del_later += [torch.full((1 << 16,), torch.nan, device=DEVICE) for _ in range(64)]
        del del_later

    def filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(allocate)
        def allocate_and_fill(*args: Any, **kwargs: Any) -> Tensor:
            out = allocate(*args, **kwargs)
            if not out.is_floating_point() or out.layout is not torch.strided:
                return out
            with torch.no_grad():
                return out.fill_(torch.nan)

        return allocate_and_fill

    names = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided")]
    names += [(Tensor, "new_empty"), (Tensor, "new_empty_strided")]
    before = [getattr(where, name) for where, name in names]
    for (where, name), allocate in zip(names, before, strict=True):
        setattr(where, name, filled(allocate))
    try:
        yield
    finally:
        for (where, name), allocate in zip(names, before, strict=True):
            setattr(where, name, allocate)


Results = tuple[Tensor, ...]


def captured(call: Callable[[], Results]) -> Callable[[], Results]:
    """Captures the call as a CUDA graph; a replay writes the same results. Without a GPU: the call.

    The call first warms up on a side stream, as CUDA graphs require.
    """
    if not GPU:
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay() -> Results:
        graph.replay()
        return results

    return replay


def peak_beyond(call: Callable[[], object]) -> int:
    """Peak GPU bytes allocated by the call, beyond those before it; 0 without a GPU."""
    if not GPU:
        call()
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


def spin_up(seconds: float = 0.3) -> None:
    """Runs matrix products for a while, so that the GPU leaves its idle clock."""
    if not GPU or STUB:
        return
    x = torch.randn(4096, 4096, device=DEVICE, dtype=HALF)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(10):
            x @ x
        synchronize()


_FIELDS = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu",
          "power.draw", "power.limit")  # fmt: skip


def state() -> dict[str, str] | None:
    """Driver, clocks, temperature and power of the GPU from `nvidia-smi`; None without it."""
    if not GPU:
        return None
    query = f"--query-gpu={','.join(_FIELDS)}"
    try:
        output = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader", "--id=0"],
            capture_output=True, text=True, timeout=10, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in output.splitlines()[0].split(",")] if output else []
    return dict(zip(_FIELDS, values, strict=False))
