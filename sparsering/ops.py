"""The operator boundary: what torch.compile, autograd, torch.func and the FLOP counter see.

A pattern crosses the boundary as its expression (a string) and its tensors, so that a compiled
graph holds no Python objects. On the other side the call becomes a `Problem` over a layout.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .call_recipe import CallRecipe, Laid
from .checks import check_batch, check_bias, needs_operator, refuse_forward_mode
from .differentiable import differentiable, transforming
from .dispatch import BACKENDS, Backend, block_size_of
from .kernels.problem import Problem
from .kernels.reference import reference_attention
from .layouts.cache import layout_cache
from .layouts.last_query import last_query_layout
from .layouts.layout import BlockLayout, stretched
from .numerics import entry_of_distance, finite_or_zero, sum_dtype, without_autocast
from .pairs import distances_op, frame_of, kept_by_branch, pair_counts_op, slots_op
from .patterns.algebra import Frame, Pattern, check_fits
from .patterns.expression import parse
from .patterns.keys import check_key_masks, key_mask, without_key_masks
from .patterns.selected import selections_of


def attend(
    recipe: CallRecipe,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a call that `recipe_of` checked.

    A backend with a `backward` runs as a torch operator, which calls `_forward` and `_backward`.
    The operator costs a good part of a small call's time, so it is skipped if nothing needs to see
    it. A backend without `backward` runs as plain torch.
    """
    how = BACKENDS[recipe.backend]
    if recipe.direct and recipe.laid is not None and how.forward is not None:
        layout, slots = _layout(*recipe.laid)
        problem = Problem(layout, query, key, value, recipe.scale, slots=slots)
        return how.forward(problem if how.reads_slots else problem.in_first_slots())
    if recipe.plain and recipe.laid is None and how.backward is not None and not pattern.tensors:
        _complete(recipe, query, key, pattern, options)
    call = {
        "query": query,
        "key": key,
        "value": value,
        "scale": recipe.scale,
        "q_start": recipe.q_start,
        "block_size": recipe.block_size if recipe.laid is None else recipe.laid[3],
        "backend": recipe.backend,
        "slot_bias": None,
        **options,
    }
    spelt: dict[str, Any] = {"tensors": pattern.tensors, "pattern": pattern.expression}
    if how.backward is not None:
        seen = [x for x in (*options.values(), *pattern.tensors) if isinstance(x, Tensor)]
        if not recipe.plain:
            seen += [query, key, value]
            refuse_forward_mode(*seen)
        if recipe.learns or (seen and needs_operator(*seen)):
            return _attention(**call, **spelt)
    if how.forward is not None and not recipe.plain and transforming():
        raise NotImplementedError(
            f"{recipe.backend} does not run under torch.func (grad, vmap); name another backend or "
            "none"
        )
    with without_autocast(query):
        if how.forward is None:
            return _reference(**call, **spelt)
        return how.forward(_problem(pattern, **call))


def _complete(
    recipe: CallRecipe, query: Tensor, key: Tensor, pattern: Pattern, options: Mapping[str, Any]
) -> None:
    """Adds the layout's key to a recipe, for all calls that share it."""
    check_batch(pattern, query.shape[0])
    as_data = "key_mask" in BACKENDS[recipe.backend].extras and options["block_bias"] is None
    rest, masks = without_key_masks(pattern) if as_data else (pattern, ())
    laid = _laid(rest, query, key, recipe.q_start, recipe.block_size, recipe.backend)
    check_fits(rest, laid[2])
    unused = all(x is None for x in options.values())
    recipe.direct = unused and not masks and not recipe.learns
    recipe.laid = laid


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    how, problem = _parsed_problem(**dict(zip(_NAMES, arguments, strict=True)))
    assert how.forward is not None
    with without_autocast(problem.query):
        return how.forward(problem)


def _backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    *given, out, lse, grad_out, grad_lse, wanted = arguments
    call = dict(zip(_NAMES, given, strict=True))
    how, problem = _parsed_problem(**call)
    assert how.backward is not None
    problem = problem._replace(learns_distances=wanted[_NAMES.index("distance_bias")])
    with without_autocast(problem.query):
        grads = how.backward(problem.in_first_slots(), out, lse, grad_out, grad_lse)._asdict()
    if (slots := call["slot_bias"]) is not None:
        grads["slot_bias"] = _slot_gradient(grads["block_bias"], problem.layout, slots)
    return tuple(grads.get(name) for name in _NAMES[: _NAMES.index("tensors")])


def value_gradient(
    backend: str,
    query: Tensor,
    key: Tensor,
    pattern: Pattern,
    lse: Tensor,
    grad_out: Tensor,
    *,
    scale: float,
    q_start: int,
    block_size: int | None,
    options: Mapping[str, Any],
) -> Tensor:
    """Sums `exp(s - lse) grad_out` over queries, [B, Hkv, Nk, Dv], for a checked call.

    lse [B, Hq, Nq] may cover more keys than the pattern. A sink must be part of lse, not an option.
    """
    value = query.new_zeros(*key.shape[:3], grad_out.shape[3])
    problem = _problem(
        pattern,
        query,
        key,
        value,
        scale=scale,
        q_start=q_start,
        block_size=block_size,
        backend=backend,
        **options,
    )._replace(learns_distances=False)
    backward = BACKENDS[backend].backward
    assert backward is not None
    with without_autocast(query):
        zeros = torch.zeros_like(grad_out), torch.zeros_like(lse)
        return backward(problem.in_first_slots(), zeros[0], lse, grad_out, zeros[1]).value


@torch.library.custom_op("sparsering::slot_mass", mutates_args=())
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
    """Sums `weight exp(s - lse)` over the pairs of each slot, [B, Hq, R * k].

    The call is checked and its pattern has one selection; `weight` is [B, Hq, Nq].
    """
    value = parse(pattern, tensors)
    slots = lse.new_zeros(*query.shape[:2], _num_slots(value))
    problem = _problem(
        value,
        query,
        key,
        key,
        scale=scale,
        q_start=q_start,
        block_size=None,
        backend=backend,
        block_bias=None,
        slot_bias=slots,
    )
    how = BACKENDS[backend]
    with without_autocast(query):
        if how.entry_mass is not None:
            mass = how.entry_mass(problem, lse, weight)
        else:  # with zero out and grad_out, and grad_lse = weight, the backward has dS = P * weight
            assert how.backward is not None
            none = torch.zeros_like(query)
            found = how.backward(problem.in_first_slots(), none, lse, none, weight.contiguous())
            assert found.block_bias is not None
            mass = found.block_bias
    return _slot_gradient(mass, problem.layout, slots)


@slot_mass.register_fake
def _(
    query: Tensor, key: Tensor, lse: Tensor, weight: Tensor, tensors: Sequence[Tensor],
    pattern: str, *rest: object,
) -> Tensor:  # fmt: skip
    return lse.new_empty(*query.shape[:2], _num_slots(parse(pattern, tensors)))


def _num_slots(pattern: Pattern) -> int:
    """Returns the number of slots R * k of a pattern's only selection."""
    (selection,) = selections_of(pattern)
    return math.prod(selection.indices.shape[-2:])


_CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor? block_bias, Tensor? slot_bias, "
    "Tensor? distance_bias, Tensor? sink, Tensor? dropout_seed, Tensor[] tensors, str pattern, "
    "float scale, float? softcap, float? dropout_p, SymInt q_start, SymInt? block_size, str backend"
)
_NAMES = [argument.split()[-1] for argument in _CALL.split(",")]

_attention = differentiable(
    "attention",
    _CALL,
    _forward,
    _backward,
    refusal="second derivatives exist for backend='reference' alone; pass that to attention",
)


def _parsed_problem(
    *, tensors: Sequence[Tensor], pattern: str, backend: str, **call: Any
) -> tuple[Backend, Problem]:
    """Turns the operator's arguments into the backend that runs the call, and its `Problem`."""
    return BACKENDS[backend], _problem(parse(pattern, tensors), backend=backend, **call)


def _problem(
    pattern: Pattern,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    q_start: int,
    block_size: int | None,
    backend: str,
    **options: Any,
) -> Problem:
    """Builds the `Problem` of a call: looks up its layout, and takes over the other options.

    Backends that support key masks get them as data, so that a new mask needs no new layout. With
    a block bias the layout includes the masks, because the bias counts the blocks of the pattern.
    """
    mask, slot_bias = None, options.pop("slot_bias", None)
    check_batch(pattern, query.shape[0])
    if "key_mask" in BACKENDS[backend].extras:
        rest, masks = without_key_masks(pattern)
        check_key_masks(masks, len(query), key.shape[2])
        mask = key_mask(masks, key.shape[2], query.device) if masks else None
        pattern = rest if options["block_bias"] is None else pattern
    laid = _laid(pattern, query, key, q_start, block_size, backend)
    if options["block_bias"] is None:
        layout, slots = _layout(*laid)
    else:
        layout, slots = layout_cache.layout(*laid[1:]), ()
    check_bias(options["block_bias"], layout)
    if slot_bias is not None:
        options["block_bias"] = _entry_bias(slot_bias, layout)
    problem = Problem(layout, query, key, value, key_mask=mask, slots=slots, **options)
    return problem if BACKENDS[backend].reads_slots else problem.in_first_slots()


def _entry_bias(slot_bias: Tensor, layout: BlockLayout) -> Tensor:
    """Converts a bias of slots [B, Hq, R * k] to a bias of layout entries [B, Hq, entries]."""
    if all(p.slot is None for p in layout.passes) and layout.passes:
        raise NotImplementedError(
            "slots need tiles of one row and one block of SelectedBlocks: a block_size that "
            "divides the selection's; choose blocks of a multiple of 16 tokens, or give slot_bias "
            "to attention with backend='reference'"
        )
    slot = stretched(layout.entry_slots, *slot_bias.shape[:2])
    return torch.nn.functional.pad(slot_bias, (0, 1)).gather(-1, slot % (slot_bias.shape[2] + 1))


def _slot_gradient(grad: Tensor, layout: BlockLayout, slot_bias: Tensor) -> Tensor:
    """Converts the gradient of a bias of entries to the gradient of the bias of slots."""
    slot = stretched(layout.entry_slots, *grad.shape[:2])
    of_slots = grad.new_zeros(*slot_bias.shape[:2], slot_bias.shape[2] + 1)
    return of_slots.scatter_add_(-1, slot % of_slots.shape[2], grad)[..., :-1].contiguous()


def _laid(
    pattern: Pattern,
    query: Tensor,
    key: Tensor,
    q_start: int,
    block_size: int | None,
    backend: str,
) -> Laid:
    """Returns the arguments of `_layout`, with the block size filled in."""
    frame = frame_of(query, key, q_start)
    if block_size is None:
        block_size = block_size_of(backend, pattern, query, frame)
    return backend, pattern, frame, block_size, query.device


def _layout(
    backend: str, pattern: Pattern, frame: Frame, block_size: int, device: torch.device
) -> tuple[BlockLayout, tuple[int, ...]]:
    """Returns a layout from the cache, and for each pass the bitmap row of the first query."""
    found = None
    if frame.q_len == 1 and BACKENDS[backend].refuses is None:  # such a backend takes no page
        found = last_query_layout(pattern, frame, block_size, device)
    return found or (layout_cache.layout(pattern, frame, block_size, device), ())


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    tensors: Sequence[Tensor],
    pattern: str,
    scale: float,
    q_start: int,
    block_size: int | None,
    backend: str,
    block_bias: Tensor | None,
    slot_bias: Tensor | None = None,
    distance_bias: Tensor | None,
    dropout_p: float | None,
    dropout_seed: Tensor | None,
    **extras: Any,
) -> tuple[Tensor, Tensor]:
    """Dense attention by the pattern's definition; a layout only locates the blocks of a bias."""
    dtype, kept = sum_dtype(query), None
    spelt = query.detach(), key.detach(), tensors, pattern, q_start
    dropout = None if dropout_p is None or dropout_seed is None else (dropout_p, dropout_seed)
    if block_bias is None and slot_bias is None:
        counts = pair_counts_op(*spelt).to(dtype)
        log_counts = counts.log()
        if dropout is not None:
            kept = pair_counts_op(*spelt, *dropout).to(dtype) / counts.clamp(min=1)
    else:
        declared = parse(pattern, tensors)
        check_batch(declared, query.shape[0])
        laid = _laid(declared, query, key, q_start, block_size, backend)
        branches = list(range(len(declared.branches)))
        if block_bias is not None:
            layout = layout_cache.layout(*laid[1:])
            check_bias(block_bias, layout)
            branches = [p.branch for p in layout.passes]
            number = layout.entry_of_pairs(len(query)).to(query.device)  # [passes, B, Hq, Nq, Nk]
            biased = number, block_bias.to(dtype)
        elif slot_bias is not None:  # index 0 is a zero bias, for pairs without a slot
            padded = torch.nn.functional.pad(slot_bias.to(dtype), (1, 0))
            biased = slots_op(*spelt), padded
        log_counts = _log_biased_counts(*biased)
        if dropout is not None:
            of_branch = kept_by_branch(declared, laid[2], *dropout)
            which = torch.tensor(branches, dtype=torch.int64)
            of_kept = _log_biased_counts(*biased, of_branch[which].to(query.device))
            kept = (of_kept - finite_or_zero(log_counts)).exp()
    if kept is not None and dropout is not None:
        kept = kept / (1 - dropout[0])
    if distance_bias is not None:
        entry = entry_of_distance(distances_op(*spelt), distance_bias)
        distance_bias = distance_bias.to(dtype)[..., entry]
    return reference_attention(
        query, key, value, log_counts, scale, distance_bias=distance_bias, kept=kept, **extras
    )


def _log_biased_counts(number: Tensor, block_bias: Tensor, kept: Tensor | None = None) -> Tensor:
    """Returns the log of each pair's multiplicity times exp(bias), [B, Hq, Nq, Nk].

    Sums over passes, or only over the passes that `kept` marks for the pair.
    `number`: [passes, B, Hq, Nq, Nk] bias index of every pair, -1 if the pass has no such pair.
    """
    block_bias = torch.nn.functional.pad(block_bias, (0, 1))  # gather fails on an empty dim
    flat = block_bias[None, :, :, None].expand(len(number), -1, -1, number.shape[3], -1)
    there = number >= 0 if kept is None else (number >= 0) & kept
    bias = torch.where(number >= 0, flat.gather(-1, number.clamp(min=0)), -torch.inf)
    highest = finite_or_zero(bias.detach().amax(0))
    total = torch.where(there, (bias - highest).exp(), 0.0).sum(0)
    none = total == 0
    return torch.where(none, -torch.inf, highest + torch.where(none, 1.0, total).log())


def _visited_pairs(arguments: Sequence[Any]) -> float:
    call = dict(zip(_NAMES, arguments, strict=False))
    query, key = call["query"], call["key"]
    pattern = parse(call["pattern"], call["tensors"])
    check_batch(pattern, query.shape[0])
    laid = _laid(pattern, query, key, call["q_start"], call["block_size"], call["backend"])
    layout = layout_cache.layout(*laid[1:])
    return query.shape[0] * query.shape[1] * layout.num_pairs


@register_flop_formula(torch.ops.sparsering.attention, get_raw=True)
def _flops(*arguments: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Counts two matmuls on the pattern's exact pairs; extras are not matmuls and count as 0."""
    query, _, value, *_ = arguments
    return int(2 * _visited_pairs(arguments) * (query.shape[3] + value.shape[3]))


@register_flop_formula(torch.ops.sparsering.attention_backward, get_raw=True)
def _flops_backward(*arguments: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Counts five matmuls on the pattern's exact pairs."""
    query, _, value, *_ = arguments
    return int(2 * _visited_pairs(arguments) * (3 * query.shape[3] + 2 * value.shape[3]))
