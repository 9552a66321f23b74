"""Evaluates a user's `score_mod` on the scores of (query, key) pairs."""

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
    """Evaluates a score_mod on scores [C, g, m, n]: C batch entries, g heads, m queries, n keys.

    The indices are batch [C], head [C, g], query [C, m] and key [C, n]. `pairs` is bool and
    broadcasts to the scores. Where it is False, the function is not evaluated, because it and its
    gradient may be NaN there; the result is 0.
    """
    if pairs is None or is_shape_alone(pairs):
        over = torch.vmap(function, (0, None, None, None, 0))  # keys
        over = torch.vmap(over, (0, None, None, 0, None))  # queries
        over = torch.vmap(over, (0, None, 0, None, None))  # heads
        return torch.vmap(over)(score, batch, head, query, key)
    unit, group, row, column = places = pairs.expand(score.shape).nonzero(as_tuple=True)
    if not len(unit):
        return score.masked_fill(~pairs, 0.0)  # still a part of what autograd records
    own = batch[unit], head[unit, group], query[unit, row], key[unit, column]
    values = torch.vmap(function)(score[places], *own)
    return torch.zeros_like(score).index_put(places, values.to(score.dtype))
