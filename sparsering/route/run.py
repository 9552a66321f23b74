"""Runs a checked call, as a torch operator if something observes it, else directly."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..checks import needs_operator, observed
from ..ground.numerics import without_autocast
from ..kernels.backends import BACKENDS
from ..kernels.triton import remember
from ..patterns.selected import has_lists
from .behind_padding import parts_of
from .decision import Decision
from .exported import is_exported, tables_of
from .operators import attention_op
from .options import IN_OPERATORS
from .scored import attend_scored
from .work import Work, layout_of, listed_once, problem_of

_NO_SCORE_MOD = (
    "torch.export cannot carry a score_mod, a function that no operator takes; write softcap, "
    "distance_bias or sink where one of them says the same"
)
_UNUSED: dict[str, Any] = dict.fromkeys(IN_OPERATORS)


def attend(call: Call, decision: Decision) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a checked call, by the backend that was decided.

    A backend over layouts runs as a torch operator only if autograd, a compiler or a mode observes
    the call, because an operator takes a good part of a small call's time.
    """
    backend, parts = BACKENDS[decision.backend], decision.parts
    if decision.is_bare and parts is not None:
        layout, rows = layout_of(*parts.layout_key)
        work = Work(layout=layout, first_bitmap_rows=rows)
        return backend.forward(work.problem(call.query, call.key, call.value, call.scale))
    pattern, options = call.pattern, call.options
    if pattern.tensors and not torch.compiler.is_compiling():
        remember(pattern)
    if options["score_mod"] is not None and backend.reads_layouts:
        if is_exported():
            raise NotImplementedError(_NO_SCORE_MOD)
        with without_autocast(call.query):
            return attend_scored(call, decision.backend)
    if backend.reads_layouts:
        text, operands = pattern.operands
        if torch.compiler.is_exporting():
            operands = (*operands, *tables_of(call))
        tensors = [x for x in (*options.in_use.values(), *operands) if isinstance(x, Tensor)]
        if not decision.is_plain:
            tensors += call.inputs
        if decision.learns or (tensors and needs_operator(*tensors)):
            if backend.runs_lists and _is_recorded_alone(call):
                text, operands = listed_once(call, decision.backend).pattern.operands
            return attention_op(
                query=call.query,
                key=call.key,
                value=call.value,
                tensors=operands,
                pattern=text,
                scale=call.scale,
                q_start=call.q_start,
                block_size=call.block_size,
                backend=decision.backend,
                **{**_UNUSED, **options.in_use},
            )
    with without_autocast(call.query):
        return backend.run(call, partial(parts_of, call, decision.backend, parts))


def _is_recorded_alone(call: Call) -> bool:
    """Whether autograd records a call over lists, and nothing else observes it or its tensors."""
    if not has_lists(call.pattern) or not torch.is_grad_enabled():
        return False
    tensors = *call.inputs, *call.options.in_use.values(), *call.pattern.tensors
    learns = any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
    return learns and not observed(*tensors)


def value_gradient(call: Call, backend: str, lse: Tensor, grad: Tensor) -> Tensor:
    """Sums `exp(s - lse) grad` over queries: [B, Hkv, Nk, Dv]; lse includes any sink."""
    problem = problem_of(call, backend)._replace(learns_distances=False)
    with without_autocast(call.query):
        zeros = torch.zeros_like(grad), torch.zeros_like(lse)
        return BACKENDS[backend].backward(problem, zeros[0], lse, grad, zeros[1]).value
