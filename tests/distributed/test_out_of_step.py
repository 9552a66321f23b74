"""Ranks in different calls at once: each gets an error that says so, and the group stays usable."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ring_workers import workers_of
from torch import Tensor

import sparsering as sr
from sparsering.distributed import RingMismatchError, ring_attention, unshard
from sparsering.nn import MultiheadAttention, SelectedAttention
from sparsering.selection import GatedSchedule, PatternRefiner, Schedule

two = workers_of(2)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def module(**options: Any) -> MultiheadAttention:
    return MultiheadAttention(
        16, 4, batch_first=True, pattern=sr.SlidingWindow(5, 3), group=dist.group.WORLD, **options
    )


def backward(out: Tensor) -> Callable[[], object]:
    """The backward pass of a call that both ranks have made."""
    return lambda: out.sum().backward()


def calls() -> dict[str, Callable[[], Callable[[], object]]]:
    """By name, what prepares a call on both ranks, and returns the call of one of them."""
    ring = lambda: ring_attention(*(leaf(2, 4, 8, 4) for _ in range(3)), sr.SlidingWindow(5, 3))  # noqa: E731
    own = lambda: module()(*[leaf(2, 8, 16)] * 3, need_weights=False)[0]  # noqa: E731
    cross = lambda: module()(leaf(2, 4, 16), *[leaf(2, 8, 16)] * 2, need_weights=False)[0]  # noqa: E731
    return {
        "ring_attention": lambda: ring,
        "backward of ring_attention": lambda: backward(ring()),
        "compressed": lambda: (
            lambda: ring_attention(
                *(torch.randn(2, 4, 8, 4) for _ in range(3)), sr.Causal(), compression="auto:0.1"
            )
        ),
        "unshard": lambda: lambda: unshard(leaf(2, 4, 8, 4)),
        "backward of unshard": lambda: backward(unshard(leaf(2, 4, 8, 4))),
        "attention of a module": lambda: own,
        "backward of a module": lambda: backward(own()),
        "cross attention of a module": lambda: cross,
        "backward of cross attention": lambda: backward(cross()),
        "selected attention": lambda: (
            lambda: SelectedAttention(16, 2, block_size=4, k=2, group=dist.group.WORLD)(
                leaf(1, 8, 16)
            )
        ),
        "PatternRefiner": lambda: lambda: PatternRefiner(1, 4, 4, 3).update(dist.group.WORLD),
        "GatedSchedule": lambda: (
            lambda: GatedSchedule(Schedule([(0, 1.0)]), 0.5).step(1.0, dist.group.WORLD)
        ),
    }


def run(rank: int, names: tuple[str, str]) -> str:
    """Returns what a rank raises where the other makes another call; then both make the first."""
    torch.manual_seed(0)
    prepared = [calls()[name]() for name in names]  # in the same order on both ranks
    try:
        prepared[rank]()
        said = "no error"
    except RingMismatchError as error:
        said = str(error)
    calls()[names[0]]()()
    return said


NAMES = list(calls())
PAIRS = list(itertools.combinations(NAMES, 2))
PAIRS.remove(("backward of ring_attention", "backward of a module"))  # these are one call


@pytest.mark.parametrize("first", NAMES[:-1])
def test_both_ranks_are_told(two, first):
    for pair in (x for x in PAIRS if x[0] == first):
        for names in (pair, pair[::-1]):
            for said in two.run(run, names):
                assert said != "no error", names


def test_ranks_in_calls_of_two_kinds_are_told_so(two):
    for said in two.run(run, ("PatternRefiner", "GatedSchedule")):
        assert "in another call" in said


def test_every_collective_begins_with_an_agreement():
    """A function that calls one of torch's collectives agrees first, or is known to come after."""
    after = {
        "exchange.py": {"start"},  # `agree` itself, and messages behind one
        "shards.py": {"forward"},  # `unshard` has agreed
        # the training loop, in which all ranks follow one recipe
        "ranks.py": {"any_signal", "gather", "total", "clip_gradients"},
    }
    kinds = "all_gather|all_reduce|broadcast|barrier|reduce_scatter|all_to_all|isend|irecv"
    found = []
    for path in Path(sr.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for match in re.finditer(rf"dist\.({kinds})\w*\b", text):
            name = re.findall(r"def (\w+)\(", text[: match.start()])[-1]
            body = text[text.rindex(f"def {name}(", 0, match.start()) : match.start()]
            if "agree_to_begin(" not in body and name not in after.get(path.name, set()):
                found.append(f"{path.name}: {name}")
    assert not found
