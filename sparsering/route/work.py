"""The work of a call: tiles of pairs, lists of keys, and keys that no query sees.

Each public function ends in a `Work`: attention over a sequence or documents (`work_of`), new
tokens of a cache or a draft (decoding/), and a rank of a ring (distributed/). Only a `Work` makes a
`Problem`, which the backends take.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import Call
from ..checks import check_bias
from ..kernels.backends import BACKENDS
from ..kernels.problem import Problem
from ..layouts.cache import layout_cache
from ..layouts.last_query import last_query_layout
from ..layouts.layout import BlockLayout, stretched
from ..layouts.lists import (
    Coordinates,
    Lists,
    list_biases,
    list_slot_gradient,
    lists_of,
    with_key_lists,
)
from ..patterns.algebra import Frame, Pattern
from ..patterns.keys import key_mask
from ..patterns.selected import EdgeLists
from .decision import Parts, parts_of_call


class Work(NamedTuple):
    """All that a backend needs besides tensors and options: tiles, lists of keys, hidden keys."""

    layout: BlockLayout  # the tiles, which have the pairs that are in no list
    # For each pass, the bitmap row of the first query; () if all are 0.
    first_bitmap_rows: tuple[int, ...] = ()
    lists: tuple[Lists, ...] = ()  # single keys that queries list, beside the tiles
    key_mask: Tensor | None = None  # bool [B or 1, Nk], False for keys that no query sees

    @property
    def num_pairs(self) -> float:
        """Number of (query, key) pairs of tiles and lists, mean over batch entries and heads."""
        return float(self.layout.num_pairs) + sum(listed.num_pairs for listed in self.lists)

    def problem(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, **options: Any
    ) -> Problem:
        """Builds the `Problem` of this work on these tensors; `options` are fields of it."""
        return Problem(
            layout=self.layout,
            query=query,
            key=key,
            value=value,
            scale=scale,
            key_mask=self.key_mask,
            first_bitmap_rows=self.first_bitmap_rows,
            lists=self.lists,
            **options,
        )


def work_of(call: Call, backend: str, parts: Parts | None = None) -> Work:
    """Builds the work of a call for a backend, or finds its layout in the cache.

    Raises: ValueError if the pattern is for other lengths, heads or batch entries.
    """
    parts = parts or parts_of_call(call, backend)
    layout_key, masks, sources = parts
    in_use = call.options.in_use
    hidden = key_mask(masks, layout_key[1].kv_len, call.query.device) if masks else None
    if sources:
        tiles, lists = _tiles_and_lists(call, backend, parts, hidden)
        layout = layout_cache.layout(tiles, *layout_key[1:])
        return Work(layout=layout, lists=lists, key_mask=hidden)
    build = BACKENDS[backend].selected_layout
    if "block_bias" in in_use:
        return Work(layout=layout_cache.layout(*layout_key), key_mask=hidden)
    if build and call.pattern.tensors and (selected := build(*layout_key)) is not None:
        return Work(layout=selected, key_mask=hidden)
    layout, rows = layout_of(*layout_key)
    return Work(layout=layout, first_bitmap_rows=rows, key_mask=hidden)


def _tiles_and_lists(
    call: Call, backend: str, parts: Parts, hidden: Tensor | None
) -> tuple[Pattern, tuple[Lists, ...]]:
    """Lists the keys that tiles do not have; returns the pattern for tiles, and the lists."""
    tiles, frame, *_ = parts.layout_key
    in_use = call.options.in_use
    return lists_of(
        tiles,
        parts.sources,
        frame,
        coordinates=Coordinates.of(call.pattern, frame) if _BY_PLACE & in_use.keys() else None,
        valid=hidden,
        has_slot_bias="slot_bias" in in_use,
        list_keys=BACKENDS[backend].list_keys,
    )


_BY_PLACE = {"distance_bias", "dropout_p"}  # options that read the positions of tokens


def listed_once(call: Call, backend: str) -> Call:
    """Returns a call over the keys that its queries list, so that backward lists none again.

    Autograd saves these keys in place of a selection's indices. The call stays as it is if its bias
    belongs to the slots of the indices, if distances or dropout count in a tree or in documents of
    their own, or if the keys would take more memory than the indices.
    """
    in_use, pattern = call.options.in_use, call.pattern
    if {"block_bias", "slot_bias"} & in_use.keys() or call.q_start < 0:
        return call
    if _BY_PLACE & in_use.keys() and Coordinates.differ(pattern):
        return call
    parts = parts_of_call(call, backend)
    if not _saves_memory(parts):
        return call
    masks, kv_len, device = parts.key_masks, call.key.shape[2], call.query.device
    hidden = key_mask(masks, kv_len, device) if masks else None
    tiles, lists = _tiles_and_lists(call, backend, parts, hidden)
    if (ready := BACKENDS[backend].ready_lists) is not None:
        lists = tuple(ready(x, kv_len, device) for x in lists)
    pattern = with_key_lists(tiles, lists, masks, call.q_start)
    return call._replace(pattern=pattern)


def _saves_memory(parts: Parts) -> bool:
    """Whether the keys that queries list take at most the memory of the selections' indices."""
    (tiles, frame, *_), masks, sources = parts
    selections = [x.selection for of_branch in sources for x in of_branch]
    if any(isinstance(x, EdgeLists) for x in selections):
        return False  # padded, they take more
    listed = 0
    for own, of_branch in zip(tiles.branches, sources, strict=True):
        limits = (x.limit for x in of_branch if x.limit is not None)
        inside = (mask for x in of_branch for mask in (x.selection, *x.inside))
        every = own, *masks, *limits, *inside
        batches = max(x.num_batches() or 1 for x in every)
        tables = max(x.num_tables(frame) for x in every)
        slots = sum(x.selection.indices.shape[-1] * x.selection.block_size for x in of_branch)
        listed += 4 * batches * tables * frame.q_len * slots  # int32
    return listed <= sum(x.indices.nbytes for x in selections)


def problem_of(call: Call, backend: str, parts: Parts | None = None) -> Problem:
    """Builds the `Problem` of a call for a backend; the arguments are those of `work_of`.

    A slot bias becomes a bias of the layout's blocks or of the lists.
    """
    work = work_of(call, backend, parts)
    options = dict(call.options.in_use)
    if (bias := options.get("block_bias")) is not None:
        check_bias(bias.shape[-1], work.layout)
    if (slot_bias := options.pop("slot_bias", None)) is not None:
        options["block_bias"] = block_bias_of(slot_bias, work)
    if (function := options.pop("score_mod", None)) is not None:
        calls = "score_mod" in BACKENDS[backend].extras
        options["score_mod" if calls else "coordinate_bias"] = function.function
        options["captured"] = tuple(x for x in function.read if x.requires_grad)
    return work.problem(call.query, call.key, call.value, call.scale, **options)


def block_bias_of(slot_bias: Tensor, work: Work | Problem) -> Tensor:
    """Converts a slot bias [B, Hq, R * k] to the block bias that kernels take for this work."""
    if work.lists:
        return list_biases(work.lists, slot_bias)
    return _entry_bias(slot_bias, work.layout)


def _entry_bias(slot_bias: Tensor, layout: BlockLayout) -> Tensor:
    """Converts a slot bias [B, Hq, R * k] to one number per visited tile pair, [B, Hq, blocks]."""
    has_entries = layout.entry_slots.shape[-1] > 0  # False if there are no queries
    if all(p.slot is None for p in layout.passes) and has_entries and slot_bias.shape[2]:
        raise NotImplementedError(
            "slot_bias needs tiles of one row and one block of SelectedBlocks, got tiles that span "
            "several; pass a block_size, 16 or more, that divides the selection's, or pass "
            "backend='reference'"
        )
    slot = stretched(layout.entry_slots, *slot_bias.shape[:2])
    return torch.nn.functional.pad(slot_bias, (0, 1)).gather(-1, slot % (slot_bias.shape[2] + 1))


def slot_gradient(grad: Tensor, problem: Problem, slot_bias: Tensor) -> Tensor:
    """Converts the gradient of `problem.block_bias` to that of the slot bias [B, Hq, R * k].

    It sums over the blocks, or the list items, of each slot.
    """
    if problem.lists:
        return list_slot_gradient(problem.lists, grad)
    slot = stretched(problem.layout.entry_slots, *grad.shape[:2])
    by_slot = grad.new_zeros(*slot_bias.shape[:2], slot_bias.shape[2] + 1)
    return by_slot.scatter_add_(-1, slot % by_slot.shape[2], grad)[..., :-1].contiguous()


def layout_of(
    pattern: Pattern, frame: Frame, block_size: int, device: torch.device
) -> tuple[BlockLayout, tuple[int, ...]]:
    """Returns a layout and, for each pass, the bitmap row of the first query; () if all are 0.

    A single last query gets a row of a cached page of queries, so that decoding compiles nothing.
    """
    page = last_query_layout(pattern, frame, block_size, device) if frame.q_len == 1 else None
    return page or (layout_cache.layout(pattern, frame, block_size, device), ())
