"""What `sparsering tune` measured, as it lies on disk: one file for each processor and kernel.

And what its measurements share: the processor's name, and how far results may differ.
"""

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import cache_folder, replace_file

Choices = dict[str, dict[str, Any]]
"""`configs` of kernels and `block_sizes` of patterns, each by what it was measured for."""

AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""The largest `error_of` that results of a candidate may have."""


def processor_name() -> str:
    """The name of this machine's processor, as far as it is told."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def file_of(kind: str, processor: str, version: str) -> Path:
    """Where what was measured of a kind (a kernel) on a processor is kept; it need not exist."""
    plain = "".join(c if c.isalnum() else "-" for c in processor)
    return cache_folder() / f"{kind}-{plain}-{version}.json"


def read(path: Path) -> Choices:
    """What was measured so far."""
    if path.exists():
        found: Choices = json.loads(path.read_text())
        return found
    return {"configs": {}, "block_sizes": {}}


def add(path: Path, configs: dict[str, Any], block_sizes: dict[str, int]) -> Path:
    """Adds measured choices to those on disk, in one step; returns the file."""
    known = read(path)
    known["configs"] |= configs
    known["block_sizes"] |= block_sizes
    replace_file(path, json.dumps(known, indent=1).encode())
    return path


def block_key(expression: str, like: Tensor) -> str:
    """What a measured block size is kept under."""
    return f"{expression} {str(like.dtype).removeprefix('torch.')} head dim {like.shape[-1]}"


def error_of(got: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest of some results: the norm of the difference over that of what is expected.

    On what is finite there; infinite where other numbers are finite.
    """
    return max(_error(a, b) for a, b in zip(got, expected, strict=True))


def _error(got: Tensor, expected: Tensor) -> float:
    finite = expected.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return torch.inf
    difference = (got.float() - expected.float())[finite].norm()
    return float(difference / expected.float()[finite].norm().clamp(min=1e-30))
