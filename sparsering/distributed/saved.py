"""The tensors that the passes of a ring call work on: `Moving` for tangents, `Saved` for gradients.

Both are of one rank, or of the whole sequence in `simulate_ring`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.problem import delta_tangent

Pair = tuple[Tensor, Tensor]
"""Keys and values, or the tangents of both."""


class Moving(NamedTuple):
    """Tensors and tangents of a forward-mode call, of one rank or of all; tokens are dim 2."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    query_t: Tensor
    key_t: Tensor
    value_t: Tensor

    @classmethod
    def of(
        cls, own: Sequence[Tensor], out: Tensor, lse: Tensor, tangents: Sequence[Tensor | None]
    ) -> "Moving":
        """Builds it from [query, key, value] and their tangents; None stands for a zero tangent.

        A tensor without a tangent gets zeros.
        """
        query, key, value = own
        pairs = zip(own, tangents, strict=False)
        query_t, key_t, value_t = (torch.zeros_like(x) if t is None else t for x, t in pairs)
        return cls(
            query=query,
            key=key,
            value=value,
            out=out,
            lse=lse,
            query_t=query_t,
            key_t=key_t,
            value_t=value_t,
        )

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The keys and values, then the tangents of both."""
        return (self.key, self.value), (self.key_t, self.value_t)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Moving":
        """Returns it with `change(x)` in place of each tensor, for example a cut of its tokens."""
        return Moving(*map(change, self))


class Moves(NamedTuple):
    """Tangents for `Saved`: of query, key, value, grad_out, lse and delta."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    lse: Tensor
    delta: Tensor  # rowsum(dO * O) - dlse


class Saved(NamedTuple):
    """Tensors that a backward pass needs, of one rank or of all; tokens are dim 2."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    moves: Moves | None = None  # None in a pass for gradients; else it is for their tangents

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The keys and values; then the tangents of both, if there are any."""
        own = (self.key, self.value)
        return (own,) if self.moves is None else (own, (self.moves.key, self.moves.value))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Saved":
        """Returns it with `change(x)` in place of each tensor, for example a cut of its tokens."""
        *own, moves = self
        moved = None if moves is None else Moves(*map(change, moves))
        return Saved._make([*map(change, own), moved])


def no_tokens(x: Tensor) -> Tensor:
    """Cuts a tensor to 0 tokens in dim 2: a rank that sends no query rows sends this."""
    return x[:, :, :0]


def saved_moves(
    x: Moving, results_t: Pair, grads: Pair, grads_t: tuple[Tensor | None, ...]
) -> Saved:
    """Builds the `Saved` of a pass that computes tangents of gradients.

    `results_t` are the tangents of (out, lse); `grads` their gradients, and `grads_t` the tangents
    of these, None for one that stays.
    """
    (grad_out, grad_lse), (grad_out_t, grad_lse_t), (out_t, lse_t) = grads, grads_t, results_t
    moves = Moves(
        query=x.query_t,
        key=x.key_t,
        value=x.value_t,
        grad_out=torch.zeros_like(grad_out) if grad_out_t is None else grad_out_t,
        lse=lse_t,
        delta=delta_tangent(x.out, out_t, grad_out, grad_out_t, grad_lse_t),
    )
    return Saved(
        query=x.query,
        key=x.key,
        value=x.value,
        out=x.out,
        lse=x.lse,
        grad_out=grad_out,
        grad_lse=grad_lse,
        moves=moves,
    )
