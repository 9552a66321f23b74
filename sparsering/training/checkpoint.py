"""Checkpoints: one safetensors file, whose metadata describe the run and have a hash per tensor.

    Checkpoint(folder, step=100, recipe=recipe, ...).save(model, optimizer, selection)
    load_checkpoint(folder).restore(model, optimizer, selection)

Saving writes the file under another name, then renames it over the old one. A failure before the
rename leaves the old checkpoint whole. Rank 0 writes; runs of any number of processes can read it.

A checkpoint may come from a stranger, so nothing in it is executed or unpickled. Its header is
checked against the recipe's model before memory is allocated for tensors. The hashes detect damage,
not forgery.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..commands import install
from ..files import check_file, opened, replace_file, unique_pairs
from ..models.longnet import LongNetLM
from ..patterns.arguments import escaped
from .adaptive import Selection, blocks_of
from .micro_batches import make_moments
from .ranks import ALONE, Ranks
from .recipe import Recipe

FORMAT = "sparsering checkpoint 3"
MOST_HEADER_BYTES = 16 << 20  # about 50,000 tensors; parsing needs ten times this memory

_FILE, _OLD_FILE = "checkpoint.safetensors", "checkpoint.json"
_OLD_FORMAT = "sparsering checkpoint 2"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Describes a folder's checkpoint: the run, as it was saved after `step` optimizer steps."""

    folder: Path
    step: int
    command: str  # what saved it: "train", "demo" or "demo-ring"
    recipe: Recipe
    fingerprint: str  # hash of the text (`Text.fingerprint`)
    init: str = ""  # digest of the checkpoint whose weights the run began with; "" for none
    hashes: Mapping[str, str] = field(default_factory=dict)  # sha256 of each saved tensor, by name

    @property
    def finished(self) -> bool:
        """Whether all steps of the recipe are done."""
        return self.step == self.recipe.steps

    @property
    def digest(self) -> str:
        """A hash of all saved tensors."""
        return hashlib.sha256(json.dumps(sorted(self.hashes.items())).encode()).hexdigest()

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        selection: Selection | None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Replaces the folder's checkpoint atomically; `hashes` is not read.

        All ranks call this function and rank 0 writes. If it cannot, all ranks raise OSError and
        the old checkpoint remains.
        """
        facts = {"command": self.command, "step": self.step, "recipe": asdict(self.recipe)}
        facts |= {"fingerprint": self.fingerprint, "torch": torch.__version__, "init": self.init}
        state = {} if selection is None else selection.tensors()
        tensors = _named_tensors(model, optimizer, state)
        ranks.together(lambda: write(self.folder, tensors, facts) if ranks.leads else None)

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        selection: Selection | None = None,
    ) -> None:
        """Copies saved weights into a model of this recipe, and the states of the others.

        Raises ValueError if a tensor is damaged; what was copied until then stays.
        """
        if optimizer is not None and self.step:
            make_moments(optimizer)
        state = {} if selection is None else selection.tensors()
        with _opened(self.folder) as file:
            for name, x in _named_tensors(model, optimizer, state).items():
                saved = file.get_tensor(name)
                if _hash(saved) != self.hashes.get(name):
                    raise ValueError(f"the sha256 of {name} is not the one that was written")
                x.copy_(saved)
        if selection is not None:
            selection.restore(state)


def write(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Replaces a folder's checkpoint by one of these tensors; `facts` are JSON about the run."""
    facts = {**facts, "format": FORMAT, "sha256": {name: _hash(x) for name, x in tensors.items()}}
    content = _safetensors().torch.save(
        {name: x.contiguous() for name, x in tensors.items()}, {"sparsering": json.dumps(facts)}
    )
    replace_file(folder / _FILE, content)
    for part in folder.glob(f".{_FILE}.*.part"):  # left by processes that were killed meanwhile
        with suppress(OSError):
            part.unlink()


def has_checkpoint(folder: Path) -> bool:
    """Whether a folder contains a checkpoint, of an older version too."""
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
            kinds[name] = _kind(header.get_shape(), header.get_dtype())
        try:
            facts = json.loads(text, object_pairs_hook=unique_pairs)
        except (ValueError, RecursionError):
            raise ValueError("the description is not JSON, or has a name twice") from None
        checkpoint = _described(folder, facts)
        _check_kinds(checkpoint, kinds)
    return checkpoint


def load_model(folder: str | Path) -> LongNetLM:
    """Returns a checkpoint's model in eval mode; raises as `load_checkpoint`."""
    checkpoint = load_checkpoint(Path(folder))
    model = checkpoint.recipe.build_model()
    checkpoint.restore(model)
    return model.eval()


def _convert(folder: Path) -> None:
    """Writes the checkpoint of version 0.2.0 as one file, beside its own files."""
    safetensors = _safetensors()
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
    """Opens a checkpoint's file without loading tensors, and names the folder in ValueErrors."""
    safetensors, path = _safetensors(), folder / _FILE
    try:
        check_file(path)
        with open(path, "rb") as start:
            if (length := int.from_bytes(start.read(8), "little")) > MOST_HEADER_BYTES:
                raise ValueError(f"its header has {length} bytes, which is too long")
        with safetensors.safe_open(path, framework="pt") as file:
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
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ValueError(f"the format is not {FORMAT!r}")
    facts = {"init": "", **facts}  # which checkpoints of 0.2.0 do not have
    kinds = {
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
    return Checkpoint(
        folder=folder,
        step=step,
        command=facts["command"],
        recipe=recipe,
        fingerprint=facts["fingerprint"],
        init=facts["init"],
        hashes=facts["sha256"],
    )


def _check_kinds(checkpoint: Checkpoint, kinds: Mapping[str, str]) -> None:
    """Raises ValueError if the tensors do not match the recipe's model and its optimizer."""
    unexpected = set(kinds)
    for name, kind in _needed_kinds(checkpoint):
        if (got := kinds.get(name, "missing")) != kind:
            raise ValueError(f"{name} is {got}, and the recipe's model needs {kind}")
        unexpected.discard(name)
    if unexpected:
        names = ", ".join(sorted(unexpected)[:3])
        raise ValueError(f"the file has tensors of another model ({names})")


def _kind(shape: Sequence[int], dtype: str = "F32") -> str:
    return f"{dtype} {list(shape)}"


def _needed_kinds(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yields names and kinds of all tensors of a checkpoint, without building what has them."""
    recipe = checkpoint.recipe
    for parameter, shape in recipe.parameter_shapes():
        yield f"model.{parameter}", _kind(shape)
        if checkpoint.step:  # AdamW has no state before its first step
            yield f"optimizer.{parameter}.step", _kind(())
            yield f"optimizer.{parameter}.exp_avg", _kind(shape)
            yield f"optimizer.{parameter}.exp_avg_sq", _kind(shape)
    if recipe.attention != "selected":
        return
    yield "selection.clock", _kind((), "I64")
    rows = recipe.num_heads, blocks_of(recipe)
    for layer in range(recipe.num_layers if recipe.refine else 0):
        yield f"selection.{layer}.table", _kind((*rows, min(recipe.blocks, rows[1])), "I64")
        yield f"selection.{layer}.updates", _kind((), "I64")
        counts = dict.fromkeys(("sums", "counts", "barred_until"), "I64")
        for name, dtype in {"mass": "F64", "observed": "BOOL", **counts}.items():
            yield f"selection.{layer}.{name}", _kind((*rows, rows[1]), dtype)


def _named_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, selection: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns weights, and states of the optimizer and the selection, by their saved names."""
    tensors = {f"selection.{name}": x for name, x in selection.items()}
    for name, weight in model.named_parameters():
        tensors[f"model.{name}"] = weight.detach()
        for key, value in optimizer.state[weight].items() if optimizer else ():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def _hash(x: Tensor) -> str:
    content = x.cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(content.data).hexdigest()


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError(f"checkpoints need safetensors; {install('cli')}") from None
    return safetensors
