"""Parts of a sharded checkpoint: each rank writes what it has, and any number of ranks reads them.

    hashes = write_parts(folder, tensors, ranks)  # sha256 of each part, by the name of its file
    kinds = read_kinds(folder, hashes)            # checks the parts' headers against one another
    read_parts(folder, hashes, tensors)           # copies what this rank's tensors have

`torch.distributed.checkpoint` (DCP) plans which rank writes and reads what. Its usual storage keeps
the plan in a pickled file. So its storage for safetensors is used instead, where the header of each
part says at which offsets its tensors begin.
"""

import json
import math
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ..ground.files import unique_pairs
from .ranks import Ranks
from .tensor_files import hash_file, kind_of, opened_tensors, safetensors_or_hint

_OFFSETS = "DCP_SHARDING_INFO"  # in a part's header: JSON {name: {"saved_offsets": [...]}}


def write_parts(folder: Path, tensors: Mapping[str, DTensor], ranks: Ranks) -> dict[str, str]:
    """Writes each rank's parts of tensors to a new folder; all ranks must call it together.

    Returns, on all ranks: the sha256 of each part, by the name of its file.

    Raises, on all ranks: OSError or MemoryError if a rank cannot write, and the folder is removed;
        ValueError if the ranks do not write into one folder.
    """
    safetensors_or_hint()  # DCP would only say that a module is missing
    try:
        dcp.save(
            dict(tensors),
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
        )
    except CheckpointException as failed:
        if ranks.leads:
            shutil.rmtree(folder, ignore_errors=True)
        rank, (error, _) = next(iter(failed.failures.items()))
        reason = (isinstance(error, OSError) and error.strerror) or error
        kind = next(
            (kind for kind in (OSError, MemoryError) if isinstance(error, kind)), RuntimeError
        )
        raise kind(
            f"rank {rank}: {reason} while writing parts of a checkpoint into {folder}; what was "
            "there before is untouched"
        ) from None
    seen = ranks.gather(_parts_in(folder))
    if seen != seen[:1] * len(seen):
        raise ValueError(
            f"expected a folder that all ranks share, got parts of a checkpoint in {folder} that "
            "some ranks do not see; choose an --out on a file system that all machines mount"
        )
    own = seen[0][ranks.rank :: ranks.world_size]
    hashes = ranks.together(lambda: {name: hash_file(folder / name) for name in own})
    return dict(sorted(pair for part in ranks.gather(hashes) for pair in part.items()))


def read_kinds(folder: Path, hashes: Mapping[str, str]) -> dict[str, str]:
    """Returns dtype and shape of each tensor that the parts form together, without reading them.

    Raises ValueError if a part is missing or not one of these, or if a tensor has gaps.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise ValueError(f"its parts, the folder {folder.name}, are missing")
    if odd := set(_parts_in(folder)) ^ hashes.keys():
        names = ", ".join(sorted(odd)[:3])
        raise ValueError(f"parts in {folder.name} are missing, or are of another one: {names}")
    dtypes: dict[str, str] = {}
    shapes: dict[str, list[int]] = {}
    counts: dict[str, int] = {}
    for part in hashes:
        with opened_tensors(folder / part) as file:
            offsets = _offsets_of(part, file.metadata() or {})
            for name in file.keys():  # noqa: SIM118 - the file is not a mapping
                header = file.get_slice(name)
                sizes, first = header.get_shape(), offsets.get(name, [])
                if len(first) != len(sizes):
                    raise ValueError(f"{part} does not say where its part of {name} begins")
                ends = [start + size for start, size in zip(first, sizes, strict=True)]
                shape = shapes.setdefault(name, ends)
                dtype = dtypes.setdefault(name, header.get_dtype())
                if dtype != header.get_dtype() or len(shape) != len(ends):
                    raise ValueError(f"the parts of {name} are not of one tensor")
                shapes[name] = [max(pair) for pair in zip(shape, ends, strict=True)]
                counts[name] = counts.get(name, 0) + math.prod(sizes)
    for name, shape in shapes.items():
        if counts[name] != math.prod(shape):
            raise ValueError(f"the parts of {name} have gaps, or overlap")
    return {name: kind_of(shape, dtypes[name]) for name, shape in shapes.items()}


def read_parts(folder: Path, hashes: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Copies saved tensors into `tensors`, each whole or only the part that this rank holds.

    It reads only the files that this rank needs, and waits for no other rank. Raises ValueError if
    one of these files was changed.
    """
    reader = _CheckedReader(str(folder))
    reader.hashes = hashes
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP warns that each rank reads by itself
            dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
    except CheckpointException as failed:
        error, _ = next(iter(failed.failures.values()))
        raise error from None


class _CheckedReader(HuggingFaceStorageReader):
    """DCP's reader of parts; it compares the sha256 of each file that it needs before reading."""

    hashes: Mapping[str, str]  # by file name

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        needed = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        for path in map(Path, sorted(needed)):
            if hash_file(path) != self.hashes[path.name]:
                raise ValueError(f"the sha256 of {path.name} is not the one that was written")
        return super().read_data(plan, planner)


def _parts_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def _offsets_of(part: str, header: Mapping[str, str]) -> dict[str, list[int]]:
    """Returns where each tensor of a part begins, {name: [index, ...]}; ValueError if malformed."""
    try:
        places: Any = json.loads(header.get(_OFFSETS, ""), object_pairs_hook=unique_pairs)
        offsets = {name: place["saved_offsets"] for name, place in places.items()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{part} lacks the table of where its tensors begin, so it is damaged"
        ) from None
    for name, first in offsets.items():
        whole = isinstance(first, list) and all(type(n) is int and 0 <= n < 1 << 48 for n in first)
        if not whole:
            raise ValueError(f"{part} does not say where its part of {name} begins")
    return offsets
