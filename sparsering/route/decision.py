"""Checks a call and decides how it runs; later calls with equal properties reuse the decision.

A decision depends on shapes, dtypes, device, pattern and options, and on whether autograd records
the call, but not on values.
"""

import os
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch

from ..call import NO_OPTIONS, Call, Inputs
from ..checks import (
    autocast_inputs,
    check_batch,
    check_inputs,
    checked_integer_or_none,
    checked_scale,
    kind_of,
)
from ..coordinates import is_coordinate_bias
from ..kernels.backends import BACKENDS, Backend, block_size_of, choose, form_for_mode, mode
from ..kernels.triton import interpreting
from ..layouts.lists import ListedPairs, is_only_lists, split
from ..patterns.algebra import Frame, Pattern, check_fits
from ..patterns.keys import KeyMasks, without_key_masks
from ..patterns.positions import Full
from ..patterns.selected import CHECK, has_lists
from .options import OPTIONS, checked_options, refuse_options

Choices = tuple[Any, Any, Any, Any]
"""`attention`'s arguments backend, scale, q_start and block_size."""
LayoutKey = tuple[Pattern, Frame, int, torch.device]
"""Arguments of `work.layout_of`: pattern, frame, block size and device."""


class Parts(NamedTuple):
    """A pattern, divided into what tiles, a key mask and lists of keys compute."""

    layout_key: LayoutKey  # what a layout of tiles is built from
    key_masks: KeyMasks = ()  # keys that no query sees, for the backend as data
    # for each branch, the selections whose keys are listed; () if there are no lists
    sources: tuple[tuple[ListedPairs, ...], ...] = ()


class Decision(NamedTuple):
    """How to run calls of one kind (equal pattern, shapes, dtypes and options), cached by kind."""

    backend: str
    scale: float
    q_start: int
    block_size: int | None = None  # the caller's argument
    is_plain: bool = False  # True if no compiler, tracer, profiler, mode or transform observes it
    learns: bool = False  # True if autograd records query, key or value
    parts: Parts | None = None  # None for a pattern with tensors, whose parts depend on the call
    is_bare: bool = False  # True if it only needs a layout: no options, masks or gradients
    table: tuple[Backend, ...] = ()  # `BACKENDS` at the time of the decision

    @classmethod
    def of(cls, call: Call, backend: str) -> "Decision":
        """Returns the decision to run one call on a backend, which no other call reuses."""
        return cls(
            backend=backend, scale=call.scale, q_start=call.q_start, block_size=call.block_size
        )


_MOST = 256  # largest number of decisions in the cache
_decisions: dict[Hashable, Decision] = {}
"""Decisions about recent calls, by the result of `_kind`."""


def decided(
    inputs: Inputs,
    pattern: Pattern,
    choices: Choices,
    options: Mapping[str, Any],
    in_cache: bool = False,
) -> tuple[Call, Decision]:
    """Returns a checked call and how it runs; later calls of the same kind skip most checks.

    `options` are those besides `choices`, {} if none is in use; they are checked in each call.
    `in_cache` is True if the inputs are only new tokens of a cache: the decision then has no parts.
    """
    kind = _kind(inputs, pattern, choices, options, in_cache)
    decision = None if kind is None else _decisions.get(kind)
    if decision is not None and decision.table == tuple(BACKENDS.values()):
        query, key, value = inputs
        checked = NO_OPTIONS
        if options:
            checked = checked_options(query, key, pattern, choices[-1], **options)
        call = Call(
            query=query,
            key=key,
            value=value,
            pattern=pattern,
            scale=decision.scale,
            q_start=decision.q_start,
            block_size=decision.block_size,
            options=checked,
        )
        return call, decision
    named = dict(zip(("scale", "q_start", "block_size"), choices[1:], strict=True))
    call = checked_call(inputs, pattern, **named, **options)
    backend = form_for_mode(choose(choices[0], call.inputs, call.options.names, pattern))
    decision = Decision.of(call, backend)
    if in_cache and BACKENDS[backend].refuses is not None:
        raise NotImplementedError(
            f"{backend}: it runs whole sequences, and no cache; leave out backend="
        )
    if kind is not None:
        learns = kind[0][-1]
        decision = decision._replace(is_plain=True, learns=learns, table=tuple(BACKENDS.values()))
        if BACKENDS[backend].reads_layouts and not pattern.tensors and not in_cache:
            parts = parts_of_call(call, backend)
            is_bare = not (parts.key_masks or learns or call.options.in_use)
            decision = decision._replace(parts=parts, is_bare=is_bare)
        if len(_decisions) >= _MOST:
            for oldest in list(_decisions)[:1]:
                _decisions.pop(oldest, None)  # no KeyError if another thread removed it
        _decisions[kind] = decision
    return call, decision


_ITSELF = Full()  # placeholder for a pattern in the parts that it keeps
_MOST_PARTS = 8  # a pattern keeps its parts for so many kinds of calls


def parts_of_call(call: Call, backend: str) -> Parts:
    """Returns the parts of a call's pattern; they are stored in the pattern for later calls.

    Raises: ValueError if the pattern is for other lengths, heads or batch entries.
    """
    pattern, query = call.pattern, call.query
    in_tiles = "block_bias" in call.options.in_use
    looks = bool(pattern.tensors) and os.environ.get(CHECK) == "1"  # checks each call's lists
    kind = backend, call.frame, call.block_size, query.device, len(query), in_tiles, looks
    kept: dict[Hashable, _KeptParts] = vars(pattern).setdefault("_parts", {})
    if (found := kept.get(kind)) is None:
        parts = _taken_apart(call, backend, in_tiles)
        if len(kept) >= _MOST_PARTS:
            kept.clear()
        kept[kind] = _KeptParts.of(parts, pattern)
        return parts
    return found.parts if found.is_whole else found.with_pattern(pattern)


class _KeptParts(NamedTuple):
    """Parts stored in a pattern, without the pattern itself, which could not be freed otherwise.

    A pattern that refers to itself would live until a garbage collection, with its tensors.
    """

    parts: Parts
    is_whole: bool  # False if the pattern itself has to be put back

    @classmethod
    def of(cls, parts: Parts, pattern: Pattern) -> "_KeptParts":
        # without tensors, a pattern that refers to itself wastes little memory
        if not pattern.tensors or not _holds(parts, pattern):
            return cls(parts, is_whole=True)
        return cls(_exchanged(parts, pattern, _ITSELF), is_whole=False)

    def with_pattern(self, pattern: Pattern) -> Parts:
        """Returns the parts with the pattern back in its places."""
        return _exchanged(self.parts, _ITSELF, pattern)


def _holds(parts: Parts, pattern: Pattern) -> bool:
    """Whether the pattern itself is among its parts, such as a mask that tiles compute whole."""
    listed = [x.selection for of_branch in parts.sources for x in of_branch]
    return any(x is pattern for x in (parts.layout_key[0], *parts.key_masks, *listed))


def _exchanged(parts: Parts, old: Any, new: Any) -> Parts:
    """Returns parts with pattern `new` wherever `old` itself is one of them."""
    tiles, frame, size, device = parts.layout_key
    sources = parts.sources
    if sources:
        sources = tuple(
            [
                tuple([x._replace(selection=new) if x.selection is old else x for x in of_branch])
                for of_branch in sources
            ]
        )
    return Parts(
        layout_key=(new if tiles is old else tiles, frame, size, device),
        key_masks=tuple([new if x is old else x for x in parts.key_masks]),
        sources=sources,
    )


def _taken_apart(call: Call, backend: str, in_tiles: bool) -> Parts:
    """Divides a call's pattern into what tiles, a key mask and lists of keys compute.

    Key masks are data of the backend, so a new mask needs no new layout. A block bias has a number
    for each visited block of the whole pattern, so with it the tiles keep all pairs.
    """
    pattern, frame, kernels = call.pattern, call.frame, BACKENDS[backend]
    check_batch(pattern, len(call.query))
    masks: KeyMasks = ()
    sources: tuple[tuple[ListedPairs, ...], ...] = ()
    if "key_mask" in kernels.extras:
        rest, masks = without_key_masks(pattern)
        pattern = pattern if in_tiles else rest
    check_fits(pattern, frame)
    for mask in masks:
        check_fits(mask, frame)
    if kernels.runs_lists and not in_tiles and has_lists(pattern):
        pattern, sources = split(pattern)
    if (size := call.block_size) is None:
        size = block_size_of(backend, pattern, call.query, frame)
    layout_key = pattern, frame, size, call.query.device
    return Parts(layout_key=layout_key, key_masks=masks, sources=sources)


def _kind(
    inputs: Inputs, pattern: object, choices: Choices, options: Mapping[str, Any], in_cache: bool
) -> tuple[Any, ...] | None:
    """Returns a key under which `decided` finds a call's decision.

    None if calls cannot share it.
    """
    types = tuple(map(type, choices))
    if not isinstance(pattern, Pattern) or not _COMPARED.issuperset(types):
        return None
    if (tensors := kind_of(*inputs)) is None:
        return None
    in_use: tuple[str, ...] = ()
    if options:
        if type(p := options.get("dropout_p")) not in _COMPARED:
            return None
        unused = None if p else "dropout_p"
        in_use = tuple([name for name, x in options.items() if x is not None and name != unused])
        if (function := options.get("score_mod")) is not None and is_coordinate_bias(function):
            in_use += ("coordinate_bias",)
    interpreted = (choices[0] == "triton" or tensors[4].type != "cpu") and interpreting()
    # For a pattern with tensors, each call looks up its layout; the decision depends on its type.
    pattern_key: object = pattern
    if pattern.tensors:
        listed = has_lists(pattern)
        pattern_key = type(pattern), listed, listed and is_only_lists(pattern)
    # `types` is needed because 1 == True
    invariant = mode.is_batch_invariant
    return tensors, pattern_key, choices, types, in_use, interpreted, in_cache, invariant


_COMPARED = frozenset((type(None), int, float, str))  # other types in `choices` are not cached


def checked_call(inputs: Inputs, pattern: Pattern, **options: Any) -> Call:
    """Checks the arguments of `attention` and fills in defaults; returns a `Call`.

    Raises: ValueError for a wrong shape, dtype or number, TypeError for a wrong kind.
    """
    check_inputs(*inputs, pattern)
    scale = checked_scale(options.pop("scale", None), inputs[0])
    q_start = checked_integer_or_none("q_start", options.pop("q_start", None))
    size = checked_integer_or_none("block_size", options.pop("block_size", None))
    query, key, value = autocast_inputs(*inputs)
    q_start = key.shape[2] - query.shape[2] if q_start is None else q_start
    refuse_options("attention", options, OPTIONS, {})
    checked = checked_options(query, key, pattern, size, **options)
    return Call(
        query=query,
        key=key,
        value=value,
        pattern=pattern,
        scale=scale,
        q_start=q_start,
        block_size=size,
        options=checked,
    )
