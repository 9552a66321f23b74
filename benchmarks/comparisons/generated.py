"""Bytes a second of a small trained model: plain decoding, and guesses that one pass verifies."""

import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from sparsering.models import LongNetLM
from sparsering.training.loop import train
from sparsering.training.recipe import Recipe

from ..measure import Row, spread_of

_NEW = 400  # bytes


def generated(quick: bool) -> list[Row]:
    """Trains a model and a smaller one on Python's sources; `quick` trains few steps."""
    steps, context, rounds = (4, 512, 1) if quick else (300, 4096, 5)
    recipe = Recipe(
        pattern="LongNet((256, 1024, 4096), (1, 4, 16)) & Causal()",
        context=context, steps=steps, num_layers=2, dtype="float32",
    )  # fmt: skip
    smaller = Recipe(
        pattern="SlidingWindow(255)", context=context, steps=steps, num_layers=1, width=64,
        dtype="float32",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = train(recipe, Path(folder) / "large")
        small = train(smaller, Path(folder) / "small").model.eval()
    model, passes = run.model.eval(), list[None]()
    model.norm.register_forward_hook(lambda *_: passes.append(None))
    prompt = run.text.validation[: context // 2].tolist()
    ways = {"plain": None, "ngram": "ngram", "smaller model": small}
    calls = {
        (name, temperature): partial(_write, model, prompt, draft, temperature)
        for name, draft in ways.items()
        for temperature in (0.0, 0.7)
    }
    times: dict[tuple[str, float], list[float]] = {key: [] for key in calls}
    counts, texts = {}, {}
    for _ in range(rounds):
        for key, call in calls.items():
            passes.clear()
            begin = time.perf_counter()
            texts[key] = call()
            times[key].append(time.perf_counter() - begin)
            counts[key] = len(passes)
    rows: list[Row] = []
    for (name, temperature), seconds in times.items():
        plain = texts["plain", temperature]
        rows.append({
            "draft": name, "temperature": temperature, "prompt": len(prompt), "new": _NEW,
            "loss": run.validation_loss, "bytes_per_pass": _NEW / counts[name, temperature],
            "bytes_per_s": _NEW / sorted(seconds)[len(seconds) // 2],
            **spread_of([1000 * x for x in seconds]),
            "same": texts[name, temperature] == plain,
        })  # fmt: skip
    return rows


def _write(
    model: LongNetLM, prompt: list[int], draft: str | LongNetLM | None, temperature: float
) -> list[int]:
    """Generates with the same seed in each way."""
    drawn = model.generate(
        torch.tensor([prompt]), _NEW, temperature=temperature, draft=draft,  # type: ignore[arg-type]
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    return [int(token) for token in drawn]
