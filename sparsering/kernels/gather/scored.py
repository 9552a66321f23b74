"""Evaluates a `score_mod` on the visited tiles of a chunk, with the gradients of what it reads."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from ...ground.numerics import sum_dtype
from ..over_pairs import over_pairs
from ..problem import Problem
from .units import Chunk

Unit = int | slice
"""Index of the units of a chunk that are computed together: an int for one, a slice for all."""


class _Sum:
    """The gradient of a tensor that a score_mod indexes, summed in place over all chunks.

    Autograd would allocate zeros of the tensor's shape for each chunk. The number of chunks grows
    with the tokens, so a tensor with a number per pair would cost time cubic in the tokens.
    """

    def __init__(self, of: Tensor) -> None:
        self._of = of
        self.total: Tensor | None = None

    def add(self, index: tuple[Tensor, ...], grad: Tensor) -> None:
        if self.total is None:
            self.total = torch.zeros_like(self._of, dtype=sum_dtype(self._of))
        self.total.index_put_(index, grad.to(self.total.dtype), accumulate=True)


class _Indexed(Function):
    """Computes `x[index]`; its backward adds the gradient to a `_Sum` instead of returning it."""

    @staticmethod
    def forward(x: Tensor, to: _Sum, *index: Tensor) -> Tensor:
        del to
        return x[index]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.to, *index = inputs
        ctx.save_for_backward(*index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.to.add(ctx.saved_tensors, grad)
        return None, None, *(None for _ in ctx.saved_tensors)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, to: _Sum, *index: Tensor
    ) -> tuple[Tensor, int]:
        """Moves the dim that vmap maps to the front of each index, so that indices broadcast."""
        dims = in_dims[2:]
        own = max(i.dim() - (dim is not None) for i, dim in zip(index, dims, strict=True))

        def in_front(i: Tensor, dim: int | None) -> Tensor:
            if dim is None:
                return i
            i = i.movedim(dim, 0)
            return i.reshape(len(i), *(1,) * (own + 1 - i.dim()), *i.shape[1:])

        return _Indexed.apply(x, to, *map(in_front, index, dims)), 0


class _Sums(TorchFunctionMode):
    """While active, it replaces `x[index]` by `_Indexed` for tensors that a score_mod reads."""

    def __init__(self, captured: Sequence[Tensor]) -> None:
        super().__init__()
        self.of = {id(x): _Sum(x) for x in captured}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__ and (to := self.of.get(id(args[0]))) is not None:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(i, Tensor) and i.dtype == torch.int64 for i in index):
                return _Indexed.apply(args[0], to, *index)
        return func(*args, **(kwargs or {}))


class Scores:
    """Applies a `score_mod` to scores and collects gradients; without one it changes nothing."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._grads: list[Tensor | None] = [None] * len(problem.captured)
        self._sums = _Sums(problem.captured)

    def changed(self, score: Tensor, chunk: Chunk, unit: Unit, added: Tensor | None) -> Tensor:
        """Returns what score_mod makes of scores [..., g * m, n].

        0 for pairs that do not attend.
        """
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
        """Returns (scores, changed scores); autograd records the change for `gradient`."""
        if self.problem.score_mod is None:
            return score, score
        with torch.enable_grad(), self._sums:
            leaf = score.detach().requires_grad_()
            return leaf, self.changed(leaf, chunk, unit, added)

    def gradient(self, leaf: Tensor, changed: Tensor, grad: Tensor) -> Tensor:
        """Converts the gradient of changed scores to that of scores.

        It also adds the gradients of captured tensors to their sums.
        """
        if self.problem.score_mod is None:
            return grad
        if not changed.requires_grad:  # the function reads neither scores nor captured tensors
            return torch.zeros_like(grad)
        inputs: Sequence[Tensor] = (leaf, *self.problem.captured)
        grads: Any = torch.autograd.grad(changed, inputs, grad, allow_unused=True)
        found, *others = grads  # None for an input that does not affect the result
        for number, other in enumerate(others):
            self._grads[number] = _added(self._grads[number], other)
        return torch.zeros_like(grad) if found is None else found

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Returns a gradient for each captured tensor; None if it does not affect any score."""
        found = []
        for x, grad in zip(self.problem.captured, self._grads, strict=True):
            total = self._sums.of[id(x)].total
            found.append(_added(grad, None if total is None else total.to(x.dtype)))
        return tuple(found)


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Returns the sum of two gradients, where None stands for 0."""
    if one is None or other is None:
        return one if other is None else other
    return one + other
