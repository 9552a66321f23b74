"""Evaluates a `score_mod` on the visited tiles of a chunk, with the gradients of what it reads."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..problem import Problem, ScoreMod
from .units import Chunk

Unit = int | slice
"""Index of the units of a chunk that are computed together: an int for one, a slice for all."""


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
    if pairs is None:
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


class Scores:
    """The scores of a problem's chunks, changed by its `score_mod`, if it has one."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.grads: list[Tensor | None] = [None] * len(problem.captured)

    def changed(self, score: Tensor, chunk: Chunk, unit: Unit, added: Tensor | None) -> Tensor:
        """Returns the changed scores [.., g * m, n]; 0 where `added` is -inf, since no pair is."""
        if self.problem.score_mod is None:
            return score
        query, key = chunk.q[unit], chunk.k[unit]
        if isinstance(unit, int):
            query, key = query[None], key[None]
        heads, q_len = self.problem.query.shape[1:3]
        each = score.reshape(*query.shape, key.shape[-1])
        pairs = None if added is None else added != -torch.inf
        result = over_pairs(
            self.problem.score_mod,
            each,
            query[:, 0, 0] // (heads * q_len),
            query[:, :, 0] // q_len % heads,
            query[:, 0] % q_len,
            key % self.problem.key.shape[2],
            pairs,
        )
        return result.to(score.dtype).contiguous().view(score.shape)

    def recorded(
        self, score: Tensor, chunk: Chunk, unit: Unit, added: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the scores, and changed ones whose gradient `gradient` takes."""
        if self.problem.score_mod is None:
            return score, score
        with torch.enable_grad():
            leaf = score.detach().requires_grad_()
            return leaf, self.changed(leaf, chunk, unit, added)

    def gradient(self, leaf: Tensor, changed: Tensor, grad: Tensor) -> Tensor:
        """Returns the gradient of the scores; adds those of the captured tensors to `grads`."""
        if self.problem.score_mod is None:
            return grad
        if not changed.requires_grad:  # a function that reads neither scores nor such tensors
            return torch.zeros_like(grad)
        inputs: Sequence[Tensor] = (leaf, *self.problem.captured)
        grads: Any = torch.autograd.grad(changed, inputs, grad, allow_unused=True)
        found, *others = grads  # None for what the result does not depend on
        for number, other in enumerate(others):
            before = self.grads[number]
            if other is not None:
                self.grads[number] = other if before is None else before + other
        return torch.zeros_like(grad) if found is None else found
