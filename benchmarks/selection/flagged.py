"""Flagged facts: a scorer learns what a mean cannot show; at longer inputs; and by which schedule.

A question asks for the value of the one flagged fact with its key, among `16 * blocks` facts, and
may look at 4 blocks. `chosen` holds all ways to choose them, `Reader.step` all ways to train.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import sparsering as sr
from sparsering.bench.measure import Row
from sparsering.selection import (
    BlockScorer,
    GatedSchedule,
    Schedule,
    block_mass,
    block_scores,
    pool_blocks,
    select_blocks,
    selection_loss,
)

from .models import FactReader, cross_entropy
from .tasks import FACTS, QUERIES, Facts, flagged_facts, generator

K = 4  # blocks of a question
LEARNED = ("kl", "bias", "straight-through", "pooled")
WITH_SCORER = (*LEARNED, "frozen")


@dataclass(frozen=True)
class Size:
    """Blocks of a sequence, key tokens, sequences of a step, steps."""

    blocks: int
    num_keys: int
    batch: int
    steps: int


SMALL = Size(32, 256, 8, 3000)
HARD = Size(128, 256, 4, 6000)
LONG = Size(32, 1024, 8, 3000)


class Reader:
    """A model, its scorer and their optimizer, trained by one way of choosing.

    `arm` is "full", a choice without parameters ("oracle", "random", "window", "mean", "sub"), or a
    scorer: never trained ("frozen"), or trained by the divergence from the exact mass of blocks
    ("kl"), by being added to the scores ("bias"), by that without changing them
    ("straight-through"), or through a branch that attends to pooled blocks ("pooled").
    """

    def __init__(self, arm: str, size: Size, seed: int):
        torch.manual_seed(seed)
        self.arm, self.size, self.number, self.accuracy = arm, size, 0, 0.0
        self.random = generator(seed)
        self.model = FactReader(size.num_keys)
        self.scorer = BlockScorer(
            32, 1, FACTS, index_dim=32, causal=False, detach=arm != "pooled"
        )
        parameters = [*self.model.parameters(), *self.scorer.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=3e-3)

    def state(self) -> dict[str, object]:
        """All that a run in the middle of its steps consists of."""
        parts = {"model": self.model, "scorer": self.scorer, "optimizer": self.optimizer}
        state: dict[str, object] = {name: part.state_dict() for name, part in parts.items()}
        rest = {"number": self.number, "accuracy": self.accuracy}
        return copy.deepcopy({**state, **rest, "random": self.random.get_state()})

    def resume(self, state: dict) -> "Reader":
        """Goes on from another run's state."""
        for name in ("model", "scorer", "optimizer"):
            getattr(self, name).load_state_dict(copy.deepcopy(state[name]))
        self.number, self.accuracy = state["number"], state["accuracy"]
        self.random.set_state(state["random"])
        return self

    def step(self, k: int) -> float:
        """One step at k blocks a question (all of them: dense attention); the loss of answers."""
        facts = flagged_facts(self.size.batch, self.size.blocks, self.size.num_keys, self.random)
        seen = Seen(self, facts, k, train=True)
        logits = self.model(facts, seen)
        loss = cross_entropy(logits, facts.answers)
        self.optimizer.zero_grad()
        (loss + seen.side_loss).backward()
        self.optimizer.step()
        right = (logits.argmax(-1) == facts.answers).float().mean().item()
        self.accuracy += 0.02 * (right - self.accuracy)
        self.number += 1
        return loss.item()

    @torch.no_grad()
    def evaluate(self, k: int = K, *, blocks: int | None = None, shuffled: bool = False) -> Row:
        """Accuracy and recall over 4,096 questions, and the pairs visited of those there are."""
        blocks = blocks or self.size.blocks
        random, batch = generator(10_000), max(1, 256 // blocks)
        right, found, density = [], [], []
        for _ in range(64 // batch):
            facts = flagged_facts(batch, blocks, self.size.num_keys, random)
            seen = Seen(self, facts, k, train=False, shuffled=shuffled)
            logits = self.model(facts, seen)
            right.append((logits.argmax(-1) == facts.answers).float().mean().item())
            density.append(seen.density)
            if seen.indices is not None:
                hit = seen.indices[:, 0] == facts.blocks[..., None]
                found.append(hit.any(-1).float().mean().item())
        return {
            "tokens": blocks * FACTS,
            "accuracy": statistics.mean(right),
            "recall": statistics.mean(found) if found else None,
            "density": statistics.mean(density),
        }


class Seen:
    """Attention of one batch, as the model calls it; what was chosen and what it costs to train."""

    def __init__(
        self, reader: Reader, facts: Facts, k: int, *, train: bool, shuffled: bool = False
    ):
        self.reader, self.facts, self.k, self.train = reader, facts, k, train
        self.shuffled = shuffled
        self.side_loss: Tensor | float = 0.0
        self.indices: Tensor | None = None
        self.density = 1.0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        arm, blocks = self.reader.arm, k.shape[2] // FACTS
        is_dense = arm == "full" or self.k >= blocks
        scores = self.reader.scorer(q, k, q_start=0) if arm in WITH_SCORER else None
        if is_dense and arm not in ("bias", "straight-through"):
            if arm == "kl" and self.train:
                mass = block_scores(
                    q.detach(), k.detach(), FACTS, method="exact", causal=False, q_start=0
                ).exp()
                self.side_loss = selection_loss(scores, mass)
            out = sr.attention(q, k, v, sr.Full(), q_start=0)
        else:
            out = self.sparse(q, k, v, scores, min(self.k, blocks))
        if arm == "pooled":
            out = out + torch.softmax(scores, -1) @ pool_blocks(v, FACTS)
        return out

    def sparse(self, q: Tensor, k: Tensor, v: Tensor, scores: Tensor | None, width: int) -> Tensor:
        arm = self.reader.arm
        ranked = scores.detach() if scores is not None else self.other_scores(q, k)
        if self.shuffled:
            ranked = ranked[..., torch.randperm(ranked.shape[-1], generator=generator(1))]
        self.indices = select_blocks(
            ranked, width, block_size=FACTS, sink=0, local=0, causal=False
        )
        pattern = sr.SelectedBlocks(self.indices, FACTS, query_block=1)
        if not self.train:
            layout = pattern.layout(*(x.shape[2] for x in (q, k)), q_start=0, block_size=FACTS)
            self.density = layout.num_pairs / (QUERIES * k.shape[2])
        bias = None
        if arm in ("bias", "straight-through"):
            bias = scores.gather(-1, self.indices)
            bias = bias if arm == "bias" else bias - bias.detach()
        if arm == "kl" and self.train:
            mass = block_mass(q, k, pattern, q_start=0)
            self.side_loss = selection_loss(scores, mass, self.indices)
        return sr.attention(q, k, v, pattern, slot_bias=bias, q_start=0)

    def other_scores(self, q: Tensor, k: Tensor) -> Tensor:
        arm, blocks = self.reader.arm, k.shape[2] // FACTS
        shape = (len(q), 1, QUERIES, blocks)
        if arm == "window":  # questions come after the facts: the last blocks are the nearest
            return torch.arange(blocks).float().expand(shape)
        if arm in ("mean", "sub"):
            options = {"method": arm, "causal": False, "q_start": 0}
            return block_scores(q.detach(), k.detach(), FACTS, **options)
        drawn = torch.rand(shape, generator=self.reader.random if self.train else generator(2))
        if arm == "oracle":
            drawn.scatter_(-1, self.facts.blocks[:, None, :, None], 2.0)
        return drawn


def trained(reader: Reader, steps: int, blocks_at: Callable[[Reader], int]) -> list[float]:
    """Losses of so many more steps, each at the number of blocks that the run so far asks for."""
    return [reader.step(blocks_at(reader)) for _ in range(steps)]


def ramp(blocks: int, steps: int = 1000) -> Schedule:
    """log2 of the blocks of a question: from all to 4, geometrically."""
    return Schedule(((0, math.log2(blocks)), (steps, math.log2(K))))
