"""Reads safetensors files that may come from a stranger, and hashes tensors and files.

    with opened_tensors(folder / "checkpoint.safetensors") as file:
        weight = file.get_tensor("model.norm.weight")

Only plain files with headers of a reasonable length are opened. Nothing is executed or unpickled.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from ..ground.buffers import add_bytes
from ..ground.commands import install
from ..ground.files import check_file

MOST_HEADER_BYTES = 16 << 20  # about 50,000 tensors; parsing needs ten times this memory


@contextmanager
def opened_tensors(path: Path) -> Iterator[Any]:
    """Opens a safetensors file of unknown origin safely, without reading tensors.

    Raises: FileNotFoundError; ValueError for a link, pipe or folder, or too long a header;
        SafetensorError if the file is no safetensors file; ImportError without safetensors.
    """
    safetensors = safetensors_or_hint()
    check_file(path)
    with open(path, "rb") as start:
        if (length := int.from_bytes(start.read(8), "little")) > MOST_HEADER_BYTES:
            raise ValueError(
                f"its header has {length:,} bytes, above the limit of {MOST_HEADER_BYTES:,}"
            )
    with safetensors.safe_open(path, framework="pt") as file:
        yield file


def kind_of(shape: Sequence[int], dtype: str = "F32") -> str:
    """Returns the dtype and shape of a tensor as one text, such as "F32 [256, 128]"."""
    return f"{dtype} {list(shape)}"


def hash_tensor(x: Tensor) -> str:
    """Returns the sha256 of a tensor's bytes in row-major order."""
    state = hashlib.sha256()
    add_bytes(state, x)
    return state.hexdigest()


def hash_file(path: Path) -> str:
    """Returns the sha256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def safetensors_or_hint() -> ModuleType:
    """Imports safetensors; the ImportError says how to install it and numpy."""
    try:
        if find_spec("numpy") is None:
            raise ImportError
        import safetensors.torch
    except ImportError:
        raise ImportError(f"checkpoints need safetensors; {install('cli')}") from None
    return safetensors
