"""Checkpoints: `checkpoint.json` names safetensors files in its folder, with their hashes.

    save_checkpoint(About(folder, step=100, recipe=recipe, ...), model, optimizer, selection)
    checkpoint = load_checkpoint(folder)

Saving first writes the tensors to files with new names, then renames the new `checkpoint.json`
over the old one. A failure before the rename leaves the old checkpoint whole. Rank 0 writes; runs
of any number of processes can read it.

A checkpoint may come from a stranger, so nothing in it is executed or unpickled. `checkpoint.json`
is checked against the files' headers, and both against the recipe's model, before memory is
allocated for tensors. The hashes detect damage, not forgery.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..files import read_file, replace_file, unique_pairs
from ..models.longnet import LongNetLM
from ..patterns.arguments import escaped
from .adaptive import Selection, blocks_of
from .micro_batches import make_moments
from .ranks import ALONE, Ranks
from .recipe import Recipe
from .tensor_files import Files, Index, Kind, load_tensors, read_index, write_tensors

FORMAT = "sparsering checkpoint 2"
MOST_JSON_BYTES = 16 << 20

_FILE_NAME = re.compile(r"checkpoint-[0-9a-z-]{1,80}\.safetensors")


@dataclass(frozen=True, eq=False)
class About:
    """Holds the contents of a `checkpoint.json`, which was saved after `step` optimizer steps."""

    folder: Path
    step: int
    command: str  # the subcommand that saved it, "train" or "demo"
    recipe: Recipe
    fingerprint: str  # hash of the text (`Text.fingerprint`)
    files: Files  # size and hash of each safetensors file, by file name


@dataclass(frozen=True, eq=False)
class Checkpoint(About):
    """Adds to `About` an index of the saved tensors: `model.*` weights, `optimizer.*` state."""

    tensors: Index

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        selection: Selection | None = None,
    ) -> None:
        """Copies saved weights into a model of this recipe, and the states of the others."""
        if optimizer is not None and self.step:
            make_moments(optimizer)
        load_tensors(self.tensors, named_tensors(model, optimizer))
        if selection is not None:
            state = selection.tensors()
            load_tensors(self.tensors, {f"selection.{name}": x for name, x in state.items()})
            selection.restore(state)


def save_checkpoint(
    about: About,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    selection: Selection | None,
    ranks: Ranks = ALONE,
) -> None:
    """Replaces the checkpoint of `about.folder` atomically; `about.files` is not read.

    All ranks call this function and rank 0 writes. If it cannot, all ranks raise OSError and the
    old checkpoint remains.
    """
    tensors = named_tensors(model, optimizer)
    if selection is not None:
        tensors |= {f"selection.{name}": x for name, x in selection.tensors().items()}
    values = {
        "format": FORMAT, "command": about.command, "step": about.step,
        "recipe": asdict(about.recipe), "fingerprint": about.fingerprint,
        "torch": torch.__version__, "threads": torch.get_num_threads(),
        "rng": "windows are drawn from (recipe.seed, step)",
    }  # fmt: skip
    ranks.together(lambda: _write(about.folder, tensors, values) if ranks.leads else None)


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Returns this rank's weights and optimizer state, under `model.*` and `optimizer.*` names."""
    tensors: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        tensors[f"model.{name}"] = weight.detach()
        for key, value in optimizer.state[weight].items() if optimizer else ():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads and verifies a checkpoint but loads no tensors.

    Raises: FileNotFoundError if there is no checkpoint; ValueError if it is damaged or from another
    program; ImportError without safetensors.
    """
    about = read_about(folder)
    try:
        tensors = read_index(folder, about.files)
        _check_kinds(about, {name: kind for name, (kind, _) in tensors.items()})
    except FileNotFoundError as error:
        missing = Path(error.filename or "file").name
        raise _damaged(folder, f"{missing}, which checkpoint.json names, is missing") from None
    except ValueError as error:
        raise _damaged(folder, str(error)) from None
    return Checkpoint(**vars(about), tensors=tensors)


def read_about(folder: Path) -> About:
    """Reads the folder's `checkpoint.json`, but no tensors; raises as `load_checkpoint`."""
    try:
        text = read_file(folder / "checkpoint.json", MOST_JSON_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"expected a checkpoint in {folder}, found no checkpoint.json; name a folder that "
            "train or demo wrote"
        ) from None
    except ValueError as error:
        raise _damaged(folder, str(error)) from None
    try:
        values = json.loads(text, object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError):
        raise _damaged(folder, "checkpoint.json is not JSON, or has a name twice") from None
    try:
        return _about(folder, values)
    except ValueError as error:
        raise _damaged(folder, f"in checkpoint.json, {error}") from None


def load_model(folder: str | Path) -> LongNetLM:
    """Returns a checkpoint's model in eval mode; raises as `load_checkpoint`."""
    checkpoint = load_checkpoint(Path(folder))
    model = checkpoint.recipe.build_model()
    checkpoint.restore(model)
    return model.eval()


def _about(folder: Path, values: Any) -> About:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"the format is not {FORMAT!r}")
    if not (files := _value(_value(values, "tensors", dict), "files", dict)):
        raise ValueError("no file of tensors is named")
    for name in files:
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a file of tensors")
        for key, kind in (("bytes", int), ("sha256", str)):
            _value(_value(files, name, dict), key, kind)
    recipe = Recipe.from_json(_value(values, "recipe", dict))
    step = _value(values, "step", int)
    if not 0 <= step <= recipe.steps:
        raise ValueError(f"step {step} is not from 0 to the recipe's {recipe.steps}")
    command, fingerprint = (_value(values, name, str) for name in ("command", "fingerprint"))
    return About(folder, step, command, recipe, fingerprint, files)


def _value(values: dict[str, Any], name: str, kind: type) -> Any:
    value = values.get(name)
    if type(value) is not kind:
        raise ValueError(f"{name!r} is no {kind.__name__}")
    return value


def _check_kinds(about: About, kinds: dict[str, Kind]) -> None:
    """Raises ValueError if the tensors do not match the recipe's model and its optimizer."""
    unexpected = set(kinds)
    for name, kind in _needed_kinds(about):
        if name not in kinds:
            raise ValueError(
                f"the checkpoint lacks {name}, which its model needs; copy the missing file of its "
                "rank"
            )
        if kinds[name] != kind:
            raise ValueError(f"{name} is {kinds[name]}, and the recipe's model needs {kind}")
        unexpected.discard(name)
    if unexpected:
        names = ", ".join(sorted(unexpected)[:3])
        raise ValueError(f"the files have tensors of another model ({names})")


def _needed_kinds(about: About) -> Iterator[tuple[str, Kind]]:
    """Yields names and kinds of all tensors of a checkpoint, without building what has them."""
    recipe = about.recipe
    for parameter, shape in recipe.parameter_shapes():
        yield f"model.{parameter}", Kind(tuple(shape))
        if about.step:  # AdamW has no state before its first step
            yield f"optimizer.{parameter}.step", Kind(())
            yield f"optimizer.{parameter}.exp_avg", Kind(tuple(shape))
            yield f"optimizer.{parameter}.exp_avg_sq", Kind(tuple(shape))
    if recipe.attention != "selected":
        return
    yield "selection.clock", Kind((), "I64")
    rows = recipe.num_heads, blocks_of(recipe)
    for layer in range(recipe.num_layers if recipe.refine else 0):
        yield f"selection.{layer}.table", Kind((*rows, min(recipe.blocks, rows[1])), "I64")
        yield f"selection.{layer}.updates", Kind((), "I64")
        for name, dtype in (("mass", "F64"), ("observed", "BOOL")):
            yield f"selection.{layer}.{name}", Kind((*rows, rows[1]), dtype)
        for name in ("sums", "counts", "barred_until"):
            yield f"selection.{layer}.{name}", Kind((*rows, rows[1]), "I64")


def _write(folder: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Writes the tensors, and a `checkpoint.json` that names their file; removes older files."""
    files = write_tensors(folder, about["step"], tensors)
    about["tensors"] = {"files": files}
    try:
        replace_file(folder / "checkpoint.json", json.dumps(about, indent=2).encode() + b"\n")
    except BaseException:
        names = set(files)
        with suppress(OSError, ValueError):  # the old checkpoint may name an equal file
            names -= read_about(folder).files.keys()
        _remove(folder, names)
        raise
    # Processes that were killed while they wrote a file leave it as `.checkpoint*.part`.
    on_disk = (*folder.glob("checkpoint-*.safetensors"), *folder.glob(".checkpoint*.part"))
    _remove(folder, {path.name for path in on_disk} - files.keys())


def _remove(folder: Path, names: set[str]) -> None:
    for name in names:
        with suppress(OSError):
            (folder / name).unlink()


def _damaged(folder: Path, what: str) -> ValueError:
    return ValueError(
        f"expected a sparsering checkpoint in {folder}, got a damaged or foreign one: "
        f"{escaped(what)}; start a new run with another --out"
    )
