"""Builds layouts of selected blocks on the device of their indices, without a host sync."""

import itertools
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ground.numerics import long_sum_dtype
from ..patterns.algebra import And, Frame, Mask, Pattern
from ..patterns.positions import Causal
from ..patterns.selected import SelectedBlocks, selections_of
from .bitmaps import pack
from .layout import BlockLayout, Pass, row_of, stretched


def selected_layout(pattern: Pattern, frame: Frame, block_size: int) -> BlockLayout | None:
    """Builds the layout of `SelectedBlocks`, alone or with `Causal`; None for other patterns.

    A query tile is a row of the selection, or an equal part of a row that divides `block_size`.
    Tables have room for all k indices of a row, so shapes are known without reading them. Indices
    of no block, repeats and, with `Causal`, later blocks become padding at a table's end.
    """
    if (found := selection_of(pattern, frame, block_size)) is None:
        return None
    selection, causal = found
    chosen = selection.indices
    device, end = chosen.device, frame.q_start + frame.q_len
    tokens, parts = gcd(selection.row_size, block_size), selection.block_size // block_size
    tile = torch.arange(frame.q_start // tokens, -(-end // tokens), device=device)
    first, last = (tile * tokens).clamp(min=frame.q_start), ((tile + 1) * tokens).clamp(max=end) - 1
    keys, last_keys = -(-frame.kv_len // block_size), (frame.kv_len - 1) % block_size + 1

    chosen = chosen.view((1,) * (4 - chosen.dim()) + chosen.shape)  # [B or 1, H or 1, R, k]
    rows, slots = chosen.shape[2:]
    listed = torch.where((chosen >= 0) & (chosen < keys), chosen * parts, keys).int()
    if parts > 1:
        part = torch.arange(parts, device=device, dtype=torch.int32)
        listed = (listed[..., None] + part).clamp(max=keys).flatten(3)
    key, slot = listed.sort(dim=-1, stable=True)
    slot = slot // parts + torch.arange(rows, device=device)[:, None] * slots
    nothing = key == keys
    nothing[..., 1:] |= key[..., 1:] == key[..., :-1]
    of_tiles: Any = tile * tokens // selection.row_size - selection.first_row
    if tokens == selection.row_size:
        of_tiles = slice(frame.q_start // tokens - selection.first_row, None)
    key, slot, nothing = (x[:, :, of_tiles][:, :, : len(tile)] for x in (key, slot, nothing))
    bitmap, diagonals = torch.full_like(key, -1), slot.new_zeros(0, block_size, block_size).bool()
    unseen: Tensor | int = 0
    if causal:
        own = (first // block_size).int()[:, None]
        nothing = nothing | (key > own)
        number, diagonals = _diagonals(frame.q_start, first, tokens, block_size)
        bitmap = torch.where(key == own, number.int()[:, None], -1)
        above = _above_diagonal(first, last, frame, block_size)
        unseen = ((bitmap >= 0) & ~nothing).any(-1) * above
    count = (~nothing).sum(-1)
    lacking = ((key == keys - 1) & ~nothing).any(-1) * (block_size - last_keys)
    pairs = (last + 1 - first) * (count * block_size - lacking) - unseen

    key_start = torch.arange(keys, device=device) * block_size
    key_tile, bitmap, slot = _packed(nothing, key, bitmap, slot)
    p = Pass(
        step=1,
        query_start=(first - frame.q_start)[None],
        query_stop=(last + 1 - frame.q_start)[None],
        key_start=key_start[None],
        key_stop=(key_start + block_size).clamp(max=frame.kv_len)[None],
        row_ptr=pad(count.cumsum(-1), (1, 0)).int(),
        key_tile=key_tile.clamp(min=0),
        bitmap=bitmap,
        bitmaps=pack(diagonals),
        covers=(True, True),
        longest=(slots * parts, len(tile)),
        slot=slot,
    )
    mean = pairs.sum().to(long_sum_dtype(pairs.device)) / max(1, pairs.shape[:2].numel())
    return BlockLayout(frame, block_size, (p,), mean)


def selection_of(pattern: Pattern, frame: Frame, size: int) -> tuple[SelectedBlocks, bool] | None:
    """Returns the pattern's selection, and whether the pattern is `selection & Causal()`.

    Returns None for any other pattern, if `size` does not divide the selection's block size,
    for negative query positions, and if there are no queries, keys, heads or listed blocks.
    """
    masks = pattern.masks if isinstance(pattern, And) else (pattern,)
    selections = [mask for mask in masks if isinstance(mask, SelectedBlocks)]
    causal = any(isinstance(mask, Causal) for mask in masks)
    if len(selections) != 1 or len(masks) != 1 + causal:
        return None
    (selection,) = selections
    if selection.block_size % size or frame.q_start < 0:
        return None
    if not (frame.q_len and frame.kv_len and frame.num_heads and selection.indices.shape[-1]):
        return None
    return selection, causal


def with_slots(p: Pass, mask: Mask, frame: Frame, block_size: int, alone: bool) -> Pass:
    """Adds `Pass.slot`, the index at which the mask's selection lists each tile pair's key block.

    Returns the pass unchanged if the mask does not have exactly one selection, or if a tile spans
    several rows or blocks of it; also if the mask has several passes (`alone` is False) and
    `block_size` does not divide the selection's blocks, since any pass may then have selected
    pairs.
    """
    selections = selections_of(mask)
    if len(selections) != 1 or p.step > 1 or p.query_origin is not None:
        return p
    (selection,) = selections
    if not alone and selection.block_size % block_size:
        return p
    first = p.query_start + frame.q_start
    one_row = _each_in_one(first, p.query_stop + frame.q_start, selection.row_size)
    if not (one_row and _each_in_one(p.key_start, p.key_stop, selection.block_size)):
        return p
    batches, heads = selection.num_batches() or 1, selection.num_tables(frame)
    batches, heads = max(batches, p.row_ptr.shape[0]), max(heads, p.row_ptr.shape[1])
    row_ptr, key_tile = (stretched(x, batches, heads) for x in (p.row_ptr, p.key_tile))
    row = row_of(row_ptr, key_tile.shape[-1])
    slot = torch.full(key_tile.shape, -1)
    for b, h in itertools.product(range(batches), range(heads)):
        n = int(row_ptr[b, h, -1])
        query, key = first[0][row[b, h, :n]], p.key_start[0][key_tile[b, h, :n].long()]
        slot[b, h, :n] = selection.slot_of_pairs(query, key, b, h * frame.num_heads // heads, frame)
    return replace(p, slot=slot)


def _each_in_one(start: Tensor, stop: Tensor, size: int) -> bool:
    """Whether no tile crosses a multiple of `size`, so that each lies in one block of that size."""
    return bool((start // size == torch.maximum(start, stop - 1) // size).all())


def _diagonals(q_start: int, first: Tensor, tokens: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Builds the causal bitmaps of the key tiles that contain a query tile's own positions.

    Returns: for each query tile the index of its bitmap; the bitmaps, bool [n, b, b].
    """
    places = torch.arange(block_size, device=first.device)
    offsets, number = places[::tokens], first % block_size // tokens
    if len(first) <= len(offsets):
        offsets, number = first % block_size, torch.arange(len(first), device=first.device)
    elif q_start % tokens:  # the first tile begins within a row of the selection
        offsets = pad(offsets, (0, 1), value=q_start % block_size)
        number = torch.where(first == q_start, len(offsets) - 1, number)
    return number, offsets[:, None, None] + places[:, None] >= places


def _above_diagonal(first: Tensor, last: Tensor, frame: Frame, block_size: int) -> Tensor:
    """Counts for each query tile, in the key tile that contains it, the pairs with later keys."""
    end = ((first // block_size + 1) * block_size).clamp(max=frame.kv_len)
    hidden_first, hidden_last = ((end - 1 - x).clamp(min=0) for x in (first, last))
    return (hidden_first * (hidden_first + 1) - (hidden_last - 1).clamp(min=-1) * hidden_last) // 2


def _packed(nothing: Tensor, *tables: Tensor) -> list[Tensor]:
    """Moves items to drop (where `nothing` is True) to the end of each table, as -1.

    Takes tensors [B, H, tiles, width] and flattens their last two dims.
    """
    nothing = nothing.flatten(2)
    room = nothing.shape[2]
    place = torch.where(nothing, room, (~nothing).cumsum(-1) - 1)
    shape = *place.shape[:2], room + 1
    filled = (x.new_full(shape, -1).scatter_(-1, place, x.flatten(2)) for x in tables)
    return [x[..., :room] for x in filled]
