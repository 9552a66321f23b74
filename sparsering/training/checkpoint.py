"""Checkpoints: `checkpoint.json`, which names one safetensors file beside it by its hash.

    save_checkpoint(folder, model, optimizer, step=100, recipe=recipe, fingerprint=text.fingerprint)
    checkpoint = load_checkpoint(folder)

The tensors are written under a new name first; the rename of `checkpoint.json` over the old one is
the moment at which the new checkpoint replaces the old. Whatever happens before it leaves the old
pair whole.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..models.longnet import LongNetLM
from .files import replace_file
from .recipe import Recipe

FORMAT = "sparsering checkpoint 1"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A run as it was after `step` steps.

    Attributes:
        folder: where it was read.
        step: optimizer steps done.
        command: which subcommand wrote it, "train" or "demo".
        recipe: what the run depends on.
        fingerprint: of the text.
        tensors: weights `model.*`, optimizer state `optimizer.*` and torch's random state `rng`.
    """

    folder: Path
    step: int
    command: str
    recipe: Recipe
    fingerprint: str
    tensors: dict[str, Tensor]

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Puts weights, optimizer state and torch's random state back.

        Raises: ValueError where the tensors are not those of this model.
        """
        parameters = dict(model.named_parameters())
        found = {name for name in self.tensors if name.startswith("model.")}
        wanted = {f"model.{name}" for name in parameters}
        if odd := found ^ wanted:
            raise _damaged(self.folder, f"weights of another model ({', '.join(sorted(odd)[:3])})")
        with torch.no_grad():
            for name, parameter in parameters.items():
                tensor = self.tensors[f"model.{name}"]
                if tensor.shape != parameter.shape:
                    got, expected = tuple(tensor.shape), tuple(parameter.shape)
                    raise _damaged(self.folder, f"{name} of shape {got}, not {expected}")
                parameter.copy_(tensor)
                if optimizer is not None:
                    prefix = f"optimizer.{name}."
                    optimizer.state[parameter] = {
                        key.removeprefix(prefix): value.clone()
                        for key, value in self.tensors.items()
                        if key.startswith(prefix)
                    }
        if optimizer is not None and "rng" in self.tensors:
            torch.set_rng_state(self.tensors["rng"])


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
    tensors = {"rng": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    content = _safetensors().save(tensors)
    digest = hashlib.sha256(content).hexdigest()
    name = f"checkpoint-{step:06d}-{digest[:12]}.safetensors"
    about = {
        "format": FORMAT,
        "command": command,
        "step": step,
        "recipe": recipe.to_json(),
        "fingerprint": fingerprint,
        "rng": "windows are drawn from (recipe.seed, step); torch's state is the tensor `rng`",
        "tensors": {"file": name, "bytes": len(content), "sha256": digest},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    replace_file(folder / name, content)
    try:
        replace_file(folder / "checkpoint.json", json.dumps(about, indent=2).encode() + b"\n")
    except BaseException:
        if not _names(folder, name):
            (folder / name).unlink(missing_ok=True)
        raise
    for old in (*folder.glob("checkpoint-*.safetensors"), *folder.glob(".checkpoint*.part")):
        if old.name != name:  # the replaced one, and what a killed process left
            old.unlink(missing_ok=True)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads and verifies a checkpoint.

    Raises: FileNotFoundError where there is none; ValueError where it is damaged or not one of
    ours; ImportError without safetensors.
    """
    about = read_about(folder)
    try:
        name, digest = about["tensors"]["file"], about["tensors"]["sha256"]
        step, command, fingerprint = about["step"], about["command"], about["fingerprint"]
        recipe = Recipe.from_json(about["recipe"])
        if Path(name).name != name or not isinstance(step, int):
            raise ValueError(f"unusable values {name!r}, {step!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(folder, f"checkpoint.json with {type(error).__name__}: {error}") from None
    try:
        content = (folder / name).read_bytes()
    except FileNotFoundError:
        raise _damaged(folder, f"no {name}, which checkpoint.json names") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise _damaged(folder, f"{name} whose content has another sha256 than when it was written")
    return Checkpoint(folder, step, command, recipe, fingerprint, _safetensors().load(content))


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
    """Whether the folder's checkpoint.json points to this file."""
    try:
        return bool(read_about(folder)["tensors"]["file"] == name)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _damaged(folder: Path, what: str) -> ValueError:
    return ValueError(
        f"expected a sparsering checkpoint in {folder}, got a damaged or foreign one: {what}; "
        "train anew with another --out"
    )
