"""The training loop: steps, validations and checkpoints, from a folder's last checkpoint on.

    run = train(Recipe(steps=200), Path("runs/mine"))

All random numbers of a step depend on (seed, step) alone, so a run that was stopped and resumed has
the losses of an uninterrupted run. On SIGINT or SIGTERM, training finishes the current step, saves
and returns.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO

import torch

from ..ground.keywords import with_hints
from ..ground.out_of_memory import ran_out_of_memory
from ..ground.progress import Progress, progress, unshown
from ..models.longnet import LongNetLM
from ..nn.transformer import Attend
from .adaptive import Selection
from .checkpoint import Checkpoint
from .data import Text, Windows, validation_windows
from .metrics import cut_metrics
from .micro_batches import (
    checked_part,
    forget_failure,
    largest_part,
    windows_that_fit,
)
from .ranks import ALONE, Ranks
from .recipe import Recipe, best_dtype
from .resuming import read_inputs, start_from
from .signals import stop_signal
from .step import adamw, autocast, gradients, training_step


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
    micro_batch: int  # windows of all ranks that are computed at once; a divisor of the batch size
    init: str = ""  # digest of the checkpoint whose weights the run began with
    selection: Selection | None = None  # what decides the blocks of attention "selected"
    halves: bool = False  # whether the micro-batch is halved where memory runs out
    stopped_by: int | None = None  # number of the signal that stopped the run
    file: TextIO | None = None  # `metrics.jsonl`, open on rank 0 during training

    @property
    def attend(self) -> Sequence[Attend] | None:
        """The attention of each layer; None if layers use the model's pattern."""
        return None if self.selection is None else self.selection.attends()

    @property
    def validation_loss(self) -> float:
        """The last validation loss in nats per byte; NaN before the first validation."""
        return self._last_validation()[1]

    @property
    def validated_at(self) -> int:
        """The step of the last validation; 0 before the first."""
        return self._last_validation()[0]

    def _last_validation(self) -> tuple[int, float]:
        records = (r for r in reversed(self.metrics) if "validation_loss" in r)
        return next(((r["step"], r["validation_loss"]) for r in records), (0, math.nan))

    def save(self) -> None:
        """Writes a checkpoint of the state after this step; all ranks must call it together."""
        checkpoint = Checkpoint(
            folder=self.out,
            step=self.step,
            command=self.command,
            recipe=self.recipe,
            fingerprint=self.text.fingerprint,
            init=self.init,
        )
        checkpoint.save(self.model, self.optimizer, self.selection, self.ranks)
        self.saved_at = self.step

    @torch.no_grad()
    def validate(self, stop: Callable[[], int | None]) -> None:
        """Logs the mean validation loss of this step, unless that is done or a signal arrives."""
        if any(r["step"] == self.step and "validation_loss" in r for r in self.metrics):
            return
        losses = []
        for tokens, targets in self.windows:
            if stop() is not None:
                return
            with autocast(self.recipe.dtype, self.ranks.device.type):
                losses.append(
                    self.ranks.total(self.ranks.loss(self.model, tokens, targets, self.attend))
                )
        self._log(step=self.step, validation_loss=sum(losses) / len(losses))

    def advance(self, work: Progress) -> None:
        """Trains one step, logs and shows it; FloatingPointError if the loss is not finite."""
        recipe, began = self.recipe, time.perf_counter()
        if self.selection is not None:
            losses = (r["loss"] for r in reversed(self.metrics) if "loss" in r)
            self.selection.begin(self.step, next(losses, math.nan))
        loss, norm, rate = self._trained_step(work)
        seconds = time.perf_counter() - began
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(
                f"expected a finite loss and gradient, got {loss} and {norm} at step {self.step}; "
                f"the checkpoint of step {self.saved_at} is whole; start a new run with a smaller "
                "--learning-rate"
            )
        if self.selection is not None:
            self.selection.end()
        self.step += 1
        tokens = recipe.batch_size * recipe.context
        speed = {"tokens": tokens, "seconds": seconds}
        self._log(step=self.step, loss=loss, learning_rate=rate, grad_norm=norm, **speed)
        shown = f"loss {loss:.3f} (validation {self.validation_loss:.3f})"
        work.advance(note=f"{shown}  {tokens / seconds:,.0f} tokens/s")

    def _trained_step(self, work: Progress) -> tuple[float, float, float]:
        """Runs `training_step`; if memory runs out, runs it again with smaller micro-batches.

        Raises MemoryError if they may not be halved, or have a single window on each rank.
        """
        recipe, text, least = self.recipe, self.text.train, self.ranks.size("dp")
        state = self.model, self.optimizer, recipe, self.step, text, self.ranks
        while True:
            half = largest_part(recipe.batch_size, self.micro_batch / least / 2, least)
            try:
                return training_step(*state, attend=self.attend, micro_batch=self.micro_batch)
            except (RuntimeError, MemoryError) as error:
                if not ran_out_of_memory(error):
                    raise
                if not self.halves or self.micro_batch == least:
                    way_out = f"pass --resume --micro-batch {half}"
                    if self.micro_batch == least:
                        way_out = "begin anew with --checkpoint-layers or a smaller --context"
                    raise MemoryError(
                        f"memory ran out at step {self.step} with {self.micro_batch} windows at a "
                        f"time; the checkpoint of step {self.saved_at} is whole; {way_out}"
                    ) from error
            forget_failure(self.optimizer)
            self.set_micro_batch(half)
            work.say(f"Step {self.step}: memory ran out; from here on {half} windows at a time")

    def set_micro_batch(self, size: int) -> None:
        """Changes how many windows are computed at once, and logs it for resumed runs."""
        self.micro_batch = size
        self._log(step=self.step, micro_batch=size)

    def _log(self, **record: Any) -> None:
        """Appends a record to `metrics` and, on rank 0, to `metrics.jsonl`."""
        self.metrics.append(record)
        if self.file is not None:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()


@with_hints()
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
    micro_batch: int | Literal["auto"] | None = None,
    init: Path | None = None,
    ranks: Ranks = ALONE,
) -> Run:
    """Trains a byte-level LongNet model and writes `metrics.jsonl` and checkpoints to a folder.

    A folder with an unfinished run of these settings is continued from its last checkpoint, and
    records of later steps are removed from `metrics.jsonl`. Only `steps` may differ from the
    checkpoint's recipe. A finished run is never overwritten.

    Args:
        recipe: the settings that the losses depend on.
        out: the output folder.
        resume: the folder must have a checkpoint. If its run is finished, nothing is done.
        command: "train", "demo" or "demo-ring", stored in the checkpoint. A run is continued only
            by the command that began it, since a demo's report describes its own checkpoint.
        save_every, validate_every: intervals in steps. A run also saves whenever it ends or stops,
            and validates after the last step of the recipe.
        num_validation_windows: number of disjoint windows of the validation bytes.
        stop_after: stop as if interrupted when this many steps are done.
        micro_batch: windows of all ranks that are computed at once, an equal part of the batch;
            default all. "auto": as many as fit in the memory that is free, and half as many where
            it runs out all the same. Over ranks it only chooses: running out is an error there.
        init: folder of a checkpoint whose weights a new run begins with, on other text too. A run
            that is continued must have begun with the same weights.
        ranks: the processes that train together, each of which calls this function. Only rank 0
            prints and writes metrics. A signal to one rank stops all ranks at the same step.

    Returns: the run, finished or stopped early. If ranks have parts of the parameters, so does its
        model; `load_model(out)` returns the whole model.

    Raises:
        FileExistsError: the folder contains a finished run and `resume` is false, or a run of
            another command.
        FileNotFoundError, ValueError: the text or checkpoint is missing or unusable.
        OSError: a file could not be written; the last checkpoint is whole.
        FloatingPointError: the loss is not finite.
        MemoryError: memory ran out, and the micro-batch is fixed or a single window.
        RingError, RuntimeError: another rank died or does not answer.
    """
    run = _prepare(
        recipe,
        out,
        command=command,
        resume=resume,
        ranks=ranks,
        num_windows=num_validation_windows,
        init=init,
    )
    last = recipe.steps if stop_after is None else min(stop_after, recipe.steps)
    leads = ranks.leads
    show = partial(progress, "train", unit="step", after_s=0.0) if leads else unshown
    with (
        stop_signal(ranks) as stop,
        open(out / "metrics.jsonl", "a") if leads else nullcontext() as run.file,
        show(total=recipe.steps, done=run.step) as work,
    ):
        _choose_micro_batch(run, micro_batch)
        while True:
            if run.step % validate_every == 0 or run.step == recipe.steps:
                run.validate(stop)
            if run.step >= last or stop() is not None:
                break
            run.advance(work)
            if run.step % save_every == 0:
                run.save()
        if run.saved_at != run.step:
            run.save()
    run.stopped_by = stop()
    return run


def _prepare(
    recipe: Recipe,
    out: Path,
    *,
    command: str,
    resume: bool,
    ranks: Ranks,
    num_windows: int,
    init: Path | None,
) -> Run:
    """Builds the state of a new run, or of one that continues from the folder's checkpoint."""
    recipe, text, checkpoint = ranks.together(
        partial(read_inputs, recipe, out, command, resume=resume, ranks=ranks)
    )
    if checkpoint is not None and ranks.leads and not resume:
        print(f"Going on after step {checkpoint.step} of the run in {out}", flush=True)
    if recipe.dtype == "auto":  # rank 0 chooses for all ranks
        dtype = "bfloat16" if ranks.device.type == "cuda" else best_dtype()
        recipe = replace(recipe, dtype=ranks.from_leader(dtype))
    step = 0 if checkpoint is None else checkpoint.step
    ranks.agree("recipe, text and checkpoint", (recipe, text.fingerprint, step))

    model = recipe.build_model()
    begun_with = "" if checkpoint is None else checkpoint.init
    if init is not None:
        begun_with = ranks.together(partial(start_from, model, recipe, init, checkpoint))
    ranks.place(model)
    optimizer = adamw(model, recipe)
    group = None if ranks.mesh is None else ranks.mesh["dp"].get_group()
    selection = Selection(recipe, group) if recipe.attention == "selected" else None
    if checkpoint is not None:
        ranks.together(partial(checkpoint.restore, model, optimizer, selection))
    windows = validation_windows(text.validation, context=recipe.context, count=num_windows)
    run = Run(
        recipe=recipe,
        text=text,
        windows=windows,
        model=model,
        optimizer=optimizer,
        out=out,
        command=command,
        ranks=ranks,
        step=step,
        saved_at=step,
        metrics=[],
        micro_batch=recipe.batch_size,
        init=begun_with,
        selection=selection,
    )
    if checkpoint is None:
        run.save()  # fails now, before the training, if the folder cannot be written
    last = None if checkpoint is None else step
    metrics = ranks.together(lambda: cut_metrics(out, last) if ranks.leads else [])
    run.metrics = ranks.from_leader(metrics)
    return run


def _choose_micro_batch(run: Run, chosen: int | Literal["auto"] | None) -> None:
    """Sets how many windows are computed at once, as the user chose or by the free memory.

    For "auto" it is the last one of a resumed run, else the largest that fits in memory.
    """
    batch, dp = run.recipe.batch_size, run.ranks.size("dp")
    if chosen is None:
        return
    if chosen != "auto":
        run.micro_batch = checked_part(chosen, batch, dp, "--micro-batch")
        return
    run.halves = run.ranks.mesh is None
    if sizes := [record["micro_batch"] for record in run.metrics if "micro_batch" in record]:
        source = f"micro_batch in {run.out / 'metrics.jsonl'}"
        run.micro_batch = checked_part(sizes[-1], batch, dp, source)
        return
    state = run.model, run.recipe, run.step, run.text.train, run.ranks
    one_window = partial(gradients, *state, dp, 1, run.attend)
    rank = None if run.ranks.mesh is None else run.ranks.rank
    fits = windows_that_fit(one_window, run.ranks.device, rank)
    forget_failure(run.optimizer)
    run.set_micro_batch(largest_part(batch, min(run.ranks.gather(fits)), dp))
