"""Parts of the GPU benchmark that fail, die and hang, for the tests of how it runs parts."""

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.gpu import device, parts, running

MENDED = "GPU_BENCHMARK_MENDED"  # names a file in whose presence nothing goes wrong
SMOKES = "GPU_BENCHMARK_SMOKES"  # in its presence the smoke fails


def case(how: str) -> Iterator[dict[str, object]]:
    """A row, then what its name says, then another."""
    yield {"backend": how, "ms": 1.0, "least_ms": 1.0, "most_ms": 1.0}
    if how == "smokes" and SMOKES in os.environ:
        raise RuntimeError("what was timed is wrong: errors ['0.5']")
    if not Path(os.environ[MENDED]).exists():
        if how == "fails":
            raise RuntimeError("what was timed is wrong: errors ['0.5']")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "breaks":  # the GPU, as an illegal access does
            device.is_alive = lambda: False
            raise RuntimeError("an illegal memory access was encountered")
        if how == "hangs":
            time.sleep(1000)
    yield {"backend": how, "ms": 2.0, "least_ms": 1.0, "most_ms": 3.0}


def _part(*cases: str, timed: bool = True, bound: float = 60.0) -> parts.Part:
    return parts.Part(
        "odd", {name: partial(case, name) for name in cases}, float(len(cases)), bound, timed
    )


PARTS = {
    parts.SMOKE: _part("smokes"),
    "alone": _part("fine", "fails", "dies", "breaks", "hangs", "last"),
    "together": _part("one", "dies", "two", "fails", timed=False),
    "bounded": _part("first", "second", bound=-1.0),
}


def work(connection: Connection, folder: str) -> None:
    """The worker of these parts."""
    parts.PARTS = PARTS
    running.work(connection, folder)
