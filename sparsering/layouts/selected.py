"""Layouts of selected blocks, built on the device that holds the indices, without a host sync."""

import itertools
from dataclasses import replace
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..patterns.algebra import And, Frame, Mask, Pattern
from ..patterns.positions import Causal
from ..patterns.selected import SelectedBlocks, selections_of
from .bitmaps import pack
from .layout import BlockLayout, Pass, row_of, stretched


def selected_layout(pattern: Pattern, frame: Frame, block_size: int) -> BlockLayout | None:
    """The layout of `SelectedBlocks`, alone or with `Causal`; None for any other pattern.

    A query tile is a row, or as much of it as fits a tile. All shapes are known ahead: tables have
    room for all slots of each row, and end before what lists nothing, repeats or lies in the
    future.
    """
    masks = pattern.masks if isinstance(pattern, And) else (pattern,)
    selections = [mask for mask in masks if isinstance(mask, SelectedBlocks)]
    causal = any(isinstance(mask, Causal) for mask in masks)
    if len(selections) != 1 or len(masks) != 1 + causal:
        return None
    (selection,) = selections
    chosen = selection.indices
    if selection.block_size % block_size or frame.q_start < 0:
        return None
    if not frame.q_len or not frame.kv_len or not chosen.shape[-1]:
        return None
    device, end = chosen.device, frame.q_start + frame.q_len
    tokens, parts = gcd(selection.row_size, block_size), selection.block_size // block_size
    tile = torch.arange(frame.q_start // tokens, -(-end // tokens), device=device)
    first, last = (tile * tokens).clamp(min=frame.q_start), ((tile + 1) * tokens).clamp(max=end) - 1
    row = tile * tokens // selection.row_size - selection.first_row
    keys = -(-frame.kv_len // block_size)

    chosen = chosen.view((1,) * (4 - chosen.dim()) + chosen.shape)  # [B or 1, H or 1, R, k]
    width = chosen.shape[-1] * parts
    part = torch.arange(parts, device=device)
    listed = (
        torch.where((chosen >= 0) & (chosen < keys), chosen * parts, keys)[..., None] + part
    )  # [B or 1, H or 1, R, k, parts]
    key, slot = listed.clamp(max=keys).flatten(3).sort(dim=-1, stable=True)
    slot = slot // parts + torch.arange(chosen.shape[2], device=device)[:, None] * chosen.shape[3]
    nothing = key == keys
    nothing[..., 1:] |= key[..., 1:] == key[..., :-1]
    key, slot, nothing = (x[:, :, row] for x in (key, slot, nothing))  # of each tile
    bitmap, diagonals = (
        torch.full_like(key, -1),
        key.new_zeros(0, block_size, block_size, dtype=torch.bool),
    )
    if causal:
        nothing |= key * block_size > last[:, None]
        number, diagonals = _diagonals(frame.q_start, first, tokens, block_size)
        bitmap = torch.where(key == (first // block_size)[:, None], number[:, None], -1)

    count = (~nothing).sum(-1)
    q, k_stop = last + 1 - first, ((key + 1) * block_size).clamp(max=frame.kv_len)
    columns = k_stop - key * block_size
    within = (columns - (first % block_size)[:, None]).clamp(min=0).minimum(q[:, None])
    below = first[:, None] % block_size * within + within * (within + 1) // 2
    diagonal = below + (q[:, None] - within) * columns
    pairs = torch.where(bitmap >= 0, diagonal, q[:, None] * columns).masked_fill(nothing, 0)

    key_start = torch.arange(keys, device=device) * block_size
    key_tile, bitmap, slot = _packed(nothing, key, bitmap, slot)
    p = Pass(
        step=1,
        query_start=(first - frame.q_start)[None],
        query_stop=(last + 1 - frame.q_start)[None],
        key_start=key_start[None],
        key_stop=(key_start + block_size).clamp(max=frame.kv_len)[None],
        row_ptr=pad(count.cumsum(-1), (1, 0)).int(),
        key_tile=key_tile.clamp(min=0).int(),
        bitmap=bitmap.int(),
        bitmaps=pack(diagonals),
        covers=(True, True),
        longest=(width, len(tile)),
        slot=slot,
    )
    return BlockLayout(frame, block_size, (p,), pairs.sum((2, 3)).double().mean())


def with_slots(p: Pass, mask: Mask, frame: Frame, block_size: int) -> Pass:
    """The same pass, telling which slot of the mask's one selection lists each entry.

    As it is where there is no such selection, or entries are not of one row and one block of it.
    """
    selections = selections_of(mask)
    if len(selections) != 1 or p.step > 1 or p.query_origin is not None:
        return p
    (selection,) = selections
    first, last = p.query_start + frame.q_start, p.query_stop + frame.q_start - 1
    in_rows = first // selection.row_size == last // selection.row_size
    if selection.block_size % block_size or not in_rows.all():
        return p
    batches, heads = selection.num_batches() or 1, selection.num_tables(frame)
    batches, heads = max(batches, p.row_ptr.shape[0]), max(heads, p.row_ptr.shape[1])
    row_ptr, key_tile = (stretched(x, batches, heads) for x in (p.row_ptr, p.key_tile))
    row = row_of(row_ptr, key_tile.shape[-1])
    slot = torch.full(key_tile.shape, -1)
    for b, h in itertools.product(range(batches), range(heads)):
        n = int(row_ptr[b, h, -1])
        query, key = first[0][row[b, h, :n]], p.key_start[0][key_tile[b, h, :n].long()]
        head = h * frame.num_heads // heads
        slot[b, h, :n] = selection.slot_of_pairs(query, key, b, head, frame)
    return replace(p, slot=slot)


def _diagonals(q_start: int, first: Tensor, tokens: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Which causal bitmap each query tile has with the block that it lies in, and these cells.

    `first`: of each tile its first position; the first tile may begin within its row.
    """
    places = torch.arange(block_size, device=first.device)
    offsets, number = places[::tokens], first % block_size // tokens
    if q_start % tokens:
        offsets = pad(offsets, (0, 1), value=q_start % block_size)
        number = torch.where(first == q_start, len(offsets) - 1, number)
    return number, offsets[:, None, None] + places[:, None] >= places


def _packed(nothing: Tensor, *tables: Tensor) -> list[Tensor]:
    """Tables [B, H, tiles, width] as [B, H, entries], without what is nothing; padded with -1."""
    nothing = nothing.flatten(2)
    room = nothing.shape[2]
    place = torch.where(nothing, room, (~nothing).cumsum(-1) - 1)
    empty = torch.full((*place.shape[:2], room + 1), -1, device=place.device)
    return [empty.scatter(-1, place, x.flatten(2).long())[..., :room] for x in tables]
