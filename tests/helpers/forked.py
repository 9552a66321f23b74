"""Processes of their own, forked from one that has imported torch and the library and used neither.

Importing takes a fresh process longer than most tests; one is started for all of them. Those that
are about importing, or about what the environment says at that time, start a fresh one.
"""

import atexit
import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

IMPORTED = ("torch.distributed.fsdp", "sparsering.training", "hypothesis")
WITH_MODELS = ("transformers_models", "parallel_cases", "sharing_families")  # of tests/integrations
_own: list[int | None] = [None]  # the id of the process that this module has started


def forking() -> ForkServerContext:
    """Returns the context whose processes are forked, from one that runs and has imported all.

    That one is started with this process's `sys.path`: Python 3.11 does not hand it over, and what
    is not found is not imported, without a word.
    """
    context = multiprocessing.get_context("forkserver")
    more = WITH_MODELS if any(name in sys.modules for name in WITH_MODELS) else ()
    context.set_forkserver_preload([*IMPORTED, *more])
    server: Any = forkserver._forkserver
    if server._forkserver_pid not in (None, *_own):  # a benchmark's, which has imported less
        server._stop()
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    _own[0] = server._forkserver_pid
    return context


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code as a script, with further variables in its environment."""
    with tempfile.TemporaryDirectory() as folder:
        paths = f"{folder}/out", f"{folder}/error"
        process = forking().Process(target=_execute, args=(code, environment, paths))
        process.start()
        process.join()
        out, error = (Path(path).read_text() for path in paths)
    return subprocess.CompletedProcess(code, process.exitcode, out, error)


def _execute(code: str, environment: dict[str, str], paths: tuple[str, str]) -> None:
    gc.freeze()  # what was imported: no search for garbage looks through it
    os.environ.update(environment)
    tempfile.tempdir = None  # which was found where imports ran
    for number, path in enumerate(paths, 1):
        with open(path, "w") as file:
            os.dup2(file.fileno(), number)
    try:
        exec(code, {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()  # as at the end of a script; a forked process would leave them out
