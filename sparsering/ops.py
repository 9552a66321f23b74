"""The torch operator of `attention`, which torch.compile, autograd and the FLOP counter see.

It gets a pattern as its expression and its tensors, so that graphs hold no Python objects.
"""

import math
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .call_recipe import CallRecipe, Inputs, layout_key_of
from .checks import check_batch, check_bias, needs_operator, refuse_forward_mode
from .differentiable import differentiable
from .dispatch import BACKENDS, Backend, block_size_of
from .extras import OPTIONS, Extras, operator_schema
from .kernels.library_calls import SECOND_DERIVATIVES
from .kernels.lists import split_lists
from .kernels.problem import Problem
from .kernels.reference import reference_attention
from .kernels.triton import remember
from .layouts.cache import layout_cache
from .layouts.last_query import last_query_layout
from .layouts.layout import BlockLayout, stretched
from .numerics import entry_of_distance, finite_or_zero, sum_dtype, without_autocast
from .pairs import distances_op, frame_of, kept_by_branch, pair_counts_op, places_op
from .patterns.algebra import Frame, Pattern, check_fits
from .patterns.expression import parse, parse_owned
from .patterns.keys import key_mask
from .patterns.selected import selections_of
from .patterns.tree import check_distances
from .streams import OUTSIDE_CUDA_GRAPHS


def attend(
    recipe: CallRecipe, inputs: Inputs, pattern: Pattern, extras: Extras
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a call that `recipe_of` checked.

    A backend with a `backward` runs as a torch operator, unless neither autograd nor a compiler
        observes the call: the operator takes a good part of a small call's time.
    """
    query, backend = inputs[0], BACKENDS[recipe.backend]
    if recipe.layout_key is not None and backend.forward is not None:
        layout, slots = _layout(*recipe.layout_key)
        problem = Problem(layout, *inputs, recipe.scale, slots=slots)
        return backend.forward(problem if backend.reads_slots else problem.in_first_slots())
    if pattern.tensors and not torch.compiler.is_compiling():
        remember(pattern)
    if backend.backward is not None:
        text, operands = pattern.operands
        tensors = [x for x in (*extras.in_use.values(), *operands) if isinstance(x, Tensor)]
        if not recipe.plain:
            tensors += inputs
            refuse_forward_mode(*tensors)
        if recipe.learns or (tensors and needs_operator(*tensors)):
            query, key, value = inputs
            return _attention(
                query=query,
                key=key,
                value=value,
                tensors=operands,
                pattern=text,
                scale=recipe.scale,
                q_start=recipe.q_start,
                block_size=recipe.block_size,
                backend=recipe.backend,
                **{**_UNUSED, **extras.in_use},
            )
    with without_autocast(query):
        if backend.library_call is not None:
            return _library_call(recipe, inputs, pattern, extras)
        if backend.forward is None:
            return _reference(recipe, inputs, pattern, extras)
        return backend.forward(_problem(recipe, inputs, pattern, extras))


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    backend, problem = _parsed_problem(arguments)
    assert backend.forward is not None
    with without_autocast(problem.query):
        return backend.forward(problem)


def _backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    *inputs, out, lse, grad_out, grad_lse, wanted = arguments
    backend, problem = _parsed_problem(inputs)
    assert backend.backward is not None
    problem = problem._replace(learns_distances=wanted[_NAMES.index("distance_bias")])
    with without_autocast(problem.query):
        grads = backend.backward(problem.in_first_slots(), out, lse, grad_out, grad_lse)._asdict()
    if (slots := inputs[_NAMES.index("slot_bias")]) is not None:
        grads["slot_bias"] = _slot_gradient(grads["block_bias"], problem, slots)
    return tuple(grads.get(name) for name in _NAMES[: _NAMES.index("tensors")])


def value_gradient(
    recipe: CallRecipe, inputs: Inputs, pattern: Pattern, extras: Extras, lse: Tensor, grad: Tensor
) -> Tensor:
    """Sums `exp(s - lse) grad` over queries, [B, Hkv, Nk, Dv]; lse includes any sink."""
    problem = _problem(recipe, inputs, pattern, extras)
    problem = problem._replace(learns_distances=False).in_first_slots()
    backward = BACKENDS[recipe.backend].backward
    assert backward is not None
    with without_autocast(inputs[0]):
        zeros = torch.zeros_like(grad), torch.zeros_like(lse)
        return backward(problem, zeros[0], lse, grad, zeros[1]).value


@torch.library.custom_op("sparsering::slot_mass", mutates_args=(), tags=OUTSIDE_CUDA_GRAPHS)
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
    """Sums `weight exp(s - lse)` over the pairs of each listed block: [B, Hq, R * k]."""
    value = parse_owned(pattern, tensors)
    slots = lse.new_zeros(*query.shape[:2], _num_slots(value))
    recipe = CallRecipe(backend=backend, scale=scale, q_start=q_start)
    extras = Extras({"slot_bias": slots})
    problem = _problem(recipe, (query, key, key), value, extras)
    kernels = BACKENDS[backend]
    with without_autocast(query):
        if kernels.entry_mass is not None and not problem.lists:
            mass = kernels.entry_mass(problem, lse, weight)
        else:  # with out = grad_out = 0 and grad_lse = weight, backward computes dS = P * weight
            assert kernels.backward is not None
            zeros, grad_lse = torch.zeros_like(query), weight.contiguous()
            grads = kernels.backward(problem.in_first_slots(), zeros, lse, zeros, grad_lse)
            assert grads.block_bias is not None
            mass = grads.block_bias
    return _slot_gradient(mass, problem, slots)


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


_CALL = operator_schema(OPTIONS, "SymInt q_start, SymInt? block_size, str backend")
_NAMES = [argument.split()[-1] for argument in _CALL.split(",")]
_UNUSED: dict[str, Any] = dict.fromkeys(OPTIONS)

_attention = differentiable("attention", _CALL, _forward, _backward, refusal=SECOND_DERIVATIVES)


def _parsed_call(arguments: Sequence[Any]) -> tuple[CallRecipe, Pattern, Extras]:
    """Converts the operator's arguments after query, key, value to (recipe, pattern, extras)."""
    call = dict(zip(_NAMES[3:], arguments[3:], strict=True))
    pattern = parse_owned(call.pop("pattern"), call.pop("tensors"))
    recipe = CallRecipe(
        backend=call.pop("backend"),
        scale=call.pop("scale"),
        q_start=call.pop("q_start"),
        block_size=call.pop("block_size"),
    )
    if call["distance_bias"] is not None:
        check_distances(pattern)
    return recipe, pattern, Extras({name: x for name, x in call.items() if x is not None})


def _parsed_problem(arguments: Sequence[Any]) -> tuple[Backend, Problem]:
    """Converts the operator's arguments to the backend that runs the call, and its `Problem`."""
    recipe, pattern, extras = _parsed_call(arguments)
    query, key, value = arguments[:3]
    return BACKENDS[recipe.backend], _problem(recipe, (query, key, value), pattern, extras)


def _problem(recipe: CallRecipe, inputs: Inputs, pattern: Pattern, extras: Extras) -> Problem:
    (query, key, _), options = inputs, dict(extras.in_use)
    slot_bias = options.pop("slot_bias", None)
    if pattern.tensors and BACKENDS[recipe.backend].runs_lists:
        check_batch(pattern, query.shape[0])
        check_fits(pattern, frame := frame_of(query, key, recipe.q_start))
        if (split := split_lists(pattern, frame, extras.in_use)) is not None:
            pattern, lists = split
            size = recipe.block_size or block_size_of(recipe.backend, pattern, query, frame)
            layout = layout_cache.layout(pattern, frame, size, query.device)
            if slot_bias is not None:
                options["block_bias"] = lists[0].bias(slot_bias)
            return Problem(layout, *inputs, recipe.scale, lists=lists, **options)
    layout_key, masks = layout_key_of(recipe, query, key, pattern, extras)
    if masks:
        for mask in masks:
            check_fits(mask, layout_key[1])
        options["key_mask"] = key_mask(masks, key.shape[2], query.device)
    slots: tuple[int, ...] = ()
    build = BACKENDS[recipe.backend].selected_layout
    if (bias := extras["block_bias"]) is not None:
        layout = layout_cache.layout(*layout_key)
        check_bias(bias.shape[-1], layout)
    elif build and pattern.tensors and (selected := build(*layout_key)) is not None:
        layout = selected
    else:
        layout, slots = _layout(*layout_key)
    if slot_bias is not None:
        options["block_bias"] = _entry_bias(slot_bias, layout)
    problem = Problem(layout, *inputs, recipe.scale, slots=slots, **options)
    return problem if BACKENDS[recipe.backend].reads_slots else problem.in_first_slots()


def _entry_bias(slot_bias: Tensor, layout: BlockLayout) -> Tensor:
    """Converts a slot bias [B, Hq, R * k] to a block bias [B, Hq, blocks] of the layout."""
    if all(p.slot is None for p in layout.passes) and layout.passes and slot_bias.shape[2]:
        raise NotImplementedError(
            "slot_bias needs tiles of one row and one block of SelectedBlocks, got tiles that span "
            "several; pass a block_size, 16 or more, that divides the selection's, or pass "
            "backend='reference'"
        )
    slot = stretched(layout.entry_slots, *slot_bias.shape[:2])
    return torch.nn.functional.pad(slot_bias, (0, 1)).gather(-1, slot % (slot_bias.shape[2] + 1))


def _slot_gradient(grad: Tensor, problem: Problem, slot_bias: Tensor) -> Tensor:
    """Sums a block bias's gradient [B, Hq, blocks] over the blocks of each slot: [B, Hq, R * k]."""
    if problem.lists:
        return problem.lists[0].slot_gradient(grad)
    slot = stretched(problem.layout.entry_slots, *grad.shape[:2])
    by_slot = grad.new_zeros(*slot_bias.shape[:2], slot_bias.shape[2] + 1)
    return by_slot.scatter_add_(-1, slot % by_slot.shape[2], grad)[..., :-1].contiguous()


def _layout(
    pattern: Pattern, frame: Frame, block_size: int, device: torch.device
) -> tuple[BlockLayout, tuple[int, ...]]:
    """Returns (cached layout, bitmap row of the first query in each pass, or () if all are 0)."""
    page = last_query_layout(pattern, frame, block_size, device) if frame.q_len == 1 else None
    return page or (layout_cache.layout(pattern, frame, block_size, device), ())


def _library_call(
    recipe: CallRecipe, inputs: Inputs, pattern: Pattern, extras: Extras
) -> tuple[Tensor, Tensor]:
    """Runs a backend that hands the whole call to a library; NotImplementedError if it cannot."""
    name, backend = recipe.backend, BACKENDS[recipe.backend]
    assert backend.library_call is not None and backend.refuses is not None
    assert not extras.in_use, f"{name} computes no {sorted(extras.in_use)}"
    refuse_forward_mode(*inputs)
    check_batch(pattern, inputs[0].shape[0])
    check_fits(pattern, frame := frame_of(*inputs[:2], recipe.q_start))
    if refused := backend.refuses(inputs, pattern, frame):
        raise NotImplementedError(f"{name}: {'; '.join(refused)}; leave out backend=")
    return backend.library_call(*inputs, pattern, frame, recipe.scale)


def _reference(
    recipe: CallRecipe, inputs: Inputs, pattern: Pattern, extras: Extras
) -> tuple[Tensor, Tensor]:
    """Computes dense attention by the pattern's definition; a layout only locates biased blocks."""
    query, key, _ = inputs
    dtype, factor = sum_dtype(query), None
    text, operands = pattern.operands
    call = query.detach(), key.detach(), operands, text, recipe.q_start
    rest = {**_UNUSED, **extras.in_use}
    block_bias, slot_bias = rest.pop("block_bias"), rest.pop("slot_bias")
    p, seed, distance_bias = map(rest.pop, ("dropout_p", "dropout_seed", "distance_bias"))
    if block_bias is None and slot_bias is None:
        counts = pair_counts_op(*call).to(dtype)
        log_counts = counts.log()
        if p is not None:
            factor = pair_counts_op(*call, p, seed).to(dtype) / counts.clamp(min=1)
    else:
        if block_bias is not None:
            biased = places_op(*call, recipe.block_size, block_bias.shape[-1]), block_bias.to(dtype)
        elif slot_bias is not None:  # index 0: no bias, for pairs in no listed block
            biased = places_op(*call), torch.nn.functional.pad(slot_bias.to(dtype), (1, 0))
        log_counts = _log_biased_counts(*biased)
        if p is not None:
            frame = frame_of(query, key, recipe.q_start)
            kept = kept_by_branch(pattern, frame, p, seed).to(query.device)
            factor = (_log_biased_counts(*biased, kept) - finite_or_zero(log_counts)).exp()
    if factor is not None:
        factor = factor / (1 - p)
    if distance_bias is not None:
        entry = entry_of_distance(distances_op(*call), distance_bias)
        distance_bias = distance_bias.to(dtype)[..., entry]
    rest |= {"distance_bias": distance_bias, "dropout_factor": factor}
    return reference_attention(*inputs, log_counts, recipe.scale, **rest)


def _log_biased_counts(number: Tensor, block_bias: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns log(sum of exp(bias)) over the branches that have a pair, [B, Hq, Nq, Nk].

    `number` [branches, B, Hq, Nq, Nk]: pair's index in `block_bias`, or -1; `mask`: False omits it.
    """
    block_bias = torch.nn.functional.pad(block_bias, (0, 1))  # gather fails on an empty dim
    flat = block_bias[None, :, :, None].expand(len(number), -1, -1, number.shape[3], -1)
    counted = number >= 0 if mask is None else (number >= 0) & mask
    bias = torch.where(number >= 0, flat.gather(-1, number.clamp(min=0)), -torch.inf)
    highest = finite_or_zero(bias.detach().amax(0))
    total = torch.where(counted, (bias - highest).exp(), 0.0).sum(0)
    empty = total == 0
    return torch.where(empty, -torch.inf, highest + torch.where(empty, 1.0, total).log())


def _flops(arguments: Sequence[Any], by_head_dim: int, by_value_dim: int) -> int:
    """Counts FLOPs: each pair has `by_head_dim` dot products over D, `by_value_dim` over Dv."""
    query, key, value, *_ = arguments
    recipe, pattern, extras = _parsed_call(arguments[: len(_NAMES)])
    layout_key, _ = layout_key_of(recipe, query, key, pattern, extras)
    pattern, lists = split_lists(pattern, layout_key[1], extras.in_use) or (pattern, ())
    pairs = float(layout_cache.layout(pattern, *layout_key[1:]).num_pairs)
    pairs += sum(float((x.keys >= 0).double().sum((2, 3)).mean()) for x in lists)
    pairs *= query.shape[0] * query.shape[1]
    return int(2 * pairs * (by_head_dim * query.shape[3] + by_value_dim * value.shape[3]))


def _register_flops(counter: ModuleType) -> None:
    for operator, *dims in (("attention", 1, 1), ("attention_backward", 3, 2)):
        register = counter.register_flop_formula(getattr(torch.ops.sparsering, operator), True)
        register(lambda *arguments, dims=dims, **_: _flops(arguments, *dims))


class _CounterImport(MetaPathFinder):
    """Registers the FLOP formulas when torch's counter is imported: to import it loads Triton."""

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
