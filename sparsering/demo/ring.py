"""Trains a small LongNet whose tokens several processes share, and reports what moves.

    torchrun --standalone --nproc-per-node 4 -m sparsering demo-ring --out runs/demo-ring

It compares the losses with those of one process and the received bytes with the plan's, and draws
which rank sends how much to which.
"""

import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from ..distributed import RingPlan, last_traffic
from ..distributed.sharding import num_tokens
from ..ground.commands import over_processes
from ..ground.files import replace_file
from ..patterns.positions import Full
from ..plots.traffic import traffic_image
from ..training.checkpoint import has_checkpoint
from ..training.data import read_text
from ..training.loop import Run, train
from ..training.ranks import Ranks, ranks_of_torchrun
from ..training.recipe import DTYPES, Recipe
from ..training.step import adamw, autocast, training_step
from .memory import peak_memory_bytes

RECIPE = Recipe(steps=60, num_layers=2, dtype="float32")
QUICK = replace(
    RECIPE, context=256, pattern="LongNet((64, 256), (1, 4)) & Causal()", width=32, steps=4
)  # tiny sizes, which show that everything runs
COMPARED_STEPS = 10
TOLERANCE = 1e-4  # allowed relative difference of losses: one process sums in another order
TIMEOUT_S = 300.0  # the other ranks wait while rank 0 trains alone for the comparison


class RankFigures(NamedTuple):
    """Holds the attention work, received bytes and peak memory of one rank."""

    tokens: int
    pairs: int | float  # (query, key) pairs that it computes, summed over heads and branches
    # Bytes received for one layer's attention. Forward: counted, planned, planned if every rank
    # needed every key. Then these three for the backward.
    received: list[int | float]
    peak_bytes: int | None  # largest resident memory in training; None if unknown


def demo_ring(out: Path, *, recipe: Recipe = RECIPE) -> int:
    """Trains with each window's tokens sharded over all ranks; compares losses with one process.

    It takes about a minute with four ranks on two cores. A demo that was stopped goes on;
    `report.txt`, which is written last, says that a demo is finished.

    Returns: 0; 1 if losses or bytes are not as expected; 128 + n if signal n stopped it. Raises
    FileExistsError for a folder with a finished demo or another run.
    """
    if not dist.is_torchelastic_launched():
        raise ValueError(
            "expected processes started by torchrun, got a single process; run "
            f"{over_processes('demo-ring')}"
        )
    began = time.perf_counter()
    with ranks_of_torchrun(int(os.environ["WORLD_SIZE"]), timeout=TIMEOUT_S) as ranks:
        ranks.together(partial(_check_unfinished, out))
        if ranks.leads:
            print(
                f"Training {recipe.num_layers} layers of width {recipe.width}: {recipe.context:,} "
                f"bytes of context\nover {ranks.size('sp')} processes, attention by "
                f"{recipe.pattern}.",
                flush=True,
            )
        every = recipe.steps  # saves and validates only at the end
        run = train(
            recipe,
            out,
            resume=ranks.from_leader(has_checkpoint(out)),
            command="demo-ring",
            save_every=every,
            validate_every=every,
            ranks=ranks,
        )
        if run.stopped_by is not None:
            return 128 + run.stopped_by
        plan = ranks.plan(run.model, recipe.context)
        figures = ranks.gather(_figures(ranks, plan, run))
        code = 0
        if ranks.leads:
            print("Training the first steps again in one process ...", flush=True)
            lines, code = _report(run, plan, figures)
            lines += _picture(out, plan, run.recipe)
            replace_file(out / "report.txt", "".join(f"{line}\n" for line in lines).encode())
            print(*lines, sep="\n")
            print(f"The demo took {time.perf_counter() - began:.0f} s. Written: {out}")
        return ranks.from_leader(code)


def _check_unfinished(out: Path) -> None:
    """Raises FileExistsError if the folder has the report of a finished demo."""
    if (report := out / "report.txt").exists():
        raise FileExistsError(
            f"{out} has a finished demo, which is not overwritten; read {report}, or choose "
            "another --out"
        )


def _figures(ranks: Ranks, plan: RingPlan, run: Run) -> RankFigures:
    """Returns this rank's figures after training.

    Received bytes are counted in one more forward and backward pass.
    """
    memory = peak_memory_bytes()
    with autocast(run.recipe.dtype, ranks.device.type):
        ranks.loss(run.model, *run.windows[0]).backward()
    rank = ranks.place_along("sp")
    head_dim, dtype = run.recipe.width // run.recipe.num_heads, DTYPES[run.recipe.dtype]
    received: list[int | float] = []
    for backward in (False, True):
        received.append(last_traffic(backward=backward).received_bytes)
        for p in (plan, _full_ring(plan)):
            planned = p.bytes_received(rank, head_dim=head_dim, dtype=dtype, backward=backward)
            received.append(planned)
    return RankFigures(num_tokens(plan.ranges[rank]), plan.load(rank), received, memory)


def _full_ring(plan: RingPlan) -> RingPlan:
    """Plans a ring with the shards of `plan`, in which every query attends to every key."""
    return RingPlan.build(
        Full(),
        plan.frame.kv_len,
        plan.world_size,
        num_heads=plan.frame.num_kv_heads,
        sharding=plan.sharding,
    )


def _report(run: Run, plan: RingPlan, figures: list[RankFigures]) -> tuple[list[str], int]:
    """Returns the lines of the report, and 1 if losses or bytes are not as expected, else 0."""
    lines: list[str] = []
    say = lines.append
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        alone, peak = pool.submit(_losses_alone, run.recipe).result()
    losses = [record["loss"] for record in run.metrics if "loss" in record]
    pairs = list(zip(losses, alone, strict=False))  # the single process trains only the first steps
    largest = max(abs(a - b) / abs(b) for a, b in pairs)

    widths: tuple[int, ...] = (4, 16, 16, 14)
    say(_row(widths, "step", f"{plan.world_size} processes", "one process", "difference"))
    for step, (a, b) in enumerate(pairs, 1):
        say(_row(widths, step, f"{a:.7f}", f"{b:.7f}", f"{abs(a - b):.1e}"))
    say(f"Largest relative difference of the losses: {largest:.1e} (at most {TOLERANCE:g}).")
    say("")

    widths = (4, 8, 14, 11, 11, 13, 11, 11, 13, 13)
    say(f"{'':37}received, one layer forward        received, one layer backward")
    headings = ("counted", "planned", "full ring")
    say(_row(widths, "rank", "tokens", "pairs", *headings, *headings, "peak memory"))
    for rank, row in enumerate(figures):
        sizes = map(_size, (*row.received, row.peak_bytes))
        say(_row(widths, rank, f"{row.tokens:,}", f"{row.pairs:,}", *sizes))
    loads = [row.pairs for row in figures]
    say(f"Load: the busiest rank has {max(loads) / (sum(loads) / len(loads)):.3f} x the mean.")
    counted, planned, full = (
        [size for row in figures for size in row.received[i::3]] for i in range(3)
    )
    share = f"{sum(counted) / sum(full):.3%}" if sum(full) else "all"
    say(f"Attention moved {share} of what a full ring of the same shards does.")
    parameters = sum(p.nbytes for p in run.model.parameters())
    say(f"Beside it, each step sums gradients of {_size(parameters)} over the ranks.")
    say(f"Peak memory of the one process: {_size(peak)}.")
    if counted != planned:
        say("The counted bytes differ from the plan.")
    if not largest <= TOLERANCE:
        say("The losses differ from the losses of one process.")
    return lines, int(counted != planned or not largest <= TOLERANCE)


def _picture(out: Path, plan: RingPlan, recipe: Recipe) -> list[str]:
    """Draws the traffic between ranks in `traffic.png`; returns a line for the report.

    The line names the picture, or the package that is missing to draw it.
    """
    head_dim, itemsize = recipe.width // recipe.num_heads, DTYPES[recipe.dtype].itemsize
    panels = [
        (pattern_text, tokens, 2 * head_dim * itemsize)  # a row: the key and value of one head
        for pattern_text, tokens in (
            (recipe.pattern, plan.tokens),
            ("Full(): a ring that sends everything", _full_ring(plan).tokens),
        )
    ]
    try:
        replace_file(out / "traffic.png", traffic_image(panels))
    except ImportError as error:
        return [f"No picture of the traffic: {error}."]
    return [f"Who sends what: {out / 'traffic.png'}"]


def _losses_alone(recipe: Recipe) -> tuple[list[float], int | None]:
    """Trains in one process; returns the first losses and the peak memory."""
    text = read_text(recipe.data, context=recipe.context, seed=recipe.seed, glob=recipe.glob)
    model = recipe.build_model()
    optimizer = adamw(model, recipe)
    losses = [
        training_step(model, optimizer, recipe, step, text.train)[0]
        for step in range(min(COMPARED_STEPS, recipe.steps))
    ]
    return losses, peak_memory_bytes()


def _row(widths: tuple[int, ...], *cells: object) -> str:
    """Formats a line of a table: each cell on the right of its column."""
    line = "".join(f"{cell!s:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"  {line}"


def _size(number: float | None) -> str:
    """Formats a number of bytes in KiB, MiB or GiB; None is "unknown"."""
    if number is None:
        return "unknown"
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number:,.0f} B"
