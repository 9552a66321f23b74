"""Runs calls in a process that may take little more memory, and again when it may take all."""

import ctypes
import gc
import re
import resource
from collections.abc import Callable
from pathlib import Path

from sparsering.ground.out_of_memory import ran_out_of_memory

_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2  # of mallopt


def data_bytes() -> int:
    """Returns what RLIMIT_DATA limits: all memory that is the process's own."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def ask_the_system_each_time() -> None:
    """Makes the allocator take and return memory at each request, so that a limit is met."""
    libc = ctypes.CDLL(None)
    for parameter, value in ((_MMAP_THRESHOLD, 1 << 14), (_TRIM_THRESHOLD, 0), (_TOP_PAD, 0)):
        libc.mallopt(parameter, value)


def runs_within(room: int, call: Callable[[], object]) -> bool:
    """Whether a call ends while the process may take `room` more bytes; other errors are raised."""
    gc.collect()
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + room, most))
    try:
        call()
        return True
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
