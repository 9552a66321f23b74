"""Checkpoints: `checkpoint.json`, which names one safetensors file beside it by its hash.

    save_checkpoint(folder, model, optimizer, step=100, recipe=recipe, fingerprint=text.fingerprint)
    checkpoint = load_checkpoint(folder)

The tensors are written under a new name first; the rename of `checkpoint.json` over the old one is
the moment at which the new checkpoint replaces the old. Whatever happens before it leaves the old
pair whole. Where several processes train, `parts` writes a folder of files in place of the one;
each kind is read by one process and by many.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..files import replace_file
from ..models.longnet import LongNetLM
from .parts import read_parts, write_parts
from .recipe import Recipe

FORMAT = "sparsering checkpoint 1"


class Content(Protocol):
    """The tensors of a checkpoint, wherever they are."""

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Of all tensors, by name."""

    def fill(self, room: dict[str, Tensor]) -> None:
        """Overwrites tensors of these names and shapes, whole or sharded ones."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A run as it was after `step` steps.

    Attributes:
        folder: where it was read.
        step: optimizer steps done.
        command: which subcommand wrote it, "train" or "demo".
        recipe: what the run depends on.
        fingerprint: of the text.
        content: weights `model.*`, optimizer state `optimizer.*` and, from one process, torch's
            random state `rng`.
    """

    folder: Path
    step: int
    command: str
    recipe: Recipe
    fingerprint: str
    content: Content

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Puts weights, optimizer state and torch's random state back.

        Raises: ValueError where the tensors are not those of this model.
        """
        shapes = self.content.shapes
        parameters = dict(model.named_parameters())
        found = {name for name in shapes if name.startswith("model.")}
        wanted = {f"model.{name}" for name in parameters}
        if odd := found ^ wanted:
            raise _damaged(self.folder, f"weights of another model ({', '.join(sorted(odd)[:3])})")
        room: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            room[f"model.{name}"] = parameter.detach()
            if (shape := shapes[f"model.{name}"]) != parameter.shape:
                got, expected = tuple(shape), tuple(parameter.shape)
                raise _damaged(self.folder, f"{name} of shape {got}, not {expected}")
            if optimizer is not None:
                prefix = f"optimizer.{name}."
                state = {
                    key.removeprefix(prefix): torch.zeros_like(parameter.detach())
                    if shape == parameter.shape
                    else torch.zeros(shape, device=parameter.device)
                    for key, shape in shapes.items()
                    if key.startswith(prefix)
                }
                room |= {prefix + key: value for key, value in state.items()}
                optimizer.state[parameter] = state
        if optimizer is not None and "rng" in shapes:
            room["rng"] = torch.get_rng_state()
        self.content.fill(room)
        if "rng" in room:
            torch.set_rng_state(room["rng"])


@dataclass(frozen=True, eq=False)
class Whole:
    """The tensors of one file, in memory."""

    tensors: dict[str, Tensor]

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def fill(self, room: dict[str, Tensor]) -> None:
        for name, x in room.items():
            tensor = self.tensors[name]
            if isinstance(x, DTensor):
                tensor = distribute_tensor(
                    tensor.to(x.device), x.device_mesh, x.placements, src_data_rank=None
                )
            x.copy_(tensor)


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    recipe: Recipe,
    fingerprint: str,
    command: str,
) -> None:
    """Replaces the folder's checkpoint as a whole.

    Raises: OSError where it cannot be written, with the old one untouched; ImportError without
    safetensors.
    """
    tensors = {"rng": torch.get_rng_state(), **named_tensors(model, optimizer)}
    content = _safetensors().save(tensors)
    digest = hashlib.sha256(content).hexdigest()
    name = f"checkpoint-{step:06d}-{digest[:12]}.safetensors"
    about = {
        **describe(step=step, recipe=recipe, fingerprint=fingerprint, command=command),
        "rng": "windows are drawn from (recipe.seed, step); torch's state is the tensor `rng`",
        "tensors": {"file": name, "bytes": len(content), "sha256": digest},
    }
    replace_file(folder / name, content)
    point_to(folder, name, about)


def save_checkpoint_of_ranks(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    recipe: Recipe,
    fingerprint: str,
    command: str,
    launch: str | None,
) -> None:
    """As `save_checkpoint`, where every rank calls it and writes what it has.

    Args:
        launch: noted, so that processes started again know their own checkpoint.

    Raises: OSError where a rank cannot write its part, with the old checkpoint untouched.
    """
    name, digests = write_parts(folder, step, named_tensors(model, optimizer))
    if dist.get_rank() == 0:
        about = {
            **describe(step=step, recipe=recipe, fingerprint=fingerprint, command=command),
            "launch": launch,
            "tensors": {"folder": name, "files": digests},
        }
        point_to(folder, name, about)


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights `model.*` and optimizer state `optimizer.*`, as they are on this process."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def describe(*, step: int, recipe: Recipe, fingerprint: str, command: str) -> dict[str, Any]:
    """What `checkpoint.json` says of a run, beside where its tensors are."""
    return {
        "format": FORMAT,
        "command": command,
        "step": step,
        "recipe": recipe.to_json(),
        "fingerprint": fingerprint,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def point_to(folder: Path, name: str, about: dict[str, Any]) -> None:
    """Makes the checkpoint whose tensors lie in `name` the folder's, and removes all others.

    Raises: OSError where that cannot be written; then the new one is removed.
    """
    try:
        replace_file(folder / "checkpoint.json", json.dumps(about, indent=2).encode() + b"\n")
    except BaseException:
        if not _names(folder, name):
            _remove(folder / name)
        raise
    for old in (*folder.glob("checkpoint-*"), *folder.glob(".checkpoint*.part")):
        if old.name != name:  # the replaced one, and what a killed process left
            _remove(old)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads and verifies a checkpoint.

    Raises: FileNotFoundError where there is none; ValueError where it is damaged or not one of
    ours; ImportError without safetensors.
    """
    about = read_about(folder)
    try:
        tensors = about["tensors"]
        name = tensors["folder"] if "folder" in tensors else tensors["file"]
        step, command, fingerprint = about["step"], about["command"], about["fingerprint"]
        recipe = Recipe.from_json(about["recipe"])
        digests = tensors["files"] if "folder" in tensors else {name: tensors["sha256"]}
        if not all(Path(x).name == x for x in (name, *digests)) or not isinstance(step, int):
            raise ValueError(f"unusable values {name!r}, {step!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(folder, f"checkpoint.json with {type(error).__name__}: {error}") from None
    content: Content
    try:
        if "folder" in tensors:
            content = read_parts(folder / name, digests)
        else:
            content = Whole(_read_whole(folder / name, digests[name]))
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise _damaged(folder, f"no {missing}, which checkpoint.json names") from None
    except ValueError as error:
        raise _damaged(folder, str(error)) from None
    return Checkpoint(folder, step, command, recipe, fingerprint, content)


def _read_whole(path: Path, digest: str) -> dict[str, Tensor]:
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"{path.name} whose content has another sha256 than when it was written")
    return _safetensors().load(content)


def read_about(folder: Path) -> dict[str, Any]:
    """The content of `checkpoint.json`. Raises as `load_checkpoint`."""
    path = folder / "checkpoint.json"
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"expected a checkpoint in {folder}, found no checkpoint.json; check --out, or start "
            "without --resume"
        ) from None
    try:
        about = json.loads(text)
    except ValueError:
        raise _damaged(folder, "checkpoint.json that is not JSON") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise _damaged(folder, f"checkpoint.json without the format {FORMAT!r}")
    return about


def load_model(folder: str | Path) -> LongNetLM:
    """The model of a checkpoint, ready to `sample`. Raises as `load_checkpoint`."""
    checkpoint = load_checkpoint(Path(folder))
    model = checkpoint.recipe.build_model()
    checkpoint.restore(model)
    return model.eval()


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("checkpoints need safetensors; pip install 'sparsering[cli]'") from None
    return safetensors.torch


def _names(folder: Path, name: str) -> bool:
    """Whether the folder's checkpoint.json points to this file or folder."""
    try:
        return name in read_about(folder)["tensors"].values()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _damaged(folder: Path, what: str) -> ValueError:
    return ValueError(
        f"expected a sparsering checkpoint in {folder}, got a damaged or foreign one: {what}; "
        "train anew with another --out"
    )
