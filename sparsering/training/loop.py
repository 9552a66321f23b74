"""The training loop: AdamW, warm-up and cosine, autocast, checkpoints, and stopping on signals.

    run = train(Recipe(steps=200), Path("runs/mine"))

All random numbers of a step depend on (seed, step) alone, so a run that was stopped and resumed has
the losses of an uninterrupted run. On SIGINT or SIGTERM, training finishes the current step, saves
and returns.
"""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
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
from .data import Text, Windows, read_text, training_window, validation_windows
from .progress import Show, progress_lines
from .ranks import ALONE, Ranks
from .recipe import DTYPES, Recipe, best_dtype
from .torchrun import launch

MOST_METRICS_BYTES = 256 << 20


@dataclass(eq=False)
class Run:
    """A training run: the state between two steps, and the result of `train`."""

    recipe: Recipe  # the settings, with "auto" replaced by the dtype in use
    text: Text
    windows: Windows  # validation windows
    model: LongNetLM
    optimizer: torch.optim.Optimizer
    out: Path
    command: str
    ranks: Ranks
    step: int  # steps done; fewer than recipe.steps after a run that was stopped
    saved_at: int  # step of the last checkpoint
    metrics: list[dict[str, Any]]  # the records of `metrics.jsonl`
    stopped_by: int | None = None  # number of the signal that stopped the run
    file: TextIO | None = None  # `metrics.jsonl`, open on rank 0 during training

    @property
    def validation_loss(self) -> float:
        """The last validation loss in nats per byte; NaN before the first validation."""
        return self._validations()[-1][1]

    @property
    def validated_at(self) -> int:
        """The step of the last validation; 0 before the first."""
        return self._validations()[-1][0]

    def _validations(self) -> list[tuple[int, float]]:
        of = "validation_loss"
        return [(0, math.nan), *((r["step"], r[of]) for r in self.metrics if of in r)]

    def save(self) -> None:
        """Writes a checkpoint of the model and optimizer after the current step."""
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

    @torch.no_grad()
    def validate(self, stop: Callable[[], int | None]) -> None:
        """Logs the step's mean validation loss, unless it is already logged or a signal arrives."""
        if any(r["step"] == self.step and "validation_loss" in r for r in self.metrics):
            return
        losses = []
        for tokens, targets in self.windows:
            if stop() is not None:
                return
            with autocast(self.recipe.dtype, self.ranks.device.type):
                losses.append(self.ranks.total(self.ranks.loss(self.model, tokens, targets)))
        self._log(step=self.step, validation_loss=sum(losses) / len(losses))

    def advance(self, show: Show) -> None:
        """Trains one step, logs and shows it; FloatingPointError if the loss is not finite."""
        recipe, began = self.recipe, time.perf_counter()
        loss, norm, rate = training_step(
            self.model, self.optimizer, recipe, self.step, self.text.train, self.ranks
        )
        seconds = time.perf_counter() - began
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(
                f"expected a finite loss and gradient, got {loss} and {norm} at step {self.step}; "
                f"the checkpoint of step {self.saved_at} is whole; start a new run with a smaller "
                "--learning-rate"
            )
        self.step += 1
        tokens = recipe.batch_size * recipe.context
        speed = {"tokens": tokens, "seconds": seconds}
        self._log(step=self.step, loss=loss, learning_rate=rate, grad_norm=norm, **speed)
        show(self.step, loss, tokens / seconds, self._validations)

    def _log(self, **record: Any) -> None:
        self.metrics.append(record)
        if self.file is not None:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()


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
        out: the output folder. Without `resume` it must not contain a checkpoint, except that a
            demo may replace the checkpoint of an earlier demo.
        resume: continue from the folder's checkpoint, and remove the records of later steps from
            `metrics.jsonl`.
        command: "train" or "demo", stored in the checkpoint.
        save_every, validate_every: intervals in steps. A run also saves whenever it ends or stops,
            and validates after the last step of the recipe.
        num_validation_windows: number of disjoint windows of the validation bytes.
        stop_after: stop as if interrupted when this many steps are done.
        ranks: the processes that train together, each of which calls this function. Only rank 0
            prints and writes metrics. A signal to one rank stops all ranks at the same step.

    Returns: the run, finished or stopped early.

    Raises:
        FileExistsError: the folder contains a checkpoint and `resume` is false.
        FileNotFoundError, ValueError: the text or checkpoint is missing or unusable.
        OSError: a file could not be written; the last checkpoint is whole.
        FloatingPointError: the loss is not finite.
        RingError, RuntimeError: another rank died or does not answer.
    """
    run = _prepare(recipe, out, command, resume, ranks, num_validation_windows)
    last = recipe.steps if stop_after is None else min(stop_after, recipe.steps)
    leads = ranks.leads
    show: Show = progress_lines(recipe.steps) if leads else lambda *_: None
    with (
        stop_signal(ranks) as stop,
        open(out / "metrics.jsonl", "a") if leads else nullcontext() as run.file,
    ):
        while True:
            if run.step % validate_every == 0 or run.step == recipe.steps:
                run.validate(stop)
            if run.step >= last or stop() is not None:
                break
            run.advance(show)
            if run.step % save_every == 0:
                run.save()
        if run.saved_at != run.step:
            run.save()
    run.stopped_by = stop()
    return run


def _prepare(
    recipe: Recipe, out: Path, command: str, resume: bool, ranks: Ranks, num_windows: int
) -> Run:
    recipe, text, checkpoint = ranks.together(partial(_inputs, recipe, out, command, resume, ranks))
    if recipe.dtype == "auto":  # rank 0 chooses for all ranks
        dtype = "bfloat16" if ranks.device.type == "cuda" else best_dtype()
        recipe = replace(recipe, dtype=ranks.from_leader(dtype))
    step = 0 if checkpoint is None else checkpoint.step
    ranks.agree("recipe, text and checkpoint", (recipe, text.fingerprint, step))

    model = recipe.build_model()
    ranks.place(model)
    optimizer = adamw(model, recipe)
    if checkpoint is not None:
        ranks.together(partial(checkpoint.restore, model, optimizer))
    windows = validation_windows(text.validation, context=recipe.context, count=num_windows)
    run = Run(recipe, text, windows, model, optimizer, out, command, ranks, step, step, [])
    if checkpoint is None:
        run.save()  # fails now, before the training, if the folder cannot be written
    last = None if checkpoint is None else step
    metrics = ranks.together(lambda: _cut_metrics(out, last) if ranks.leads else [])
    run.metrics = ranks.from_leader(metrics)
    return run


def _inputs(
    recipe: Recipe, out: Path, command: str, resume: bool, ranks: Ranks
) -> tuple[Recipe, Text, Checkpoint | None]:
    ranks.check(recipe)
    checkpoint = load_checkpoint(out, ranks) if resume else None
    text = read_text(recipe.data, context=recipe.context, seed=recipe.seed, glob=recipe.glob)
    if checkpoint is not None:
        return _resumed_recipe(recipe, text, checkpoint), text, checkpoint
    exists = (out / "checkpoint.json").exists()
    if exists and not (command == "demo" and load_checkpoint(out).command == "demo"):
        raise FileExistsError(
            f"expected no checkpoint in {out}, found one; add --resume to go on, or choose another "
            "--out"
        )
    return recipe, text, None


def training_step(
    model: LongNetLM,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    step: int,
    train: Tensor,
    ranks: Ranks = ALONE,
    *,
    attend: Attend | None = None,
) -> tuple[float, float, float]:
    """Runs forward, backward and update on the step's windows of the training bytes.

    Returns: loss (nats per byte) and gradient norm before clipping, over all ranks' windows; and
        the learning rate.
    """
    tokens, targets = training_window(
        train, context=recipe.context, batch_size=recipe.batch_size, seed=recipe.seed, step=step
    )
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
    """Returns a context that autocasts to bfloat16, or does nothing for float32."""
    return torch.autocast(device_type, DTYPES["bfloat16"], enabled=dtype == "bfloat16")


@contextmanager
def stop_signal(ranks: Ranks) -> Iterator[Callable[[], int | None]]:
    """Yields a function that returns the number of a SIGINT or SIGTERM that any rank got, or None.

    All ranks call the function together. A second signal has its usual effect at once. Python sets
    handlers only in the main thread, so in other threads signals keep their usual effect.
    """
    numbers: list[int] = []
    in_main_thread = threading.current_thread() is threading.main_thread()
    stopping = (signal.SIGINT, signal.SIGTERM) if in_main_thread else ()
    handlers = {number: signal.getsignal(number) for number in stopping}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        numbers.append(number)
        restore()

    for number in handlers:
        signal.signal(number, note)
    try:
        yield lambda: ranks.any_signal(numbers[0] if numbers else None)
    finally:
        restore()


def _resumed_recipe(recipe: Recipe, text: Text, checkpoint: Checkpoint) -> Recipe:
    """Replaces dtype "auto" by the checkpoint's; ValueError if recipe or text differs."""
    saved = checkpoint.recipe
    if recipe.dtype == "auto":
        recipe = replace(recipe, dtype=saved.dtype)
    # The text may have moved: its fingerprint is compared below, not its path.
    ours, theirs = asdict(replace(recipe, data=saved.data, glob=saved.glob)), asdict(saved)
    if differences := [f"{name} {theirs[name]!r}" for name in ours if ours[name] != theirs[name]]:
        raise ValueError(
            f"the options differ from those of the checkpoint in {checkpoint.folder}, which was "
            f"trained with {', '.join(differences)}; leave these options out to resume, or start a "
            "new run with another --out"
        )
    if text.fingerprint != checkpoint.fingerprint:
        raise ValueError(
            f"expected the text that the checkpoint in {checkpoint.folder} was trained on, got "
            "another (files or bytes changed); restore it, or start a new run with another --out"
        )
    return recipe


def _cut_metrics(out: Path, step: int | None) -> list[dict[str, Any]]:
    """Removes the records after `step` (None: all) from `metrics.jsonl`; returns the others."""
    path = out / "metrics.jsonl"
    records: list[dict[str, Any]] = []
    try:
        lines = [] if step is None else read_file(path, MOST_METRICS_BYTES).splitlines()
        records = [r for r in _records(lines) if r["step"] <= step]
    except FileNotFoundError:
        pass
    except ValueError as error:
        raise ValueError(
            f"expected the metrics of a run in {path}, got an unusable file: {error}; remove "
            "it to go on without these metrics"
        ) from None
    replace_file(path, "".join(json.dumps(record) + "\n" for record in records).encode())
    return records


def _records(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """Parses lines of `metrics.jsonl`; ValueError for JSON that is not a record of a step."""
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # a killed run may leave its last line incomplete
            continue
        if (
            not isinstance(record, dict)
            or type(record.get("step")) is not int
            or any(type(x) not in (int, float) or abs(x) > 1e300 for x in record.values())
        ):
            raise ValueError(f"line {number} is not a JSON object of numbers with a step")
        yield record
