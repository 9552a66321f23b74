"""Demo: trains a small LongNet model on real text at 16,384 bytes of context and measures it.

Run as `sparsering demo --out runs/demo`.
"""

import math
import time
from pathlib import Path

import torch

from ..files import replace_file
from ..patterns.expression import parse
from ..patterns.positions import Causal
from ..plots import loss_png, patterns_png, require_matplotlib, speed_png
from .data import SEPARATOR, bigram_loss, unigram_loss
from .html import readable, report_html, table
from .loop import Run, train
from .measure import (
    GenerationTime,
    StepTime,
    generation_time,
    peak_memory_bytes,
    step_times,
)
from .recipe import Recipe

RECIPE = Recipe(steps=300, num_layers=2)  # a small model, for more steps in the same time
PROMPT_BYTES, SAMPLE_BYTES = 200, 300


def demo(out: Path, *, recipe: Recipe = RECIPE, resume: bool = False) -> int:
    """Trains, times a step with sparse and with dense attention, writes plots and `report.html`.

    Args:
        out: the output folder; files of an earlier demo in it are replaced.
        recipe: the training settings; the default takes about four minutes on two cores.
        resume: continue an interrupted demo.

    Returns: 0; 1 if the model does not beat the bigram baseline; 128 + n if signal n stopped the
    training.

    Raises: as `train`; ImportError if matplotlib is missing, before any work.
    """
    require_matplotlib()  # fails now rather than after the training
    began = time.perf_counter()
    pattern = parse(recipe.pattern)
    pairs, dense_pairs = (
        p.layout(recipe.context, num_heads=recipe.num_heads).num_pairs for p in (pattern, Causal())
    )
    print(
        f"Training {recipe.num_layers} layers of width {recipe.width} at {recipe.context:,} bytes "
        "of context,"
    )
    print(
        f"attention by {recipe.pattern}: {pairs / dense_pairs:.1%} of the causal pairs.", flush=True
    )
    run = train(recipe, out, resume=resume, command="demo", save_every=50, validate_every=50)
    if run.stopped_by is not None:
        print(
            f"Stopped at step {run.step} of {recipe.steps}; to go on: sparsering demo --out {out} "
            "--resume"
        )
        return 128 + run.stopped_by
    memory = peak_memory_bytes()

    print("Timing the step with this pattern and with dense attention ...", flush=True)
    sparse, dense = step_times(run)
    unigram, bigram = (loss(run.text.train, run.windows) for loss in (unigram_loss, bigram_loss))
    prompt = bytes(run.text.validation[:PROMPT_BYTES].tolist()).split(SEPARATOR)[0] or b"\n"
    tokens = run.model.generate(
        torch.tensor([list(prompt)]), SAMPLE_BYTES, generator=torch.Generator().manual_seed(0)
    )
    sample = bytes(int(token) for token in tokens)
    generation = generation_time(run, SAMPLE_BYTES)

    baselines = {"byte unigram": unigram, "byte bigram": bigram}
    images = _pictures(run, sparse, dense, baselines)
    for name, png in images.items():
        replace_file(out / f"{name}.png", png)
    rows = _rows(run, sparse, dense, baselines, memory) + _generation_rows(generation)
    rows.append(("wall time of the demo", f"{time.perf_counter() - began:.0f} s"))
    summary = (
        f"A byte-level LongNet language model read {_trained_bytes(run):,} bytes of {_source(run)} "
        f"in windows of {recipe.context:,}. Every figure below was measured in this run."
    )
    page = report_html(
        "sparsering demo",
        summary,
        rows,
        {
            "Loss": images["loss"],
            "One training step": images["speed"],
            "What each query sees": images["patterns"],
        },
        {"Prompt (validation text)": readable(prompt), "The model goes on": readable(sample)},
    )
    replace_file(out / "report.html", page.encode())
    print(table(rows))
    print(
        f"\nThe model continues {prompt[-60:].decode('utf-8', 'replace')!r}:\n{readable(sample)}\n"
    )
    print(f"Report: {out / 'report.html'}")
    if not run.validation_loss < bigram:
        print(
            f"The model's validation loss {run.validation_loss:.3f} does not beat the bigram's "
            f"{bigram:.3f}."
        )
        return 1
    return 0


def _rows(
    run: Run, sparse: StepTime, dense: StepTime, baselines: dict[str, float], memory: int | None
) -> list[tuple[str, str]]:
    """Rows (name, value) of the report's table."""
    parameters = sum(p.numel() for p in run.model.parameters())
    seconds = [record["seconds"] for record in run.metrics if "seconds" in record]
    rows = [
        ("parameters", f"{parameters:,}"),
        ("steps x tokens", f"{run.step} x {run.recipe.batch_size * run.recipe.context:,}"),
        ("autocast dtype", run.recipe.dtype),
        ("threads", str(torch.get_num_threads())),
        ("validation loss (nats per byte)", f"{run.validation_loss:.3f}"),
        ("validation bits per byte", f"{run.validation_loss / math.log(2):.3f}"),
        *((f"{name} loss, same bytes", f"{loss:.3f}") for name, loss in baselines.items()),
        ("training steps took", f"{sum(seconds):.0f} s"),
        ("a step, sparse", f"{sparse.seconds:.2f} s"),
        ("a step, dense causal attention", f"{dense.seconds:.2f} s"),
        ("tokens/s, sparse", f"{sparse.tokens_per_s:,.0f}"),
        ("tokens/s, dense", f"{dense.tokens_per_s:,.0f}"),
        ("the whole step is faster by", f"{dense.seconds / sparse.seconds:.1f} x"),
        ("attention is faster by", f"{dense.attention_seconds / sparse.attention_seconds:.1f} x"),
        ("attention share of the step, sparse", f"{sparse.attention_share:.0%}"),
        ("attention share of the step, dense", f"{dense.attention_share:.0%}"),
    ]
    if memory is not None:
        rows.append(("peak memory of training (RSS)", f"{memory / 1e6:,.0f} MB"))
    return rows


def _generation_rows(generation: GenerationTime) -> list[tuple[str, str]]:
    most, full = generation.cache_bytes, generation.full_cache_bytes
    rows = [
        (
            f"to read a prompt of {generation.prompt_tokens:,} bytes",
            f"{generation.prompt_seconds:.2f} s",
        ),
        ("keys and values held, at most", f"{most / 1e6:.2f} MB"),
        ("full caches would hold", f"{full / 1e6:.2f} MB, {full / most:.1f} x"),
    ]
    if generation.tokens_per_s is not None:
        rows.insert(1, ("tokens/s, generating after it", f"{generation.tokens_per_s:,.0f}"))
    return rows


def _pictures(
    run: Run, sparse: StepTime, dense: StepTime, baselines: dict[str, float]
) -> dict[str, bytes]:
    """Draws the report's plots: PNG bytes by file name."""
    pattern = parse(run.recipe.pattern)
    length, num_heads = run.recipe.context, run.recipe.num_heads
    return {
        "loss": loss_png(run.metrics, baselines),
        "patterns": patterns_png(
            [
                ("dense attention: Causal()", Causal(), length),
                (f"this model: {run.recipe.pattern}", pattern, length),
                (
                    f"the same, its first {max(length // 16, 1):,} bytes",
                    pattern,
                    max(length // 16, 1),
                ),
            ],
            num_heads=num_heads,
        ),
        "speed": speed_png(
            {
                "this pattern": (sparse.attention_seconds, sparse.seconds),
                "dense": (dense.attention_seconds, dense.seconds),
            },
            title=f"{length:,} bytes of context, {run.recipe.dtype}, "
            f"{torch.get_num_threads()} threads",
        ),
    }


def _source(run: Run) -> str:
    return run.recipe.data or "Python's standard library"


def _trained_bytes(run: Run) -> int:
    return run.step * run.recipe.batch_size * run.recipe.context
