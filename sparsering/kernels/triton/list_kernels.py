"""The Triton kernels over lists of keys: a program gathers the keys that one query lists.

Rows of scores are the query heads that share a list and a kv head; columns are listed keys. For dK
and dV, the items of all lists are sorted by key, and a program sums over the items of one key. If
many heads share a list, another kernel first sums over the heads of each item, on tensor cores. No
two programs write the same memory, and sums run in a fixed order.

Head dims above 512 are split into the first 512 channels and a rest, so that 576 is not padded to
1,024.
"""

import triton
import triton.language as tl

from .backward import weight_of
from .combine import add_pieces, merge
from .device import elements, kernel
from .tile_scores import apart, bias_at, capped, kept_pairs, products, words_of

_LOG2_E = tl.constexpr(1.4426950408889634)
_PIECES = tl.constexpr(8)  # pieces of a row that are loaded at once, and added in a fixed order
_FIRST = tl.constexpr(512)  # channels of a row before its rest
_NO_KEY = tl.constexpr(2**31 - 1)  # sorts behind all keys


@triton.jit
def _query_of(program, parts, q_len, lists, heads, kv_heads, tables):
    """Returns what a program computes: (part of the heads, query, batch entry, kv head, table).

    Parts vary the fastest between programs.
    """
    part = (program % parts).to(tl.int32)
    query = program // parts % q_len
    rest = program // parts // q_len
    of_list = rest % lists
    return (
        part,
        query,
        rest // lists,
        of_list,
        of_list * kv_heads // lists,
        of_list * tables // lists,
    )


@triton.jit
def _rest_of(pointers, real, HEAD_DIM: tl.constexpr, REST: tl.constexpr):
    """Loads the channels of rows from 512 on, [rows, REST]."""
    dim = _FIRST + tl.arange(0, REST)
    return tl.load(
        pointers[:, None] + dim[None, :],
        mask=real[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )


@triton.jit
def _rows_of(pointers, real, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Loads the first channels of rows, [rows, PADDED_DIM]."""
    dim = tl.arange(0, PADDED_DIM)
    return tl.load(
        pointers[:, None] + dim[None, :],
        mask=real[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )


@triton.jit
def _keys_at(pointer, first, count, KEYS: tl.constexpr):
    """Loads KEYS of the `count` keys that a row lists, from slot `first` on, int64; -1 for no key.

    A step loads those of the next one, so that the loads of its rows do not wait for theirs.
    """
    slot = first + tl.arange(0, KEYS)
    return tl.load(pointer + slot, mask=slot < count, other=-1).to(tl.int64)


@triton.jit
def _place_of_query(of_query, batch, query, q_start, q_len, query_batch, PLACED: tl.constexpr):
    """Returns (position, depth in a tree, index of the dropout seed) of queries, int64 each."""
    if PLACED:
        at = of_query + batch * query_batch + query
        return tl.load(at), tl.load(at + q_len), tl.load(at + 2 * q_len)
    else:
        position = query.to(tl.int64) + q_start
        return position, position, tl.zeros_like(position)


@triton.jit
def _place_of_key(
    of_key, batch, kv_head, token, there, kv_len, kv_heads, key_batch, key_heads,
    PLACED: tl.constexpr,
):
    """Returns (position, depth in a tree) of keys, int64 each; depth is position elsewhere."""
    if PLACED:
        at = of_key + batch * key_batch + (kv_head * key_heads // kv_heads) * kv_len + token
        depth = tl.load(at + key_heads * kv_len, mask=there, other=0)
        return tl.load(at, mask=there, other=0), depth
    else:
        return token, token


@kernel
def list_rows_kernel(
    indices, valid, keys, counts,
    table_batch: tl.int64, valid_batch: tl.int64, rows: tl.int64, slots: tl.int64,
    first_row: tl.int64, q_start: tl.int64, q_len: tl.int64, kv_len: tl.int64,
    left: tl.int64, right: tl.int64, near_left: tl.int64, near_right: tl.int64,
    tables: tl.int32, row_size: tl.int32,
    SIZE: tl.constexpr, NUMBER: tl.constexpr, HIDDEN: tl.constexpr,
):
    """Writes the keys that one query lists [B, tables, Nq, slots * SIZE], and their number.

    `indices` [B or 1, tables, rows, slots] are blocks of SIZE keys; a repeat counts once. Keys of
    the query at position p are those from `p - left` to `p + right`, but not from `p - near_left`
    to `p + near_right`; with HIDDEN, only those that are true in `valid` [B or 1, Nk]. They ascend,
    and -1 stands behind them. NUMBER is a power of two, not below slots * SIZE.
    """
    program = tl.program_id(0).to(tl.int64)
    position = q_start + program % q_len
    table = program // q_len % tables
    batch = program // q_len // tables
    row = tl.minimum(tl.maximum(position // row_size - first_row, 0), rows - 1)
    number = tl.arange(0, NUMBER)
    listed = slots * SIZE
    from_row = indices + batch * table_batch + (table * rows + row) * slots
    block = tl.load(from_row + number // SIZE, mask=number < listed, other=-1)
    inside = (block >= 0) & (block < kv_len) & (position >= 0)
    key = tl.where(inside, block, 0) * SIZE + number % SIZE
    inside &= (key < kv_len) & (key >= position - left) & (key <= position + right)
    inside &= (key < position - near_left) | (key > position + near_right)
    if HIDDEN:
        seen = tl.load(valid + batch * valid_batch + key, mask=inside, other=0)
        inside &= seen != 0
    ordered = tl.sort(tl.where(inside, key, _NO_KEY).to(tl.int32))
    before = tl.gather(ordered, tl.maximum(number - 1, 0), 0)
    first = (ordered < _NO_KEY) & ((ordered != before) | (number == 0))
    count = tl.sum(first.to(tl.int32))
    place = tl.cumsum(first.to(tl.int32)) - 1
    to = keys + program * listed
    tl.store(to + place, ordered, mask=first)
    behind = (number >= count) & (number < listed)
    tl.store(to + number, tl.full([NUMBER], -1, tl.int32), mask=behind)
    tl.store(counts + program, count)


@kernel
def list_forward_kernel(
    query, key, value, keys, counts, place, bias, distance_bias, seed, of_query, of_key, out, lse,
    piece_out, piece_lse,
    q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64, k_batch: tl.int64, k_head: tl.int64,
    k_token: tl.int64, v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64,
    keys_batch: tl.int64, counts_batch: tl.int64, query_batch: tl.int64, key_batch: tl.int64,
    key_heads: tl.int64,
    distance_batch: tl.int64, distance_head: tl.int64, seed_batch: tl.int64, q_start: tl.int64,
    q_len: tl.int64, kv_len: tl.int64, slots: tl.int64,
    lists: tl.int32, heads: tl.int32, kv_heads: tl.int32, tables: tl.int32, parts: tl.int32,
    pieces: tl.int32, reach: tl.int32, branch: tl.int32, least: tl.int32,
    scale: tl.float32, cap: tl.float32, kept_scale: tl.float32,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    REST: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    ALIGN: tl.constexpr, RUNNING: tl.constexpr, SINK: tl.constexpr, BIASED: tl.constexpr,
    CAPPED: tl.constexpr, DISTANCES: tl.constexpr, DROPPING: tl.constexpr, PLACED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, SHARED: tl.constexpr, CUT: tl.constexpr,
):
    """Writes out [B, heads, Nq, Dv] and lse [B, heads, Nq] over listed keys.

    A row of `keys` [B or 1, tables, Nq, slots] begins with its keys; `counts` says how many they
    are. With RUNNING, results are merged into `out` (float32) and `lse`; with SINK, `lse` has the
    sinks at first, and `out` counts as zeros. With SHARED, the first channels of a key are its
    value, and are loaded once. With CUT, a program takes one of `pieces` parts of a row's keys; it
    writes to piece_out [B, heads, Nq, pieces, Dv] and piece_lse, for `list_merge_kernel`.
    """
    program = tl.program_id(0).to(tl.int64)
    part, row, batch, of_list, kv_head, table = _query_of(
        program, parts * pieces, q_len, lists, heads, kv_heads, tables
    )
    part, piece = part // pieces, part % pieces
    group = heads // lists
    in_group = part * ROWS + tl.arange(0, ROWS)
    real = in_group < group
    head = of_list * group + in_group
    from_row = query + batch * elements(q_batch, ALIGN) + row * elements(q_token, ALIGN)
    from_row += head * elements(q_head, ALIGN)
    q = _rows_of(from_row, real, HEAD_DIM, PADDED_DIM)
    if REST:
        q_rest = _rest_of(from_row, real, HEAD_DIM, REST)
    key += batch * elements(k_batch, ALIGN) + kv_head * elements(k_head, ALIGN)
    value += batch * elements(v_batch, ALIGN) + kv_head * elements(v_head, ALIGN)
    k_token, v_token = elements(k_token, ALIGN), elements(v_token, ALIGN)
    listed = batch * keys_batch + (table * q_len + row) * slots
    of_row = (batch * heads + head) * q_len + row
    if DISTANCES or DROPPING:
        position, depth, stream = _place_of_query(
            of_query, batch, row, q_start, q_len, query_batch, PLACED
        )
    if DISTANCES:
        biases = distance_bias + batch * distance_batch + head * distance_head
    if DROPPING:
        a, b = words_of(tl.load(seed + batch * seed_batch + stream), head, branch, position)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_VALUE_DIM], tl.float32)
    count = tl.load(counts + batch * counts_batch + table * q_len + row)
    begin = 0
    if CUT:
        each = (count + pieces * KEYS - 1) // (pieces * KEYS) * KEYS
        begin = piece * each
        count = tl.minimum(begin + each, count)
    ahead = _keys_at(keys + listed, begin, count, KEYS)
    for first in tl.range(begin, count, KEYS, num_stages=STAGES):
        slot, token = first + tl.arange(0, KEYS), ahead
        ahead = _keys_at(keys + listed, first + KEYS, count, KEYS)
        there = token >= 0
        k_rows = key + token * k_token
        k = _rows_of(k_rows, there, HEAD_DIM, PADDED_DIM)
        v = k if SHARED else _rows_of(value + token * v_token, there, VALUE_DIM, PADDED_VALUE_DIM)
        score = products(q, k, from_row, k_rows, real, there, HEAD_DIM, PRECISION)
        if REST:
            k_rest = _rest_of(k_rows, there, HEAD_DIM, REST)
            if k.dtype != tl.float32:  # `products` reads all of wide float32 rows
                score = tl.dot(q_rest, tl.trans(k_rest), score, input_precision=PRECISION)
        if CAPPED:
            score, _ = capped(score, scale, cap)
        else:
            score *= scale
        if DISTANCES or DROPPING:
            key_position, key_depth = _place_of_key(
                of_key, batch, kv_head, token, there, kv_len, kv_heads, key_batch, key_heads, PLACED
            )
        if DISTANCES:
            distance = apart(key_depth, depth)[None, :]
            score += bias_at(biases[:, None], distance, reach, real[:, None] & there[None, :])
        if BIASED:
            own = tl.load(place + listed + slot, mask=there, other=0)
            added = bias + of_row[:, None] * slots + own[None, :]
            score += tl.load(added, mask=real[:, None] & there[None, :], other=0.0)
        score = tl.where(there[None, :], score, float("-inf"))
        now = tl.maximum(highest, tl.max(score, 1))
        base = tl.where(now == float("-inf"), 0.0, now)
        weight = tl.exp2((score - base[:, None]) * _LOG2_E)
        decay = tl.exp2((highest - base) * _LOG2_E)
        total = total * decay + tl.sum(weight, 1)
        if DROPPING:
            stays = kept_pairs(a[:, None], b[:, None], key_position[None, :], least)
            weight = tl.where(stays, weight, 0.0)
        acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        highest = now

    some = total != 0.0  # true for NaN, so that the result is NaN too
    total = tl.where(some, total, 1.0)
    acc /= total[:, None]
    if DROPPING:
        acc *= kept_scale
    natural = tl.where(some, highest + tl.log(total), float("-inf"))
    dim = tl.arange(0, PADDED_VALUE_DIM)
    kept = real[:, None] & (dim < VALUE_DIM)[None, :]
    if CUT:
        place = of_row * pieces + piece
        tl.store(piece_out + place[:, None] * VALUE_DIM + dim[None, :], acc, mask=kept)
        tl.store(piece_lse + place, natural, mask=real)
    else:
        to_out = out + of_row[:, None] * VALUE_DIM + dim[None, :]
        if RUNNING:
            earlier = tl.load(to_out, mask=kept, other=0.0)
            earlier_lse = tl.load(lse + of_row, mask=real, other=float("-inf"))
            acc, natural = merge(earlier, earlier_lse, acc, natural)
        elif SINK:
            sinks = tl.load(lse + of_row, mask=real, other=float("-inf"))
            acc, natural = merge(tl.zeros_like(acc), sinks, acc, natural)
        tl.store(to_out, acc.to(out.dtype.element_ty), mask=kept)
        tl.store(lse + of_row, natural, mask=real)


@kernel
def list_merge_kernel(
    piece_out, piece_lse, out, lse, pieces: tl.int64,
    VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr, RUNNING: tl.constexpr,
    SINK: tl.constexpr,
):
    """Merges the results of the pieces of one row's keys into out [B, heads, Nq, Dv] and lse."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, PADDED_VALUE_DIM)[None, :]
    to_out, kept = out + row * VALUE_DIM + dim, dim < VALUE_DIM
    to_lse = lse + row + tl.arange(0, 1)
    acc = tl.load(to_out, mask=kept & RUNNING, other=0.0).to(tl.float32)
    highest = tl.load(to_lse) if RUNNING or SINK else tl.full([1], float("-inf"), tl.float32)
    total = tl.where(highest == float("-inf"), 0.0, 1.0)
    for begin in range(0, pieces, _PIECES):
        piece = begin + tl.arange(0, _PIECES)
        there, place = piece < pieces, row * pieces + piece
        other_lse = tl.load(piece_lse + place, mask=there, other=float("-inf"))
        other = tl.load(
            piece_out + place[:, None] * VALUE_DIM + dim, mask=there[:, None] & kept, other=0.0
        )
        acc, total, highest = add_pieces(
            acc, total, highest, other[:, None, :], other_lse[:, None]
        )
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(to_out, (acc / total[:, None]).to(out.dtype.element_ty), mask=kept)
    tl.store(to_lse, highest + tl.log(total))


@kernel
def list_query_kernel(
    query, key, value, grad_out, keys, counts, place, bias, distance_bias, seed, of_query, of_key,
    delta, row_lse, grad_query, grad_bias, grad_score,
    q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64, k_batch: tl.int64, k_head: tl.int64,
    k_token: tl.int64, v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64, g_batch: tl.int64,
    g_head: tl.int64, g_token: tl.int64, keys_batch: tl.int64, counts_batch: tl.int64,
    query_batch: tl.int64, key_batch: tl.int64, key_heads: tl.int64, distance_batch: tl.int64,
    distance_head: tl.int64, seed_batch: tl.int64, row_head: tl.int64, q_start: tl.int64,
    q_len: tl.int64, kv_len: tl.int64, slots: tl.int64,
    lists: tl.int32, heads: tl.int32, kv_heads: tl.int32, tables: tl.int32, parts: tl.int32,
    reach: tl.int32, branch: tl.int32, least: tl.int32,
    scale: tl.float32, cap: tl.float32, kept_scale: tl.float32,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    REST: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    ALIGN: tl.constexpr, RUNNING: tl.constexpr, BIASED: tl.constexpr, CAPPED: tl.constexpr,
    DISTANCES: tl.constexpr, LEARNS_DISTANCES: tl.constexpr, DROPPING: tl.constexpr,
    PLACED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, SHARED: tl.constexpr,
):
    """Writes dQ [B, heads, Nq, D]; with RUNNING, it adds to what memory holds.

    With BIASED, it also writes dS [B, heads, Nq, slots] by the place of each key in the bias; with
    LEARNS_DISTANCES, by slot. Slots without a key are not written.
    """
    program = tl.program_id(0).to(tl.int64)
    part, row, batch, of_list, kv_head, table = _query_of(
        program, parts, q_len, lists, heads, kv_heads, tables
    )
    group = heads // lists
    in_group = part * ROWS + tl.arange(0, ROWS)
    real = in_group < group
    head = of_list * group + in_group
    from_row = query + batch * elements(q_batch, ALIGN) + row * elements(q_token, ALIGN)
    from_row += head * elements(q_head, ALIGN)
    q = _rows_of(from_row, real, HEAD_DIM, PADDED_DIM)
    if REST:
        q_rest = _rest_of(from_row, real, HEAD_DIM, REST)
        dq_rest = tl.zeros([ROWS, REST], tl.float32)
    from_grad = grad_out + batch * elements(g_batch, ALIGN) + row * elements(g_token, ALIGN)
    from_grad += head * elements(g_head, ALIGN)
    do = _rows_of(from_grad, real, VALUE_DIM, PADDED_VALUE_DIM)
    key += batch * elements(k_batch, ALIGN) + kv_head * elements(k_head, ALIGN)
    value += batch * elements(v_batch, ALIGN) + kv_head * elements(v_head, ALIGN)
    k_token, v_token = elements(k_token, ALIGN), elements(v_token, ALIGN)
    listed = batch * keys_batch + (table * q_len + row) * slots
    of_row = (batch * heads + head) * q_len + row
    in_rows = (batch * heads + head) * row_head + row
    d = tl.load(delta + in_rows, mask=real, other=0.0)
    sums_to = tl.load(row_lse + in_rows, mask=real, other=float("inf"))
    if DISTANCES or DROPPING:
        position, depth, stream = _place_of_query(
            of_query, batch, row, q_start, q_len, query_batch, PLACED
        )
    if DISTANCES:
        biases = distance_bias + batch * distance_batch + head * distance_head
    if DROPPING:
        a, b = words_of(tl.load(seed + batch * seed_batch + stream), head, branch, position)
    dq = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    count = tl.load(counts + batch * counts_batch + table * q_len + row)
    ahead = _keys_at(keys + listed, 0, count, KEYS)
    for first in tl.range(0, count, KEYS, num_stages=STAGES):
        slot, token = first + tl.arange(0, KEYS), ahead
        if REST and q.dtype == tl.float32:  # no registers are left to load a step ahead
            token = _keys_at(keys + listed, first, count, KEYS)
        else:
            ahead = _keys_at(keys + listed, first + KEYS, count, KEYS)
        there = token >= 0
        pairs = real[:, None] & there[None, :]
        k_rows, v_rows = key + token * k_token, value + token * v_token
        k = _rows_of(k_rows, there, HEAD_DIM, PADDED_DIM)
        v = k if SHARED else _rows_of(v_rows, there, VALUE_DIM, PADDED_VALUE_DIM)
        score = products(q, k, from_row, k_rows, real, there, HEAD_DIM, PRECISION)
        if REST:
            k_rest = _rest_of(k_rows, there, HEAD_DIM, REST)
            if k.dtype != tl.float32:  # `products` reads all of wide float32 rows
                score = tl.dot(q_rest, tl.trans(k_rest), score, input_precision=PRECISION)
        if CAPPED:
            score, slope = capped(score, scale, cap)
        else:
            score *= scale
        if DISTANCES or DROPPING:
            key_position, key_depth = _place_of_key(
                of_key, batch, kv_head, token, there, kv_len, kv_heads, key_batch, key_heads, PLACED
            )
        if DISTANCES:
            score += bias_at(biases[:, None], apart(key_depth, depth)[None, :], reach, pairs)
        if BIASED:
            own = tl.load(place + listed + slot, mask=there, other=0)
            in_bias = of_row[:, None] * slots + own[None, :]
            score += tl.load(bias + in_bias, mask=pairs, other=0.0)
        power = tl.where(there[None, :], (score - sums_to[:, None]) * _LOG2_E, float("-inf"))
        weight = weight_of(power)
        dweight = products(do, v, from_grad, v_rows, real, there, VALUE_DIM, PRECISION)
        if DROPPING:
            stays = kept_pairs(a[:, None], b[:, None], key_position[None, :], least)
            dweight = tl.where(stays, dweight * kept_scale, 0.0)
        dscore = tl.where(there[None, :], (dweight - d[:, None]) * weight, 0.0)
        if BIASED:
            tl.store(grad_bias + in_bias, dscore, mask=pairs)
        if LEARNS_DISTANCES:
            tl.store(grad_score + of_row[:, None] * slots + slot[None, :], dscore, mask=pairs)
        if CAPPED:
            dscore *= slope
        dq = tl.dot(dscore.to(k.dtype), k, dq, input_precision=PRECISION)
        if REST:
            dq_rest = tl.dot(dscore.to(k.dtype), k_rest, dq_rest, input_precision=PRECISION)

    _store_rows(grad_query + of_row * HEAD_DIM, dq * scale, real, 0, HEAD_DIM, PADDED_DIM, RUNNING)
    if REST:
        _store_rows(
            grad_query + of_row * HEAD_DIM, dq_rest * scale, real, _FIRST, HEAD_DIM, REST, RUNNING
        )


@triton.jit
def _store_rows(
    pointers, rows, real,
    FIRST: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, RUNNING: tl.constexpr,
):
    """Writes rows [rows, PADDED_DIM] to the channels from FIRST on.

    With RUNNING, it adds them to what memory holds.
    """
    dim = FIRST + tl.arange(0, PADDED_DIM)
    to = pointers[:, None] + dim[None, :]
    kept = real[:, None] & (dim < HEAD_DIM)[None, :]
    if RUNNING:
        rows += tl.load(to, mask=kept, other=0.0)
    tl.store(to, rows.to(pointers.dtype.element_ty), mask=kept)


@kernel
def list_key_kernel(
    query, key, value, grad_out, order, start, place, bias, distance_bias, seed, of_query, of_key,
    delta, row_lse, grad_key, grad_value,
    q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64, k_batch: tl.int64, k_head: tl.int64,
    k_token: tl.int64, v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64, g_batch: tl.int64,
    g_head: tl.int64, g_token: tl.int64, order_batch: tl.int64, start_batch: tl.int64,
    keys_batch: tl.int64, query_batch: tl.int64, key_batch: tl.int64, key_heads: tl.int64,
    distance_batch: tl.int64, distance_head: tl.int64, seed_batch: tl.int64, row_head: tl.int64,
    q_start: tl.int64, q_len: tl.int64, kv_len: tl.int64, slots: tl.int64,
    lists: tl.int32, heads: tl.int32, kv_heads: tl.int32, tables: tl.int32, reach: tl.int32,
    branch: tl.int32, least: tl.int32,
    scale: tl.float32, cap: tl.float32, kept_scale: tl.float32,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr, ALIGN: tl.constexpr,
    RUNNING: tl.constexpr, BIASED: tl.constexpr, CAPPED: tl.constexpr, DISTANCES: tl.constexpr,
    DROPPING: tl.constexpr, PLACED: tl.constexpr,
):
    """Writes dK [B, kv heads, Nk, D] and dV [.., Dv] of one key; with RUNNING, adds to memory.

    `order` [B or 1, tables, Nq * slots] has the items of lists, as query * slots + slot, sorted by
    key, then by query; those of key k are from `start[k]` to `start[k + 1]`. Rows are pairs of an
    item and a head.
    """
    program = tl.program_id(0).to(tl.int64)
    token = program % kv_len
    kv_head = program // kv_len % kv_heads
    batch = program // kv_len // kv_heads
    group = heads // lists
    from_key = key + batch * elements(k_batch, ALIGN) + kv_head * elements(k_head, ALIGN)
    from_key += token * elements(k_token, ALIGN)
    from_value = value + batch * elements(v_batch, ALIGN) + kv_head * elements(v_head, ALIGN)
    from_value += token * elements(v_token, ALIGN)
    dim = tl.arange(0, PADDED_DIM)
    value_dim = tl.arange(0, PADDED_VALUE_DIM)
    k = tl.load(from_key + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    v = tl.load(from_value + value_dim, mask=value_dim < VALUE_DIM, other=0.0).to(tl.float32)
    dk = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    dv = tl.zeros([ROWS, PADDED_VALUE_DIM], tl.float32)
    if REST:
        rest = _FIRST + tl.arange(0, REST)
        k_rest = tl.load(from_key + rest, mask=rest < HEAD_DIM, other=0.0).to(tl.float32)
        dk_rest = tl.zeros([ROWS, REST], tl.float32)
    if DISTANCES or DROPPING:
        key_position, key_depth = _place_of_key(
            of_key, batch, kv_head, token, True, kv_len, kv_heads, key_batch, key_heads, PLACED
        )
    for of_kv_head in range(lists // kv_heads):  # each list that query heads of this kv head have
        of_list = kv_head * lists // kv_heads + of_kv_head
        table = of_list * tables // lists
        starts = start + batch * start_batch + table * (kv_len + 1) + token
        first, end = tl.load(starts) * group, tl.load(starts + 1) * group
        for begin in range(first, end, ROWS):
            number = begin + tl.arange(0, ROWS)
            real = number < end
            head = of_list * group + number % group
            at = order + batch * order_batch + table * q_len * slots + number // group
            entry = tl.load(at, mask=real, other=0).to(tl.int64)
            row = entry // slots
            from_row = query + batch * elements(q_batch, ALIGN) + row * elements(q_token, ALIGN)
            from_row += head * elements(q_head, ALIGN)
            q = _rows_of(from_row, real, HEAD_DIM, PADDED_DIM).to(tl.float32)
            from_grad = grad_out + batch * elements(g_batch, ALIGN)
            from_grad += row * elements(g_token, ALIGN) + head * elements(g_head, ALIGN)
            do = _rows_of(from_grad, real, VALUE_DIM, PADDED_VALUE_DIM).to(tl.float32)
            in_rows = (batch * heads + head) * row_head + row
            d = tl.load(delta + in_rows, mask=real, other=0.0)
            sums_to = tl.load(row_lse + in_rows, mask=real, other=float("inf"))
            score = tl.sum(q * k[None, :], 1)
            if REST:
                q_rest = _rest_of(from_row, real, HEAD_DIM, REST).to(tl.float32)
                score += tl.sum(q_rest * k_rest[None, :], 1)
            if CAPPED:
                score, slope = capped(score, scale, cap)
            else:
                score *= scale
            if DISTANCES or DROPPING:
                position, depth, stream = _place_of_query(
                    of_query, batch, row, q_start, q_len, query_batch, PLACED
                )
            if DISTANCES:
                biases = distance_bias + batch * distance_batch + head * distance_head
                score += bias_at(biases, apart(key_depth, depth), reach, real)
            if BIASED:
                in_list = batch * keys_batch + table * q_len * slots + entry
                own = tl.load(place + in_list, mask=real, other=0)
                in_bias = ((batch * heads + head) * q_len + row) * slots + own
                score += tl.load(bias + in_bias, mask=real, other=0.0)
            weight = weight_of(tl.where(real, (score - sums_to) * _LOG2_E, float("-inf")))
            dweight = tl.sum(do * v[None, :], 1)
            if DROPPING:
                of_row = tl.load(seed + batch * seed_batch + stream)
                a, b = words_of(of_row, head, branch, position)
                stays = kept_pairs(a, b, key_position, least)
                dweight = tl.where(stays, dweight * kept_scale, 0.0)
                dv += tl.where(stays, weight * kept_scale, 0.0)[:, None] * do
            else:
                dv += weight[:, None] * do
            dscore = tl.where(real, (dweight - d) * weight, 0.0)
            if CAPPED:
                dscore *= slope
            dk += dscore[:, None] * q
            if REST:
                dk_rest += dscore[:, None] * q_rest

    to_key = ((batch * kv_heads + kv_head) * kv_len + token) * HEAD_DIM
    _store_row(grad_key + to_key, tl.sum(dk, 0) * scale, dim, HEAD_DIM, RUNNING)
    if REST:
        _store_row(grad_key + to_key, tl.sum(dk_rest, 0) * scale, rest, HEAD_DIM, RUNNING)
    to_value = ((batch * kv_heads + kv_head) * kv_len + token) * VALUE_DIM
    _store_row(grad_value + to_value, tl.sum(dv, 0), value_dim, VALUE_DIM, RUNNING)


@triton.jit
def _store_row(pointer, row, dim, HEAD_DIM: tl.constexpr, RUNNING: tl.constexpr):
    """Writes channels `dim` of one row; with RUNNING, adds them to what memory holds."""
    if RUNNING:
        row += tl.load(pointer + dim, mask=dim < HEAD_DIM, other=0.0)
    tl.store(pointer + dim, row.to(pointer.dtype.element_ty), mask=dim < HEAD_DIM)


@kernel
def list_item_kernel(
    query, key, value, grad_out, keys, place, bias, distance_bias, seed, of_query, of_key, delta,
    row_lse, of_item,
    q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64, k_batch: tl.int64, k_head: tl.int64,
    k_token: tl.int64, v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64, g_batch: tl.int64,
    g_head: tl.int64, g_token: tl.int64, keys_batch: tl.int64, query_batch: tl.int64,
    key_batch: tl.int64, key_heads: tl.int64, distance_batch: tl.int64, distance_head: tl.int64,
    seed_batch: tl.int64, row_head: tl.int64, q_start: tl.int64, q_len: tl.int64, kv_len: tl.int64,
    slots: tl.int64, first_query: tl.int64, queries: tl.int64,
    lists: tl.int32, heads: tl.int32, kv_heads: tl.int32, tables: tl.int32, reach: tl.int32,
    branch: tl.int32, least: tl.int32,
    scale: tl.float32, cap: tl.float32, kept_scale: tl.float32,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    REST: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    ALIGN: tl.constexpr, BIASED: tl.constexpr, CAPPED: tl.constexpr, DISTANCES: tl.constexpr,
    DROPPING: tl.constexpr, PLACED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    """Writes dK and dV of each item of some queries' lists, summed over the heads of the list.

    `of_item` [B, kv heads, queries, lists of a kv head, slots, D + Dv] is float32, for the queries
    from `first_query` on. Slots without a key are not written. Rows of scores are keys here, and
    columns are heads, so that they can be summed over without a transposition.
    """
    program = tl.program_id(0).to(tl.int64)
    block, in_chunk, batch, of_list, kv_head, table = _query_of(
        program, (slots + KEYS - 1) // KEYS, queries, lists, heads, kv_heads, tables
    )
    row = first_query + in_chunk
    listed = batch * keys_batch + (table * q_len + row) * slots
    slot = block.to(tl.int64) * KEYS + tl.arange(0, KEYS)
    token = tl.load(keys + listed + slot, mask=slot < slots, other=-1).to(tl.int64)
    if tl.max(token, 0) < 0:
        return
    there = token >= 0
    k_rows = key + batch * elements(k_batch, ALIGN) + kv_head * elements(k_head, ALIGN)
    k_rows += token * elements(k_token, ALIGN)
    v_rows = value + batch * elements(v_batch, ALIGN) + kv_head * elements(v_head, ALIGN)
    v_rows += token * elements(v_token, ALIGN)
    k = _rows_of(k_rows, there, HEAD_DIM, PADDED_DIM)
    # also where values are in the keys: rows with two uses would be kept in registers
    v = _rows_of(v_rows, there, VALUE_DIM, PADDED_VALUE_DIM)
    dk = tl.zeros([KEYS, PADDED_DIM], tl.float32)
    dv = tl.zeros([KEYS, PADDED_VALUE_DIM], tl.float32)
    if REST:
        k_rest = _rest_of(k_rows, there, HEAD_DIM, REST)
        dk_rest = tl.zeros([KEYS, REST], tl.float32)
    if DISTANCES or DROPPING:
        position, depth, stream = _place_of_query(
            of_query, batch, row, q_start, q_len, query_batch, PLACED
        )
        key_position, key_depth = _place_of_key(
            of_key, batch, kv_head, token, there, kv_len, kv_heads, key_batch, key_heads, PLACED
        )
    if DISTANCES:
        distance = apart(key_depth, depth)[:, None]
    if DROPPING:
        word = tl.load(seed + batch * seed_batch + stream)
    if BIASED:
        own = tl.load(place + listed + slot, mask=there, other=0)
    query += batch * elements(q_batch, ALIGN) + row * elements(q_token, ALIGN)
    grad_out += batch * elements(g_batch, ALIGN) + row * elements(g_token, ALIGN)
    q_head, g_head = elements(q_head, ALIGN), elements(g_head, ALIGN)
    group = heads // lists
    for first in tl.range(0, group, ROWS, num_stages=STAGES):
        in_group = first + tl.arange(0, ROWS)
        real = in_group < group
        head = of_list * group + in_group
        pairs = there[:, None] & real[None, :]
        from_row, from_grad = query + head * q_head, grad_out + head * g_head
        q = _rows_of(from_row, real, HEAD_DIM, PADDED_DIM)
        do = _rows_of(from_grad, real, VALUE_DIM, PADDED_VALUE_DIM)
        in_rows = (batch * heads + head) * row_head + row
        d = tl.load(delta + in_rows, mask=real, other=0.0)
        sums_to = tl.load(row_lse + in_rows, mask=real, other=float("inf"))
        score = products(k, q, k_rows, from_row, there, real, HEAD_DIM, PRECISION, 64)
        if REST:
            q_rest = _rest_of(from_row, real, HEAD_DIM, REST)
            if k.dtype != tl.float32:  # `products` reads all of wide float32 rows
                score = tl.dot(k_rest, tl.trans(q_rest), score, input_precision=PRECISION)
        if CAPPED:
            score, slope = capped(score, scale, cap)
        else:
            score *= scale
        if DISTANCES:
            biases = distance_bias + batch * distance_batch + head * distance_head
            score += bias_at(biases[None, :], distance, reach, pairs)
        if BIASED:
            in_bias = ((batch * heads + head) * q_len + row)[None, :] * slots + own[:, None]
            score += tl.load(bias + in_bias, mask=pairs, other=0.0)
        power = tl.where(there[:, None], (score - sums_to[None, :]) * _LOG2_E, float("-inf"))
        weight = weight_of(power)
        dweight = products(v, do, v_rows, from_grad, there, real, VALUE_DIM, PRECISION, 64)
        kept = weight
        if DROPPING:
            a, b = words_of(word, head, branch, position)
            stays = kept_pairs(a[None, :], b[None, :], key_position[:, None], least)
            kept = tl.where(stays, weight * kept_scale, 0.0)
            dweight = tl.where(stays, dweight * kept_scale, 0.0)
        dv = tl.dot(kept.to(do.dtype), do, dv, input_precision=PRECISION)
        dscore = tl.where(there[:, None], (dweight - d[None, :]) * weight, 0.0)
        if CAPPED:
            dscore *= slope
        dk = tl.dot(dscore.to(q.dtype), q, dk, input_precision=PRECISION)
        if REST:
            dk_rest = tl.dot(dscore.to(q.dtype), q_rest, dk_rest, input_precision=PRECISION)

    apiece = lists // kv_heads
    number = ((batch * kv_heads + kv_head) * queries + in_chunk) * apiece + of_list % apiece
    to = of_item + (number * slots + slot) * (HEAD_DIM + VALUE_DIM)
    _store_rows(to, dk * scale, there, 0, HEAD_DIM, PADDED_DIM, False)
    if REST:
        _store_rows(to, dk_rest * scale, there, _FIRST, HEAD_DIM, REST, False)
    _store_rows(to + HEAD_DIM, dv, there, 0, VALUE_DIM, PADDED_VALUE_DIM, False)


@kernel
def list_sum_kernel(
    of_item, order, start, grad_key, grad_value,
    order_batch: tl.int64, start_batch: tl.int64, items: tl.int64, kv_len: tl.int64,
    kv_heads: tl.int32, tables: tl.int32, parts: tl.int32,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CHANNELS: tl.constexpr, COUNT: tl.constexpr,
    RUNNING: tl.constexpr,
):
    """Sums dK and dV of the items of one key, for some of the channels of both.

    `order` [B or 1, tables, items] has the items of lists sorted by key, then by query; those of
    key k are from `start[k]` to `start[k + 1]`. Items are added one by one to the sum before, so
    that a sum does not depend on how many queries a launch is for. With RUNNING, the sum before is
    in memory, and keys without items are left alone.
    """
    program = tl.program_id(0).to(tl.int64)
    part = program % parts
    token = program // parts % kv_len
    kv_head = program // parts // kv_len % kv_heads
    batch = program // parts // kv_len // kv_heads
    table = kv_head * tables // kv_heads
    starts = start + batch * start_batch + table * (kv_len + 1)
    first, end = tl.load(starts + token), tl.load(starts + token + 1)
    if RUNNING & (first >= end):
        return
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    of_key, of_value = channel < HEAD_DIM, channel >= HEAD_DIM
    real = channel < HEAD_DIM + VALUE_DIM
    of_value &= real
    number = (batch * kv_heads + kv_head) * kv_len + token
    to_key = grad_key + number * HEAD_DIM + channel
    to_value = grad_value + number * VALUE_DIM + (channel - HEAD_DIM)
    total = tl.zeros([CHANNELS], tl.float32)
    if RUNNING:
        total = tl.load(to_key, mask=of_key, other=0.0)
        total += tl.load(to_value, mask=of_value, other=0.0)
    order += batch * order_batch + table * items
    of_item += (batch * kv_heads + kv_head) * items * (HEAD_DIM + VALUE_DIM)
    for begin in range(first, end, COUNT):
        for i in tl.static_range(COUNT):  # the loads of these rows do not wait for one another
            there = begin + i < end
            item = tl.load(order + begin + i, mask=there, other=0)
            row = of_item + item * (HEAD_DIM + VALUE_DIM) + channel
            total += tl.load(row, mask=real & there, other=0.0)
    tl.store(to_key, total.to(grad_key.dtype.element_ty), mask=of_key)
    tl.store(to_value, total.to(grad_value.dtype.element_ty), mask=of_value)


@kernel
def list_distance_kernel(
    grad_score, order, start, grad,
    order_batch: tl.int64, start_batch: tl.int64, entries: tl.int64,
    lists: tl.int32, heads: tl.int32, size: tl.int32, splits: tl.int32,
    COUNT: tl.constexpr,
):
    """Writes grad [B, heads, size, splits]: partial sums of dS over the pairs of each distance.

    `order` [B or 1, lists, entries] has the items of lists sorted by distance; those of distance
    number r are from `start[r]` to `start[r + 1]`. A split is a part of this range.
    """
    program = tl.program_id(0).to(tl.int64)
    split = program % splits
    distance = program // splits % size
    head = program // splits // size % heads
    batch = program // splits // size // heads
    of_list = head * lists // heads
    starts = start + batch * start_batch + of_list * (size + 1) + distance
    begin, end = tl.load(starts), tl.load(starts + 1)
    each = (end - begin + splits - 1) // splits
    first = begin + split * each
    last = tl.minimum(first + each, end)
    total = tl.zeros([COUNT], tl.float32)
    for number in range(first, last, COUNT):
        at = number + tl.arange(0, COUNT)
        real = at < last
        entry = tl.load(order + batch * order_batch + of_list * entries + at, mask=real, other=0)
        total += tl.load(
            grad_score + (batch * heads + head) * entries + entry, mask=real, other=0.0
        )
    tl.store(grad + program, tl.sum(total, 0))
