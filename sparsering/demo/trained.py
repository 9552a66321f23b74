"""Demo: trains a small LongNet model on real text at 16,384 bytes of context and measures it.

Run as `sparsering demo --out runs/demo`.
"""

import math
import shlex
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from .. import __version__
from ..ground.commands import sparsering
from ..ground.files import replace_file
from ..kernels.tuning_file import processor_name
from ..patterns.expression import parse
from ..patterns.positions import Causal
from ..plots.attended import patterns_image
from ..plots.figure import require_matplotlib
from ..plots.losses import loss_image, speed_image
from ..training.checkpoint import has_checkpoint
from ..training.data import Windows
from ..training.loop import Run, train
from ..training.recipe import Recipe
from .memory import peak_memory_bytes
from .page import report_html, table
from .step_times import StepTime, step_times

RECIPE = Recipe(steps=300, num_layers=2)
QUICK = Recipe(
    context=256, pattern="LongNet((64, 256), (1, 4)) & Causal()", width=32, num_layers=1, steps=4
)  # tiny sizes, which show that everything runs
GENERATED_BYTES = 300


def demo(out: Path, *, recipe: Recipe = RECIPE) -> int:
    """Trains, times steps with sparse and with dense attention, writes plots and `report.html`.

    It takes about four minutes on two cores. A demo that was stopped goes on from its last
    checkpoint; `report.html`, which is written last, says that a demo is finished.

    Returns: 0; 1 if the model does not beat the bigram baseline; 128 + n if signal n stopped the
    training. Raises FileExistsError for a folder with a finished demo or another run.
    """
    require_matplotlib()  # fails before the training, not after it
    report = out / "report.html"
    if report.exists():
        raise FileExistsError(
            f"{out} has a finished demo, which is not overwritten; open {report}, or choose "
            f"another --out, as in: {_command(out.with_name(out.name + '-2'), recipe)}"
        )
    began = time.perf_counter()
    pattern = parse(recipe.pattern)
    pairs, dense_pairs = (
        p.layout(recipe.context, num_heads=recipe.num_heads).num_pairs for p in (pattern, Causal())
    )
    print(
        f"Training {recipe.num_layers} layers of width {recipe.width} at {recipe.context:,} bytes "
        f"of context,\nattention by {recipe.pattern}: {pairs / dense_pairs:.1%} of the causal "
        "pairs.",
        flush=True,
    )
    begun = has_checkpoint(out)  # by a demo that was stopped, perhaps while it measured
    run = train(recipe, out, resume=begun, command="demo", save_every=50, validate_every=50)
    if run.stopped_by is not None:
        print(f"Stopped at step {run.step} of {recipe.steps}; to go on: {_command(out, recipe)}")
        return 128 + run.stopped_by
    memory = peak_memory_bytes()

    print("Timing the step with this pattern and with dense attention ...", flush=True)
    times = step_times(run)
    baselines = {
        "byte unigram": unigram_loss(run.text.train, run.windows),
        "byte bigram": bigram_loss(run.text.train, run.windows),
    }
    images = _images(run, times, baselines)
    for name, png in zip(
        ("speed", "dense", "pattern", "start", "loss"), images.values(), strict=True
    ):
        replace_file(out / f"{name}.png", png)
    generated, saving = _generation_rows(run)
    rows = _training_rows(run, times, baselines, memory) + generated
    rows.append(("wall time of the demo", f"{time.perf_counter() - began:.0f} s"))
    sparse, dense = times
    attention = dense.attention_seconds / sparse.attention_seconds
    numbers = [
        (
            f"{dense.seconds / sparse.seconds:.1f} x",
            "faster training steps than with dense attention, whose loss was not compared",
        ),
        (f"{attention:.1f} x", "faster attention, forward and backward"),
        (f"{saving:.1f} x", "fewer bytes of keys and values while it generates"),
    ]
    num_bytes = run.step * recipe.batch_size * recipe.context
    summary = (
        f"A byte-level LongNet language model read {num_bytes:,} bytes of "
        + (recipe.data or "Python's standard library")
        + f" in windows of {recipe.context:,}. Every figure below was measured in this run."
    )
    conditions = (
        f"Measured {datetime.now(UTC):%Y-%m-%d %H:%M} UTC on {processor_name()}, "
        f"{torch.get_num_threads()} threads; sparsering {__version__}, torch {torch.__version__}. "
        f"Pattern {recipe.pattern}, seed {recipe.seed}."
    )
    title = "A small LongNet, trained and measured"
    page = report_html(title, summary, numbers, images, rows, conditions)
    replace_file(report, page.encode())
    print(table(rows))
    print(f"\nReport: {report}")
    if not run.validation_loss < baselines["byte bigram"]:
        print(
            f"The model's validation loss {run.validation_loss:.3f} does not beat the bigram's "
            f"{baselines['byte bigram']:.3f}."
        )
        return 0 if recipe == QUICK else 1  # the few steps of QUICK cannot beat it
    return 0


def _command(out: Path, recipe: Recipe) -> str:
    """Returns the shell command that runs the demo, or goes on with it, in the same folder."""
    quick = " --quick" if recipe == QUICK else ""
    return sparsering(f"demo --out {shlex.quote(str(out))}{quick}")


def _training_rows(
    run: Run, times: tuple[StepTime, StepTime], baselines: dict[str, float], memory: int | None
) -> list[tuple[str, str]]:
    """Returns the report's rows (name, value) about the training run and its measured steps."""
    sparse, dense = times
    parameters = sum(p.numel() for p in run.model.parameters())
    seconds = [record["seconds"] for record in run.metrics if "seconds" in record]
    tokens = run.recipe.batch_size * run.recipe.context
    rows = [
        ("parameters", f"{parameters:,}"),
        ("steps x tokens", f"{run.step} x {tokens:,}"),
        ("autocast dtype", run.recipe.dtype),
        ("threads", str(torch.get_num_threads())),
        ("validation loss (nats per byte)", f"{run.validation_loss:.3f}"),
        ("validation bits per byte", f"{run.validation_loss / math.log(2):.3f}"),
        *((f"{name} loss, same bytes", f"{loss:.3f}") for name, loss in baselines.items()),
        ("training steps took", f"{sum(seconds):.0f} s"),
        ("a step, sparse", f"{sparse.seconds:.2f} s"),
        ("a step, dense causal attention", f"{dense.seconds:.2f} s"),
        ("validation loss of dense attention after equal steps", "not compared"),
        ("tokens/s, sparse", f"{tokens / sparse.seconds:,.0f}"),
        ("tokens/s, dense", f"{tokens / dense.seconds:,.0f}"),
        ("the whole step is faster by", f"{dense.seconds / sparse.seconds:.1f} x"),
        ("attention is faster by", f"{dense.attention_seconds / sparse.attention_seconds:.1f} x"),
        ("attention share of the step, sparse", f"{sparse.attention_seconds / sparse.seconds:.0%}"),
        ("attention share of the step, dense", f"{dense.attention_seconds / dense.seconds:.0%}"),
    ]
    if memory is not None:
        rows.append(("peak memory of training (RSS)", f"{memory / 1e6:,.0f} MB"))
    return rows


class TimedTokens:
    """Iterates over tokens of `LongNetLM.generate`; times the first token and the later ones."""

    def __init__(self, tokens: Iterable[Tensor]) -> None:
        self.tokens = tokens
        self.num_tokens = 0
        self.prompt_seconds = 0.0  # from the start to the first token
        self.seconds = 0.0  # from the first token to the last

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
        """Tokens per second, without the first token; None for fewer than two tokens."""
        return (self.num_tokens - 1) / self.seconds if self.num_tokens > 1 else None


def _generation_rows(run: Run) -> tuple[list[tuple[str, str]], float]:
    """Measures generation after a validation prompt; prompt and output fill one context.

    Returns: the report's rows, and the bytes of full caches divided by the bytes that are held.
    """
    prompt = run.text.validation[: max(run.recipe.context - GENERATED_BYTES, 1)].long()[None]
    caches = run.model.caches(max_length=prompt.shape[1] + GENERATED_BYTES)
    tokens = TimedTokens(run.model.generate(prompt, GENERATED_BYTES, caches=caches, temperature=0))
    most = max(run.model.cache_bytes(caches)[0] for _ in tokens)
    full = run.model.cache_bytes(caches)[1]
    rows = [
        (f"to read a prompt of {prompt.shape[1]:,} bytes", f"{tokens.prompt_seconds:.2f} s"),
        ("tokens/s, generating after it", f"{tokens.tokens_per_s:,.0f}"),
        ("keys and values held, at most", f"{most / 1e6:.2f} MB"),
        ("full caches would hold", f"{full / 1e6:.2f} MB, {full / most:.1f} x"),
    ]
    return rows, full / most


def _images(
    run: Run, times: tuple[StepTime, StepTime], baselines: dict[str, float]
) -> dict[str, bytes]:
    """Draws the report's five PNG images, by caption."""
    sparse, dense = times
    pattern, length = parse(run.recipe.pattern), run.recipe.context
    start = max(length // 16, 1)
    seconds = {
        "this pattern": (sparse.attention_seconds, sparse.seconds),
        "dense": (dense.attention_seconds, dense.seconds),
    }
    conditions = f"{length:,} bytes, {run.recipe.dtype}, {torch.get_num_threads()} threads"
    images = {"One training step": speed_image(seconds, title=conditions)}
    for caption, text, shown, tokens in (
        ("What each query sees in dense attention", "Causal()", Causal(), length),
        ("What each query sees in this model", run.recipe.pattern, pattern, length),
        (f"The same, the first {start:,} bytes", run.recipe.pattern, pattern, start),
    ):
        panel = [(text, shown, tokens)]
        images[caption] = patterns_image(panel, num_heads=run.recipe.num_heads)
    return images | {"Loss over the steps": loss_image(run.metrics, baselines)}


def unigram_loss(train: Tensor, windows: Windows) -> float:
    """Computes the loss, in nats, of predicting each byte by its frequency in `train`."""
    counts = torch.bincount(train, minlength=256).double() + 1
    log_share = (counts / counts.sum()).log()
    return -float(torch.cat([log_share[targets].flatten() for _, targets in windows]).mean())


def bigram_loss(train: Tensor, windows: Windows) -> float:
    """Computes the loss, in nats, of predicting a byte from the one before, by pairs in `train`."""
    pairs = train[:-1].long() * 256 + train[1:]
    counts = torch.bincount(pairs, minlength=256 * 256).view(256, 256).double() + 1
    log_share = (counts / counts.sum(1, keepdim=True)).log()
    return -float(torch.cat([log_share[pair].flatten() for pair in windows]).mean())
