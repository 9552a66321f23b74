"""Ranks that are in different calls at once: each gets an error, and the group can go on.

Each rank makes one call, or one backward pass; where they differ, all ranks must raise. Then all
make one call together, whose results are those of one process.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import hypothesis.strategies as st
import torch
from helpers import ring_workers
from helpers.ring_workers import Workers
from oracles.patterns_oracle import Spec, build
from torch import Tensor

import sparsering as sr
from sparsering.distributed import RingMismatchError, ring_attention, shard, unshard
from sparsering.nn import MultiheadAttention
from sparsering.selection import GatedSchedule, PatternRefiner, Schedule

from .attack import Cell

CALLS = ("ring", "unshard", "module", "cross attention", "refiner", "schedule")
PASSES = ("forward", "backward")
FORWARD_ALONE = ("refiner", "schedule")
STEPS = tuple(x for x in product(CALLS, PASSES) if x[0] not in FORWARD_ALONE or x[1] == "forward")
CELLS = [
    Cell(call, one, other, "float64") for (call, one), other in product(STEPS, CALLS)
]  # (call, pass) of rank 0, call of another rank
MOST = 3  # ranks
SPECS: tuple[Spec, ...] = (("Causal",), ("SlidingWindow", 5, 3, 1), ("Full",), ("Dilated", 8, 2, 0))


@dataclass(frozen=True)
class OutOfStep:
    """One call or backward pass of each rank, and its pattern."""

    steps: tuple[tuple[str, str], ...]
    specs: tuple[Spec, ...]
    length: int
    seed: int = 0

    def cells(self) -> list[Cell]:
        return [Cell(*self.steps[0], call, "float64") for call, _ in self.steps[1:]]

    def check(self) -> None:
        kinds = {kind_of(*rank) for rank in zip(self.steps, self.specs, strict=True)}
        for said, error in workers().run(run, self, world=len(self.steps)):
            # queries of two lengths may fit together, as those of one call
            if not {("module", "forward"), ("cross attention", "forward")} <= set(self.steps):
                assert (said != "") == (len(kinds) > 1), f"{kinds}: {said or 'no error'}"
            assert error <= 1e-12, f"after it, an error of {error:.1e}"


def kind_of(step: tuple[str, str], spec: Spec) -> tuple[Any, ...]:
    """Returns what must be equal on all ranks: a module's backward pass is that of its ring."""
    call, which = step
    if call in (*FORWARD_ALONE, "unshard"):
        return step
    return ("ring" if step == ("module", "backward") else call), which, spec


def prepared(group: Any, step: tuple[str, str], spec: Spec, length: int) -> Callable[[], object]:
    """Makes what a call needs on all ranks; returns the call of this rank."""
    pattern, draw = build(spec), functools.partial(torch.randn, dtype=torch.float64)
    own = shard(torch.arange(length), dim=0, group=group).numel()

    def leaf(*shape: int) -> Tensor:
        return draw(*shape).requires_grad_()

    def module() -> MultiheadAttention:
        sizes = {"batch_first": True, "dtype": torch.float64}
        return MultiheadAttention(8, 2, **sizes, pattern=pattern, group=group)

    calls: dict[str, Callable[[], Any]] = {
        "ring": lambda: ring_attention(
            *(leaf(1, 2, own, 4) for _ in range(3)), pattern, group=group
        ),
        "unshard": lambda: unshard(leaf(1, 2, own, 4), group=group),
        "module": lambda: module()(*[leaf(1, own, 8)] * 3, need_weights=False)[0],
        "cross attention": lambda: module()(
            leaf(1, shard(torch.arange(length // 2), dim=0, group=group).numel(), 8),
            *[leaf(1, own, 8)] * 2,
            need_weights=False,
        )[0],
        "refiner": lambda: PatternRefiner(1, 4, 4, 3).update(group),
        "schedule": lambda: GatedSchedule(Schedule([(0, 1.0)]), 0.5).step(1.0, group),
    }
    if step[1] == "forward":
        return calls[step[0]]
    out = calls[step[0]]().sum()
    return out.backward


def run(rank: int, case: OutOfStep) -> tuple[str, float]:
    """Returns what this rank raises, and the error of a call that all make after it."""
    world = len(case.steps)
    group = ring_workers.groups[world]
    torch.manual_seed(case.seed)
    calls = zip(case.steps, case.specs, strict=True)
    ready = [prepared(group, *rest, case.length) for rest in calls]  # in one order on all ranks
    said = ""
    try:
        ready[rank]()
    except (RingMismatchError, ValueError) as error:
        said = str(error)
    whole = torch.randn(3, 1, 2, 12, 4, dtype=torch.float64, generator=torch.Generator())
    pattern = build(case.specs[0])
    out = ring_attention(*(shard(x, group=group) for x in whole), pattern, group=group)
    exact = shard(sr.attention(*whole, pattern, backend="reference"), group=group)
    return said, float((out - exact).abs().max()) if out.numel() else 0.0


@functools.cache
def workers() -> Workers:
    return Workers(MOST)


@st.composite
def cases(draw: st.DrawFn, cell: Cell) -> OutOfStep:
    """Draws what the ranks do, with the first two as a cell says."""
    passes = st.sampled_from(PASSES)
    steps = [(cell.option, cell.pattern)]
    for call in (cell.backend, *draw(st.lists(st.sampled_from(CALLS), max_size=MOST - 2))):
        steps.append((call, "forward" if call in FORWARD_ALONE else draw(passes)))
    same, spec = draw(st.booleans()), draw(st.sampled_from(SPECS))
    specs = tuple(spec if same else draw(st.sampled_from(SPECS)) for _ in steps)
    return OutOfStep(tuple(steps), specs, draw(st.integers(4, 12)), draw(st.integers(0, 9)))
