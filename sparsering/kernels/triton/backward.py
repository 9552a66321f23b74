"""The backward Triton kernels: one loops over key tiles for dQ, one over query tiles for dK and dV.

With the merged lse and `delta = rowsum(dO * O) - dlse`, every visited pair of every pass has
`P = exp(s - lse)` and `dS = P * (dP - delta)`; dP is 0 where P was dropped. No two programs write
the same memory: there are no atomics, and sums run in a fixed order.
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
    step_of,
    table_of,
    unit_at,
    visible,
)
from .distances import store_diagonals
from .places import coordinate_sums, distances
from .tile_scores import apart, bias_at, capped, kept_pairs, products, words_of
from .walk import UNIT

_UNIT = tl.constexpr(UNIT)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def weight_of(power):
    """Returns 2 ** power, but at most 1.

    The backward rounds huge scores in another way than the forward, so a power can be above 0.
    """
    return tl.exp2(tl.minimum(power, 0.0, propagate_nan=tl.PropagateNan.ALL))


@kernel
def query_kernel(
    query, key, value, grad_out, key_tiles, value_tiles, bias, delta, row_lse, grad_query, piece,
    grad_bias,
    units, start, tokens, bitmap, entry, words, tile_start, tile_stop,
    distance_bias, key_mask, seed, dropout_stream, tile_origin, origin, depth_shift,
    diagonals, ends, diagonal_start, query_coords, key_coords, slopes, grad_places, piece_places,
    q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_token: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64, k_side: tl.int64, v_side: tl.int64,
    g_batch: tl.int64, g_head: tl.int64, g_token: tl.int64,
    dq_batch: tl.int64, dq_head: tl.int64, bias_batch: tl.int64, bias_head: tl.int64,
    distance_batch: tl.int64, distance_head: tl.int64, mask_batch: tl.int64, seed_batch: tl.int64,
    row_batch: tl.int64, row_head: tl.int64, origin_shift: tl.int64,
    query_place_batch: tl.int64, key_place_batch: tl.int64, query_place_dim: tl.int64,
    key_place_dim: tl.int64, place_batch: tl.int64, place_head: tl.int64, step: tl.int64,
    num_units: tl.int64, num_entries: tl.int64,
    num_tiles: tl.int64, num_slots: tl.int64, num_blocks: tl.int64, num_heads: tl.int32,
    group: tl.int32, first_head: tl.int32, all_heads: tl.int32, tables: tl.int32,
    table_batches: tl.int32, axes: tl.int32, parts: tl.int32, reach: tl.int32, branch: tl.int32,
    least: tl.int32, kv_len: tl.int64, scale: tl.float32, cap: tl.float32,
    kept_scale: tl.float32,
    TILE: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    PACK: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    ALIGN: tl.constexpr,
    RUNNING: tl.constexpr, BIASED: tl.constexpr, CAPPED: tl.constexpr, DISTANCES: tl.constexpr,
    BY_DEPTH: tl.constexpr,
    LEARNS_DISTANCES: tl.constexpr, DROPPING: tl.constexpr, STREAMS: tl.constexpr,
    KEYS_MASKED: tl.constexpr, DIMS: tl.constexpr, LOW: tl.constexpr,
    LEARNS_PLACES: tl.constexpr, PLACE_WIDTH: tl.constexpr,
    CUT: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, WARP_SPECIALIZE: tl.constexpr, STAGES: tl.constexpr,
):
    """Writes dQ [B, heads, Nq, D] of each work unit: a query tile and some of its key tiles.

    `forward_kernel` explains pieces and CUT. With BIASED, it also writes sums of dS per tile pair;
    with LEARNS_DISTANCES, sums of dS by distance. With RUNNING, it adds to a float32 dQ.
    """
    step = step_of(step, TMA)
    STEPS: tl.constexpr = (TILE + KEYS - 1) // KEYS
    MASKED_STEPS: tl.constexpr = (TILE + MASKED - 1) // MASKED
    GAPS: tl.constexpr = TILE % KEYS != 0 or KEYS_MASKED
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
    value_dim = tl.arange(0, PADDED_VALUE_DIM)
    from_row = heads * elements(q_head, ALIGN) + position * elements(q_token, ALIGN)
    from_row += batch * elements(q_batch, ALIGN)
    kept = real[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(query + from_row[:, None] + dim[None, :], mask=kept, other=0.0)
    from_grad = heads * elements(g_head, ALIGN) + position * elements(g_token, ALIGN)
    from_grad += batch * elements(g_batch, ALIGN)
    do = tl.load(
        grad_out + from_grad[:, None] + value_dim[None, :],
        mask=real[:, None] & (value_dim < VALUE_DIM)[None, :],
        other=0.0,
    )
    of_row = batch * row_batch + heads * row_head + position
    d = tl.load(delta + of_row, mask=real, other=0.0)
    sums_to = tl.load(row_lse + of_row, mask=real, other=float("inf"))

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
        slope_of_head = tl.load(slopes + heads, mask=real, other=0.0)
    if LEARNS_PLACES:
        dplace = tl.zeros([ROWS, PLACE_WIDTH], tl.float32)
    packed = tl.arange(0, ROWS // TOKENS)  # the program's heads; each has sums of dS of its own
    there = (packed < PACK) & (head % group + packed < group)
    dq = tl.zeros([ROWS, PADDED_DIM], tl.float32)
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
            of_rows = token + tl.arange(0, SIZE) * step
            score = products(
                q, k, query + from_row, key + k_offset + of_rows * k_token, real, in_tile,
                HEAD_DIM, PRECISION,
            )
            if DIMS:
                of_key = key_coords + batch * key_place_batch + of_rows
                far_apart = distances(
                    of_query, of_key, query_place_dim, key_place_dim, real, in_tile, DIMS, LOW
                )
                score -= slope_of_head[:, None] * far_apart
            if BIASED:
                of_entry = bias + heads * bias_head + tl.load(entry + e)
                base = (sums_to - tl.load(of_entry, mask=real, other=0.0)) * _LOG2_E
            else:
                base = sums_to
            if DISTANCES or DROPPING:
                along_key = tl.arange(0, SIZE) * step
                first_key = tl.load(origin + e).to(tl.int64) + origin_shift + first_slot * step
            if CAPPED:
                score, slope = capped(score, scale, cap)
            elif DISTANCES:
                score *= scale
            if DISTANCES:
                far = first_key + tl.load(depth_shift + e) if BY_DEPTH else first_key
                far = apart(far, first_query)
                distance = far + along_key.to(tl.int32)[None, :] - along_query[:, None]
                score += bias_at(biases[:, None], distance, reach, real[:, None])
            left = _LOG2_E if CAPPED or DISTANCES else scale * _LOG2_E
            power = score * left - base[:, None]
            if masked_entries:
                bits = visible(words, tl.load(bitmap + e), slot, first_slot, TILE, WORD, SIZE)
                power = tl.where(in_tile[None, :] & (bits != 0), power, float("-inf"))
            elif GAPS:
                power = tl.where(in_tile[None, :], power, float("-inf"))
            weight = weight_of(power)
            dweight = products(
                do, v, grad_out + from_grad, value + v_offset + of_rows * v_token, real, in_tile,
                VALUE_DIM, PRECISION,
            )
            if DROPPING:
                kept_keys = (first_key + along_key)[None, :]
                stays = kept_pairs(a[:, None], b[:, None], kept_keys, least)
                dweight = tl.where(stays, dweight * kept_scale, 0.0)
            dscore = (dweight - d[:, None]) * weight
            if BIASED:
                sums = tl.sum(tl.reshape(tl.sum(dscore, 1), [ROWS // TOKENS, TOKENS]), 1)
                of_head = batch * num_heads + head + packed
                place = (of_head * num_blocks + tl.load(entry + e)) * (parts * MASKED_STEPS)
                tl.store(grad_bias + place + part * MASKED_STEPS + i % STEPS_OF, sums, mask=there)
            if LEARNS_DISTANCES:
                line = (batch * num_heads + head + packed) * num_entries + e
                line = (line * parts + part) * STEPS_OF + i % STEPS_OF
                store_diagonals(
                    diagonals, ends, diagonal_start, line, there, dscore,
                    far - (part * TOKENS * step).to(tl.int32), step, reach, ROWS, TOKENS, SIZE,
                )
            if CAPPED:
                dscore *= slope
            if LEARNS_PLACES:
                dplace += coordinate_sums(
                    dscore, slope_of_head * scale, of_query, of_key, query_place_dim,
                    key_place_dim, real, in_tile, DIMS, LOW, PLACE_WIDTH,
                )
            dq = tl.dot(dscore.to(k.dtype), k, dq, input_precision=PRECISION)

    dq *= scale
    cut = tl.load(units + 4)
    if cut >= 0:
        place = ((batch * num_heads + heads) * num_slots + cut) * TILE + slot
        tl.store(piece + place[:, None] * HEAD_DIM + dim[None, :], dq, mask=kept)
        if LEARNS_PLACES:
            column = tl.arange(0, PLACE_WIDTH)[None, :]
            to_place = piece_places + place[:, None] * (DIMS + 1) + column
            tl.store(to_place, dplace, mask=real[:, None] & (column <= DIMS))
    else:
        to_row = batch * elements(dq_batch, ALIGN) + heads * elements(dq_head, ALIGN)
        to_row += position.to(tl.int64) * HEAD_DIM
        to = grad_query + to_row[:, None] + dim[None, :]
        if RUNNING:
            dq += tl.load(to, mask=kept, other=0.0)
        tl.store(to, dq.to(grad_query.dtype.element_ty), mask=kept)
        if LEARNS_PLACES:
            column = tl.arange(0, PLACE_WIDTH)[None, :]
            to_row = batch * place_batch + heads * place_head
            to_row += position.to(tl.int64) * (DIMS + 1)
            to_place = grad_places + to_row[:, None] + column
            has = real[:, None] & (column <= DIMS)
            if RUNNING:
                dplace += tl.load(to_place, mask=has, other=0.0)
            tl.store(to_place, dplace, mask=has)


@kernel
def key_kernel(
    query, key, value, grad_out, query_tiles, grad_out_tiles, delta_tiles, row_lse_tiles, bias,
    delta, row_lse, grad_key, grad_value, piece_key, piece_value,
    units, start, tokens, bitmap, entry, words, tile_start, tile_stop,
    distance_bias, key_mask, seed, dropout_stream, tile_origin, origin, depth_shift,
    query_coords, key_coords, slopes, grad_places, piece_places,
    q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_token: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64,
    g_batch: tl.int64, g_head: tl.int64, g_token: tl.int64, q_side: tl.int64, g_side: tl.int64,
    dk_batch: tl.int64, dk_head: tl.int64, dv_batch: tl.int64, dv_head: tl.int64,
    bias_batch: tl.int64, bias_head: tl.int64, distance_batch: tl.int64, distance_head: tl.int64,
    mask_batch: tl.int64, seed_batch: tl.int64, row_batch: tl.int64, row_head: tl.int64,
    origin_shift: tl.int64, query_place_batch: tl.int64, key_place_batch: tl.int64,
    query_place_dim: tl.int64, key_place_dim: tl.int64, place_batch: tl.int64,
    place_head: tl.int64, step: tl.int64, num_units: tl.int64, num_entries: tl.int64,
    num_tiles: tl.int64, num_slots: tl.int64, num_heads: tl.int32, group: tl.int32,
    first_head: tl.int32, all_heads: tl.int32, tables: tl.int32, table_batches: tl.int32,
    axes: tl.int32, reach: tl.int32, branch: tl.int32, least: tl.int32,
    scale: tl.float32, cap: tl.float32, kept_scale: tl.float32,
    TILE: tl.constexpr, WORD: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
    QUERIES: tl.constexpr, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr, ALIGN: tl.constexpr,
    RUNNING: tl.constexpr, BIASED: tl.constexpr, CAPPED: tl.constexpr, DISTANCES: tl.constexpr,
    BY_DEPTH: tl.constexpr,
    DROPPING: tl.constexpr, STREAMS: tl.constexpr, KEYS_MASKED: tl.constexpr,
    DIMS: tl.constexpr, LOW: tl.constexpr, LEARNS_PLACES: tl.constexpr,
    PLACE_WIDTH: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, WARP_SPECIALIZE: tl.constexpr, STAGES: tl.constexpr,
):
    """Writes dK [B, shares, Nk, D] and dV of each work unit: a key tile and its query tiles.

    A share is the sum over HEADS query heads; the caller adds up the shares of a kv head.
    """
    step = step_of(step, TMA)
    PARTS: tl.constexpr = (TILE + KEYS - 1) // KEYS
    STEPS: tl.constexpr = (TILE + QUERIES - 1) // QUERIES
    WHOLE: tl.constexpr = TILE % QUERIES == 0
    MASKED_STEPS: tl.constexpr = (TILE + MASKED - 1) // MASKED
    part, unit, head, batch = program_of(PARTS, HEADS, num_units, num_heads, group)
    table, axis = table_of(batch, first_head + head, all_heads, tables, table_batches, axes)
    units += (table * num_units + unit) * _UNIT
    tile, first, masked, _ = unit_at(units)
    if tile < 0:
        return
    first_key = part * KEYS
    begin, stop = span_of(tile_start, tile_stop, axis, num_tiles, tile, first_key, step, WIDE)
    if begin >= stop:
        return

    keys = first_key + tl.arange(0, KEYS)
    position = begin + tl.arange(0, KEYS) * step.to(begin.dtype)
    real = (position < stop) & (keys < TILE)
    dim = tl.arange(0, PADDED_DIM)
    value_dim = tl.arange(0, PADDED_VALUE_DIM)
    kept = real[:, None] & (dim < HEAD_DIM)[None, :]
    value_kept = real[:, None] & (value_dim < VALUE_DIM)[None, :]
    kv_head = head // group
    from_key = batch * elements(k_batch, ALIGN) + kv_head * elements(k_head, ALIGN)
    from_key += position * elements(k_token, ALIGN)
    from_value = batch * elements(v_batch, ALIGN) + kv_head * elements(v_head, ALIGN)
    from_value += position * elements(v_token, ALIGN)
    k = tl.load(key + from_key[:, None] + dim[None, :], mask=kept, other=0.0)
    v = tl.load(value + from_value[:, None] + value_dim[None, :], mask=value_kept, other=0.0)
    in_table = table * num_entries
    start += in_table
    if DISTANCES or DROPPING:
        origin += table * num_entries
        depth_shift += table * num_entries
        key_position = tl.load(tile_origin + axis * num_tiles + tile) + first_key * step
        along_key = tl.arange(0, KEYS) * step
    if DROPPING:
        dropout_stream += table * num_entries
    if DIMS:
        of_key = key_coords + batch * key_place_batch + position
    if LEARNS_PLACES:
        dplace = tl.zeros([KEYS, PLACE_WIDTH], tl.float32)
    dk = tl.zeros([KEYS, PADDED_DIM], tl.float32)
    dv = tl.zeros([KEYS, PADDED_VALUE_DIM], tl.float32)
    q_token, g_token = elements(q_token, ALIGN), elements(g_token, ALIGN)
    # with a single head, the compiler knows the bounds and drops the loop, which saves registers
    heads = tl.minimum(HEADS, (kv_head + 1) * group - head) if HEADS > 1 else 1
    for own in range(0, heads):
        h = head + own
        for masked_entries in tl.static_range(2):
            q_offset, q_row, q_column = head_of(
                batch, h, q_batch, q_head, q_side, q_token, ALIGN, TMA
            )
            g_offset, g_row, g_column = head_of(
                batch, h, g_batch, g_head, g_side, g_token, ALIGN, TMA
            )
            of_head = batch * row_batch + h * elements(row_head, 1)
            if TMA:
                of_head = of_head.to(tl.int32)  # fits int32, as `launch.line` has checked
            lower = tl.load(units + 2) if masked_entries else first
            upper = tl.load(units + 3) if masked_entries else masked
            ahead = tl.load(start + lower, mask=lower < upper, other=0)
            for i in tl.range(
                lower * (MASKED_STEPS if masked_entries else STEPS),
                upper * (MASKED_STEPS if masked_entries else STEPS),
                num_stages=2 if masked_entries and STAGES > 2 else STAGES,
                warp_specialize=WARP_SPECIALIZE,
            ):
                SIZE: tl.constexpr = MASKED if masked_entries else QUERIES
                STEPS_OF: tl.constexpr = MASKED_STEPS if masked_entries else STEPS
                e = i // STEPS_OF
                first_slot = i % STEPS_OF * SIZE
                slot = first_slot + tl.arange(0, SIZE)
                token = ahead + first_slot * step
                ahead = tl.load(start + (i + 1) // STEPS_OF, mask=i + 1 < upper * STEPS_OF, other=0)
                in_tile = slot < (tl.load(tokens + in_table + e) if masked_entries else TILE)
                along = tl.arange(0, SIZE) * step
                of_row = of_head + token + along
                q = load_rows(
                    query_tiles, query, q_offset, q_row, q_column, token, in_tile, step, q_token,
                    SIZE, HEAD_DIM, PADDED_DIM, WHOLE and not masked_entries,
                    TMA and not masked_entries, WIDE,
                )
                do = load_rows(
                    grad_out_tiles, grad_out, g_offset, g_row, g_column, token, in_tile, step,
                    g_token, SIZE, VALUE_DIM, PADDED_VALUE_DIM, WHOLE and not masked_entries,
                    TMA and not masked_entries, WIDE,
                )
                if TMA and not masked_entries:
                    base = row_lse_tiles.load([(of_head + token).to(tl.int32)])
                else:
                    base = tl.load(row_lse + of_row, mask=in_tile, other=float("inf"))
                score = products(
                    k, q, key + from_key, query + q_offset + (token + along) * q_token, real,
                    in_tile, HEAD_DIM, PRECISION,
                )
                if DIMS:
                    slope_of_head = tl.load(slopes + h)
                    of_query = query_coords + batch * query_place_batch + token + along
                    score -= slope_of_head * distances(
                        of_key, of_query, key_place_dim, query_place_dim, real, in_tile, DIMS, LOW
                    )
                if BIASED:
                    of_head_bias = bias + batch * bias_batch + h * elements(bias_head, 1)
                    base -= tl.load(of_head_bias + tl.load(entry + in_table + e))
                    base *= _LOG2_E
                if DISTANCES or DROPPING:
                    query_position = tl.load(origin + e).to(tl.int64) + origin_shift
                    query_position += first_slot * step
                if CAPPED:
                    score, slope = capped(score, scale, cap)
                elif DISTANCES:
                    score *= scale
                if DISTANCES:
                    far = query_position - tl.load(depth_shift + e) if BY_DEPTH else query_position
                    distance = apart(key_position, far) + along_key.to(tl.int32)[:, None]
                    distance -= along.to(tl.int32)[None, :]
                    biases = distance_bias + batch * distance_batch
                    biases += h * elements(distance_head, 1)
                    score += bias_at(biases, distance, reach, in_tile[None, :])
                left = _LOG2_E if CAPPED or DISTANCES else scale * _LOG2_E
                power = score * left - base[None, :]
                if masked_entries:
                    number = tl.load(bitmap + in_table + e)
                    bits = visible(words, number, keys, first_slot, TILE, WORD, SIZE)
                    power = tl.where(bits != 0, power, float("-inf"))
                weight = weight_of(power)
                if DROPPING:
                    number = tl.load(dropout_stream + e) if STREAMS else 0
                    a, b = words_of(
                        tl.load(seed + batch * seed_batch + number), first_head + h, branch,
                        query_position + along,
                    )
                    kept_keys = (key_position + along_key)[:, None]
                    stays = kept_pairs(a[None, :], b[None, :], kept_keys, least)
                    given = tl.where(stays, weight, 0.0).to(do.dtype)
                else:
                    given = weight.to(do.dtype)
                dv = tl.dot(given, do, dv, input_precision=PRECISION)
                dweight = products(
                    v, do, value + from_value, grad_out + g_offset + (token + along) * g_token,
                    real, in_tile, VALUE_DIM, PRECISION,
                )
                # delta is loaded as late as possible, to save registers
                if TMA and not masked_entries:
                    d = delta_tiles.load([(of_head + token).to(tl.int32)])
                else:
                    d = tl.load(delta + of_row, mask=in_tile, other=0.0)
                if DROPPING:
                    dweight = tl.where(stays, dweight * kept_scale, 0.0)
                dscore = (dweight - d[None, :]) * weight
                if CAPPED:
                    dscore *= slope
                if LEARNS_PLACES:
                    dplace += coordinate_sums(
                        dscore, slope_of_head * scale, of_key, of_query, key_place_dim,
                        query_place_dim, real, in_tile, DIMS, LOW, PLACE_WIDTH,
                    )
                dk = tl.dot(dscore.to(q.dtype), q, dk, input_precision=PRECISION)

    # Load these again, because they would take registers if they were kept through the loop.
    tile, cut = tl.load(units), tl.load(units + 4)
    head += tile >> 31  # adds 0, but `axis` now depends on the load, so no register keeps it
    _, axis = table_of(batch, first_head + head, all_heads, tables, table_batches, axes)
    begin, stop = span_of(tile_start, tile_stop, axis, num_tiles, tile, first_key, step, WIDE)
    position = begin + tl.arange(0, KEYS) * step.to(begin.dtype)
    real = (position < stop) & (keys < TILE)
    kept = real[:, None] & (dim < HEAD_DIM)[None, :]
    value_kept = real[:, None] & (value_dim < VALUE_DIM)[None, :]
    dk *= scale
    if DROPPING:
        dv *= kept_scale
    if KEYS_MASKED:  # the loop ignores the mask: a key affects only its own row of dK and dV
        seen = tl.load(key_mask + batch * mask_batch + position, mask=real, other=0) != 0
        dk, dv = tl.where(seen[:, None], dk, 0.0), tl.where(seen[:, None], dv, 0.0)
        if LEARNS_PLACES:
            dplace = tl.where(seen[:, None], dplace, 0.0)
    share, shares = head, num_heads
    if HEADS > 1:
        of_group = (group + HEADS - 1) // HEADS
        shares = num_heads // group * of_group
        share = head // group * of_group + head % group // HEADS
    if cut >= 0:
        place = ((batch * shares + share) * num_slots + cut) * TILE + keys
        tl.store(piece_key + place[:, None] * HEAD_DIM + dim[None, :], dk, mask=kept)
        to_piece = piece_value + place[:, None] * VALUE_DIM + value_dim[None, :]
        tl.store(to_piece, dv, mask=value_kept)
        if LEARNS_PLACES:
            column = tl.arange(0, PLACE_WIDTH)[None, :]
            to_place = piece_places + place[:, None] * DIMS + column
            tl.store(to_place, dplace, mask=real[:, None] & (column < DIMS))
    else:
        to_row = batch * elements(dk_batch, ALIGN) + share * elements(dk_head, ALIGN)
        to_key = grad_key + (to_row + position.to(tl.int64) * HEAD_DIM)[:, None] + dim[None, :]
        to_row = batch * elements(dv_batch, ALIGN) + share * elements(dv_head, ALIGN)
        to_row += position.to(tl.int64) * VALUE_DIM
        to_value = grad_value + to_row[:, None] + value_dim[None, :]
        if RUNNING:
            dk += tl.load(to_key, mask=kept, other=0.0)
            dv += tl.load(to_value, mask=value_kept, other=0.0)
        tl.store(to_key, dk.to(grad_key.dtype.element_ty), mask=kept)
        tl.store(to_value, dv.to(grad_value.dtype.element_ty), mask=value_kept)
        if LEARNS_PLACES:
            column = tl.arange(0, PLACE_WIDTH)[None, :]
            to_row = batch * place_batch + share * place_head + position.to(tl.int64) * DIMS
            to_place = grad_places + to_row[:, None] + column
            has = real[:, None] & (column < DIMS)
            if RUNNING:
                dplace += tl.load(to_place, mask=has, other=0.0)
            tl.store(to_place, dplace, mask=has)
