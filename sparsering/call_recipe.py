"""Checks a call and decides how it runs; later calls with equal properties reuse the decision.

The decision, a `CallRecipe`, depends on shapes, dtypes, device, pattern, options and on whether
autograd records the call, but not on the values in query, key and value.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checks import autocast_inputs, check_inputs, checked_integer_or_none, checked_scale, kind_of
from .dispatch import BACKENDS, Backend, choose
from .extras import NO_EXTRAS, checked_extras
from .kernels.triton import interpreting
from .patterns.algebra import Frame, Pattern

Inputs = tuple[Tensor, Tensor, Tensor]
LayoutKey = tuple[str, Pattern, Frame, int, torch.device]
"""Arguments of `ops._layout`: backend, pattern, frame, block size and device."""


@dataclass(slots=True, eq=False)
class CallRecipe:
    """Decisions about how a call runs; equal calls reuse them until `BACKENDS` changes."""

    backend: str
    scale: float
    q_start: int
    block_size: int | None = None  # tokens per tile, None if the caller does not choose
    plain: bool = False  # True if no compiler, tracer, profiler, mode or transform observes it
    learns: bool = False  # True if autograd records query, key or value
    layout_key: LayoutKey | None = None  # set by the first call, if the pattern has no tensors
    direct: bool = False  # True if the backend needs only a layout: no extras, masks or gradients
    table: tuple[Backend, ...] = ()  # `BACKENDS` at the time of the decision

    @property
    def tile_size(self) -> int | None:
        """Tokens per tile: the block size of `layout_key` or, until it is set, `block_size`."""
        return self.block_size if self.layout_key is None else self.layout_key[3]


_MOST = 256  # largest number of recipes in the cache
_recipes: dict[Hashable, CallRecipe] = {}
"""Recipes of recent calls, by the result of `_kind`."""


def recipe_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    choices: tuple[Any, Any, Any, Any],
    extras: Mapping[str, Any],
) -> tuple[CallRecipe, Inputs, dict[str, Any]]:
    """Checks a call and returns how it runs: (recipe, (query, key, value), extras).

    Calls with equal shapes, dtypes, device, pattern and options share a recipe, so that only the
    first is checked; extras are checked in each call.

    Args:
        choices: `attention`'s backend, scale, q_start and block_size.
        extras: all other options of the call, {} if none is in use.
    """
    kind = _kind(query, key, value, pattern, choices, extras)
    recipe = None if kind is None else _recipes.get(kind)
    backend, scale, q_start, block_size = choices
    if recipe is not None and recipe.table == tuple(BACKENDS.values()):
        options = checked_extras(query, pattern, block_size, key, **extras) if extras else NO_EXTRAS
        return recipe, (query, key, value), options
    call = {"scale": scale, "q_start": q_start, "block_size": block_size}
    inputs, call, options = checked_call(query, key, value, pattern, **call, **extras)
    recipe = CallRecipe(choose(backend, inputs, options, pattern, call["q_start"]), **call)
    if kind is not None:
        recipe.plain, recipe.learns, recipe.table = True, kind[0][-1], tuple(BACKENDS.values())
        if len(_recipes) >= _MOST:
            for oldest in list(_recipes)[:1]:
                _recipes.pop(oldest, None)  # no KeyError if another thread removed it
        _recipes[kind] = recipe
    return recipe, inputs, options


def _kind(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: object,
    choices: tuple[Any, ...],
    extras: Mapping[str, Any],
) -> tuple[Any, ...] | None:
    """Returns the dictionary key of a call's recipe, or None if no other call can share it.

    For a pattern with tensors, the key has only its type: nothing else in the pattern changes the
    recipe, and each call looks up its own layout.
    """
    types = tuple(map(type, choices))
    if not isinstance(pattern, Pattern) or not _COMPARED.issuperset(types):
        return None
    tensors = kind_of(query, key, value)
    if tensors is None:
        return None
    in_use: tuple[str, ...] = ()
    if extras:
        if type(p := extras.get("dropout_p")) not in _COMPARED:
            return None
        unused = None if p else "dropout_p"
        in_use = tuple(name for name, x in extras.items() if x is not None and name != unused)
    interpreted = (choices[0] == "triton" or tensors[4].type != "cpu") and interpreting()
    pattern_key = type(pattern) if pattern.tensors else pattern
    return tensors, pattern_key, choices, types, in_use, interpreted  # `types` tells 1 from True


_COMPARED = frozenset((type(None), int, float, str))  # types that `_kind` accepts in `choices`


def checked_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    scale: float | None = None,
    q_start: int | None = None,
    block_size: int | None = None,
    **extras: Any,
) -> tuple[Inputs, dict[str, Any], dict[str, Any]]:
    """Checks a call; returns (query, key, value), {scale, q_start, block_size}, and the extras."""
    check_inputs(query, key, value, pattern)
    scale = checked_scale(scale, query)
    q_start = checked_integer_or_none("q_start", q_start)
    block_size = checked_integer_or_none("block_size", block_size)
    query, key, value = autocast_inputs(query, key, value)
    call = {
        "scale": scale,
        "q_start": key.shape[2] - query.shape[2] if q_start is None else q_start,
        "block_size": block_size,
    }
    return (query, key, value), call, checked_extras(query, pattern, block_size, key, **extras)
