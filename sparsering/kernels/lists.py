"""Lists of single keys: `SelectedBlocks` of blocks below 16 tokens, which need no layout.

SelectedBlocks(indices, 1) & Causal()                   each query's list, without later keys
(SlidingWindow(511) | SelectedBlocks(indices, 1)) & Causal()    a list beside a layout
"""

from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ..patterns.algebra import And, Frame, Mask, Mixture, Not, Or, Pattern, joined_masks, parts_of
from ..patterns.positions import GlobalTokens
from ..patterns.selected import SelectedBlocks, has_lists
from ..patterns.tree import Tree

_MOST_CELLS = 1 << 18  # (query, key) pairs that are compared with a mask at a time
_Terms = list[tuple[SelectedBlocks | None, tuple[Mask, ...]]]


class Lists(NamedTuple):
    """The keys that each query of a branch lists.

    Keys of the selection ascend, so that results have the same bits for each order of its slots.
    """

    keys: Tensor  # int32 [B or 1, H, Nq, n], H divides Hq; -1: none. A repeat does not count.
    row: Tensor  # [Nq], each query's row of the selection
    shape: tuple[int, int, int]  # rows and slots of the selection, and keys of a slot
    branch: int  # of the mixture
    # int32 like `keys`, the place in the caller's order that each key had, which is its place in a
    # bias; of equal keys, the first in that order is first. Only for a call with a slot bias.
    place: Tensor | None = None

    def bias(self, slot_bias: Tensor) -> Tensor:
        """Converts a slot bias [B, Hq, R * k] to one by place, [B, Hq, Nq, n]."""
        rows, slots, size = self.shape
        of_row = slot_bias.unflatten(2, (rows, slots))  # [B, Hq, R, k]
        of_query = of_row.index_select(2, self.row)  # [B, Hq, Nq, k]
        of_key = of_query.repeat_interleave(size, 3)  # [B, Hq, Nq, k * size]
        return pad(of_key, (0, self.keys.shape[3] - slots * size))

    def slot_gradient(self, grad: Tensor) -> Tensor:
        """Converts the gradient of `bias` to that of the slot bias."""
        rows, slots, size = self.shape
        of_key = grad[..., : slots * size].unflatten(3, (slots, size))  # [B, Hq, Nq, k, size]
        of_slot = of_key.sum(4)  # [B, Hq, Nq, k]
        of_row = of_slot.new_zeros(*of_slot.shape[:2], rows, slots)  # [B, Hq, R, k]
        return of_row.index_add_(2, self.row, of_slot).flatten(2)  # [B, Hq, R * k]


def split_lists(
    pattern: Pattern, frame: Frame, options: Collection[str]
) -> tuple[Pattern, tuple[Lists, ...]] | None:
    """Splits a pattern into (the rest, for a layout; lists), or returns None if it has no lists.

    None also for two lists in a branch, lists inside `Packed` or `Tree`, and distances by depth.

    Cost: O(Nq n) time and memory; with a slot bias beside a list O(Nq Nk) time.
    """
    if not has_lists(pattern) or "block_bias" in options or pattern.num_streams > 1:
        return None
    masks = [x for branch in pattern.branches for x in joined_masks(branch)]
    depths = "distance_bias" in options and any(isinstance(x, Tree) for x in masks)
    if depths or 0 in (frame.q_len, frame.kv_len, frame.num_heads):
        return None
    rest: list[Mask] = []
    found: list[Lists] = []
    for number, branch in enumerate(pattern.branches):
        terms = _terms(branch)
        listed = [(selection, limits) for selection, limits in terms if selection is not None]
        others = tuple(_joined(limits) for selection, limits in terms if selection is None)
        if len(listed) > 1 or any(_has_list(x) for _, limits in terms for x in limits):
            return None
        rest.append(_joined(others, Or) if others else GlobalTokens(0))
        for selection, limits in listed:
            limit = _joined(limits) if limits else None
            beside = None
            if others and "slot_bias" in options:  # listed pairs of either have their slot's bias
                beside, rest[-1] = rest[-1], GlobalTokens(0)
                limit = None if limit is None else Or((limit, beside))
            elif others:
                limit = _joined((*limits, Not(rest[-1])))
            has_bias = "slot_bias" in options
            found.append(_lists(selection, limit, beside, frame, number, has_bias))
    return (Mixture(tuple(rest)) if len(rest) > 1 else rest[0]), tuple(found)


def _has_list(mask: Mask) -> bool:
    """True if a mask contains a list, at any depth."""
    return any(isinstance(part, SelectedBlocks) and has_lists(part) for part in parts_of(mask))


def _terms(mask: Mask) -> _Terms:
    """Splits a mask into a union of terms: (a list or None, masks that limit it)."""
    if not has_lists(mask):
        return [(None, (mask,))]
    if isinstance(mask, Or):
        return [term for part in mask.masks for term in _terms(part)]
    if not isinstance(mask, And):
        assert isinstance(mask, SelectedBlocks)
        return [(mask, ())]
    found: _Terms = [(None, ())]
    for part in mask.masks:
        found = [
            (other if own is None else own, (*limits, *more, *_second(own, other)))
            for own, limits in found
            for other, more in _terms(part)
        ]
    return found


def _second(own: Mask | None, other: Mask | None) -> tuple[Mask, ...]:
    return () if own is None or other is None else (other,)


def _joined(masks: tuple[Mask, ...], operator: type[And | Or] = And) -> Mask:
    return masks[0] if len(masks) == 1 else operator(masks)


def _lists(
    selection: SelectedBlocks,
    limit: Mask | None,
    beside: Mask | None,
    frame: Frame,
    branch: int,
    has_bias: bool,
) -> Lists:
    """Lists the keys of a selection within `limit`, and then those of `beside`."""
    size, table = selection.block_size, selection.indices
    bounds = [mask for mask in (limit, beside) if mask is not None]
    # masks are evaluated on the CPU; without any, a list on a GPU stays there
    table = table.cpu() if bounds else table
    table = table.view((1,) * (4 - table.dim()) + table.shape)  # [B or 1, H or 1, R, k]
    batches = max(len(table), *(mask.num_batches() or 1 for mask in bounds), 1)
    heads = max(table.shape[1], *(mask.num_tables(frame) for mask in bounds), 1)
    entries = [(b, h, h * frame.num_heads // heads) for b in range(batches) for h in range(heads)]
    limits = [limit.at(b, head, frame) for b, _, head in entries] if limit is not None else []
    rows, slots = table.shape[2:]
    position = torch.arange(frame.q_start, frame.q_start + frame.q_len, device=table.device)
    # [Nq]
    row = (position // selection.row_size - selection.first_row).clamp(0, max(0, rows - 1))
    inside = torch.arange(size, dtype=torch.int32, device=table.device)
    shape = batches, heads, frame.q_len, slots * size
    keys = torch.empty(shape, dtype=torch.int32, device=table.device)
    place = torch.empty_like(keys) if has_bias else None
    step = max(1, _MOST_CELLS // max(1, slots * size))
    for start in range(0, frame.q_len, step):
        part = slice(start, start + step)
        which, here, to = row[part], position[part, None], keys[:, :, part]
        # [B or 1, H or 1, n, k] numbers of blocks; the number behind the last stands for none
        listed = table[:, :, which].clamp_(-1, -(-frame.kv_len // size)).int()
        if place is None:
            listed = _ascending(listed)
        else:
            listed, slot = _ascending_slots(listed, -(-frame.kv_len // size))
            place[:, :, part] = _of_heads(_keys_of(slot, inside), heads)
        each = _keys_of(listed, inside)  # [B or 1, H or 1, n, k * size]
        each.masked_fill_((each < 0) | (each >= frame.kv_len) | (here < 0), -1)
        to.copy_(_of_heads(each, heads))
        for (b, h, _), own in zip(entries, limits, strict=False):
            to[b, h].masked_fill_(~own.holds(here, to[b, h].long(), frame), -1)
    if beside is not None:
        every = torch.arange(frame.kv_len)
        # the keys of each (batch entry, head, query), in this order, each list as long as it is
        more = [
            cells.expand(frame.kv_len).nonzero()[:, 0].int()
            for b, _, head in entries
            for here in position.split(max(1, _MOST_CELLS // max(1, frame.kv_len)))
            for cells in beside.at(b, head, frame).holds(here[:, None], every, frame)
        ]
        others = pad_sequence(more, batch_first=True, padding_value=-1)  # [B * H * Nq, most]
        others = others.view(*shape[:3], -1)  # [B, H, Nq, most]
        keys = torch.cat((keys, others), -1)
        if place is not None:
            more_places = torch.arange(shape[3], keys.shape[3], dtype=torch.int32)
            place = torch.cat((place, more_places.expand_as(others)), -1)
    return Lists(keys=keys, row=row, shape=(rows, slots, size), branch=branch, place=place)


def _keys_of(blocks: Tensor, inside: Tensor) -> Tensor:
    """Replaces each block [..., k] by its keys, [..., k * size]."""
    size = len(inside)
    return (blocks[..., None] * size + inside).flatten(-2) if size > 1 else blocks


def _of_heads(tables: Tensor, heads: int) -> Tensor:
    """Repeats tables [B, H, ...] for `heads` heads."""
    return tables.repeat_interleave(heads // tables.shape[1], 1)


def _ascending_slots(listed: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Sorts int32 rows of numbers from -1 to `blocks`; returns them and the slots they came from.

    Of equal numbers, the first slot is first: numbers and slots are sorted as one integer.
    """
    slots = listed.shape[-1]
    bits = slots.bit_length()
    wide = listed.long() if (blocks + 2) << bits > torch.iinfo(torch.int32).max else listed
    slot = torch.arange(slots, dtype=wide.dtype, device=wide.device)
    both = _ascending((wide << bits).bitwise_or_(slot))
    return (both >> bits).int(), both.bitwise_and_((1 << bits) - 1).int()


def _ascending(listed: Tensor) -> Tensor:
    """Sorts rows of integers; on the CPU in place by numpy, in a tenth of torch's time."""
    if listed.device.type == "cpu":
        with suppress(RuntimeError):  # torch runs without numpy too
            listed.numpy().sort(-1)
            return listed
    return listed.sort(dim=-1).values
