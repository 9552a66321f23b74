"""The forward Triton kernel: a program keeps a query tile and loops over the tile's key tiles.

A program's rows are the tokens of one tile (or of a part of it), for `PACK` query heads that share
keys and a table: row r is token r % TOKENS of head r // TOKENS. Scores [rows, keys] are in float32
registers. Exponentials are computed as powers of two.
"""

import triton
import triton.language as tl

from .combine import merge
from .device import (
    elements,
    from_table,
    head_of,
    kernel,
    load_rows,
    program_of,
    rows_of,
    span_of,
    step_of,
    table_of,
    unit_at,
    visible,
)
from .places import distances
from .tile_scores import apart, bias_at, capped, kept_pairs, products, words_of
from .walk import UNIT

_UNIT = tl.constexpr(UNIT)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(acc, highest, total, score, v, bias, scale, keep, stays, MASKED: tl.constexpr,
            BIASED: tl.constexpr, DROPPING: tl.constexpr, PRECISION: tl.constexpr):
    """Runs a step of the online softmax; returns (acc [rows, Dv], highest [rows], total [rows]).

    `score` is not yet multiplied by `scale`. Where `keep` is 0, there is no pair. Where `stays` is
    False, dropout removes the weight from acc, but not from total.
    """
    if MASKED:
        score = tl.where(keep != 0, score, float("-inf"))
    most = tl.max(score, 1)
    scaled = most * scale
    if BIASED:
        scaled += bias
    now = tl.maximum(highest, scaled)
    base = tl.where(now == float("-inf"), 0.0, now)
    # Subtract the maximum before any rounding, so that the highest score gives exactly 0.
    most = tl.where(most == float("-inf"), 0.0, most)
    shift = (scaled - base) * _LOG2_E
    weight = tl.exp2((score - most[:, None]) * (scale * _LOG2_E) + shift[:, None])
    decay = tl.exp2((highest - base) * _LOG2_E)
    total = total * decay + tl.sum(weight, 1)
    if DROPPING:
        weight = tl.where(stays, weight, 0.0)
    acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return acc, now, total


@kernel
def forward_kernel(
    query, key, value, key_tiles, value_tiles, bias, out, lse, piece_out, piece_lse,
    units, start, tokens, bitmap, entry, words, tile_start, tile_stop,
    distance_bias, key_mask, seed, dropout_stream, tile_origin, origin, depth_shift,
    query_coords, key_coords, slopes,
    q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_token: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64, k_side: tl.int64, v_side: tl.int64,
    o_batch: tl.int64, o_head: tl.int64, lse_batch: tl.int64, lse_head: tl.int64,
    bias_batch: tl.int64, bias_head: tl.int64, distance_batch: tl.int64, distance_head: tl.int64,
    mask_batch: tl.int64, seed_batch: tl.int64, origin_shift: tl.int64,
    query_place_batch: tl.int64, key_place_batch: tl.int64, query_place_dim: tl.int64,
    key_place_dim: tl.int64,
    step: tl.int64, num_units: tl.int64, num_entries: tl.int64,
    num_tiles: tl.int64, num_slots: tl.int64, num_heads: tl.int32, group: tl.int32,
    first_head: tl.int32, all_heads: tl.int32, tables: tl.int32, table_batches: tl.int32,
    axes: tl.int32, parts: tl.int32, reach: tl.int32, branch: tl.int32, least: tl.int32,
    bitmap_row: tl.int32, kv_len: tl.int64,
    scale: tl.float32, cap: tl.float32, kept_scale: tl.float32,
    TILE: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    PACK: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    ALIGN: tl.constexpr,
    RUNNING: tl.constexpr, SINK: tl.constexpr, BIASED: tl.constexpr, CAPPED: tl.constexpr,
    DISTANCES: tl.constexpr, BY_DEPTH: tl.constexpr, DROPPING: tl.constexpr, STREAMS: tl.constexpr,
    KEYS_MASKED: tl.constexpr, DIMS: tl.constexpr, LOW: tl.constexpr,
    CUT: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, WARP_SPECIALIZE: tl.constexpr, STAGES: tl.constexpr,
):
    """Writes out [B, heads, Nq, Dv] and lse [B, heads, Nq] of units: query tiles, or their pieces.

    With RUNNING, merges results into `out` (float32) and `lse`; with SINK, into zeros and `lse`,
    which has the sinks. Query i of a tile reads row `bitmap_row + i` of bitmaps. With CUT, tables
    may list keys from `kv_len` on, which do not exist in this call. A piece has some of the key
    tiles of a query tile that was cut; its result goes to a slot of piece_out [B, heads, slots,
    TILE, Dv] and piece_lse, for `merge_kernel`.
    """
    step = step_of(step, TMA)
    STEPS: tl.constexpr = (TILE + KEYS - 1) // KEYS
    MASKED_STEPS: tl.constexpr = (TILE + MASKED - 1) // MASKED
    GAPS: tl.constexpr = TILE % KEYS != 0 or KEYS_MASKED  # True if even full tiles need a mask
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
        batch, kv_head, k_batch, k_head, k_side, k_token, ALIGN, TMA
    )
    v_offset, v_row, v_column = head_of(
        batch, kv_head, v_batch, v_head, v_side, v_token, ALIGN, TMA
    )
    bias += batch * bias_batch
    start, tokens, bitmap, entry = from_table(start, tokens, bitmap, entry, table, num_entries)
    if DISTANCES or DROPPING:
        origin += table * num_entries
        depth_shift += table * num_entries
        first_query = tl.load(tile_origin + axis * num_tiles + tile)
    if DISTANCES:
        biases = distance_bias + batch * distance_batch + heads * distance_head
        along_query = (slot * step).to(tl.int32)
    if DROPPING:
        number = tl.load(dropout_stream + axis * num_tiles + tile) if STREAMS else 0
        a, b = words_of(
            tl.load(seed + batch * seed_batch + number), first_head + heads, branch,
            first_query + slot * step,
        )
    if DIMS:
        of_query = query_coords + batch * query_place_batch + position
        slope = tl.load(slopes + heads, mask=real, other=0.0)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_VALUE_DIM], tl.float32)
    for masked_entries in tl.static_range(2):
        lower = masked if masked_entries else first
        upper = end if masked_entries else masked
        ahead = tl.load(start + lower, mask=lower < upper, other=0)
        for i in tl.range(
            lower * (MASKED_STEPS if masked_entries else STEPS),
            upper * (MASKED_STEPS if masked_entries else STEPS),
            num_stages=2 if masked_entries and STAGES > 2 else STAGES,
            warp_specialize=WARP_SPECIALIZE,
        ):
            SIZE: tl.constexpr = MASKED if masked_entries else KEYS
            STEPS_OF: tl.constexpr = MASKED_STEPS if masked_entries else STEPS
            e = i // STEPS_OF
            first_slot = i % STEPS_OF * SIZE
            keys = first_slot + tl.arange(0, SIZE)
            token = ahead + first_slot * step
            ahead = tl.load(start + (i + 1) // STEPS_OF, mask=i + 1 < upper * STEPS_OF, other=0)
            in_tile = keys < (tl.load(tokens + e) if masked_entries else TILE)
            if masked_entries and CUT:
                in_tile &= token + tl.arange(0, SIZE) * step < kv_len
            if KEYS_MASKED:
                of_keys = key_mask + batch * mask_batch + token + tl.arange(0, SIZE) * step
                in_tile &= tl.load(of_keys, mask=in_tile, other=0) != 0
            if masked_entries:
                bits = visible(
                    words, tl.load(bitmap + e), bitmap_row + slot, first_slot, TILE, WORD, SIZE
                )
                keep = tl.where(in_tile[None, :], bits, 0)
            else:
                keep = in_tile[None, :].to(tl.int32)
            k = load_rows(
                key_tiles, key, k_offset, k_row, k_column, token, in_tile, step, k_token, SIZE,
                HEAD_DIM, PADDED_DIM, not (masked_entries or GAPS), TMA and not masked_entries,
                WIDE,
            )
            v = load_rows(
                value_tiles, value, v_offset, v_row, v_column, token, in_tile, step, v_token, SIZE,
                VALUE_DIM, PADDED_VALUE_DIM, not (masked_entries or GAPS),
                TMA and not masked_entries, WIDE,
            )
            if BIASED:
                of_entry = bias + heads * bias_head + tl.load(entry + e)
                added = tl.load(of_entry, mask=real, other=0.0)
            else:
                added = 0.0
            of_rows = (token + tl.arange(0, SIZE) * step) * k_token
            score = products(
                q, k, query + from_row, key + k_offset + of_rows, real, in_tile, HEAD_DIM, PRECISION
            )
            if DIMS:
                of_key = key_coords + batch * key_place_batch + token + tl.arange(0, SIZE) * step
                far = distances(
                    of_query, of_key, query_place_dim, key_place_dim, real, in_tile, DIMS, LOW
                )
                score -= slope[:, None] * far
            if DISTANCES or DROPPING:
                along_key = tl.arange(0, SIZE) * step
                first_key = tl.load(origin + e).to(tl.int64) + origin_shift + first_slot * step
            if CAPPED:
                score, _ = capped(score, scale, cap)
            elif DISTANCES:
                score *= scale
            if DISTANCES:
                far = first_key + tl.load(depth_shift + e) if BY_DEPTH else first_key
                distance = apart(far, first_query) + along_key.to(tl.int32)[None, :]
                score += bias_at(
                    biases[:, None], distance - along_query[:, None], reach, real[:, None]
                )
            if DROPPING:
                kept_keys = (first_key + along_key)[None, :]
                stays = kept_pairs(a[:, None], b[:, None], kept_keys, least)
            else:
                stays = True
            acc, highest, total = _attend(
                acc, highest, total, score, v, added, 1.0 if CAPPED or DISTANCES else scale, keep,
                stays, masked_entries or GAPS, BIASED, DROPPING, PRECISION,
            )

    some = total != 0.0  # true for NaN, so that the result is NaN too
    total = tl.where(some, total, 1.0)
    acc /= total[:, None]
    if DROPPING:
        acc *= kept_scale
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
        elif SINK:
            acc, natural = merge(
                tl.zeros_like(acc), tl.load(to_lse, mask=real, other=float("-inf")), acc, natural
            )
        tl.store(to_out, acc.to(out.dtype.element_ty), mask=kept)
        tl.store(to_lse, natural, mask=real)
