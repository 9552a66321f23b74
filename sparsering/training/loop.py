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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TextIO

import torch
from torch import Tensor, nn

from ..models.longnet import LongNetLM
from ..nn.transformer import Attend
from ..progress import Progress, progress, unshown
from .adaptive import Selection
from .checkpoint import Checkpoint, has_checkpoint, load_checkpoint
from .data import Text, Windows, read_text, training_window, validation_windows
from .metrics import cut_metrics
from .micro_batches import (
    checked_part,
    forget_failure,
    largest_part,
    make_moments,
    ran_out_of_memory,
    windows_that_fit,
)
from .ranks import ALONE, Ranks
from .recipe import DTYPES, Recipe, best_dtype


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
        """The attention of each layer; None for that of the model."""
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
        """Writes a checkpoint of the model and optimizer after the current step."""
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
        """Logs the step's mean validation loss, unless it is already logged or a signal arrives."""
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
        """Runs `training_step`, again with half a micro-batch where memory runs out."""
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
        """Computes `size` windows at a time from now on, in a resumed run too."""
        self.micro_batch = size
        self._log(step=self.step, micro_batch=size)

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

    Returns: the run, finished or stopped early.

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
    recipe, text, checkpoint = ranks.together(partial(_inputs, recipe, out, command, resume, ranks))
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
        begun_with = ranks.together(partial(_start_from, model, recipe, init, checkpoint))
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


def _start_from(model: LongNetLM, recipe: Recipe, init: Path, resumed: Checkpoint | None) -> str:
    """Copies the weights of a checkpoint into the model of a new run; returns their digest."""
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


def _choose_micro_batch(run: Run, chosen: int | Literal["auto"] | None) -> None:
    """Sets the run's micro-batch: the one chosen, or for "auto" the last one or what fits."""
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
    fits = windows_that_fit(partial(_gradients, *state, dp, 1, run.attend), run.ranks.device)
    forget_failure(run.optimizer)
    run.set_micro_batch(largest_part(batch, min(run.ranks.gather(fits)), dp))


def _inputs(
    recipe: Recipe, out: Path, command: str, resume: bool, ranks: Ranks
) -> tuple[Recipe, Text, Checkpoint | None]:
    ranks.check(recipe)
    checkpoint = load_checkpoint(out) if resume or has_checkpoint(out) else None
    if checkpoint is not None:
        _check_may_go_on(checkpoint, recipe, command, resume)
    text = read_text(recipe.data, context=recipe.context, seed=recipe.seed, glob=recipe.glob)
    if checkpoint is not None:
        recipe = _resumed_recipe(recipe, text, checkpoint)
    return recipe, text, checkpoint


def _check_may_go_on(checkpoint: Checkpoint, recipe: Recipe, command: str, resume: bool) -> None:
    """Raises FileExistsError for a run of another command, and a finished one without `resume`."""
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


def training_step(
    model: LongNetLM,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    step: int,
    train: Tensor,
    ranks: Ranks = ALONE,
    *,
    attend: Attend | Sequence[Attend] | None = None,
    micro_batch: int | None = None,
) -> tuple[float, float, float]:
    """Runs forward, backward and update on the step's windows of the training bytes.

    `micro_batch` windows are computed at a time, default all of them.

    Returns: loss (nats per byte) and gradient norm before clipping, over all ranks' windows; and
        the learning rate.
    """
    rate = recipe.learning_rate_at(step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    size = micro_batch or recipe.batch_size
    loss = _gradients(model, recipe, step, train, ranks, size, recipe.batch_size // size, attend)
    make_moments(optimizer)
    norm = ranks.clip_gradients(model, recipe.clip_norm)
    optimizer.step()
    return ranks.total(loss), norm, rate


def _gradients(
    model: LongNetLM,
    recipe: Recipe,
    step: int,
    train: Tensor,
    ranks: Ranks,
    size: int,
    parts: int,
    attend: Attend | Sequence[Attend] | None = None,
) -> Tensor:
    """Adds the gradients of the first `parts` micro-batches of a step; returns their loss."""
    tokens, targets = training_window(
        train, context=recipe.context, batch_size=recipe.batch_size, seed=recipe.seed, step=step
    )
    total = torch.zeros((), device=ranks.device)
    for one in range(parts):
        window = slice(one * size, (one + 1) * size)
        with autocast(recipe.dtype, ranks.device.type):
            loss = ranks.loss(model, tokens[window], targets[window], attend, targets.numel())
        loss.backward()
        total += loss.detach()
    return total


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
            f"expected the text that the checkpoint in {checkpoint.folder} was trained on, got "
            "another (files or bytes changed); restore it, or start a new run with another --out"
        )
    return recipe
