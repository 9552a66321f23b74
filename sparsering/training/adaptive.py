"""Attention to blocks chosen by content while a model trains: dense first, then ever fewer blocks.

    Recipe(attention="selected", blocks=16, schedule="0:dense, 200:64, 400:16", gate="loss<=2.5")

Each token chooses blocks by `block_scores`. With `refine`, rows of tokens have tables of blocks
instead, which a `PatternRefiner` improves by the softmax mass that blocks receive.
"""

import math
import re
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ..functional import attention
from ..ground.arguments import shortened
from ..nn.transformer import Attend
from ..patterns.positions import Causal
from ..patterns.selected import SelectedBlocks
from ..selection import GatedSchedule, PatternRefiner, Schedule, block_scores, select_blocks

if TYPE_CHECKING:
    from .recipe import Recipe

_LEAST = 2  # a row has at least two blocks: the first one, and its own


class Selection:
    """Chooses the blocks that a recipe's attention visits, and holds the state of that choice."""

    def __init__(self, recipe: "Recipe", group: dist.ProcessGroup | None = None) -> None:
        schedule, bar = schedule_of(recipe)
        self.schedule = schedule if bar is None else GatedSchedule(schedule, bar)
        self.size, self.every, self.group = recipe.block_size, recipe.refine, group
        self.all, self.layers = blocks_of(recipe), recipe.num_layers
        tables = recipe.num_heads, self.all, self.all, min(recipe.blocks, self.all)
        seeds = range(recipe.num_layers if recipe.refine else 0)
        self.refiners = [PatternRefiner(*tables, seed=seed) for seed in seeds]
        self.observes = False
        self.k = int(
            schedule(0)
        )  # blocks that a row visits at this step; if all, attention is dense

    def begin(self, step: int, loss: float) -> None:
        """Chooses the number of blocks of a step; `loss` is the previous step's, NaN at first."""
        gated = isinstance(self.schedule, GatedSchedule)
        self.k = int(self.schedule.step(-loss) if gated else self.schedule(step))  # type: ignore
        self.observes = bool(self.refiners) and step % self.every == 0

    def end(self) -> None:
        """Updates the refiners' tables if this step observed the attention mass of blocks."""
        for refiner in self.refiners if self.observes else ():
            refiner.update(self.group)
        self.observes = False

    def attends(self) -> list[Attend]:
        """Returns an attention function per layer, which the model calls instead of its own."""
        return [partial(self._attend, layer) for layer in range(self.layers)]

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends in one layer: to all, or to the blocks of this step; tensors are [B, H, N, D]."""
        parts = math.gcd(4, self.size)
        scores = partial(block_scores, query.detach(), key.detach(), self.size, parts=parts)
        if self.observes and torch.is_grad_enabled():
            mass = scores(query_block=self.size, method="exact").exp()
            self.refiners[layer].observe(mass, torch.arange(self.all).expand(self.all, -1))
        if self.k >= self.all:
            return attention(query, key, value, Causal())
        rows = self.size if self.refiners else 1
        if self.refiners:
            chosen = self.refiners[layer].table.to(query.device)
        else:
            chosen = select_blocks(scores(), self.k, block_size=self.size)
        return attention(query, key, value, SelectedBlocks(chosen, self.size, rows) & Causal())

    def tensors(self) -> dict[str, Tensor]:
        """Returns the state to save: the gate's clock, and the refiners' tensors by layer."""
        clock = self.schedule.clock if isinstance(self.schedule, GatedSchedule) else 0
        tensors = {"clock": torch.tensor(clock)}
        for layer, refiner in enumerate(self.refiners):
            tensors |= {f"{layer}.{name}": x for name, x in refiner.state_dict().items()}
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Continues from the state that `tensors` returned, when a run resumes."""
        if isinstance(self.schedule, GatedSchedule):
            self.schedule.load_state_dict({"clock": int(tensors["clock"])})
        for layer, refiner in enumerate(self.refiners):
            first = f"{layer}."
            own = {k.removeprefix(first): x for k, x in tensors.items() if k.startswith(first)}
            refiner.load_state_dict(own)


def schedule_of(recipe: "Recipe") -> tuple[Schedule, float | None]:
    """Parses a recipe's schedule of blocks and the loss bound of its gate.

    ValueError if unusable.
    """
    every, points = blocks_of(recipe), []
    for part in (recipe.schedule or f"0:{recipe.blocks}").split(","):
        found = re.fullmatch(r"\s*(\d{1,12}):(dense|\d{1,13})\s*", part)
        count = every if found and found[2] == "dense" else int(found[2]) if found else 0
        if not found or count < min(_LEAST, every):
            raise ValueError(
                f"schedule must be steps and blocks, at least {_LEAST}, such as '0:dense, 200:64, "
                f"400:16', got {shortened(repr(recipe.schedule))}, blocks={recipe.blocks}"
            )
        points.append((int(found[1]), min(count, every)))
    if recipe.refine and {count for _, count in points} - {every, min(recipe.blocks, every)}:
        raise ValueError(
            f"with refine, tables have {recipe.blocks} blocks: a schedule may say dense or "
            f"{recipe.blocks}, got {recipe.schedule!r}; leave out --refine, or the other numbers"
        )
    gate = re.fullmatch(r"loss<=(\d+(?:\.\d+)?)", recipe.gate.replace(" ", ""))
    if recipe.gate and not gate:
        got = shortened(repr(recipe.gate))
        raise ValueError(f"gate must be a bound of the loss such as 'loss<=2.5', got {got}")
    return Schedule(tuple(points), "step"), -float(gate[1]) if gate else None


def blocks_of(recipe: "Recipe") -> int:
    """Returns how many blocks of keys a training window has."""
    return -(-recipe.context // recipe.block_size)
