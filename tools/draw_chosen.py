"""Draws the tokens that a trained indexer chooses: `python -m tools.draw_chosen docs/chosen.png`.

Associative recall as in the record `selection-recall.json`: 32 pairs of key and value, then each
key once more, with fill between. The second layer chooses 48 of 256 tokens for each token. Ringed
are the values that the questions ask for. Needs matplotlib and about three minutes.
"""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.selection import recall
from benchmarks.selection.models import TokenModel
from sparsering.plots.figure import DENSE, SPARSE, image, new_figure
from sparsering.selection import BlockScorer, top_tokens

SEED = 0


def trained() -> tuple[TokenModel, recall.Choice]:
    """Trains dense with the indexer beside, then with chosen tokens, as the record does."""
    torch.manual_seed(SEED)
    model = TokenModel(recall.VOCABULARY, recall.WIDTH, num_heads=1, num_kv_heads=1, reach=1)
    parts = BlockScorer(recall.WIDTH, 1, recall.SIZE, index_dim=32), recall.Indexer()
    warm = recall.Choice("warm", *parts)
    recall.train(model, warm, recall.MOST, SEED, bar=recall.BAR)
    recall.train(model, warm, recall.WARM, 2000 + SEED)
    choice = recall.Choice("tokens", *parts)
    recall.train(model, choice, recall.STEPS, 1000 + SEED)
    choice.train = False
    return model, choice


def picture(listed: Tensor, asked: Tensor) -> Any:
    """Draws the lists [N, k] of one text, and the place that each question asks for (-1: none)."""
    figure = new_figure(5.6, 5.0)
    axes = figure.add_subplot()
    query = torch.arange(len(listed))[:, None].expand_as(listed)[listed >= 0]
    axes.scatter(listed[listed >= 0], query, s=1.2, color=SPARSE, linewidths=0)
    rows = (asked >= 0).nonzero()[:, 0]
    axes.scatter(asked[rows], rows, s=26, facecolors="none", edgecolors=DENSE, linewidths=1.2)
    axes.set(xlim=(-2, len(listed)), ylim=(len(listed), -2))
    axes.set_xlabel("token that is read")
    axes.set_ylabel("token that reads")
    axes.set_aspect("equal")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


if __name__ == "__main__":
    model, choice = trained()
    print(recall.evaluate(model, choice))
    choice.pairs = recall.recall_pairs(
        1, recall.TOKENS, recall.PAIRS, recall.VOCABULARY, recall.generator(3)
    )
    lists: list[Tensor] = []

    def kept(*arguments: Any) -> Tensor:  # noqa: D103
        lists.append(top_tokens(*arguments))
        return lists[-1]

    with torch.no_grad(), patch.object(recall, "top_tokens", kept):
        model(choice.pairs.tokens, (recall.near, choice))
    back = choice.pairs.distances[0]
    asked = torch.where(back > 0, torch.arange(recall.TOKENS) - back, -1)
    listed = lists[0][0, 0]
    rows = (asked >= 0).nonzero()[:, 0]
    found = (listed[rows] == asked[rows, None]).any(1).float().mean()
    print(f"{found:.0%} of {len(rows)} questions have their value among {listed.shape[1]} tokens")
    Path(sys.argv[1]).write_bytes(image(picture(listed, asked)))
