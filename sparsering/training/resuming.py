"""Reads what a run begins with: its text, and the checkpoint that it continues, if there is one.

recipe, text, checkpoint = read_inputs(recipe, out, "train", resume=True, ranks=ranks)
"""

from dataclasses import asdict, replace
from pathlib import Path

from ..models.longnet import LongNetLM
from .checkpoint import Checkpoint, has_checkpoint, load_checkpoint
from .data import Text, read_text
from .ranks import Ranks
from .recipe import Recipe


def read_inputs(
    recipe: Recipe, out: Path, command: str, *, resume: bool, ranks: Ranks
) -> tuple[Recipe, Text, Checkpoint | None]:
    """Returns (recipe, text, checkpoint): what a run starts from; None without a checkpoint.

    Raises FileNotFoundError, FileExistsError or ValueError as `train`, before anything is written.
    """
    ranks.check(recipe)
    checkpoint = load_checkpoint(out) if resume or has_checkpoint(out) else None
    if checkpoint is not None:
        _check_may_go_on(checkpoint, recipe, command, resume)
    text = read_text(recipe.data, context=recipe.context, seed=recipe.seed, glob=recipe.glob)
    if checkpoint is not None:
        recipe = _resumed_recipe(recipe, text, checkpoint)
    return recipe, text, checkpoint


def _check_may_go_on(checkpoint: Checkpoint, recipe: Recipe, command: str, resume: bool) -> None:
    """Raises FileExistsError if the folder has a run that this command must not continue.

    That is a run of another command, or without `resume` a finished run.
    """
    folder, steps = checkpoint.folder, checkpoint.step
    if checkpoint.command != command:
        begin = f"--init {folder} begins a run with its weights in "
        raise FileExistsError(
            f"expected no run in {folder}, or one of {command}, found one of {checkpoint.command}; "
            f"{begin if command == 'train' else 'choose '}another --out"
        )
    if not resume and checkpoint.finished and recipe.steps <= steps:
        raise FileExistsError(
            f"{folder} has a finished run of {steps} steps, which is not overwritten; go on with "
            f"it by --steps above {steps}, or choose another --out"
        )


def _resumed_recipe(recipe: Recipe, text: Text, checkpoint: Checkpoint) -> Recipe:
    """Checks that recipe and text are those of the checkpoint; fills in its dtype for "auto".

    Raises: ValueError if the text or a setting other than the number of steps differs.
    """
    saved = checkpoint.recipe
    if recipe.dtype == "auto":
        recipe = replace(recipe, dtype=saved.dtype)
    if recipe.steps < checkpoint.step:
        raise ValueError(
            f"--steps must be at least {checkpoint.step}, the steps that the checkpoint in "
            f"{checkpoint.folder} has done, got {recipe.steps}"
        )
    # The text may have moved: its fingerprint is compared below, not its path.
    same = replace(recipe, data=saved.data, glob=saved.glob, steps=saved.steps)
    ours, theirs = asdict(same), asdict(saved)
    if differences := [f"{name} {theirs[name]!r}" for name in ours if ours[name] != theirs[name]]:
        raise ValueError(
            f"the options differ from those of the checkpoint in {checkpoint.folder}, which was "
            f"trained with {', '.join(differences)}; pass --resume without these options to go on, "
            "or start a new run with another --out"
        )
    if text.fingerprint != checkpoint.fingerprint:
        raise ValueError(
            f"expected the text that the checkpoint in {checkpoint.folder} was trained on, "
            f"{_place(saved)}, got another at {_place(recipe)} (files or bytes changed); restore "
            "it, or start a new run with another --out"
        )
    return recipe


def _place(recipe: Recipe) -> str:
    """Describes where a recipe's text is, for an error message."""
    return recipe.data or "the standard library of Python on this machine (no --data)"


def start_from(model: LongNetLM, recipe: Recipe, init: Path, resumed: Checkpoint | None) -> str:
    """Copies the weights of checkpoint `init` into a new model; returns the checkpoint's digest.

    A run that is continued (`resumed`) has its weights already; then it is only checked that the
    run began with those of `init`. Returns: the digest of these weights.
    """
    checkpoint = load_checkpoint(init)
    if resumed is not None:
        if resumed.init != checkpoint.digest:
            raise ValueError(
                f"expected the run in {resumed.folder} to have begun with the weights that "
                f"--init {init} has now, got a run of other weights; leave --init out to go on "
                "with that run, or choose another --out"
            )
        return resumed.init
    sizes = {field: getattr(recipe, field) for field in ("width", "num_layers", "num_heads")}
    theirs = {field: getattr(checkpoint.recipe, field) for field in sizes}
    if sizes != theirs:
        raise ValueError(
            f"init begins a run of the checkpoint's sizes, {theirs}, got {sizes}; pass these sizes"
        )
    checkpoint.restore(model)
    return checkpoint.digest
