"""Tensors of a checkpoint in safetensors files, one file per rank.

    files = write_tensors(folder, step, tensors, ranks)  # writes this rank's file
    index = read_index(folder, files_of_all_ranks)  # reads the headers alone
    index.verify(ranks)
    index.load(targets)

A whole tensor is stored under its name. A tensor that FSDP2 shards is stored as ranges of rows,
each under a name such as `model.norm.weight[64:128]`. So the files describe themselves, and any
number of ranks can each read the rows that they need.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ..files import file_size, replace_file
from .ranks import Ranks

MOST_HEADER_BYTES = 16 << 20  # about 100,000 tensors; parsing needs ten times this memory

Files = dict[str, dict[str, Any]]  # {file name: {"bytes": ..., "sha256": ...}}

_ROWS = re.compile(r"(.*)\[([0-9]{1,18}):([0-9]{1,18})\]", re.DOTALL)


class Kind(NamedTuple):
    """Shape of a tensor, and the name of its dtype in safetensors files."""

    shape: tuple[int, ...]
    dtype: str = "F32"

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class StoredRows(NamedTuple):
    """Locates rows `first:stop` of a tensor, stored in the file `path` under the name `key`."""

    path: Path
    key: str
    first: int
    stop: int
    kind: Kind


@dataclass(frozen=True, eq=False)
class TensorIndex:
    """Index of the tensors in a checkpoint's files; their values are not loaded."""

    kinds: dict[str, Kind]  # shape and dtype of each whole tensor, by name
    rows: dict[str, list[StoredRows]]  # the stored rows of each tensor, in order
    digests: dict[Path, str]  # sha256 of each file

    def verify(self, ranks: Ranks) -> None:
        """Raises ValueError if a file has changed; each rank checks a share of the files."""
        for path in sorted(self.digests)[ranks.rank :: ranks.world_size]:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != self.digests[path]:
                raise ValueError(f"the sha256 of {path.name} is not the one in checkpoint.json")

    def load(self, targets: Mapping[str, Tensor]) -> None:
        """Copies stored values into `targets`, by name; a sharded tensor gets this rank's rows."""
        with ExitStack() as stack:
            opened = cache(lambda path: stack.enter_context(_opened(path)))
            for name, x in targets.items():
                local, start = _own_rows(x)
                for rows in self.rows[name]:
                    low = max(rows.first, start)
                    high = min(rows.stop, start + (len(local) if local.shape else 1))
                    if low >= high:
                        continue
                    file = opened(rows.path)
                    if local.shape:
                        values = file.get_slice(rows.key)[low - rows.first : high - rows.first]
                        local[low - start : high - start].copy_(values)
                    else:
                        local.copy_(file.get_tensor(rows.key))


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
    index: dict[str, list[StoredRows]] = {}
    for file_name, about in files.items():
        path = folder / file_name
        if (size := file_size(path)) != about["bytes"]:
            raise ValueError(f"{file_name} has {size} bytes, but {about['bytes']} were written")
        with _opened(path) as file:
            for key in file.keys():  # noqa: SIM118 - the file is not a mapping
                header = file.get_slice(key)
                name, rows = _stored_rows(path, key, header.get_shape(), header.get_dtype())
                index.setdefault(name, []).append(rows)
    kinds = {name: _whole_kind(name, rows) for name, rows in index.items()}
    digests = {folder / name: about["sha256"] for name, about in files.items()}
    return TensorIndex(kinds, index, digests)


def _stored_rows(path: Path, key: str, shape: list[int], dtype: str) -> tuple[str, StoredRows]:
    kind = Kind(tuple(shape), dtype)
    if (match := _ROWS.fullmatch(key)) is None:
        return key, StoredRows(path, key, 0, shape[0] if shape else 1, kind)
    first, stop = int(match[2]), int(match[3])
    if not shape or stop - first != shape[0]:
        raise ValueError(
            f"{path.name} has {key!r} of shape {shape}, which has another number of rows"
        )
    return match[1], StoredRows(path, key, first, stop, kind)


def _whole_kind(name: str, rows: list[StoredRows]) -> Kind:
    """Sorts `rows`; returns the whole tensor's shape and dtype. ValueError for gaps or overlaps."""
    rows.sort(key=lambda part: (part.first, part.stop))
    kind, stop = rows[0].kind, 0
    if len(rows) == 1 and rows[0].key == name:
        return kind
    for part in rows:
        alike = (part.kind.shape[1:], part.kind.dtype) == (kind.shape[1:], kind.dtype)
        if part.key == name or part.first != stop or not alike:
            raise ValueError(f"{part.path.name} has {part.key!r}, which leaves a gap or overlaps")
        stop = part.stop
    return Kind((stop, *kind.shape[1:]), kind.dtype)


def _own_share(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Returns the tensors that this rank writes, by name: a part along "sp", rows along "dp"."""
    share: dict[str, Tensor] = {}
    share_bytes = [0] * ranks.size("sp")
    for name, x in tensors.items():
        local, first = _own_rows(x)
        if isinstance(x, DTensor):
            name = f"{name}[{first}:{first + len(local)}]"
        elif ranks.place_along("dp") > 0:
            continue
        if not local.numel():
            continue
        writer = share_bytes.index(min(share_bytes))
        share_bytes[writer] += local.nbytes
        if writer == ranks.place_along("sp"):
            share[name] = local.detach().contiguous()
    return share


def _own_rows(x: Tensor) -> tuple[Tensor, int]:
    """Returns this rank's rows of a tensor, and the index of the first row."""
    if not isinstance(x, DTensor):
        return x, 0
    assert tuple(x.placements) == (Shard(0),), x.placements
    rows, local = len(x), x.to_local()
    rows_per_rank = -(-rows // x.device_mesh.size())
    first = min(rows_per_rank * x.device_mesh.get_local_rank(), rows)
    assert len(local) == min(rows_per_rank, rows - first)
    return local, first


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
