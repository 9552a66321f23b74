"""The torch operators behind `attention`, which torch.compile, autograd and FLOP counters see.

They take a pattern as its expression and its tensors, so that graphs hold no Python objects.
"""

import math
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..call import Call, Options
from ..ground.namespace import NAMESPACE
from ..ground.numerics import without_autocast
from ..ground.streams import OUTSIDE_CUDA_GRAPHS
from ..kernels.backends import BACKENDS, second_order
from ..kernels.parts import differentiate
from ..kernels.problem import Gradients, Problem, Tangents
from ..layouts.cache import layout_cache
from ..layouts.lists import tiles_of
from ..patterns.algebra import Pattern
from ..patterns.expression import parse, parse_owned
from ..patterns.selected import selections_of
from ..patterns.tree import check_distances
from .behind_padding import parts_of
from .differentiable import Derivatives, differentiable
from .options import IN_OPERATORS, operator_schema
from .work import block_bias_of, problem_of, slot_gradient, work_of


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Computes (out, lse); the arguments are those of the schema `_CALL`."""
    with without_autocast(arguments[0]):
        call, backend = parsed_call(arguments)
        return BACKENDS[backend].run(call, partial(parts_of, call, backend))


def _backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    """Computes gradients in the order of the operator's tensors; None for one without gradient."""
    *inputs, out, lse, grad_out, grad_lse, wanted = arguments
    call, backend = parsed_call(inputs)
    results, learns = (out, lse, grad_out, grad_lse), wanted[_NAMES.index("distance_bias")]
    with without_autocast(out):
        parts = parts_of(call, backend)
        run = BACKENDS[backend].backward
        grads = differentiate(run, parts, results, learns_distances=learns)
    return _by_tensor(grads, parts[0].problem, inputs)


def _tangent(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Computes the forward-mode tangents of (out, lse); the arguments are in `Derivatives`."""
    inputs, (out, lse, *tangents) = arguments[: len(_NAMES)], arguments[len(_NAMES) :]
    call, backend = parsed_call(inputs)
    with without_autocast(out):
        problem = problem_of(call, backend)
        moved = second_order(backend).tangent(problem, out, lse, _moves(problem, tangents))
    return moved[0].to(out.dtype).contiguous(), moved[1].contiguous()


def _backward_tangent(*arguments: Any) -> tuple[Tensor | None, ...]:
    """Computes the tangents of the gradients of `_backward`, and then of (out, lse)."""
    inputs = arguments[: len(_NAMES)]
    out, lse, grad_out, grad_lse, *tangents, out_t, lse_t, wanted = arguments[len(_NAMES) :]
    call, backend = parsed_call(inputs)
    with without_autocast(out):
        problem = problem_of(call, backend)
        problem = problem._replace(learns_distances=wanted[_NAMES.index("distance_bias")])
        moved = second_order(backend).tangent_of_gradients(
            problem, (out, lse, grad_out, grad_lse), _moves(problem, tangents), (out_t, lse_t)
        )
    return *_by_tensor(moved.gradients, problem, inputs), moved.out.to(out.dtype), moved.lse


def _by_tensor(
    gradients: Gradients, problem: Problem, inputs: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """Orders a problem's gradients as the operator's tensors; converts a block to a slot bias."""
    found = gradients._asdict()
    if (slots := inputs[_NAMES.index("slot_bias")]) is not None:
        found["slot_bias"] = slot_gradient(found["block_bias"], problem, slots)
    return tuple(found.get(name) for name in _NAMES[: _NAMES.index("tensors")])


def _moves(problem: Problem, tangents: Sequence[Tensor | None]) -> Tangents:
    """Converts tangents of the operator's arguments to those of a backend's `Problem`."""
    given = dict(zip(_NAMES, tangents, strict=False))
    if (slots := given.pop("slot_bias", None)) is not None:
        given["block_bias"] = block_bias_of(slots, problem)
    return Tangents(**{name: given.get(name) for name in Tangents._fields})


@torch.library.custom_op(f"{NAMESPACE}::slot_mass", mutates_args=(), tags=OUTSIDE_CUDA_GRAPHS)
def slot_mass(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    weight: Tensor,
    tensors: Sequence[Tensor],
    pattern: str,
    scale: float,
    q_start: int,
    backend: str,
) -> Tensor:
    """Sums `weight exp(s - lse)` over the pairs of each selected block: [B, Hq, R * k].

    lse and weight are [B, Hq, Nq].
    """
    own = parse_owned(pattern, tensors)
    slots = lse.new_zeros(*query.shape[:2], _num_slots(own))
    call = Call(
        query=query,
        key=key,
        value=key,
        pattern=own,
        scale=scale,
        q_start=q_start,
        options=Options({"slot_bias": slots}),
    )
    problem = problem_of(call, backend)
    kernels = BACKENDS[backend]
    with without_autocast(query):
        if kernels.entry_mass is not None and not problem.lists:
            mass = kernels.entry_mass(problem, lse, weight)
        else:  # with out = grad_out = 0 and grad_lse = weight, backward computes dS = P * weight
            zeros, grad_lse = torch.zeros_like(query), weight.contiguous()
            grads = kernels.backward(problem, zeros, lse, zeros, grad_lse)
            assert grads.block_bias is not None
            mass = grads.block_bias
    return slot_gradient(mass, problem, slots)


@slot_mass.register_fake
def _(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    weight: Tensor,
    tensors: Sequence[Tensor],
    pattern: str,
    *rest: object,
) -> Tensor:
    return lse.new_empty(*query.shape[:2], _num_slots(parse(pattern, tensors)))


def _num_slots(pattern: Pattern) -> int:
    (selection,) = selections_of(pattern)
    return math.prod(selection.indices.shape[-2:])


_CALL = operator_schema(IN_OPERATORS, "SymInt q_start, SymInt? block_size, str backend")
_NAMES = [argument.split()[-1] for argument in _CALL.split(",")]

attention_op = differentiable(
    "attention",
    _CALL,
    Derivatives(
        forward=_forward,
        backward=_backward,
        tangent=_tangent,
        backward_tangent=_backward_tangent,
    ),
)


def named(arguments: Sequence[Any]) -> dict[str, Any]:
    """Returns the arguments of the attention operator by their names."""
    return dict(zip(_NAMES, arguments, strict=True))


def parsed_call(arguments: Sequence[Any]) -> tuple[Call, str]:
    """Builds the `Call` that an operator's arguments describe; returns (call, backend)."""
    given = dict(zip(_NAMES[3:], arguments[3:], strict=True))
    pattern = parse_owned(given.pop("pattern"), given.pop("tensors"))
    if given["distance_bias"] is not None:
        check_distances(pattern)
    query, key, value = arguments[:3]
    backend, scale, q_start, size = map(given.pop, ("backend", "scale", "q_start", "block_size"))
    call = Call(
        query=query,
        key=key,
        value=value,
        pattern=pattern,
        scale=scale,
        q_start=q_start,
        block_size=size,
        options=Options({name: x for name, x in given.items() if x is not None}),
    )
    return call, backend


def _flops(arguments: Sequence[Any], by_head_dim: int, by_value_dim: int) -> int:
    """Counts FLOPs: a pair takes `by_head_dim` products over D and `by_value_dim` over Dv."""
    call, backend = parsed_call(arguments[: len(_NAMES)])
    work, query = work_of(call, backend), call.query
    pairs = work.num_pairs
    if work.key_mask is not None:  # its layout counts pairs with hidden keys, too
        layout, tiles = work.layout, tiles_of(call.pattern)
        exact = layout_cache.layout(tiles, layout.frame, layout.block_size, query.device)
        pairs += float(exact.num_pairs) - float(layout.num_pairs)
    pairs *= query.shape[0] * query.shape[1]
    return int(2 * pairs * (by_head_dim * query.shape[3] + by_value_dim * call.value.shape[3]))


def _register_flops(counter: ModuleType) -> None:
    """Tells torch's FLOP counter the formulas of the operators."""
    for operator, *dims in (
        ("attention", 1, 1),
        ("attention_backward", 3, 2),
        ("attention_tangent", 3, 2),
        ("attention_backward_tangent", 10, 7),
    ):
        register = counter.register_flop_formula(
            getattr(getattr(torch.ops, NAMESPACE), operator), True
        )
        register(lambda *arguments, dims=dims, **_: _flops(arguments, *dims))


class _CounterImport(MetaPathFinder):
    """Registers the FLOP formulas when torch's counter is imported.

    Importing the counter here would load Triton.
    """

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        if (spec := find_spec(name)) is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def execute(module: ModuleType) -> None:
                run(module)
                _register_flops(module)

            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


_COUNTER = "torch.utils.flop_counter"
if _COUNTER in sys.modules:
    _register_flops(sys.modules[_COUNTER])
else:
    sys.meta_path.insert(0, _CounterImport())
