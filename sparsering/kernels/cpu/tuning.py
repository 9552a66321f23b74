"""Block sizes that `sparsering tune` measured for the compiled kernel on this processor.

A call never measures anything: its time, and its bits, do not depend on chance.
"""

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from .. import tuned


def block_size(expression: str, like: Tensor) -> int | None:
    """The measured block size of a pattern on tensors like this one, or None."""
    sizes = _tuned()["block_sizes"]
    return sizes.get(tuned.block_key(expression, like)) if sizes else None


def keep(expression: str, like: Tensor, size: int) -> Path:
    """Adds a measured block size to those on disk; returns the file."""
    key = tuned.block_key(expression, like)
    path = tuned.add(_path(), {}, {key: size})
    _tuned.cache_clear()
    return path


def _path() -> Path:
    return tuned.file_of("cpu", _processor(), torch.__version__)


@cache
def _tuned() -> tuned.Choices:
    """What was measured on this processor: read once."""
    return tuned.read(_path())


def _processor() -> str:
    """The name of the processor, and what of it torch and the kernel use."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name} {torch.backends.cpu.get_cpu_capability()}"
