"""What `sparsering tune` measured, as it lies on disk: one file for each processor and kernel."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from ..files import cache_folder, replace_file

Choices = dict[str, dict[str, Any]]
"""`configs` of kernels and `block_sizes` of patterns, each by what it was measured for."""


def file_of(kernel: str, processor: str, version: str) -> Path:
    """Where the choices for a kernel on a processor are kept; it need not exist."""
    plain = "".join(c if c.isalnum() else "-" for c in processor)
    return cache_folder() / f"{kernel}-{plain}-{version}.json"


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
