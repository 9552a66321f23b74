"""Associative recall (MQAR): a window of 16 tokens in the first layer, a choice in the second."""

import copy
import time
from dataclasses import dataclass

import torch
from torch import Tensor

import sparsering as sr
from sparsering.selection import (
    BlockScorer,
    block_mass,
    block_scores,
    index_scores,
    select_blocks,
    selection_loss,
    top_tokens,
)

from ..measure import Row
from .flagged import shuffle
from .models import TokenModel, cross_entropy, dense
from .tasks import Pairs, generator, recall_pairs

TOKENS, PAIRS, VOCABULARY, SIZE, K, WIDTH = 256, 32, 512, 16, 3, 64
BATCH = 8
BAR, MOST = 0.95, 800  # accuracy that the model has to reach while dense; its most steps
WARM, STEPS = 250, 150  # dense steps after that, for the scorer; steps of each arm
FAR = K * SIZE  # tokens back that a window of the same cost sees


def near(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A causal window of 16."""
    return sr.attention(q, k, v, sr.SlidingWindow(15) & sr.Causal())


class Indexer(torch.nn.Module):
    """Projects queries and keys [B, 1, N, WIDTH] for `index_scores`: 4 heads of 32, as DSA's."""

    def __init__(self) -> None:
        super().__init__()
        self.query = torch.nn.Linear(WIDTH, 4 * 32, bias=False)
        self.key = torch.nn.Linear(WIDTH, 32, bias=False)
        self.weight = torch.nn.Linear(WIDTH, 4)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = q.detach()[:, 0], k.detach()[:, 0]
        heads = self.query(q).unflatten(-1, (4, 32)).transpose(1, 2)
        return heads, self.key(k), self.weight(q)


@dataclass
class Choice:
    """Attention over 3 blocks of 16 that each token chooses, of which one is its own.

    The arm "tokens" chooses as many single tokens, by an indexer.
    """

    arm: str
    scorer: BlockScorer
    indexer: Indexer
    pairs: Pairs | None = None
    train: bool = True
    shuffled: bool = False
    loss: Tensor | float = 0.0
    density: float = 1.0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.arm == "warm":
            mass = block_scores(q.detach(), k.detach(), SIZE, method="exact").exp()
            self.loss = selection_loss(self.scorer(q, k), mass)
            of_tokens = block_scores(q.detach(), k.detach(), 1, method="exact").exp()
            causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
            scores = index_scores(*self.indexer(q, k)).masked_fill(~causal, -torch.inf)
            self.loss = self.loss + selection_loss(scores, of_tokens)
        if self.arm == "tokens":
            return self.of_tokens(q, k, v)
        if self.arm in ("warm", "full"):
            return dense(q, k, v)
        scores = self.scorer(q, k) if self.arm in ("kl", "frozen") else None
        ranked = self.ranked(q, k) if scores is None else scores
        ranked = shuffle(ranked) if self.shuffled else ranked
        local = K if self.arm == "window" else 1
        indices = select_blocks(ranked, K, block_size=SIZE, sink=0, local=local)
        pattern = sr.SelectedBlocks(indices, SIZE, query_block=1) & sr.Causal()
        out, lse = sr.attention(q, k, v, pattern, return_lse=True)
        if self.arm == "kl" and self.train:
            mass = block_mass(q, k, pattern, lse.detach())
            self.loss = selection_loss(scores, mass, indices)
        if not self.train:
            pairs = pattern.layout(TOKENS, block_size=SIZE).num_pairs
            self.density = pairs / (TOKENS * (TOKENS + 1) / 2)
        return out

    def of_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        indexed = self.indexer(q, k)
        listed = top_tokens(*indexed, FAR)
        pattern = sr.SelectedBlocks(listed, 1) & sr.Causal()
        out, lse = sr.attention(q, k, v, pattern, return_lse=True)
        if self.train:
            mass = block_mass(q, k, pattern, lse.detach())
            self.loss = selection_loss(index_scores(*indexed, listed), mass)
        self.density = float((listed >= 0).float().sum(-1).mean()) / ((TOKENS + 1) / 2)
        return out

    @torch.no_grad()
    def ranked(self, q: Tensor, k: Tensor) -> Tensor:
        if self.arm in ("mean", "sub"):
            return block_scores(q, k, SIZE, method=self.arm)
        drawn = torch.rand(len(q), 1, TOKENS, TOKENS // SIZE)
        if self.arm == "oracle":
            place = torch.arange(TOKENS) - self.pairs.distances
            drawn.scatter_(-1, (place // SIZE)[:, None, :, None], 2.0)
        return drawn


def recall(seed: int) -> list[Row]:
    """Accuracy of each arm, of all questions and of those beyond a window of the same cost.

    All arms go on from one dense phase, beside which the scorer learned: until the model has, and
    then some steps for the scorer.
    """
    rows: list[Row] = []
    torch.manual_seed(seed)
    first = TokenModel(VOCABULARY, WIDTH, num_heads=1, num_kv_heads=1, reach=1)
    untrained = BlockScorer(WIDTH, 1, SIZE, index_dim=32)
    scorer = copy.deepcopy(untrained)
    indexer = Indexer()
    dense_steps = train(first, Choice("warm", scorer, indexer), MOST, seed, bar=BAR)
    dense_steps += train(first, Choice("warm", scorer, indexer), WARM, 2000 + seed)
    for arm in ("full", "oracle", "random", "window", "mean", "frozen", "kl", "tokens"):
        start = time.perf_counter()
        model = copy.deepcopy(first)
        own = copy.deepcopy(untrained if arm == "frozen" else scorer)
        choice = Choice(arm, own, copy.deepcopy(indexer))
        train(model, choice, STEPS, 1000 + seed)
        choice.train = False
        row = {"experiment": "recall", "seed": seed, "arm": arm, "dense_steps": dense_steps}
        row["steps"] = STEPS
        row |= {"tokens": TOKENS, **evaluate(model, choice), "density": choice.density}
        if arm == "kl":
            choice.shuffled = True
            row["shuffled_far"] = evaluate(model, choice)["accuracy_far"]
        rows.append(row | {"seconds": time.perf_counter() - start})
    return rows


def train(model: TokenModel, choice: Choice, steps: int, seed: int, *, bar: float = 2.0) -> int:
    """At most so many steps, until the running accuracy reaches the bar; how many it were."""
    parameters = [*model.parameters(), *choice.scorer.parameters(), *choice.indexer.parameters()]
    optimizer, random = torch.optim.AdamW(parameters, 2e-3), generator(seed)
    accuracy = 0.0
    for step in range(steps):
        falling = min(1.0, 3 * (steps - step) / steps) if bar > 1 else 1.0
        optimizer.param_groups[0]["lr"] = 2e-3 * falling
        choice.pairs = recall_pairs(BATCH, TOKENS, PAIRS, VOCABULARY, random)
        logits = model(choice.pairs.tokens, (near, choice))
        optimizer.zero_grad()
        (cross_entropy(logits, choice.pairs.targets) + choice.loss).backward()
        optimizer.step()
        is_answer = choice.pairs.targets >= 0
        right = (logits.argmax(-1) == choice.pairs.targets)[is_answer].float().mean().item()
        accuracy += 0.1 * (right - accuracy)
        if accuracy >= bar:
            break
    return step + 1


@torch.no_grad()
def evaluate(model: TokenModel, choice: Choice, batches: int = 4) -> Row:
    """Shares of right answers, of all and of those farther back than 48 tokens."""
    random, right, far = generator(10_000), [], []
    for _ in range(batches):
        choice.pairs = recall_pairs(16, TOKENS, PAIRS, VOCABULARY, random)
        is_answer = choice.pairs.targets >= 0
        said = model(choice.pairs.tokens, (near, choice)).argmax(-1)
        right.append((said == choice.pairs.targets)[is_answer])
        far.append(choice.pairs.distances[is_answer] > FAR)
    hit, is_far = torch.cat(right), torch.cat(far)
    return {
        "accuracy": hit.float().mean().item(),
        "accuracy_far": hit[is_far].float().mean().item(),
    }
