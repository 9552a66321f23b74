"""Code that calls of other libraries' attention share: derivatives, scales, calls without keys.

Such a library computes its own gradients. For derivatives that it lacks, torch's errors say little
or nothing, so the functions below raise clear ones.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ...checks import reverse_mode_alone
from ...ground.numerics import sum_dtype

SECOND_DERIVATIVES = reverse_mode_alone("attention of another library (sdpa, flash, cudnn)")


def with_first_derivatives(*tensors: Tensor) -> list[Tensor]:
    """Returns equal tensors whose gradients raise a clear error if differentiated again."""
    if torch.compiler.is_compiling():  # its graphs refuse second derivatives themselves
        return list(tensors)
    return [_FirstDerivative.apply(x) if x.requires_grad else x for x in tensors]


def without_gradient(x: Tensor, refusal: str, *sources: Tensor) -> Tensor:
    """Returns an equal tensor whose backward raises NotImplementedError with the text `refusal`.

    Autograd sees it as made of `x` and `sources`.
    """
    learns = any(y.requires_grad for y in (x, *sources))
    equal: Tensor = _Refused.apply(refusal, x, *sources) if learns else x
    return equal


def with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Returns (query, scale) with equal scores and a scale above 0.

    Kernels that take the maximum of a row before they scale it need that.
    """
    if scale == 0:
        return 0 * query, 1.0
    return (query, scale) if scale > 0 else (-query, -scale)


def without_keys(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of a call without keys, zeros and -inf, in a differentiable form."""
    group = query.shape[1] // max(1, key.shape[1])
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    score = query @ key.mT
    return score.softmax(-1) @ value, score.to(sum_dtype(query)).logsumexp(-1)


class _FirstDerivative(Function):
    """The identity, whose gradient cannot be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Saves nothing: the gradient of a copy is the gradient itself."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return without_gradient(grad, SECOND_DERIVATIVES)


class _Refused(Function):
    """The identity of a tensor, whose backward raises NotImplementedError."""

    generate_vmap_rule = True

    @staticmethod
    def forward(refusal: str, x: Tensor, *sources: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.refusal = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise NotImplementedError(ctx.refusal)
