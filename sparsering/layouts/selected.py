"""Layouts of selected blocks, built on the device that holds the indices, without a host sync."""

import torch
from torch import Tensor

from ..patterns.algebra import And, Frame, Pattern
from ..patterns.blocks import SelectedBlocks
from ..patterns.positions import Causal
from .bitmaps import pack
from .layout import BlockLayout, Pass

_DIAGONAL = 0  # the one bitmap


def selected_layout(pattern: Pattern, frame: Frame, block_size: int) -> BlockLayout | None:
    """The layout of `SelectedBlocks`, alone or with `Causal`; None for any other pattern.

    All shapes are known ahead: tables have room for k entries of each query block, and end before
    what lists nothing, repeats or lies in the future.
    """
    masks = pattern.masks if isinstance(pattern, And) else (pattern,)
    selections = [mask for mask in masks if isinstance(mask, SelectedBlocks)]
    causal = any(isinstance(mask, Causal) for mask in masks)
    fits = len(selections) == 1 and len(masks) == 1 + causal
    if (
        not fits
        or selections[0].block_size != block_size
        or frame.q_start % block_size
        or frame.q_start < 0
    ):
        return None
    indices = selections[0].indices
    indices = indices.view((1,) * (4 - indices.dim()) + indices.shape)  # [B or 1, H or 1, Qb, k]
    first = frame.q_start // block_size
    rows, keys = -(-frame.q_len // block_size), -(-frame.kv_len // block_size)
    if not rows or not keys or not indices.shape[-1]:
        return None
    indices = indices[:, :, first : first + rows]
    valid = (indices >= 0) & (indices < keys)
    key = torch.where(valid, indices, keys).sort(dim=-1).values
    repeated = torch.zeros_like(valid)
    repeated[..., 1:] = key[..., 1:] == key[..., :-1]
    query = first + torch.arange(rows, device=indices.device)[:, None]
    nothing = (key == keys) | repeated | ((key > query) & causal)
    bitmap = torch.where((key == query) & causal, _DIAGONAL, -1)
    count = (~nothing).sum(-1)
    row_ptr = torch.nn.functional.pad(count.cumsum(-1), (1, 0)).int()
    kept_first = nothing.flatten(2).to(torch.int8).argsort(dim=-1, stable=True)

    def starts(blocks: int, length: int) -> tuple[Tensor, Tensor]:
        start = torch.arange(blocks, device=indices.device) * block_size
        return start[None], (start + block_size).clamp(max=length)[None]

    query_start, query_stop = starts(rows, frame.q_len)
    key_start, key_stop = starts(keys, frame.kv_len)
    slots = torch.arange(block_size, device=indices.device)
    lower = slots[:, None] >= slots
    p = Pass(
        step=1,
        query_start=query_start,
        query_stop=query_stop,
        key_start=key_start,
        key_stop=key_stop,
        row_ptr=row_ptr,
        key_tile=key.clamp(max=keys - 1).int().flatten(2).gather(2, kept_first),
        bitmap=bitmap.int().flatten(2).gather(2, kept_first),
        bitmaps=pack(lower[None]),
        covers=(True, True),
        longest=(indices.shape[-1], rows * indices.shape[-1]),
    )
    q, k = (query_stop - query_start)[0], (key_stop - key_start)[0]
    rows_q, columns_k = q[:, None], k[key.clamp(max=keys - 1)]
    short = torch.minimum(rows_q, columns_k)
    diagonal = short * (short + 1) // 2 + (rows_q - short) * columns_k
    pairs = torch.where(nothing, 0, torch.where(bitmap == _DIAGONAL, diagonal, rows_q * columns_k))
    return BlockLayout(frame, block_size, (p,), pairs.sum((2, 3)).double().mean())
