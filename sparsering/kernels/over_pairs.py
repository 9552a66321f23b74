"""Evaluates a `score_mod` on scores of pairs."""

import torch
from torch import Tensor

from ..ground.arguments import is_shape_alone
from .problem import ScoreMod


def over_pairs(
    function: ScoreMod,
    score: Tensor,
    batch: Tensor,
    head: Tensor,
    query: Tensor,
    key: Tensor,
    pairs: Tensor | None = None,
) -> Tensor:
    """Evaluates a score_mod on scores [C, g, m, n], from indices [C], [C, g], [C, m] and [C, n].

    `pairs`: bool, broadcasts to the scores. Where it is False the function is not evaluated, since
    it may be NaN there, and so may its gradient; the result is 0.
    """
    if pairs is None or is_shape_alone(pairs):
        over = torch.vmap(function, (0, None, None, None, 0))  # keys
        over = torch.vmap(over, (0, None, None, 0, None))  # queries
        over = torch.vmap(over, (0, None, 0, None, None))  # heads
        return torch.vmap(over)(score, batch, head, query, key)
    unit, group, row, column = places = pairs.expand(score.shape).nonzero(as_tuple=True)
    if not len(unit):
        return torch.zeros_like(score)
    own = batch[unit], head[unit, group], query[unit, row], key[unit, column]
    values = torch.vmap(function)(score[places], *own)
    return torch.zeros_like(score).index_put(places, values.to(score.dtype))
