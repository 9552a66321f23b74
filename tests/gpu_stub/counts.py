"""Counts of what a call asks of a device, and the errors of a capture."""

import contextlib
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_HERE = str(Path(__file__).parent)
_TORCH = os.path.dirname(torch.__file__)


@dataclass(frozen=True)
class Launch:
    """A Triton kernel that the driver accepted; `shared` is in bytes."""

    kernel: str
    programs: int
    warps: int
    shared: int


@dataclass(eq=False)
class Counts:
    """Holds the launches and waits in `counted()`; places are "file:line" of the code that asked.

    Attributes:
        launches: Triton kernels.
        operators: torch operators that launch a kernel or a copy, by (name, place).
        compiles: names of Triton kernels that were bound in a new way, even if read from disk.
        syncs: where the host waits for the device.
        transfers: copies between host and device.
    """

    launches: list[Launch] = field(default_factory=list)
    operators: Counter[tuple[str, str]] = field(default_factory=Counter)
    compiles: list[str] = field(default_factory=list)
    syncs: list[str] = field(default_factory=list)
    transfers: list[str] = field(default_factory=list)
    allocated: list[tuple[StorageWeakRef, str]] = field(default_factory=list, repr=False)

    @property
    def triton(self) -> int:
        return len(self.launches)

    @property
    def torch(self) -> int:
        return self.operators.total()

    def surviving(self) -> list[str]:
        """Places that allocated device memory which something still refers to.

        A thread of autograd may let go of its last gradients a moment after `grad` returned.
        """
        end = time.monotonic() + 2
        while places := [place for memory, place in self.allocated if not memory.expired()]:
            if time.monotonic() > end:
                break
            gc.collect()
            time.sleep(0.01)
        return places


_open: list[Counts] = []
_capture: list[Counts] = []
_forbidden: list[bool] = []  # of `torch.cuda.set_sync_debug_mode("error")`


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Counts what happens inside."""
    counts = Counts()
    _open.append(counts)
    try:
        yield counts
    finally:
        _open.remove(counts)


@contextlib.contextmanager
def capturing() -> Iterator[Counts]:
    """Counts as if a CUDA graph recorded what happens inside: to wait for the device is an error.

    Afterwards `surviving()` lists memory that only a replay of the graph would fill.
    """
    with counted() as counts:
        _capture.append(counts)
        try:
            yield counts
        finally:
            _capture.remove(counts)


def is_capturing() -> bool:
    return bool(_capture)


def waits_raise(forbidden: bool) -> None:
    """Makes a wait for the device an error, or permits it again."""
    _forbidden[:] = [True] if forbidden else []


def place() -> str:
    """File and line of the innermost code that is neither torch's, nor Triton's, nor the stub's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_HERE, _TORCH)) and "/site-packages/triton/" not in name:
            return f"{'/'.join(name.split('/')[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def note_launch(launch: Launch) -> None:
    for counts in _open:
        counts.launches.append(launch)


def note_compile(kernel: str) -> None:
    for counts in _open:
        counts.compiles.append(kernel)


def note_operator(name: str) -> None:
    for counts in _open:
        counts.operators[name, place()] += 1


def note_memory(x: Tensor) -> None:
    for counts in _open if x.numel() else ():
        counts.allocated.append((StorageWeakRef(x.untyped_storage()), place()))


def note_sync(what: str) -> None:
    if _capture:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what} at {place()}")
    if _forbidden:
        raise RuntimeError(f"called a synchronizing CUDA operation: {what} at {place()}")
    for counts in _open:
        counts.syncs.append(f"{what} at {place()}")


def note_transfer(what: str, *, waits: bool) -> None:
    for counts in _open:
        counts.transfers.append(f"{what} at {place()}")
    if waits:
        note_sync(what)
