"""Flagged facts: a scorer learns what a mean cannot show; at longer inputs; and by which schedule.

A question asks for the value of the one flagged fact with its key, among `16 * blocks` facts, and
may look at 4 blocks. `chosen` holds all ways to choose them, `Reader.step` all ways to train.
"""

import copy
import math
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

import sparsering as sr
from sparsering.selection import (
    BlockScorer,
    GatedSchedule,
    Schedule,
    block_mass,
    block_scores,
    select_blocks,
    selection_loss,
)

from ..measure import Row
from .models import FactReader, cross_entropy
from .tasks import FACTS, QUERIES, Facts, flagged_facts, generator

K = 4  # blocks of a question
BAR, RAMP, HOLD = 0.95, 600, 400  # accuracy that ends the dense phase; steps after it
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
        self.scorer = BlockScorer(32, 1, FACTS, index_dim=32, causal=False, detach=arm != "pooled")
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

    def rate(self, share: float) -> None:
        """Sets the learning rate, as a share of 3e-3."""
        for group in self.optimizer.param_groups:
            group["lr"] = 3e-3 * share

    def step(self, k: int) -> float:
        """One step at k blocks a question (all of them: dense attention); the loss of answers."""
        facts = flagged_facts(self.size.batch, self.size.blocks, self.size.num_keys, self.random)
        attend = FactAttention(self, facts, k, train=True)
        logits = self.model(facts, attend)
        loss = cross_entropy(logits, facts.answers)
        self.optimizer.zero_grad()
        (loss + attend.side_loss).backward()
        self.optimizer.step()
        right = (logits.argmax(-1) == facts.answers).float().mean().item()
        self.accuracy += 0.02 * (right - self.accuracy)
        self.number += 1
        return loss.item()

    @torch.no_grad()
    def evaluate(self, k: int = K, *, blocks: int | None = None, shuffled: str = "") -> Row:
        """Accuracy and recall over 4,096 questions, and the pairs visited of those there are.

        `shuffled` permutes the blocks of all scores ("scores"), or of those that select, but not of
        a pooled branch ("selection").
        """
        blocks = blocks or self.size.blocks
        random, batch = generator(10_000), max(1, 256 // blocks)
        right, hits, density = [], [], []
        for _ in range(64 // batch):
            facts = flagged_facts(batch, blocks, self.size.num_keys, random)
            attend = FactAttention(self, facts, k, train=False, shuffled=shuffled)
            logits = self.model(facts, attend)
            right.append((logits.argmax(-1) == facts.answers).float().mean().item())
            density.append(attend.density)
            if attend.indices is not None:
                hit = attend.indices[:, 0] == facts.blocks[..., None]
                hits.append(hit.any(-1).float().mean().item())
        return {
            "tokens": blocks * FACTS,
            "accuracy": statistics.mean(right),
            "recall": statistics.mean(hits) if hits else None,
            "density": statistics.mean(density),
        }


class FactAttention:
    """Attention of one batch, as the model calls it; what was chosen and what it costs to train."""

    def __init__(self, reader: Reader, facts: Facts, k: int, *, train: bool, shuffled: str = ""):
        self.reader, self.facts, self.k, self.train = reader, facts, k, train
        self.shuffled = shuffled
        self.side_loss: Tensor | float = 0.0
        self.indices: Tensor | None = None
        self.density = 1.0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        arm, blocks = self.reader.arm, k.shape[2] // FACTS
        is_dense = arm == "full" or self.k >= blocks
        scores = self.reader.scorer(q, k, q_start=0) if arm in WITH_SCORER else None
        if self.shuffled == "scores":
            scores = shuffle(scores)
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
            gate = (k @ self.reader.scorer.pool[:, :, None]).unflatten(2, (-1, FACTS)).softmax(3)
            out = out + torch.softmax(scores, -1) @ (gate * v.unflatten(2, (-1, FACTS))).sum(3)
        return out

    def sparse(self, q: Tensor, k: Tensor, v: Tensor, scores: Tensor | None, width: int) -> Tensor:
        arm = self.reader.arm
        ranked = scores.detach() if scores is not None else self.other_scores(q, k)
        if self.shuffled == "selection":
            ranked = shuffle(ranked)
        self.indices = select_blocks(ranked, width, block_size=FACTS, sink=0, local=0, causal=False)
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


def shuffle(scores: Tensor) -> Tensor:
    """The scores of other blocks, by one permutation."""
    return scores[..., torch.randperm(scores.shape[-1], generator=generator(1))]


def trained(reader: Reader, steps: int, k: int = K, *, decay: int = 300) -> Reader:
    """So many more steps at k blocks a question, the last ones at a falling learning rate."""
    for left in range(steps, 0, -1):
        reader.rate(min(1.0, left / decay))
        reader.step(k)
    return reader


def row_of(reader: Reader, experiment: str, seed: int, start: float, k: int = K) -> Row:
    """Holds the results of a run."""
    row: Row = {"experiment": experiment, "seed": seed, "arm": reader.arm, "steps": reader.number}
    row |= reader.evaluate(k)
    if reader.arm in LEARNED:
        row["shuffled"] = reader.evaluate(k, shuffled="scores")["accuracy"]
    if reader.arm == "pooled":
        row["shuffled_selection"] = reader.evaluate(k, shuffled="selection")["accuracy"]
    return row | {"seconds": time.perf_counter() - start}


def ramp(blocks: int) -> Schedule:
    """Base-2 logarithm of the blocks of a question: from all to 4, geometrically."""
    return Schedule(((0, math.log2(blocks)), (RAMP, math.log2(K))))


CHOICES = ("oracle", "random", "window", "mean", "sub", "frozen")


def small(seed: int, steps: int = 1000) -> list[Row]:
    """32 blocks, 4 of them from the first step on."""
    rows = []
    for arm in ("full", *CHOICES, *LEARNED):
        start = time.perf_counter()
        rows.append(row_of(trained(Reader(arm, SMALL, seed), steps), "small", seed, start))
    return rows


def lengths(seed: int, steps: int = 1500) -> list[Row]:
    """Trained at 512 tokens, tested at 512, 4,096 and 16,384, 4 blocks a question throughout."""
    rows = []
    for arm in ("full", "window", "mean", "sub", "kl", "pooled", "bias"):
        start = time.perf_counter()
        reader = trained(Reader(arm, LONG, seed), steps)
        row = {"experiment": "length", "seed": seed, "arm": arm, "steps": steps}
        rows += [row | reader.evaluate(blocks=blocks) for blocks in (32, 256, 1024)]
        rows[-1]["seconds"] = time.perf_counter() - start
    return rows


def hard(seed: int) -> list[Row]:
    """128 blocks, 4 of them after a dense phase that ends when the model has learned.

    One dense phase, of a model whose scorer learns beside it and does not touch it, is where all
    arms go on from. The pooled branch has 4 blocks from the first step on.
    """
    clock = time.perf_counter
    start = clock()
    first = Reader("kl", HARD, seed)
    while first.accuracy < BAR and first.number < HARD.steps:
        first.step(HARD.blocks)
    dense_seconds, state = clock() - start, first.state()
    untrained = Reader("kl", HARD, seed).scorer.state_dict()
    rows = []
    for arm in ("full", "kl", "random", "mean", "frozen"):
        start = clock() - dense_seconds
        reader = Reader(arm, HARD, seed).resume(state)
        if arm == "frozen":
            reader.scorer.load_state_dict(untrained)
        jumps = narrowed(reader)
        rows.append(row_of(reader, "hard", seed, start) | {"dense_steps": first.number} | jumps)
    start = clock()
    reader = trained(Reader("pooled", HARD, seed), 5000)
    rows.append(row_of(reader, "hard", seed, start) | {"dense_steps": 0})
    return rows


def narrowed(reader: Reader) -> Row:
    """From all blocks to 4, geometrically, while the accuracy holds; then steps at 4.

    The clock of the schedule stands where accuracy is below the bar; an arm that has stood for 200
    steps goes to 4 blocks from where it is.

    Returns: the largest rise of the loss where k changes, in standard deviations of the 50 steps
        before it; whether a run resumed in the middle of the ramp ends in the same bits.
    """
    gate = GatedSchedule(ramp(reader.size.blocks), BAR)
    losses: list[float] = []
    rises, k, middle, compared = [0.0], reader.size.blocks, None, {}
    for number in range(RAMP + 200):
        if number == RAMP // 2:
            middle = reader.state(), gate.state_dict()
        elif middle and number == RAMP // 2 + 50:
            compared["resumes_bit_equal"] = resumed(reader, *middle, steps=50)
        before, k = k, round(2.0 ** gate.step(reader.accuracy))
        losses.append(reader.step(reader.size.blocks if reader.arm == "full" else k))
        if k != before and len(losses) > 50:
            recent = losses[-51:-1]
            rises.append((losses[-1] - statistics.mean(recent)) / statistics.stdev(recent))
        if k == K:
            break
    trained(reader, HOLD, reader.size.blocks if reader.arm == "full" else K)
    return {"reached": k == K, "largest_rise": max(rises), **compared}


def resumed(reader: Reader, state: dict, clock: dict, *, steps: int) -> bool:
    """Whether so many steps from a state end in a reader's weights, bit by bit."""
    other = Reader(reader.arm, reader.size, 0).resume(state)
    gate = GatedSchedule(ramp(reader.size.blocks), BAR)
    gate.load_state_dict(clock)
    for _ in range(steps):
        k = round(2.0 ** gate.step(other.accuracy))
        other.step(other.size.blocks if other.arm == "full" else k)
    pairs = zip(reader.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def schedules(seed: int, steps: int = 4000) -> list[Row]:
    """The hard task by schedules of the step alone: always 4 blocks, and one that is fixed.

    The fixed one is half of the blocks for a tenth of the steps, then fewer, linearly, until half
    of the steps: 4. The gated one, and full attention, are rows of `hard`.
    """
    fixed = Schedule(((0, 64.0), (steps // 10, 64.0), (steps // 2, float(K))))
    rows = []
    for name, schedule in (("cold", Schedule(((0, float(K)),))), ("fixed", fixed)):
        start = time.perf_counter()
        reader = Reader("kl", HARD, seed)
        while reader.number < steps - 300:
            reader.step(round(schedule(reader.number)))
        trained(reader, 300)
        rows.append(row_of(reader, "schedule", seed, start) | {"schedule": name})
    return rows
