"""Results of `sparsering tune` on disk: one file for each processor and kernel.

Also the processor's name, and the error that results of a tuned kernel may have.
"""

import json
import os
import platform
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import cache_folder, opened, replace_file
from ..layouts.compile import check_block_size
from ..patterns.arguments import shortened

Choices = dict[str, dict[str, Any]]
"""Two tables, `configs` of kernels and `block_sizes` of patterns; keys name the measured case."""

_MOST_BYTES = 4 << 20

AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Upper bound of `error_of` for the results of a candidate, by dtype."""


def processor_name() -> str:
    """Returns the name of this machine's processor, or its architecture if the name is unknown."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def file_of(kind: str, processor: str, version: str) -> Path:
    """Returns the file of measurements of a kind (a kernel) on a processor; it need not exist."""
    plain = "".join(c if c.isalnum() else "-" for c in processor)
    return cache_folder() / f"{kind}-{plain}-{version}.json"


def read(path: Path) -> Choices:
    """Returns the measured choices of a file; empty tables, with a warning, if it is malformed."""
    if not os.path.lexists(path):
        return {"configs": {}, "block_sizes": {}}
    try:
        with opened(path, _MOST_BYTES) as file:
            return _checked(json.loads(file.read(), object_pairs_hook=_without_duplicates))
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(
            f"sparsering ignores {path}, which is not as `sparsering tune` writes it "
            f"({shortened(str(error))}); delete it, or run `sparsering tune` again",
            stacklevel=2,
        )
        return {"configs": {}, "block_sizes": {}}


def _checked(found: Any) -> Choices:
    if not isinstance(found, dict) or set(found) != {"configs", "block_sizes"}:
        raise ValueError("an object of configs and block_sizes was expected")
    if not all(isinstance(of_kind, dict) for of_kind in found.values()):
        raise ValueError("configs and block_sizes must be objects")
    for size in found["block_sizes"].values():
        check_block_size(size)
    for key, config in found["configs"].items():
        if not _is_config(config):
            raise ValueError(f"no config of a kernel under {shortened(repr(key))}")
    return found


def _is_config(config: object) -> bool:
    """True for a valid Triton `Config`: rows, streamed, warps, stages, and at most five more."""
    if not isinstance(config, list) or not 4 <= len(config) <= 9:
        return False
    if not all(type(x) in (int, bool) and 0 <= x <= 512 for x in config):
        return False
    rows, streamed, warps, stages = config[:4]
    powers = all(x & (x - 1) == 0 for x in (rows, streamed, warps))
    return powers and min(rows, streamed) >= 16 and 1 <= warps <= 32 and 1 <= stages <= 16


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def add(path: Path, configs: dict[str, Any], block_sizes: dict[str, int]) -> Path:
    """Adds measured choices to those on disk, in one step; returns the file."""
    known = read(path)
    known["configs"] |= configs
    known["block_sizes"] |= block_sizes
    replace_file(path, json.dumps(known, indent=1).encode())
    return path


def block_key(expression: str, like: Tensor) -> str:
    """Returns the key of a measured block size: expression, dtype and head dim."""
    return f"{expression} {str(like.dtype).removeprefix('torch.')} head dim {like.shape[-1]}"


def error_of(got: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Returns the largest relative error of several results: norm of the difference over norm.

    Only finite expected numbers count; infinite if the two are finite in different places.
    """
    return max(_error(a, b) for a, b in zip(got, expected, strict=True))


def _error(got: Tensor, expected: Tensor) -> float:
    finite = expected.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return torch.inf
    difference = (got.float() - expected.float())[finite].norm()
    return float(difference / expected.float()[finite].norm().clamp(min=1e-30))
