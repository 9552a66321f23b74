"""Measuring a run: the time of a step, sparse and dense, attention's share of it, and memory."""

import copy
import statistics
import sys
import time
from dataclasses import dataclass

from torch import Tensor

from ..models.longnet import dense_causal_attention
from ..nn.transformer import Attend
from .data import training_window
from .loop import Run, adamw, training_step


@dataclass(frozen=True)
class StepTime:
    """Medians over a few training steps (forward, backward, update).

    Attributes:
        seconds: of a step.
        attention_seconds: of these, in attention's forward and backward.
        tokens_per_s: tokens of a step over `seconds`.
    """

    seconds: float
    attention_seconds: float
    tokens_per_s: float

    @property
    def attention_share(self) -> float:
        """Of the step's time, 0 to 1."""
        return self.attention_seconds / self.seconds


class TimedAttention:
    """Attention with a stopwatch: `seconds` sums its forward and backward.

    Backward is timed from the arrival of the output's gradient to the first gradient that leaves
    for query, key or value; attention is one node of autograd's graph, which the CPU runs from
    start to end.
    """

    def __init__(self, attend: Attend) -> None:
        self.attend = attend
        self.seconds = 0.0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        began = time.perf_counter()
        out = self.attend(query, key, value)
        self.seconds += time.perf_counter() - began
        if out.requires_grad:
            running: list[float] = []

            def start(grad: Tensor) -> None:
                running.append(time.perf_counter())

            def stop(grad: Tensor) -> None:
                if running:
                    self.seconds += time.perf_counter() - running.pop()

            out.register_hook(start)
            for tensor in (query, key, value):
                tensor.register_hook(stop)
        return out


def step_times(run: Run, *, repeats: int = 3) -> tuple[StepTime, StepTime]:
    """Times training steps of a copy of the model: with its pattern, and with dense attention.

    The two alternate after one step each to warm up, on the same windows and the same weights; the
    run is not changed.

    Returns: (sparse, dense).
    """
    model = copy.deepcopy(run.model)
    optimizer = adamw(model, run.recipe)
    timers = [TimedAttention(model.attend), TimedAttention(dense_causal_attention)]
    steps: list[list[float]] = [[], []]
    attention: list[list[float]] = [[], []]
    for repeat in range(repeats + 1):
        tokens, targets = training_window(
            run.text.train,
            context=run.recipe.context,
            batch_size=run.recipe.batch_size,
            seed=run.recipe.seed,
            step=repeat,
        )
        for timer, step_seconds, attention_seconds in zip(timers, steps, attention, strict=True):
            timer.seconds = 0.0
            began = time.perf_counter()
            training_step(model, optimizer, run.recipe, repeat, tokens, targets, attend=timer)
            if repeat:
                step_seconds.append(time.perf_counter() - began)
                attention_seconds.append(timer.seconds)
    sparse, dense = (
        StepTime(
            statistics.median(step_seconds),
            statistics.median(attention_seconds),
            tokens.numel() / statistics.median(step_seconds),
        )
        for step_seconds, attention_seconds in zip(steps, attention, strict=True)
    )
    return sparse, dense


def peak_memory_bytes() -> int | None:
    """The largest resident set of this process so far; None where the system does not tell.

    Linux tells it of the program alone; `getrusage` also knows of what forked before it began.
    """
    try:
        with open("/proc/self/status") as status:
            return 1024 * next(int(x.split()[1]) for x in status if x.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
