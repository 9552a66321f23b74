"""Tensors of a checkpoint in safetensors files, one file per rank.

    files = write_tensors(folder, step, tensors, ranks)  # writes this rank's file
    index = read_index(folder, files_of_all_ranks)  # reads the headers alone
    index.verify(ranks)
    index.load(targets)

Every rank has all tensors, and writes a part of them. Any number of ranks can read the files.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from ..files import file_size, replace_file
from .ranks import Ranks

MOST_HEADER_BYTES = 16 << 20  # about 100,000 tensors; parsing needs ten times this memory

Files = dict[str, dict[str, Any]]  # {file name: {"bytes": ..., "sha256": ...}}


class Kind(NamedTuple):
    """Shape of a tensor, and the name of its dtype in safetensors files."""

    shape: tuple[int, ...]
    dtype: str = "F32"

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, eq=False)
class TensorIndex:
    """Index of the tensors in a checkpoint's files; their values are not loaded."""

    kinds: dict[str, Kind]  # shape and dtype of each tensor, by name
    paths: dict[str, Path]  # the file of each tensor
    digests: dict[Path, str]  # sha256 of each file

    def verify(self, ranks: Ranks) -> None:
        """Raises ValueError if a file has changed; each rank checks a share of the files."""
        for path in sorted(self.digests)[ranks.rank :: ranks.world_size]:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != self.digests[path]:
                raise ValueError(f"the sha256 of {path.name} is not the one in checkpoint.json")

    def load(self, targets: Mapping[str, Tensor]) -> None:
        """Copies stored values into `targets`, by name."""
        with ExitStack() as stack:
            opened = cache(lambda path: stack.enter_context(_opened(path)))
            for name, x in targets.items():
                x.copy_(opened(self.paths[name]).get_tensor(name))


def write_tensors(folder: Path, step: int, tensors: Mapping[str, Tensor], ranks: Ranks) -> Files:
    """Writes this rank's part of the tensors to one file, whose name contains its hash.

    Returns: {file name: size and hash}; empty if this rank writes no tensors.
    """
    save = _safetensors().torch.save
    if not (share := _own_share(tensors, ranks)):
        return {}
    content = save(share)
    digest = hashlib.sha256(content).hexdigest()
    name = f"checkpoint-{step:06d}-{digest[:12]}.safetensors"
    replace_file(folder / name, content)
    return {name: {"bytes": len(content), "sha256": digest}}


def read_index(folder: Path, files: Files) -> TensorIndex:
    """Reads the headers of files and indexes their tensors; ValueError if files are malformed."""
    kinds: dict[str, Kind] = {}
    paths: dict[str, Path] = {}
    for file_name, about in files.items():
        path = folder / file_name
        if (size := file_size(path)) != about["bytes"]:
            raise ValueError(f"{file_name} has {size} bytes, but {about['bytes']} were written")
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - the file is not a mapping
                if name in paths:
                    raise ValueError(f"{file_name} has {name!r}, which another file has too")
                header = file.get_slice(name)
                kinds[name] = Kind(tuple(header.get_shape()), header.get_dtype())
                paths[name] = path
    digests = {folder / name: about["sha256"] for name, about in files.items()}
    return TensorIndex(kinds, paths, digests)


def _own_share(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Returns the tensors that this rank writes, by name: about as many bytes on every rank."""
    share: dict[str, Tensor] = {}
    share_bytes = [0] * ranks.world_size
    for name, x in tensors.items():
        writer = share_bytes.index(min(share_bytes))
        share_bytes[writer] += x.nbytes
        if writer == ranks.rank:
            share[name] = x.detach().contiguous()
    return share


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
