"""Tensors of a checkpoint in a safetensors file.

    files = write_tensors(folder, step, tensors)
    index = read_index(folder, files)  # compares hashes, and reads the headers alone
    load_tensors(index, targets)

Older versions wrote several files, one for each rank, which are read too.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from ..files import file_size, replace_file

MOST_HEADER_BYTES = 16 << 20  # about 100,000 tensors; parsing needs ten times this memory

Files = dict[str, dict[str, Any]]  # {file name: {"bytes": ..., "sha256": ...}}


class Kind(NamedTuple):
    """Shape of a tensor, and the name of its dtype in safetensors files."""

    shape: tuple[int, ...]
    dtype: str = "F32"

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


Index = dict[str, tuple[Kind, Path]]  # kind and file of each tensor, by name


def load_tensors(index: Index, targets: Mapping[str, Tensor]) -> None:
    """Copies stored values into `targets`, by name."""
    with ExitStack() as stack:
        opened = cache(lambda path: stack.enter_context(_opened(path)))
        for name, x in targets.items():
            x.copy_(opened(index[name][1]).get_tensor(name))


def write_tensors(folder: Path, step: int, tensors: Mapping[str, Tensor]) -> Files:
    """Writes the tensors to a file whose name contains its hash; returns its size and hash."""
    content = _safetensors().torch.save({name: x.contiguous() for name, x in tensors.items()})
    digest = hashlib.sha256(content).hexdigest()
    name = f"checkpoint-{step:06d}-{digest[:12]}.safetensors"
    replace_file(folder / name, content)
    return {name: {"bytes": len(content), "sha256": digest}}


def read_index(folder: Path, files: Files) -> Index:
    """Indexes the tensors of files by their headers; ValueError if files differ from `files`."""
    index: Index = {}
    for file_name, about in files.items():
        path = folder / file_name
        if (size := file_size(path)) != about["bytes"]:
            raise ValueError(f"{file_name} has {size} bytes, but {about['bytes']} were written")
        with open(path, "rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != about["sha256"]:
                raise ValueError(f"the sha256 of {file_name} is not the one in checkpoint.json")
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - the file is not a mapping
                if name in index:
                    raise ValueError(f"{file_name} has {name!r}, which another file has too")
                header = file.get_slice(name)
                index[name] = Kind(tuple(header.get_shape()), header.get_dtype()), path
    return index


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Opens a safetensors file without loading tensors; ValueError if the file is malformed."""
    safetensors = _safetensors()
    with open(path, "rb") as start:
        if (length := int.from_bytes(start.read(8), "little")) > MOST_HEADER_BYTES:
            raise ValueError(f"{path.name} has a header of {length} bytes, which is too long")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path.name} is not a safetensors file ({error})") from None


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("checkpoints need safetensors; pip install 'sparsering[cli]'") from None
    return safetensors
