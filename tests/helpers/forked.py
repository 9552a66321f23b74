"""Processes of their own, forked from one that has imported torch and the library and used neither.

Importing takes a fresh process longer than most tests; one is started for all of them. Those that
are about importing, or about what the environment says at that time, start a fresh one.
"""

import multiprocessing
import os
import subprocess
import tempfile
from pathlib import Path

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        *("torch.distributed.fsdp", "sparsering.training", "hypothesis"),
        "transformers_models",  # of tests/integrations, if they run
    ]
)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code as a script, with further variables in its environment."""
    with tempfile.TemporaryDirectory() as folder:
        paths = f"{folder}/out", f"{folder}/error"
        process = FORKED.Process(target=_execute, args=(code, environment, paths))
        process.start()
        process.join()
        out, error = (Path(path).read_text() for path in paths)
    return subprocess.CompletedProcess(code, process.exitcode, out, error)


def _execute(code: str, environment: dict[str, str], paths: tuple[str, str]) -> None:
    os.environ.update(environment)
    for number, path in enumerate(paths, 1):
        with open(path, "w") as file:
            os.dup2(file.fileno(), number)
    exec(code, {"__name__": "__main__"})
