"""Reads and writes the results of `sparsering tune`: one file for each processor and backend."""

import json
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ground.arguments import shortened
from ..ground.commands import sparsering
from ..ground.files import cache_folder, opened, replace_file, unique_pairs
from ..layouts.compile import checked_block_size

Choices = dict[str, dict[str, Any]]
"""Content of a file: `configs` by kernel, and `block_sizes` by pattern."""

_MOST_BYTES = 4 << 20


class TuningFile:
    """The measured block sizes and configs of one backend; each device has a file, read once."""

    def __init__(self, path: Callable[[torch.device], Path]) -> None:
        self.path = path
        self._choices: dict[torch.device, Choices] = {}

    def choices(self, device: torch.device) -> Choices:
        if device not in self._choices:
            self._choices[device] = read(self.path(device))
        return self._choices[device]

    def block_size(self, expression: str, like: Tensor) -> int | None:
        """Returns the measured block size of a pattern for tensors like this one, or None."""
        sizes = self.choices(like.device)["block_sizes"]
        return sizes.get(_key(expression, like)) if sizes else None

    def keep(self, configs: dict[str, Any], block_sizes: dict[str, int], like: Tensor) -> Path:
        """Adds configs by `config_key` and block sizes by expression to the file; returns it."""
        path = self.path(like.device)
        choices = read(path)
        choices["configs"] |= configs
        choices["block_sizes"] |= {_key(x, like): size for x, size in block_sizes.items()}
        replace_file(path, json.dumps(choices, indent=1).encode())
        self.forget()
        return path

    def forget(self) -> None:
        """Makes the next call read the file again."""
        self._choices.clear()


def _key(expression: str, like: Tensor) -> str:
    return f"{expression} {str(like.dtype).removeprefix('torch.')} head dim {like.shape[-1]}"


def processor_name() -> str:
    """Returns the name of this machine's processor, or its architecture if that is unknown."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def file_of(kind: str, processor: str, version: str) -> Path:
    """Returns where the results for a kind of kernel and a processor are stored.

    The file need not exist. `kind` is the backend.
    """
    plain = "".join(c if c.isalnum() else "-" for c in processor)
    return cache_folder() / f"{kind}-{plain}-{version}.json"


def read(path: Path) -> Choices:
    """Returns a file's choices; none if it is missing, or malformed (then with a warning)."""
    try:
        if os.path.lexists(path):
            with opened(path, _MOST_BYTES) as file:
                return _checked(json.loads(file.read(), object_pairs_hook=unique_pairs))
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(
            f"sparsering ignores {path}: tuning did not write this content "
            f"({shortened(str(error))}); delete it, or run `{sparsering('tune')}` again",
            stacklevel=2,
        )
    return {"configs": {}, "block_sizes": {}}


def _checked(content: Any) -> Choices:
    """Returns the content of a file; ValueError if it is not what `sparsering tune` writes."""
    if not isinstance(content, dict) or set(content) != {"configs", "block_sizes"}:
        raise ValueError("expected a JSON object with the keys configs and block_sizes")
    if not all(isinstance(table, dict) for table in content.values()):
        raise ValueError("expected JSON objects as values of configs and block_sizes")
    for size in content["block_sizes"].values():
        checked_block_size(size)
    for key, config in content["configs"].items():
        if not _is_config(config):
            raise ValueError(f"the config of {shortened(repr(key))} is not valid")
    return content


def _is_config(config: object) -> bool:
    """True for a valid Triton `Config`: rows, streamed, warps, stages, and up to five options."""
    if not isinstance(config, list) or not 4 <= len(config) <= 9:
        return False
    if not all(type(x) in (int, bool) and 0 <= x <= 512 for x in config):
        return False
    rows, streamed, warps, stages = config[:4]
    powers = all(x & (x - 1) == 0 for x in (rows, streamed, warps))
    return powers and min(rows, streamed) >= 16 and 1 <= warps <= 32 and 1 <= stages <= 16
