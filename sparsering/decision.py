"""Checks a call and decides how it runs; later calls with equal properties reuse the decision.

It depends on shapes, dtypes, device, pattern, options and recording by autograd, not on values.
"""

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import (
    autocast_inputs,
    check_batch,
    check_inputs,
    checked_integer_or_none,
    checked_scale,
    kind_of,
)
from .dispatch import (
    BACKENDS,
    Backend,
    Inputs,
    block_size_of,
    choose,
    in_company,
    mode,
)
from .extras import NO_EXTRAS, OPTIONS, Extras, checked_extras, refuse_options
from .kernels.triton import interpreting
from .layouts.lists import Source, is_only_lists, split
from .pairs import frame_of
from .patterns.algebra import Frame, Pattern, check_fits
from .patterns.keys import KeyMasks, without_key_masks
from .patterns.selected import has_lists

Choices = tuple[Any, Any, Any, Any]
"""`attention`'s arguments backend, scale, q_start and block_size."""
LayoutKey = tuple[Pattern, Frame, int, torch.device]
"""Arguments of `work.layout_of`: pattern, frame, block size and device."""


class Parts(NamedTuple):
    """A call's pattern, taken apart by how its pairs are computed."""

    layout_key: LayoutKey  # what a layout of tiles is built from
    key_masks: KeyMasks = ()  # keys that no query sees, for the backend as data
    sources: tuple[tuple[Source, ...], ...] = ()  # of listed keys, by branch; () if there are none


class CallRecipe(NamedTuple):
    """Decisions about how a call runs; equal calls reuse them until `BACKENDS` changes."""

    backend: str
    scale: float
    q_start: int
    block_size: int | None = None  # tokens per tile; None if each call chooses it
    plain: bool = False  # True if no compiler, tracer, profiler, mode or transform observes it
    learns: bool = False  # True if autograd records query, key or value
    layout_key: LayoutKey | None = None  # if a layout is all it needs: no extras, masks, gradients
    table: tuple[Backend, ...] = ()  # `BACKENDS` at the time of the decision


_MOST = 256  # largest number of recipes in the cache
_recipes: dict[Hashable, CallRecipe] = {}
"""Recipes of recent calls, by the result of `_kind`."""


def recipe_of(
    inputs: Inputs, pattern: Pattern, choices: Choices, extras: Mapping[str, Any], in_cache: bool
) -> tuple[CallRecipe, Inputs, Extras]:
    """Returns how a call runs: (recipe, (query, key, value), extras); checks each new kind of call.

    `extras`: options besides `choices`, {} if none is in use, which are checked in each call.
        `in_cache`: True if the inputs are only new tokens: the recipe then fixes no layout.
    """
    kind = _kind(inputs, pattern, choices, extras, in_cache)
    recipe = None if kind is None else _recipes.get(kind)
    if recipe is not None and recipe.table == tuple(BACKENDS.values()):
        if not extras:
            return recipe, inputs, NO_EXTRAS
        return recipe, inputs, checked_extras(*inputs[:2], pattern, choices[-1], **extras)
    call = dict(zip(("scale", "q_start", "block_size"), choices[1:], strict=True))
    inputs, call, options = checked_call(inputs, pattern, **call, **extras)
    backend = in_company(choose(choices[0], inputs, options.in_use, pattern))
    recipe = CallRecipe(backend, **call)
    if in_cache and BACKENDS[recipe.backend].library_call is not None:
        raise NotImplementedError(
            f"{recipe.backend}: it runs whole sequences, and no cache; leave out backend="
        )
    if kind is not None:
        recipe = recipe._replace(plain=True, learns=kind[0][-1], table=tuple(BACKENDS.values()))
        if BACKENDS[recipe.backend].backward and not pattern.tensors and not in_cache:
            layout_key, masks, _ = parts_of_call(recipe, *inputs[:2], pattern, options)
            check_fits(*layout_key[:2])
            direct = None if masks or recipe.learns or options.in_use else layout_key
            recipe = recipe._replace(block_size=layout_key[2], layout_key=direct)
        if len(_recipes) >= _MOST:
            for oldest in list(_recipes)[:1]:
                _recipes.pop(oldest, None)  # no KeyError if another thread removed it
        _recipes[kind] = recipe
    return recipe, inputs, options


def parts_of_call(
    recipe: CallRecipe, query: Tensor, key: Tensor, pattern: Pattern, extras: Extras
) -> Parts:
    """Takes a call's pattern apart: tiles, key masks and sources of listed keys.

    Key masks are data of the backend, so a new one needs no new layout. A block bias has a number
    for each visited block of the whole pattern: with it, tiles have all pairs.
    """
    check_batch(pattern, query.shape[0])
    frame, kernels = frame_of(query, key, recipe.q_start), BACKENDS[recipe.backend]
    masks: KeyMasks = ()
    sources: tuple[tuple[Source, ...], ...] = ()
    in_tiles = extras["block_bias"] is not None
    if "key_mask" in kernels.extras:
        rest, masks = without_key_masks(pattern)
        pattern = pattern if in_tiles else rest
    if pattern.tensors and kernels.runs_lists:
        check_fits(pattern, frame)
        if not in_tiles and has_lists(pattern):
            pattern, sources = split(pattern)
    if (size := recipe.block_size) is None:
        size = block_size_of(recipe.backend, pattern, query, frame)
    layout_key = pattern, frame, size, query.device
    return Parts(layout_key=layout_key, key_masks=masks, sources=sources)


def _kind(
    inputs: Inputs, pattern: object, choices: Choices, extras: Mapping[str, Any], in_cache: bool
) -> tuple[Any, ...] | None:
    """Returns the dictionary key of a call's recipe, or None if no other call can share it."""
    types = tuple(map(type, choices))
    if not isinstance(pattern, Pattern) or not _COMPARED.issuperset(types):
        return None
    if (tensors := kind_of(*inputs)) is None:
        return None
    in_use: tuple[str, ...] = ()
    if extras:
        if type(p := extras.get("dropout_p")) not in _COMPARED:
            return None
        unused = None if p else "dropout_p"
        in_use = tuple(name for name, x in extras.items() if x is not None and name != unused)
    interpreted = (choices[0] == "triton" or tensors[4].type != "cpu") and interpreting()
    # each call looks up the layout of a pattern with tensors; its type alone changes the recipe
    pattern_key: object = pattern
    if pattern.tensors:
        pattern_key = type(pattern), has_lists(pattern), is_only_lists(pattern)
    # `types` tells 1 from True
    invariant = mode.is_batch_invariant
    return tensors, pattern_key, choices, types, in_use, interpreted, in_cache, invariant


_COMPARED = frozenset((type(None), int, float, str))  # types that `_kind` accepts in `choices`


def checked_call(
    inputs: Inputs, pattern: Pattern, **options: Any
) -> tuple[Inputs, dict[str, Any], Extras]:
    """Checks a call; returns (query, key, value), {scale, q_start, block_size}, and the extras."""
    check_inputs(*inputs, pattern)
    scale = checked_scale(options.pop("scale", None), inputs[0])
    q_start = checked_integer_or_none("q_start", options.pop("q_start", None))
    size = checked_integer_or_none("block_size", options.pop("block_size", None))
    query, key, value = autocast_inputs(*inputs)
    q_start = key.shape[2] - query.shape[2] if q_start is None else q_start
    call = {"scale": scale, "q_start": q_start, "block_size": size}
    refuse_options("attention", options, OPTIONS, {})
    return (query, key, value), call, checked_extras(query, key, pattern, size, **options)
