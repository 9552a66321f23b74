"""Runs calls with a score_mod, as in FlexAttention, by a backend over layouts.

They do not run as torch operators, because operators take tensors and numbers, but no functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..call import Call, Options
from ..checks import refuse_forward_mode, reverse_mode_alone
from ..ground.arguments import is_shape_alone
from ..ground.numerics import sum_dtype, without_autocast
from ..kernels.backends import BACKENDS
from ..kernels.library.derivatives import without_gradient
from ..kernels.problem import Problem
from .options import OPTIONS
from .work import problem_of, slot_gradient

_NAME = "a call with score_mod on a backend other than reference"


def attend_scored(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a call with a score_mod, by a backend over layouts."""
    refuse_forward_mode(_NAME, *call.inputs)
    if _transforming():
        raise NotImplementedError(
            "torch.func.grad and vmap cannot see the tensors that a score_mod reads; use "
            "torch.autograd, and a batch dim, or leave out score_mod"
        )
    function = call.options["score_mod"]
    learning = [n for n, x in OPTIONS.items() if x.learns and call.options[n] is not None]
    tensors = *call.inputs, *(call.options[n] for n in learning), *function.read
    rest = {**dict.fromkeys(learning), "score_mod": function.kept()}
    shared = _ScoredCall(
        on=partial(
            Call,
            pattern=call.pattern,
            scale=call.scale,
            q_start=call.q_start,
            block_size=call.block_size,
        ),
        options=call.options.changed(**rest),
        backend=backend,
        learning=learning,
    )
    out, lse = _Scored.apply(shared, *tensors)
    return out, lse


def _transforming() -> bool:
    """Whether torch.func transforms this code by a derivative or vmap."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    functorch = torch._C._functorch
    innermost = functorch.peek_interpreter_stack()
    return innermost is not None and innermost.key() != functorch.TransformType.Functionalize


@dataclass(frozen=True)
class _ScoredCall:
    """All that forward and backward of a call with a score_mod share, except the tensors."""

    on: Callable[..., Call]  # makes the `Call` from query, key, value and options
    options: Options  # the options without gradients
    backend: str
    learning: list[str]  # names of the options that get gradients

    def problem(self, tensors: tuple[Tensor, ...]) -> Problem:
        """Builds the problem from query, key, value, learning options, then tensors read."""
        query, key, value, *rest = tensors
        count = len(self.learning)
        changes: dict[str, Any] = dict(zip(self.learning, rest[:count], strict=True))
        changes["score_mod"] = self.options["score_mod"].on(rest[count:])
        options = self.options.changed(**changes)
        return problem_of(self.on(query=query, key=key, value=value, options=options), self.backend)


class _Scored(Function):
    """Autograd function of a call with a score_mod."""

    @staticmethod
    def forward(ctx: Any, call: _ScoredCall, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        query, _, value, *_ = tensors
        if is_shape_alone(query):  # without numbers, the function cannot be evaluated
            out = query.new_empty(*query.shape[:3], value.shape[3])
            lse = query.new_empty(query.shape[:3], dtype=sum_dtype(query))
        else:
            out, lse = BACKENDS[call.backend].forward(call.problem(tensors))
        ctx.call = call
        ctx.save_for_backward(*tensors, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = _Scored._gradients(ctx, grad_out, grad_lse)
        if not torch.is_grad_enabled():
            return found
        # what autograd records here is a second derivative
        sources, refusal = (*ctx.saved_tensors, grad_out, grad_lse), reverse_mode_alone(_NAME)
        return tuple(x if x is None else without_gradient(x, refusal, *sources) for x in found)

    @staticmethod
    def _gradients(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        call, (*tensors, out, lse) = ctx.call, ctx.saved_tensors
        if is_shape_alone(out):
            return None, *(torch.empty_like(x) if x.requires_grad else None for x in tensors)
        problem, backward = call.problem(tuple(tensors)), BACKENDS[call.backend].backward
        with without_autocast(problem.query):
            found = backward(problem, out, lse, grad_out, grad_lse)
        grads = found._asdict()
        if "slot_bias" in call.learning:
            slots = tensors[3 + call.learning.index("slot_bias")]
            grads["slot_bias"] = slot_gradient(grads["block_bias"], problem, slots)
        own = (grads[name] for name in ("query", "key", "value", *call.learning))
        captured = iter(found.captured)
        read = tensors[3 + len(call.learning) :]
        return None, *own, *(next(captured) if x.requires_grad else None for x in read)
