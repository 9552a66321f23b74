"""A byte language model on source text: what choosing blocks costs, and what it keeps.

A dense model is trained, and its scorers beside it frozen; from there the arms go on, each with its
own attention in both layers, for as many steps as full attention does. The bytes that tell the arms
apart are far copies: what only a look beyond all that a window of the same cost sees can copy.
"""

import math
import os
import statistics
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import sparsering as sr
from sparsering.selection import (
    BlockScorer,
    block_mass,
    block_scores,
    select_blocks,
    selection_loss,
)

from ..measure import Row
from .flagged import shuffle
from .models import TokenModel, dense
from .tasks import Sources, far_copies, generator, standard_library, windows

TOKENS, WIDTH, SEEN = 2048, 128, 256
DENSE, WARM, TAIL = 500, 200, 150  # steps: of the dense model, its scorers alone, each arm
SIZES = (32, 16)  # tokens of a block; 8 of them, or 16, for each query
HELD_OUT = 24  # texts of 2,048 bytes
HEADS, KV_HEADS, LAYERS = 4, 2, 2
WORK = Path("runs/selection")


@cache
def sources() -> Sources:
    """The text, read once."""
    return standard_library()


@cache
def held_out(texts: int = HELD_OUT) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and far copies [texts, N] of packages that no model was trained on."""
    tokens, targets = windows(sources().held_out, TOKENS, texts, generator(10_000))
    return tokens, targets, far_copies(tokens, SEEN)


@dataclass
class Choice:
    """Attention of one layer over blocks that its queries choose; what that was, and what it cost.

    `way` is "window" (the last blocks), "random", "learned" (a scorer's choice), or a method of
    `block_scores`: "mean", "sub", "exact", ...
    """

    way: str
    size: int
    k: int
    scorer: BlockScorer | None = None
    train: bool = False
    shuffled: bool = False
    sink: int = 1
    local: int = 2
    query_block: int = 1
    loss: Tensor | float = 0.0
    indices: Tensor | None = None

    def pattern(self, q: Tensor, k: Tensor) -> sr.Pattern:
        """Returns the choice of each query."""
        rows, blocks = (
            -(-x.shape[2] // size) for x, size in ((q, self.query_block), (k, self.size))
        )
        options = {"block_size": self.size, "query_block": self.query_block}
        self.scores = None
        local = self.k - self.sink if self.way == "window" else min(self.local, self.k - self.sink)
        if self.way == "learned":
            self.scores = self.scorer(q, k)
        ranked = self.scores
        if self.way in ("window", "random"):
            shape = (len(q), k.shape[1], rows, blocks)
            ranked = torch.rand(shape, generator=generator(0))
        elif ranked is None:
            with torch.no_grad():
                ranked = block_scores(
                    q,
                    k,
                    self.size,
                    query_block=self.query_block,
                    method=self.way,
                    parts=self.query_block if self.way == "antidiagonal" else 4,
                )
        ranked = shuffle(ranked) if self.shuffled else ranked
        self.indices = select_blocks(ranked, self.k, **options, sink=self.sink, local=local)
        return sr.SelectedBlocks(self.indices, self.size, self.query_block) & sr.Causal()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pattern = self.pattern(q, k)
        out, lse = sr.attention(q, k, v, pattern, return_lse=True)
        if self.train and self.scores is not None:
            mass = block_mass(q, k, pattern, lse.detach())
            self.loss = selection_loss(self.scores, mass, self.indices)
        return out


@dataclass
class Warm:
    """Dense attention beside which a scorer learns the mass of every visible block."""

    scorer: BlockScorer
    loss: Tensor | float = 0.0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            mass = block_scores(q, k, self.scorer.block_size, method="exact").exp()
        self.loss = selection_loss(self.scorer(q, k), mass)
        return dense(q, k, v)


def new_model(seed: int) -> TokenModel:
    """An untrained model."""
    torch.manual_seed(seed)
    return TokenModel(256, WIDTH, num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS)


def new_scorers(seed: int, size: int) -> torch.nn.ModuleList:
    """An untrained scorer for each layer."""
    torch.manual_seed(seed)
    scorers = (BlockScorer(WIDTH // HEADS, KV_HEADS, size, index_dim=64) for _ in range(LAYERS))
    return torch.nn.ModuleList(scorers)


def train(
    model: TokenModel, attends: list, parameters: list, steps: int, seed: int, rate: float
) -> list[float]:
    """Steps on random windows of the training text, the learning rate a half cosine; the losses.

    The side losses of the attention (what trains scorers) are added to the model's.
    """
    optimizer = torch.optim.AdamW(parameters, rate, betas=(0.9, 0.95), weight_decay=0.01)
    random, losses = generator(seed), []
    for step in range(steps):
        for group in optimizer.param_groups:
            falling = 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2
            group["lr"] = rate * min(1.0, (step + 1) / 30) * falling
        tokens, targets = windows(sources().train, TOKENS, 1, random)
        loss = F.cross_entropy(model(tokens, attends).flatten(0, 1), targets.flatten())
        side = sum(getattr(attend, "loss", 0.0) for attend in attends)
        optimizer.zero_grad()
        (loss + side).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def evaluate(model: TokenModel, attends: list, texts: int = HELD_OUT) -> Row:
    """Bits per byte: of all, of the last quarter of the texts, of far copies."""
    tokens, targets, far = held_out(texts)
    losses = torch.cat(
        [
            F.cross_entropy(model(x, attends).mT, y, reduction="none")
            for x, y in zip(tokens.split(2), targets.split(2), strict=True)
        ]
    ) / math.log(2)
    last = losses[:, -TOKENS // 4 :]
    return {
        "bits_per_byte": losses.mean().item(),
        "last_quarter": last.mean().item(),
        "far_copies": losses[far].mean().item(),
        "share_of_far_copies": far.float().mean().item(),
    }


def dense_model(seed: int) -> TokenModel:
    """The trained dense model, from `runs/selection` where it is there."""
    path, model = WORK / f"dense-{seed}.pt", new_model(seed)
    if not path.exists():
        train(model, [dense] * LAYERS, list(model.parameters()), DENSE, seed, 3e-3)
        save(model, path)
    model.load_state_dict(torch.load(path))
    return model


def warm_scorers(seed: int, model: TokenModel, size: int) -> torch.nn.ModuleList:
    """Scorers trained beside the frozen dense model, from `runs/selection` where they are there."""
    path, scorers = WORK / f"scorers-{size}-{seed}.pt", new_scorers(seed, size)
    if not path.exists():
        warmed(model, scorers, seed)
        save(scorers, path)
    scorers.load_state_dict(torch.load(path))
    return scorers


def save(module: torch.nn.Module, path: Path) -> None:
    """Writes its weights so that another process reads all of them or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_suffix(f".{os.getpid()}")
    torch.save(module.state_dict(), own)
    own.replace(path)


def warmed(
    model: TokenModel, scorers: torch.nn.ModuleList, seed: int, steps: int = WARM
) -> list[float]:
    """Trains the scorers alone; the divergence at each step, mean over layers."""
    attends = [Warm(scorer) for scorer in scorers]
    optimizer = torch.optim.Adam(scorers.parameters(), 3e-3)
    random, divergences = generator(1000 + seed), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (steps - step) / (steps / 2))
        tokens, _ = windows(sources().train, TOKENS, 1, random)
        with torch.no_grad():  # the model; each scorer's loss turns gradients on for itself
            losses = of_layers(model, attends, tokens)
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        divergences.append(loss.item())
    return divergences


def of_layers(model: TokenModel, attends: list[Warm], tokens: Tensor) -> list[Tensor]:
    """The scorers' losses on one text, of a model that is not trained."""
    x, losses = model.tokens(tokens), []
    for layer, attend in zip(model.layers, attends, strict=True):
        q, k, v = layer.heads_of(x)
        with torch.enable_grad():
            attend(q, k, v)
        losses.append(attend.loss)
        x = layer(x, dense)
    return losses


ARMS = (
    ("full", 0), ("window", 32), ("random", 32), ("frozen", 32), ("exact", 32), ("mean", 32),
    ("sub", 32), ("learned", 32), ("mean", 16), ("sub", 16), ("learned", 16),
)  # fmt: skip


def language(seed: int) -> list[Row]:
    """Ways to choose 256 tokens, and full attention, each for as many steps more."""
    shared = {"experiment": "language", "seed": seed, "tokens": TOKENS}
    shared["text"] = sources().fingerprint
    start = time.perf_counter()
    before = evaluate(dense_model(seed), [dense] * LAYERS)
    rows: list[Row] = [shared | {"arm": "dense, before", "steps": DENSE, **before}]
    rows[0]["seconds"] = time.perf_counter() - start
    for arm, size in ARMS:
        start = time.perf_counter()
        model = dense_model(seed)
        parameters, attends = list(model.parameters()), [dense] * LAYERS
        if size:
            way = "learned" if arm == "frozen" else arm
            scorers = new_scorers(seed, size)
            if arm == "learned":
                scorers = warm_scorers(seed, model, size)
                parameters += list(scorers.parameters())
            attends = [
                Choice(way, size, SEEN // size, scorer, train=arm == "learned", local=64 // size)
                for scorer in scorers
            ]
        losses = train(model, attends, parameters, TAIL, 2000 + seed, 1e-3)
        row = {**shared, "arm": arm, "block_size": size, "steps": DENSE + TAIL}
        row |= {"training_loss": statistics.mean(losses[-50:]), "density": 1.0}
        for attend in attends if size else []:
            attend.train = False
        row |= evaluate(model, attends)
        if size:
            row["density"] = density_of(attends[0])
        if arm == "learned":
            for attend in attends:
                attend.shuffled = True
            row["shuffled_far_copies"] = evaluate(model, attends)["far_copies"]
        rows.append(row | {"seconds": time.perf_counter() - start})
    return rows


def density_of(choice: Choice) -> float:
    """Pairs of what was chosen last over causal ones, from the layout."""
    pattern = sr.SelectedBlocks(choice.indices, choice.size, choice.query_block) & sr.Causal()
    options = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "block_size": choice.size}
    pairs = pattern.layout(TOKENS, **options).num_pairs
    return pairs / (TOKENS * (TOKENS + 1) / 2)
