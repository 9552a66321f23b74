"""Reads the peak memory of this process."""

import sys
from contextlib import suppress


def peak_memory_bytes() -> int | None:
    """Returns this process's largest resident memory so far; None if the system does not say.

    On Linux `getrusage` would also count the process that forked this one; VmHWM does not.
    """
    with suppress(OSError, StopIteration), open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
