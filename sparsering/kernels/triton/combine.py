"""Triton kernels that combine results: of several passes, and of the pieces of cut tiles."""

import triton
import triton.language as tl

from .device import elements, kernel, program_of, table_of
from .walk import CUT

_CUT = tl.constexpr(CUT)


@triton.jit
def merge(out, lse, other_out, other_lse):
    """Merges two results over disjoint keys; a row without keys has lse -inf."""
    most = tl.maximum(lse, other_lse)
    base = tl.where(most == float("-inf"), 0.0, most)
    a, b = tl.exp(lse - base), tl.exp(other_lse - base)
    none = a + b == 0.0
    total = tl.where(none, 1.0, a + b)
    merged = out * (a / total)[:, None] + other_out * (b / total)[:, None]
    return merged, tl.where(none, float("-inf"), base + tl.log(total))


@kernel
def merge_kernel(
    piece_out, piece_lse, out, lse, cuts, tile_start, tile_stop,
    o_batch: tl.int64, o_head: tl.int64, lse_batch: tl.int64, lse_head: tl.int64,
    step: tl.int64, num_cuts: tl.int64,
    num_tiles: tl.int64, num_slots: tl.int64, num_heads: tl.int32, first_head: tl.int32,
    all_heads: tl.int32, tables: tl.int32, table_batches: tl.int32, axes: tl.int32,
    TILE: tl.constexpr, ROWS: tl.constexpr, VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr, ALIGN: tl.constexpr, RUNNING: tl.constexpr,
    SINK: tl.constexpr,
):
    """Merges the partial results (pieces) of each cut query tile, in order, into out and lse."""
    part, number, head, batch = program_of((TILE + ROWS - 1) // ROWS, 1, num_cuts, num_heads, 1)
    table, axis = table_of(batch, first_head + head, all_heads, tables, table_batches, axes)
    cuts += (table * num_cuts + number) * _CUT
    tile = tl.load(cuts)
    if tile < 0:
        return
    slot = part * ROWS + tl.arange(0, ROWS)
    position = tl.load(tile_start + axis * num_tiles + tile) + slot * step
    real = (slot < TILE) & (position < tl.load(tile_stop + axis * num_tiles + tile))
    dim = tl.arange(0, PADDED_VALUE_DIM)
    kept = real[:, None] & (dim < VALUE_DIM)[None, :]
    row = batch * elements(o_batch, ALIGN) + head.to(tl.int64) * elements(o_head, ALIGN)
    row += position * VALUE_DIM
    to_out = out + row[:, None] + dim[None, :]
    to_lse = lse + batch * lse_batch + head.to(tl.int64) * lse_head + position
    if RUNNING:
        acc = tl.load(to_out, mask=kept, other=0.0)
        natural = tl.load(to_lse, mask=real, other=float("-inf"))
    else:
        acc = tl.zeros([ROWS, PADDED_VALUE_DIM], tl.float32)
        if SINK:
            natural = tl.load(to_lse, mask=real, other=float("-inf"))
        else:
            natural = tl.full([ROWS], float("-inf"), tl.float32)
    first = tl.load(cuts + 1)
    for piece in range(first, first + tl.load(cuts + 2)):
        place = ((batch * num_heads + head) * num_slots + piece) * TILE + slot
        other = tl.load(piece_out + place[:, None] * VALUE_DIM + dim[None, :], mask=kept, other=0.0)
        other_lse = tl.load(piece_lse + place, mask=real, other=float("-inf"))
        acc, natural = merge(acc, natural, other, other_lse)
    tl.store(to_out, acc.to(out.dtype.element_ty), mask=kept)
    tl.store(to_lse, natural, mask=real)


@kernel
def sum_kernel(
    piece, grad, cuts, tile_start, tile_stop,
    grad_batch: tl.int64, grad_head: tl.int64, step: tl.int64, num_cuts: tl.int64,
    num_tiles: tl.int64, num_slots: tl.int64, num_heads: tl.int32, first_head: tl.int32,
    all_heads: tl.int32, tables: tl.int32, table_batches: tl.int32, axes: tl.int32,
    TILE: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    ALIGN: tl.constexpr, RUNNING: tl.constexpr,
):
    """Sums the pieces of cut tiles into grad, in order; for dK and dV, `head` counts shares."""
    part, number, head, batch = program_of((TILE + ROWS - 1) // ROWS, 1, num_cuts, num_heads, 1)
    table, axis = table_of(batch, first_head + head, all_heads, tables, table_batches, axes)
    cuts += (table * num_cuts + number) * _CUT
    tile = tl.load(cuts)
    if tile < 0:
        return
    slot = part * ROWS + tl.arange(0, ROWS)
    position = tl.load(tile_start + axis * num_tiles + tile) + slot * step
    real = (slot < TILE) & (position < tl.load(tile_stop + axis * num_tiles + tile))
    dim = tl.arange(0, PADDED_DIM)
    kept = real[:, None] & (dim < HEAD_DIM)[None, :]
    row = batch * elements(grad_batch, ALIGN) + head * elements(grad_head, ALIGN)
    row += position * HEAD_DIM
    to = grad + row[:, None] + dim[None, :]
    if RUNNING:
        total = tl.load(to, mask=kept, other=0.0)
    else:
        total = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    first = tl.load(cuts + 1)
    for number in range(first, first + tl.load(cuts + 2)):
        place = ((batch * num_heads + head) * num_slots + number) * TILE + slot
        total += tl.load(piece + place[:, None] * HEAD_DIM + dim[None, :], mask=kept, other=0.0)
    tl.store(to, total.to(grad.dtype.element_ty), mask=kept)
