"""Triton kernels that combine the results of several passes, and of the pieces of cut tiles."""

import triton
import triton.language as tl

from .device import elements, kernel, program_of, table_of
from .walk import CUT

_CUT = tl.constexpr(CUT)
_PIECES = tl.constexpr(8)  # pieces of a tile that are loaded at once, and added in a fixed order


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


@triton.jit
def add_pieces(acc, total, highest, other, other_lse):
    """Adds the results of pieces [pieces, rows, Dv] to the sums of their rows.

    Returns (acc [rows, Dv], total [rows], highest [rows]), where weights are relative to `highest`.
    """
    most = tl.maximum(highest, tl.max(other_lse, 0))
    base = tl.where(most == float("-inf"), 0.0, most)
    earlier, weight = tl.exp(highest - base), tl.exp(other_lse - base)
    acc = acc * earlier[:, None] + tl.sum(other * weight[:, :, None], 0)
    return acc, total * earlier + tl.sum(weight, 0), most


@kernel
def merge_kernel(
    piece_out, piece_lse, out, lse, cuts, tile_start, tile_stop,
    o_batch: tl.int64, o_head: tl.int64, lse_batch: tl.int64, lse_head: tl.int64,
    step: tl.int64, num_cuts: tl.int64, num_tiles: tl.int64, num_slots: tl.int64,
    num_heads: tl.int32, first_head: tl.int32, all_heads: tl.int32, tables: tl.int32,
    table_batches: tl.int32, axes: tl.int32, parts: tl.int32, TILE: tl.constexpr,
    ROWS: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    ALIGN: tl.constexpr, RUNNING: tl.constexpr, SINK: tl.constexpr,
):
    """Merges the partial results (pieces) of each cut query tile into out and lse."""
    part, number, head, batch = program_of(parts, 1, num_cuts, num_heads, 1)
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
    to_out = out + (row + position * VALUE_DIM)[:, None] + dim[None, :]
    to_lse = lse + batch * lse_batch + head.to(tl.int64) * lse_head + position
    acc = tl.load(to_out, mask=kept & RUNNING, other=0.0).to(tl.float32)
    natural = tl.load(to_lse, mask=real & (RUNNING or SINK), other=float("-inf"))
    total = tl.where(natural == float("-inf"), 0.0, 1.0)
    first, count = tl.load(cuts + 1), tl.load(cuts + 2)
    for begin in range(0, count, _PIECES):  # the loads of a group do not wait for one another
        piece = begin + tl.arange(0, _PIECES)
        place = (((batch * num_heads + head) * num_slots + first + piece) * TILE)[:, None] + slot
        has = (piece < count)[:, None] & real
        other_lse = tl.load(piece_lse + place, mask=has, other=float("-inf"))
        source = piece_out + place[:, :, None] * VALUE_DIM + dim
        other = tl.load(source, mask=has[:, :, None] & kept, other=0.0)
        acc, total, natural = add_pieces(acc, total, natural, other, other_lse)
    total = tl.where(total == 0.0, 1.0, total)  # without keys, natural is -inf
    acc, natural = acc / total[:, None], natural + tl.log(total)
    tl.store(to_out, acc.to(out.dtype.element_ty), mask=kept)
    tl.store(to_lse, natural, mask=real)


@kernel
def sum_kernel(
    piece, grad, cuts, tile_start, tile_stop,
    grad_batch: tl.int64, grad_head: tl.int64, step: tl.int64, num_cuts: tl.int64,
    num_tiles: tl.int64, num_slots: tl.int64, num_heads: tl.int32, first_head: tl.int32,
    all_heads: tl.int32, tables: tl.int32, table_batches: tl.int32, axes: tl.int32,
    parts: tl.int32, TILE: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, ALIGN: tl.constexpr, RUNNING: tl.constexpr,
):
    """Sums the pieces of cut tiles into a gradient; for dK and dV, `head` counts shares."""
    part, number, head, batch = program_of(parts, 1, num_cuts, num_heads, 1)
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
    to = grad + (row + position * HEAD_DIM)[:, None] + dim[None, :]
    total = tl.load(to, mask=kept & RUNNING, other=0.0).to(tl.float32)
    first, count = tl.load(cuts + 1), tl.load(cuts + 2)
    for begin in range(0, count, _PIECES):
        nth = begin + tl.arange(0, _PIECES)
        place = (((batch * num_heads + head) * num_slots + first + nth) * TILE)[:, None] + slot
        has = ((nth < count)[:, None] & real)[:, :, None] & kept
        total += tl.sum(tl.load(piece + place[:, :, None] * HEAD_DIM + dim, mask=has, other=0.0), 0)
    tl.store(to, total.to(grad.dtype.element_ty), mask=kept)
