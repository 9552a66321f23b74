"""Measures a run: time of sparse and dense training steps, generation speed, memory."""

import copy
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from ..models.longnet import dense_causal_attention
from ..nn.transformer import Attend
from .data import training_window
from .loop import Run, adamw, training_step


@dataclass(frozen=True)
class StepTime:
    """Median times of a few training steps (forward, backward, update).

    Attributes:
        seconds: time of a step.
        attention_seconds: the part of it in attention's forward and backward.
        tokens_per_s: tokens of a step divided by `seconds`.
    """

    seconds: float
    attention_seconds: float
    tokens_per_s: float

    @property
    def attention_share(self) -> float:
        """Attention's share of the step's time, 0 to 1."""
        return self.attention_seconds / self.seconds


class TimedAttention:
    """Attention with a stopwatch: `seconds` sums the time of its forward and backward.

    Backward is timed from the gradient of the output to the first gradient of query, key or value.
    That is all of it: attention is one node of autograd's graph, which the CPU runs in one go.
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

    After one warm-up step each the two alternate, on the same windows and the same model. The run
    itself is not changed.

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


class TimedTokens:
    """Iterator over the tokens of `LongNetLM.generate`, with a stopwatch.

    Attributes:
        num_tokens: tokens so far.
        prompt_seconds: time until the first token.
        seconds: time from the first token to the last.
    """

    def __init__(self, tokens: Iterable[Tensor]) -> None:
        self.tokens = tokens
        self.num_tokens = 0
        self.prompt_seconds = self.seconds = 0.0

    def __iter__(self) -> Iterator[Tensor]:
        began = time.perf_counter()
        for token in self.tokens:
            elapsed = time.perf_counter() - began
            if self.num_tokens == 0:
                self.prompt_seconds = elapsed
            self.seconds = elapsed - self.prompt_seconds
            self.num_tokens += 1
            yield token

    @property
    def tokens_per_s(self) -> float | None:
        """Rate of the tokens after the first; None without any."""
        return (self.num_tokens - 1) / self.seconds if self.num_tokens > 1 else None


@dataclass(frozen=True)
class GenerationTime:
    """Time and memory of generation after a long prompt.

    Attributes:
        prompt_tokens: length of the prompt.
        prompt_seconds: time to read it and to draw the first token.
        tokens_per_s: rate of the tokens after the first; None with only one token.
        cache_bytes: peak size of the caches during generation.
        full_cache_bytes: size at the end of caches with all keys and values.
    """

    prompt_tokens: int
    prompt_seconds: float
    tokens_per_s: float | None
    cache_bytes: int
    full_cache_bytes: int


def generation_time(run: Run, num_tokens: int) -> GenerationTime:
    """Generates `num_tokens` after a prompt of validation text; together they fill one context."""
    most = max(run.recipe.context - num_tokens, 1)
    prompt = run.text.validation[:most].long()[None]
    caches = run.model.caches(max_length=prompt.shape[1] + num_tokens)
    tokens = TimedTokens(run.model.generate(prompt, num_tokens, caches=caches, temperature=0))
    most_bytes = max(run.model.cache_bytes(caches)[0] for _ in tokens)
    return GenerationTime(
        prompt.shape[1],
        tokens.prompt_seconds,
        tokens.tokens_per_s,
        most_bytes,
        run.model.cache_bytes(caches)[1],
    )


def peak_memory_bytes() -> int | None:
    """Largest resident set of this process so far; None if the system does not say.

    On Linux VmHWM counts this program alone; `getrusage` also counts the process that forked it.
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
