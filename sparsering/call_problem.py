"""Turns a checked call into the `Problem` that a backend computes: layout, lists, masks, biases."""

import torch
from torch import Tensor

from .call_recipe import CallRecipe, Inputs, layout_key_of
from .checks import check_batch, check_bias
from .dispatch import BACKENDS, block_size_of
from .extras import Extras
from .kernels.lists import split_lists
from .kernels.problem import Problem
from .layouts.cache import layout_cache
from .layouts.last_query import last_query_layout
from .layouts.layout import BlockLayout, stretched
from .pairs import frame_of
from .patterns.algebra import Frame, Pattern, check_fits
from .patterns.keys import key_mask


def problem_of(recipe: CallRecipe, inputs: Inputs, pattern: Pattern, extras: Extras) -> Problem:
    """Returns the problem of a checked call: lists split off, key masks joined, a layout built.

    A slot bias becomes one of the layout's blocks, or of the listed keys.
    """
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
        layout, slots = layout_of(*layout_key)
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


def slot_gradient(grad: Tensor, problem: Problem, slot_bias: Tensor) -> Tensor:
    """Sums a block bias's gradient [B, Hq, blocks] over the blocks of each slot: [B, Hq, R * k]."""
    if problem.lists:
        return problem.lists[0].slot_gradient(grad)
    slot = stretched(problem.layout.entry_slots, *grad.shape[:2])
    by_slot = grad.new_zeros(*slot_bias.shape[:2], slot_bias.shape[2] + 1)
    return by_slot.scatter_add_(-1, slot % by_slot.shape[2], grad)[..., :-1].contiguous()


def layout_of(
    pattern: Pattern, frame: Frame, block_size: int, device: torch.device
) -> tuple[BlockLayout, tuple[int, ...]]:
    """Returns (cached layout, bitmap row of the first query in each pass, or () if all are 0)."""
    page = last_query_layout(pattern, frame, block_size, device) if frame.q_len == 1 else None
    return page or (layout_cache.layout(pattern, frame, block_size, device), ())
