"""Times training steps of a run, and their attention, with its pattern and with dense attention."""

import copy
import statistics
import time
from functools import partial
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..nn.transformer import Attend
from ..training.loop import Run
from ..training.step import adamw, training_step


class StepTime(NamedTuple):
    """Holds the time of a training step (forward, backward, update), and of its attention."""

    seconds: float
    attention_seconds: float


class TimedAttention:
    """Attention with a stopwatch: `seconds` sums the time of its forward and backward.

    Backward is timed from the gradient of the output to the first gradient of query, key or value.
    Attention is one node of autograd's graph, so on a CPU this time is its whole backward.
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

    Sparse and dense steps alternate, after one warm-up step each. Returns medians (sparse, dense).
    """
    model = copy.deepcopy(run.model)
    optimizer = adamw(model, run.recipe)
    dense_attend = partial(scaled_dot_product_attention, is_causal=True)
    timers = [TimedAttention(model.attend), TimedAttention(dense_attend)]
    times: tuple[list[StepTime], list[StepTime]] = ([], [])
    for step in range(repeats + 1):
        for timer, timer_times in zip(timers, times, strict=True):
            timer.seconds = 0.0
            began = time.perf_counter()
            training_step(model, optimizer, run.recipe, step, run.text.train, attend=timer)
            timer_times.append(StepTime(time.perf_counter() - began, timer.seconds))
    sparse, dense = (StepTime(*map(statistics.median, zip(*x[1:], strict=True))) for x in times)
    return sparse, dense
