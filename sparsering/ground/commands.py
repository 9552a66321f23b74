"""Finds what a user must type to run a program of this Python, for messages.

program("pip", "pip")                        # "pip", or "/path/to/python -m pip"
program("torchrun", "torch.distributed.run")
"""

import os
import shlex
import shutil
import sys
from pathlib import Path


def program(name: str, module: str) -> str:
    """Returns `name` if PATH finds this Python's own program of that name, else `python -m module`.

    A virtual environment that is not activated has its programs beside its Python, but not on PATH.
    Then `name` would run another Python's program, or none.
    """
    own, found = Path(sys.executable).parent / name, shutil.which(name)
    if found is not None and own.exists() and os.path.samefile(found, own):
        return name
    return f"{shlex.quote(sys.executable)} -m {module}"


def install(extra: str) -> str:
    """Returns the command that installs an extra of this package, for example "hf"."""
    return f"{program('pip', 'pip')} install 'sparsering[{extra}]'"


def sparsering(arguments: str) -> str:
    """Returns the shell command `sparsering ARGUMENTS`."""
    return f"{program('sparsering', 'sparsering')} {arguments}"


def over_processes(arguments: str, number: int = 4) -> str:
    """Returns the shell command that runs `sparsering ARGUMENTS` in `number` processes."""
    torchrun = program("torchrun", "torch.distributed.run")
    return f"{torchrun} --standalone --nproc-per-node {number} -m sparsering {arguments}"
