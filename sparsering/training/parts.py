"""A checkpoint's tensors as many processes write and read them, by torch.distributed.checkpoint.

    name, digests = write_parts(folder, step, tensors)
    read_parts(folder / name, digests).fill(room)

Each rank writes and reads what it has; which ranks those are, and how many, may change in between.
"""

import hashlib
import secrets
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def write_parts(folder: Path, step: int, tensors: dict[str, Tensor]) -> tuple[str, dict[str, str]]:
    """Writes a new folder in `folder`, which all ranks can see; every rank calls it.

    Returns: its name and, on rank 0, the sha256 of each file in it.

    Raises: OSError where a rank cannot write; on all ranks.
    """
    names: list[str | OSError] = [f"checkpoint-{step:06d}-{secrets.token_hex(6)}"]
    if dist.get_rank() == 0:
        try:
            (folder / str(names[0])).mkdir(parents=True)
        except OSError as error:
            names[0] = error
    dist.broadcast_object_list(names, src=0)
    if isinstance(names[0], OSError):
        raise names[0]
    path = folder / names[0]
    try:
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(path))
    except dcp.CheckpointException as error:
        reasons = [str(reason) for reason, _ in error.failures.values()]
        raise OSError(
            f"could not write the parts of {path}: {'; '.join(dict.fromkeys(reasons))}; the "
            "checkpoint before it is untouched"
        ) from error
    own = {file.name: _sha256(file) for file in path.glob(f"__{dist.get_rank()}_*")}
    found: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.gather_object(own, found if dist.get_rank() == 0 else None)
    if dist.get_rank() == 0:
        found.append({".metadata": _sha256(path / ".metadata")})
    return names[0], {name: digest for part in found for name, digest in part.items()}


@dataclass(frozen=True, eq=False)
class Parts:
    """The tensors of such a folder; those of which a process has a part are read in part."""

    path: Path
    shapes: dict[str, torch.Size]

    def fill(self, room: dict[str, Tensor]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
            dcp.load(dict(room), storage_reader=dcp.FileSystemReader(self.path))


def read_parts(path: Path, digests: dict[str, str]) -> Parts:
    """Verifies a folder, of several ranks each some files, and reads what is in it.

    Raises: FileNotFoundError, ValueError where a file is missing or not as it was written.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = sorted(digests.keys() - {".metadata"})[rank::world]
    for name in (".metadata", *own):
        if _sha256(path / name) != digests.get(name):
            raise ValueError(f"{path.name}/{name} with another sha256 than when it was written")
    metadata = dcp.FileSystemReader(path).read_metadata()
    stored = metadata.state_dict_metadata
    return Parts(
        path, {n: x.size for n, x in stored.items() if isinstance(x, TensorStorageMetadata)}
    )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
