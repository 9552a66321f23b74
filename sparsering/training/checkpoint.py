"""Checkpoints: one safetensors file, whose metadata describe the run and have a hash per tensor.

    Checkpoint(folder, step=100, recipe=recipe, ...).save(model, optimizer, selection)
    load_checkpoint(folder).restore(model, optimizer, selection)

Saving writes the file under another name, then renames it over the old one. A failure before the
rename leaves the old checkpoint whole. Rank 0 writes; runs of any number of processes can read it.

Tensors that ranks have in parts are first written by all ranks into a new folder (`parts`). Then
the file names this folder, with a hash of each part. So the file always names the newest complete
checkpoint, and any other folder was left by a process that was stopped. The checkpoint of a
finished run is whole again, in one file.

A checkpoint may come from a stranger, so nothing in it is executed or unpickled. Its header is
checked against the recipe's model before memory is allocated for tensors. The hashes detect damage,
not forgery.
"""

import hashlib
import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..ground.arguments import escaped
from ..ground.files import opened, replace_file, unique_pairs
from ..ground.keywords import with_hints
from ..models.longnet import LongNetLM
from .adaptive import Selection, blocks_of
from .micro_batches import make_moments
from .ranks import ALONE, Ranks
from .recipe import Recipe
from .tensor_files import (
    MOST_HEADER_BYTES,
    hash_tensor,
    kind_of,
    opened_tensors,
    safetensors_or_hint,
)

FORMAT = "sparsering checkpoint 3"

_FILE, _OLD_FILE = "checkpoint.safetensors", "checkpoint.json"
_OLD_FORMAT = "sparsering checkpoint 2"
_PARTS = re.compile(r"parts-\d+-[0-9a-f]{12}")  # name of a folder of parts
_PART = re.compile(r"[a-z0-9-]+\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A folder's checkpoint without its tensors: the run's settings, its step, and hashes."""

    folder: Path
    step: int
    command: str  # what saved it: "train", "demo" or "demo-ring"
    recipe: Recipe
    fingerprint: str  # hash of the text (`Text.fingerprint`)
    init: str = ""  # digest of the checkpoint whose weights the run began with; "" for none
    # sha256 of each tensor in the file, by the tensor's name
    hashes: Mapping[str, str] = field(default_factory=dict)
    # name of the folder that has the parts of sharded tensors; "" if all tensors are in the file
    parts: str = ""
    # sha256 of each part, by the name of the part's file
    part_hashes: Mapping[str, str] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether all steps of the recipe are done."""
        return self.step == self.recipe.steps

    @property
    def digest(self) -> str:
        """A hash of all saved tensors."""
        hashes = sorted([*self.hashes.items(), *self.part_hashes.items()])
        return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        selection: Selection | None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Writes a checkpoint in place of the folder's; a failure leaves the old one whole.

        `hashes` and `parts` of `self` are not used, because they are computed anew.

        All ranks call this function. Rank 0 writes the file, and each rank its parts of sharded
        tensors, if the run is not finished. If a rank cannot write, all ranks raise OSError and the
        old checkpoint remains.
        """
        facts = {"command": self.command, "step": self.step, "recipe": asdict(self.recipe)}
        facts |= {"fingerprint": self.fingerprint, "torch": torch.__version__, "init": self.init}
        state = {} if selection is None else selection.tensors()
        tensors = _named_tensors(model, optimizer, state)
        sharded = {name: x for name, x in tensors.items() if isinstance(x, DTensor)}
        if self.finished:
            tensors |= _gathered(sharded, keep=ranks.leads)
        elif sharded:
            from .parts import write_parts

            name = ranks.from_leader(f"parts-{self.step:06d}-{secrets.token_hex(6)}")
            hashes = write_parts(self.folder / name, sharded, ranks)
            facts |= {"parts": {"folder": name, "sha256": hashes}}
            tensors = {name: x for name, x in tensors.items() if name not in sharded}
        ranks.together(lambda: write(self.folder, tensors, facts) if ranks.leads else None)

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        selection: Selection | None = None,
    ) -> None:
        """Copies saved weights into a model of this recipe, and states into the other arguments.

        A sharded tensor gets this rank's part. A checkpoint in parts may be read whole, and a whole
        one in parts. Raises ValueError if a tensor is damaged; tensors copied before it stay.
        """
        if optimizer is not None and self.step:
            make_moments(optimizer)
        state = {} if selection is None else selection.tensors()
        tensors = _named_tensors(model, optimizer, state)
        with _opened(self.folder) as file:
            whole = set(file.keys())
            for name in (name for name in tensors if name in whole):
                saved = file.get_tensor(name)
                if hash_tensor(saved) != self.hashes.get(name):
                    raise ValueError(f"the sha256 of {name} is not the one that was written")
                _copy(tensors[name], saved)
            if in_parts := {name: x for name, x in tensors.items() if name not in whole}:
                from .parts import read_parts

                read_parts(self.folder / self.parts, self.part_hashes, in_parts)
        if selection is not None:
            selection.restore(state)


def write(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Writes tensors in place of the folder's checkpoint; `facts` are the run's settings."""
    hashes = {name: hash_tensor(x) for name, x in tensors.items()}
    facts = {**facts, "format": FORMAT, "sha256": hashes}
    content = safetensors_or_hint().torch.save(
        {name: x.contiguous() for name, x in tensors.items()}, {"sparsering": json.dumps(facts)}
    )
    replace_file(folder / _FILE, content)
    for part in folder.glob(f".{_FILE}.*.part"):  # left by processes that were killed meanwhile
        with suppress(OSError):
            part.unlink()
    named = facts.get("parts", {}).get("folder")
    for old in folder.glob("parts-*"):  # parts of the last checkpoint, or of a killed process
        if _PARTS.fullmatch(old.name) and old.name != named and not old.is_symlink():
            shutil.rmtree(old, ignore_errors=True)


def has_checkpoint(folder: Path) -> bool:
    """Whether a folder has a checkpoint, of this version or of 0.2.0."""
    return (folder / _FILE).exists() or (folder / _OLD_FILE).exists()


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads and verifies a checkpoint's header but loads no tensors.

    A checkpoint of 0.2.0, `checkpoint.json` with its files, is first written anew as one file.

    Raises: FileNotFoundError if there is no checkpoint; ValueError if it is damaged or from another
    program or version; ImportError without safetensors.
    """
    if not (folder / _FILE).exists() and (folder / _OLD_FILE).exists():
        _convert(folder)
    with _opened(folder) as file:
        text = (file.metadata() or {}).get("sparsering", "")
        kinds = {}
        for name in file.keys():  # noqa: SIM118 - the file is not a mapping
            header = file.get_slice(name)
            kinds[name] = kind_of(header.get_shape(), header.get_dtype())
        try:
            facts = json.loads(text, object_pairs_hook=unique_pairs)
        except (ValueError, RecursionError):
            raise ValueError("the description is not JSON, or has a name twice") from None
        checkpoint = _described(folder, facts)
        if checkpoint.parts:
            from .parts import read_kinds

            in_parts = read_kinds(folder / checkpoint.parts, checkpoint.part_hashes)
            if twice := sorted(in_parts.keys() & kinds.keys())[:3]:
                raise ValueError(f"tensors are in the file and in its parts ({', '.join(twice)})")
            kinds |= in_parts
        _check_kinds(checkpoint, kinds)
    return checkpoint


@with_hints()
def load_model(folder: str | Path) -> LongNetLM:
    """Loads the trained model of a checkpoint, in eval mode.

    Raises the errors of `load_checkpoint`.
    """
    checkpoint = load_checkpoint(Path(folder))
    model = checkpoint.recipe.build_model()
    checkpoint.restore(model)
    return model.eval()


def _convert(folder: Path) -> None:
    """Writes a checkpoint of version 0.2.0 anew in the present format; its old files stay."""
    safetensors = safetensors_or_hint()
    try:
        with opened(folder / _OLD_FILE, MOST_HEADER_BYTES) as file:
            facts = json.loads(file.read(), object_pairs_hook=unique_pairs)
        if not isinstance(facts, dict) or facts.get("format") != _OLD_FORMAT:
            raise ValueError(f"the format is not {_OLD_FORMAT!r}")
        tensors: dict[str, Tensor] = {}
        for name, about in facts.pop("tensors")["files"].items():
            if not re.fullmatch(r"checkpoint-\d+-[0-9a-f]{12}\.safetensors", name):
                raise ValueError(f"{name!r} is no name of a file of tensors")
            with opened(folder / name, int(about["bytes"])) as file:
                content = file.read()
            if hashlib.sha256(content).hexdigest() != about["sha256"]:
                raise ValueError(f"the sha256 of {name} is not the one that was written")
            tensors |= safetensors.torch.load(content)
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError),
        safetensors.SafetensorError,
    ) as error:
        raise ValueError(
            f"expected a checkpoint of version 0.2.0 in {folder}, got a damaged or foreign one: "
            f"{escaped(str(error))}; start a new run with another --out"
        ) from None
    write(folder, tensors, facts)


@contextmanager
def _opened(folder: Path) -> Iterator[Any]:
    """Opens a checkpoint's file without reading tensors; its ValueErrors name the folder."""
    safetensors = safetensors_or_hint()
    try:
        with opened_tensors(folder / _FILE) as file:
            yield file
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"expected a checkpoint in {folder}, found no {_FILE}; name a folder that train or "
            "demo wrote"
        ) from None
    except (ValueError, safetensors.SafetensorError) as error:
        raise ValueError(
            f"expected a sparsering checkpoint in {folder}, got a damaged or foreign one: "
            f"{escaped(str(error))}; start a new run with another --out"
        ) from None


def _described(folder: Path, facts: Any) -> Checkpoint:
    """Builds a `Checkpoint` from the JSON of a file; ValueError if something in it is wrong."""
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ValueError(f"the format is not {FORMAT!r}")
    facts = {"init": "", "parts": {"folder": "", "sha256": {}}, **facts}  # older ones lack these
    kinds = {
        "parts": dict,
        "init": str,
        "step": int,
        "command": str,
        "recipe": dict,
        "fingerprint": str,
        "sha256": dict,
    }
    for name, kind in kinds.items():
        if type(facts.get(name)) is not kind:
            raise ValueError(f"{name!r} is no {kind.__name__}")
    recipe = Recipe.from_json(facts["recipe"])
    if not 0 <= (step := facts["step"]) <= recipe.steps:
        raise ValueError(f"step {step} is not from 0 to the recipe's {recipe.steps}")
    if not re.fullmatch(r"[0-9a-f]{64}|", facts["init"]):
        raise ValueError("'init' is no sha256")
    parts, part_hashes = _described_parts(facts["parts"])
    return Checkpoint(
        folder=folder,
        step=step,
        command=facts["command"],
        recipe=recipe,
        fingerprint=facts["fingerprint"],
        init=facts["init"],
        hashes=facts["sha256"],
        parts=parts,
        part_hashes=part_hashes,
    )


def _described_parts(about: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Returns (folder of the ranks' parts, {file: sha256}); ValueError if the JSON is wrong."""
    name, hashes = about.get("folder"), about.get("sha256")
    if about.keys() != {"folder", "sha256"} or type(name) is not str or type(hashes) is not dict:
        raise ValueError("'parts' must name a folder and the sha256 of each of its files")
    if bool(name) != bool(hashes) or not (name == "" or _PARTS.fullmatch(name)):
        raise ValueError(f"the folder {name!r} of the ranks' parts is misnamed or has no files")
    for part, sha256 in hashes.items():
        if not (_PART.fullmatch(part) and type(sha256) is str and _SHA256.fullmatch(sha256)):
            raise ValueError(f"the file {part!r} of a rank's part is misnamed or has no sha256")
    return name, hashes


def _check_kinds(checkpoint: Checkpoint, kinds: Mapping[str, str]) -> None:
    """Raises ValueError unless the saved tensors are those of the recipe's model and optimizer."""
    unexpected = set(kinds)
    for name, kind in _needed_kinds(checkpoint):
        if (got := kinds.get(name, "missing")) != kind:
            raise ValueError(f"{name} is {got}, and the recipe's model needs {kind}")
        unexpected.discard(name)
    if unexpected:
        names = ", ".join(sorted(unexpected)[:3])
        raise ValueError(f"the file has tensors of another model ({names})")


def _needed_kinds(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yields (name, dtype and shape) of each tensor that a checkpoint must have.

    They follow from the recipe, so neither model nor optimizer is built.
    """
    recipe = checkpoint.recipe
    for parameter, shape in recipe.parameter_shapes():
        yield f"model.{parameter}", kind_of(shape)
        if checkpoint.step:  # AdamW has no state before its first step
            yield f"optimizer.{parameter}.step", kind_of(())
            yield f"optimizer.{parameter}.exp_avg", kind_of(shape)
            yield f"optimizer.{parameter}.exp_avg_sq", kind_of(shape)
    if recipe.attention != "selected":
        return
    yield "selection.clock", kind_of((), "I64")
    rows = recipe.num_heads, blocks_of(recipe)
    for layer in range(recipe.num_layers if recipe.refine else 0):
        yield f"selection.{layer}.table", kind_of((*rows, min(recipe.blocks, rows[1])), "I64")
        yield f"selection.{layer}.updates", kind_of((), "I64")
        counts = dict.fromkeys(("sums", "counts", "barred_until"), "I64")
        for name, dtype in {"mass": "F64", "observed": "BOOL", **counts}.items():
            yield f"selection.{layer}.{name}", kind_of((*rows, rows[1]), dtype)


def _named_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, selection: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the tensors to save by name: weights, optimizer states, and the selection's state."""
    tensors = {f"selection.{name}": x for name, x in selection.items()}
    for name, weight in model.named_parameters():
        tensors[f"model.{name}"] = weight.detach()
        for key, value in optimizer.state[weight].items() if optimizer else ():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def _gathered(sharded: Mapping[str, DTensor], *, keep: bool) -> dict[str, Tensor]:
    """Joins tensors that ranks hold in parts, one by one; only the rank with `keep` stores them.

    All ranks must call it. The others get {}.
    """
    whole: dict[str, Tensor] = {}
    for name, x in sharded.items():
        joined = x.full_tensor()
        if keep:
            whole[name] = joined.cpu()
    return whole


def _copy(x: Tensor, saved: Tensor) -> None:
    """Copies a saved tensor into `x`, or, if ranks share it, this rank's part of it."""
    if isinstance(x, DTensor):
        whole = saved.to(x.device)
        # With no source rank each rank cuts its part from its own copy, and sends nothing.
        x.copy_(distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None))
    else:
        x.copy_(saved)
