"""The forward Triton kernels: a query tile of a few heads stays, its key tiles stream past.

A program's rows are tokens of one tile (or of a part of it) for `PACK` query heads that share keys
and table: row r is token r % TOKENS of head r // TOKENS. Scores are float32 registers [rows, keys];
exponentials are powers of two.
"""

import triton
import triton.language as tl

from .device import (
    elements,
    from_table,
    head_of,
    kernel,
    load_rows,
    program_of,
    rows_of,
    span_of,
    table_of,
    unit_at,
    visible,
)
from .walk import CUT, UNIT

_UNIT = tl.constexpr(UNIT)
_CUT = tl.constexpr(CUT)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(acc, highest, total, q, k, v, bias, scale, keep, MASKED: tl.constexpr,
            BIASED: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the running softmax: (acc [rows, Dv], highest [rows], total [rows])."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        score = tl.where(keep != 0, score, float("-inf"))
    most = tl.max(score, 1)
    scaled = most * scale
    if BIASED:
        scaled += bias
    now = tl.maximum(highest, scaled)
    base = tl.where(now == float("-inf"), 0.0, now)
    # the highest score is subtracted before anything is rounded: 0 whatever its size
    most = tl.where(most == float("-inf"), 0.0, most)
    shift = (scaled - base) * _LOG2_E
    weight = tl.exp2((score - most[:, None]) * (scale * _LOG2_E) + shift[:, None])
    decay = tl.exp2((highest - base) * _LOG2_E)
    total = total * decay + tl.sum(weight, 1)
    acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return acc, now, total


@kernel
def forward_kernel(
    query, key, value, bias, out, lse, piece_out, piece_lse,
    units, start, tokens, bitmap, entry, words, tile_start, tile_stop,
    q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_token: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64,
    o_batch: tl.int64, o_head: tl.int64, lse_batch: tl.int64, lse_head: tl.int64,
    bias_batch: tl.int64, bias_head: tl.int64, step: tl.int64, num_units: tl.int64,
    num_entries: tl.int64,
    num_tiles: tl.int64, num_slots: tl.int64, num_heads: tl.int32, group: tl.int32,
    first_head: tl.int32, all_heads: tl.int32, tables: tl.int32, table_batches: tl.int32,
    axes: tl.int32, parts: tl.int32, scale: tl.float32,
    TILE: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    PACK: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr, ALIGN: tl.constexpr,
    RUNNING: tl.constexpr, BIASED: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, WARP_SPECIALIZE: tl.constexpr, STAGES: tl.constexpr,
):
    """Writes out [B, heads, Nq, Dv] and lse [B, heads, Nq] of the rows of each unit.

    With RUNNING they are merged with what out (float32) and lse hold. A unit with a slot leaves its
    share in piece_out [B, heads, slots, TILE, Dv] and piece_lse, for `merge_kernel`.
    """
    STEPS: tl.constexpr = (TILE + KEYS - 1) // KEYS
    WHOLE: tl.constexpr = TILE % KEYS == 0
    part, unit, head, batch = program_of(parts, PACK, num_units, num_heads, group)
    table, axis = table_of(batch, first_head + head, all_heads, tables, table_batches, axes)
    units += (table * num_units + unit) * _UNIT
    tile, first, masked, end = unit_at(units)
    if tile < 0:
        return
    begin, stop = span_of(
        tile_start, tile_stop, axis, num_tiles, tile, part * TOKENS, step, WIDE
    )
    if begin >= stop:
        return

    slot, position, heads, real = rows_of(
        begin, stop, step.to(begin.dtype), part, head, group, TILE, ROWS, TOKENS, PACK
    )
    dim = tl.arange(0, PADDED_DIM)
    from_row = heads * elements(q_head, ALIGN) + position * elements(q_token, ALIGN)
    from_row += batch * elements(q_batch, ALIGN)
    q = tl.load(
        query + from_row[:, None] + dim[None, :],
        mask=real[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )

    kv_head = head // group
    k_token, v_token = elements(k_token, ALIGN), elements(v_token, ALIGN)
    k_offset, k_row, k_column = head_of(
        batch, kv_head, elements(k_batch, ALIGN), elements(k_head, ALIGN), k_token
    )
    v_offset, v_row, v_column = head_of(
        batch, kv_head, elements(v_batch, ALIGN), elements(v_head, ALIGN), v_token
    )
    bias += batch * bias_batch
    start, tokens, bitmap, entry = from_table(start, tokens, bitmap, entry, table, num_entries)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_VALUE_DIM], tl.float32)
    for masked_entries in tl.static_range(2):
        lower = masked if masked_entries else first
        upper = end if masked_entries else masked
        ahead = tl.load(start + lower, mask=lower < upper, other=0)
        for i in tl.range(
            lower * STEPS, upper * STEPS, num_stages=2 if masked_entries else STAGES,
            warp_specialize=WARP_SPECIALIZE,
        ):
            e = i // STEPS
            first_slot = i % STEPS * KEYS
            keys = first_slot + tl.arange(0, KEYS)
            token = ahead + first_slot * step
            ahead = tl.load(start + (i + 1) // STEPS, mask=i + 1 < upper * STEPS, other=0)
            if masked_entries:
                in_tile = keys < tl.load(tokens + e)
                bits = visible(
                    words, tl.load(bitmap + e), slot[:, None], tl.arange(0, KEYS)[None, :],
                    first_slot, TILE, WORD, KEYS,
                )
                keep = tl.where(in_tile[None, :], bits, 0)
            else:
                in_tile = keys < TILE
                keep = in_tile[None, :].to(tl.int32)
            k = load_rows(
                key, k_offset, k_row, k_column, token, in_tile, step, k_token,
                KEYS, HEAD_DIM, PADDED_DIM, WHOLE and not masked_entries, TMA, WIDE,
            )
            v = load_rows(
                value, v_offset, v_row, v_column, token, in_tile, step, v_token,
                KEYS, VALUE_DIM, PADDED_VALUE_DIM, WHOLE and not masked_entries, TMA, WIDE,
            )
            if TMA and (masked_entries or not WHOLE):  # what lies past the tile may be no number
                v = tl.where(in_tile[:, None], v, 0.0)
            if BIASED:
                of_entry = bias + heads * bias_head + tl.load(entry + e)
                added = tl.load(of_entry, mask=real, other=0.0)
            else:
                added = 0.0
            acc, highest, total = _attend(
                acc, highest, total, q, k, v, added, scale, keep, masked_entries or not WHOLE,
                BIASED, PRECISION,
            )

    some = total != 0.0  # or NaN
    total = tl.where(some, total, 1.0)
    acc /= total[:, None]
    natural = tl.where(some, highest + tl.log(total), float("-inf"))
    dim = tl.arange(0, PADDED_VALUE_DIM)
    kept = real[:, None] & (dim < VALUE_DIM)[None, :]
    cut = tl.load(units + 4)
    if cut >= 0:
        place = ((batch * num_heads + heads) * num_slots + cut) * TILE + slot
        tl.store(piece_lse + place, natural, mask=real)
        tl.store(piece_out + place[:, None] * VALUE_DIM + dim[None, :], acc, mask=kept)
    else:
        to_row = batch * elements(o_batch, ALIGN) + heads * elements(o_head, ALIGN)
        to_row += position.to(tl.int64) * VALUE_DIM
        to_out = out + to_row[:, None] + dim[None, :]
        to_lse = lse + batch * lse_batch + heads * lse_head + position
        if RUNNING:
            acc, natural = merge(
                tl.load(to_out, mask=kept, other=0.0),
                tl.load(to_lse, mask=real, other=float("-inf")), acc, natural,
            )
        tl.store(to_out, acc.to(out.dtype.element_ty), mask=kept)
        tl.store(to_lse, natural, mask=real)


@triton.jit
def merge(out, lse, other_out, other_lse):
    """Two results over disjoint keys as one; a row without keys has lse -inf."""
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
):
    """Merges the pieces of each cut tile, in order, into out and lse; see `forward_kernel`."""
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
        natural = tl.full([ROWS], float("-inf"), tl.float32)
    first = tl.load(cuts + 1)
    for piece in range(first, first + tl.load(cuts + 2)):
        place = ((batch * num_heads + head) * num_slots + piece) * TILE + slot
        other = tl.load(
            piece_out + place[:, None] * VALUE_DIM + dim[None, :], mask=kept, other=0.0
        )
        other_lse = tl.load(piece_lse + place, mask=real, other=float("-inf"))
        acc, natural = merge(acc, natural, other, other_lse)
    tl.store(to_out, acc.to(out.dtype.element_ty), mask=kept)
    tl.store(to_lse, natural, mask=real)
