"""The training loop: AdamW, warm-up and cosine, autocast, checkpoints, and stopping on signals.

    run = train(Recipe(steps=200), Path("runs/mine"))

Everything random in a step is a function of (seed, step), so a run that was stopped and resumed
has the same losses as an uninterrupted one. On SIGINT or SIGTERM, training finishes the current
step, saves and returns.
"""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from ..files import read_file, replace_file
from ..models.longnet import LongNetLM
from ..nn.transformer import Attend
from .checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from .data import Text, read_text, training_window, validation_windows
from .progress import Show, live_progress
from .ranks import ALONE, Ranks
from .recipe import DTYPES, Recipe
from .torchrun import launch

Windows = list[tuple[Tensor, Tensor]]
MOST_METRICS_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class Run:
    """Result of `train`: the trained model with its text and metrics.

    Attributes:
        recipe: the settings, with "auto" replaced by the dtype in use.
        windows: validation windows, (tokens, targets) each.
        step: steps done; fewer than recipe.steps if the run was stopped.
        stopped_by: number of the signal that stopped the run, or None.
        metrics: the records of `metrics.jsonl`.
    """

    recipe: Recipe
    model: LongNetLM
    text: Text
    windows: Windows
    step: int
    stopped_by: int | None
    metrics: list[dict[str, Any]]

    @property
    def validation_loss(self) -> float:
        """The last validation loss in nats per byte; NaN before the first."""
        losses = [
            record["validation_loss"] for record in self.metrics if "validation_loss" in record
        ]
        return losses[-1] if losses else math.nan


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    command: str = "train",
    save_every: int = 50,
    validate_every: int = 50,
    num_validation_windows: int = 8,
    stop_after: int | None = None,
    ranks: Ranks = ALONE,
) -> Run:
    """Trains a byte-level LongNet model and writes `metrics.jsonl` and checkpoints to a folder.

    Args:
        recipe: the settings that the losses depend on.
        out: the output folder. Without `resume` it must not contain a checkpoint; a demo may
            replace that of an earlier demo.
        resume: continue from the folder's checkpoint. Records of later steps are cut from
            `metrics.jsonl`.
        command: "train" or "demo", noted in the checkpoint.
        save_every, validate_every: interval in steps; both also happen at the end.
        num_validation_windows: non-overlapping windows of the validation bytes, always the same.
        stop_after: stop as if interrupted when this many steps are done.
        ranks: the processes that train together, each of which calls this; see `ranks`. Only rank 0
            prints and writes metrics. A signal to one of them stops all at the same step.

    Returns: the run, whether finished or stopped early.

    Raises:
        FileExistsError: the folder contains a checkpoint and `resume` is false.
        FileNotFoundError, ValueError: the text or checkpoint is missing or unusable.
        OSError: a file could not be written; the last checkpoint is whole.
        FloatingPointError: the loss is not finite.
        RingError, RuntimeError: another rank died or does not answer.
    """
    run = _prepared(recipe, out, command, resume, ranks)
    windows = validation_windows(
        run.text.validation, context=run.recipe.context, count=num_validation_windows
    )
    stop_at = recipe.steps if stop_after is None else min(stop_after, recipe.steps)
    with (
        stop_signal() as own_stop,
        live_progress(recipe.steps, run.step) if ranks.leads else _silence() as show,
        open(out / "metrics.jsonl", "a") if ranks.leads else nullcontext() as run.file,
    ):
        stop = ranks.agreed(own_stop)
        while True:
            if run.step % validate_every == 0 or run.step == recipe.steps:
                run.validate(windows, stop)
            if run.step >= stop_at or stop() is not None:
                break
            run.advance(show)
            if run.step % save_every == 0:
                run.save()
        if run.saved_at != run.step:
            run.save()
    return Run(run.recipe, run.model, run.text, windows, run.step, stop(), run.metrics)


@dataclass(eq=False)
class _RunInProgress:
    """The state of a run between two steps, with what its steps need."""

    recipe: Recipe
    text: Text
    model: LongNetLM
    optimizer: torch.optim.Optimizer
    out: Path
    command: str
    ranks: Ranks
    step: int
    saved_at: int  # step of the last checkpoint
    metrics: list[dict[str, Any]]
    file: TextIO | None = None  # `metrics.jsonl`, on the leader

    def save(self) -> None:
        """Writes a checkpoint of this step."""
        save_checkpoint(
            self.out,
            self.model,
            self.optimizer,
            step=self.step,
            recipe=self.recipe,
            fingerprint=self.text.fingerprint,
            command=self.command,
            launch=launch(),
            ranks=self.ranks,
        )
        self.saved_at = self.step

    def validate(self, windows: Windows, stop: Callable[[], int | None]) -> None:
        """Logs the validation loss of this step, unless it is on record or a signal comes."""
        if any(r["step"] == self.step and "validation_loss" in r for r in self.metrics):
            return
        loss = validation_loss(self.model, windows, self.recipe.dtype, stop, self.ranks)
        if loss is not None:
            self._log(step=self.step, validation_loss=loss)

    def advance(self, show: Show) -> None:
        """Trains one step, logs and shows it; FloatingPointError if its loss is not finite."""
        recipe = self.recipe
        began = time.perf_counter()
        tokens, targets = training_window(
            self.text.train,
            context=recipe.context,
            batch_size=recipe.batch_size,
            seed=recipe.seed,
            step=self.step,
        )
        loss, norm, rate = training_step(
            self.model, self.optimizer, recipe, self.step, tokens, targets, self.ranks
        )
        seconds = time.perf_counter() - began
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(
                f"expected a finite loss and gradient, got {loss} and {norm} at step {self.step}; "
                f"the checkpoint of step {self.saved_at} is whole; start a new run with a smaller "
                "--learning-rate"
            )
        self.step += 1
        self._log(
            step=self.step,
            loss=loss,
            learning_rate=rate,
            grad_norm=norm,
            tokens=tokens.numel(),
            seconds=seconds,
        )
        show(self.step, loss, tokens.numel() / seconds)

    def _log(self, **record: Any) -> None:
        self.metrics.append(record)
        if self.file is not None:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()


def _prepared(
    recipe: Recipe, out: Path, command: str, resume: bool, ranks: Ranks
) -> _RunInProgress:
    """Builds the run at its first step, from the folder's checkpoint if `resume`."""
    recipe, text, checkpoint = ranks.together(partial(_inputs, recipe, out, command, resume, ranks))
    recipe = recipe if recipe.dtype != "auto" else replace(recipe, dtype=ranks.dtype())
    step = 0 if checkpoint is None else checkpoint.step
    ranks.agree("recipe, text and checkpoint", (recipe, text.fingerprint, step))

    model = recipe.build_model()
    ranks.place(model)
    optimizer = adamw(model, recipe)
    if checkpoint is not None:
        ranks.together(partial(checkpoint.restore, model, optimizer))
    run = _RunInProgress(recipe, text, model, optimizer, out, command, ranks, step, step, [])
    if checkpoint is None:
        run.save()  # an unwritable folder fails here, before any training is lost
    last = None if checkpoint is None else step
    metrics = ranks.together(lambda: _cut_metrics(out, last) if ranks.leads else [])
    run.metrics = ranks.from_leader(metrics)
    return run


def _inputs(
    recipe: Recipe, out: Path, command: str, resume: bool, ranks: Ranks
) -> tuple[Recipe, Text, Checkpoint | None]:
    """Reads the text and the checkpoint, and refuses them if they cannot be this run's."""
    ranks.check(recipe)
    checkpoint = load_checkpoint(out, ranks) if resume else None
    text = read_text(recipe.data, context=recipe.context, seed=recipe.seed, glob=recipe.glob)
    if checkpoint is not None:
        return _same_run(recipe, text, checkpoint), text, checkpoint
    _refuse_to_overwrite(out, command)
    return recipe, text, None


def training_step(
    model: LongNetLM,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    step: int,
    tokens: Tensor,
    targets: Tensor,
    ranks: Ranks = ALONE,
    *,
    attend: Attend | None = None,
) -> tuple[float, float, float]:
    """Runs forward, backward, update; returns loss (nats per byte), gradient norm, learning rate.

    On several ranks, each passes all tokens and targets of the step, and gets the loss and the norm
    of the whole step.
    """
    rate = recipe.learning_rate_at(step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    with autocast(recipe.dtype, ranks.device.type):
        loss = ranks.loss(model, tokens, targets, attend)
    optimizer.zero_grad()
    loss.backward()
    norm = ranks.clip_gradients(model, recipe.clip_norm)
    optimizer.step()
    return ranks.total(loss), norm, rate


@torch.no_grad()
def validation_loss(
    model: LongNetLM,
    windows: Windows,
    dtype: str,
    stop: Callable[[], int | None] = lambda: None,
    ranks: Ranks = ALONE,
) -> float | None:
    """Mean nats per byte over the windows; None if `stop()` returned a signal."""
    losses = []
    for tokens, targets in windows:
        if stop() is not None:
            return None
        with autocast(dtype, ranks.device.type):
            losses.append(ranks.total(ranks.loss(model, tokens, targets)))
    return sum(losses) / len(losses)


def adamw(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Builds AdamW with weight decay on the matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


def autocast(dtype: str, device_type: str = "cpu") -> AbstractContextManager[Any]:
    """Autocast to bfloat16, disabled for float32."""
    return torch.autocast(device_type, DTYPES["bfloat16"], enabled=dtype == "bfloat16")


@contextmanager
def stop_signal() -> Iterator[Callable[[], int | None]]:
    """Yields a function that returns the number of the SIGINT or SIGTERM received so far, or None.

    A second signal has its usual effect at once. Outside the main thread handlers cannot be set, so
    there the function always returns None.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: came[0] if came else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _silence() -> Iterator[Show]:
    """Replaces `live_progress` on all ranks but the leader: it shows nothing."""
    yield lambda step, loss, tokens_per_s: None


def _same_run(recipe: Recipe, text: Text, checkpoint: Checkpoint) -> Recipe:
    """Replaces dtype "auto" by the checkpoint's; ValueError if losses would differ from its run."""
    if recipe.dtype == "auto":
        recipe = replace(recipe, dtype=checkpoint.recipe.dtype)
    if differing := recipe.differences(checkpoint.recipe):
        theirs = ", ".join(f"{name} {getattr(checkpoint.recipe, name)!r}" for name in differing)
        raise ValueError(
            f"expected the recipe of the checkpoint in {checkpoint.folder}, which has {theirs}; "
            "leave these out, or start a new run with another --out"
        )
    if text.fingerprint != checkpoint.fingerprint:
        raise ValueError(
            f"expected the text that the checkpoint in {checkpoint.folder} was trained on, got "
            "another (files or bytes changed); restore it, or start a new run with another --out"
        )
    return recipe


def _refuse_to_overwrite(out: Path, command: str) -> None:
    """Raises FileExistsError if the folder has a checkpoint; a demo may replace a demo's."""
    if not (out / "checkpoint.json").exists():
        return
    if command == "demo" and load_checkpoint(out).command == "demo":
        return
    raise FileExistsError(
        f"expected no checkpoint in {out}, found one; add --resume to go on, or choose another "
        "--out"
    )


def _cut_metrics(out: Path, step: int | None) -> list[dict[str, Any]]:
    """Cuts `metrics.jsonl` to the records up to `step` (None: to none), and returns them."""
    path = out / "metrics.jsonl"
    records: list[dict[str, Any]] = []
    try:
        lines = [] if step is None else read_file(path, MOST_METRICS_BYTES).splitlines()
    except FileNotFoundError:
        lines = []
    except ValueError as error:
        raise _no_records(out, str(error)) from None
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # a killed run may leave its last line incomplete
            continue
        if not _is_record(record):
            raise _no_records(out, f"JSON that is no record in line {number} of {path.name}")
        if record["step"] <= step:
            records.append(record)
    replace_file(path, "".join(json.dumps(record) + "\n" for record in records).encode())
    return records


def _no_records(out: Path, what: str) -> ValueError:
    return ValueError(
        f"expected numbers by name, the records of a run, in {out / 'metrics.jsonl'}, got {what}; "
        "remove it to go on without them"
    )


def _is_record(record: object) -> bool:
    """Whether this is a metrics record; the file may come with a stranger's checkpoint."""
    return (
        isinstance(record, dict)
        and type(record.get("step")) is int
        and all(type(x) in (int, float) and not abs(x) > 1e300 for x in record.values())
    )
