"""The forward for Hopper, in Gluon: a warp that loads, warpgroups that hide their exponentials.

Tiles and results are those of `forward_kernel`, where nothing but masks is asked of it. Triton
orders that kernel's steps itself: scores, weights and values one after another, by all warps at
once. Here each part says when it does what. One warp copies tiles of keys and values into rings of
STAGES buffers, as far ahead as they are free. Each warpgroup has 64 rows; in step i it starts the
scores of i, then the values of i - 1, and weighs the scores while those values are multiplied.

A buffer is `full` when its bytes have come, and `empty` when each warpgroup has read it. With
IN_TURN two warpgroups start their products one after the other, so that one weighs while the other
multiplies.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .combine import merge
from .device import (
    bits_at,
    elements,
    from_table,
    head_of,
    integers_of,
    places_of,
    program_of,
    span_of,
    table_of,
    unit_at,
)
from .scores import weigh
from .walk import UNIT

_UNIT = tl.constexpr(UNIT)


@gluon.jit
def _blank(tile, real, KEYS: gl.constexpr, DIM: gl.constexpr):
    """Zeros in the rows of a tile from `real` on, by one warp.

    A tile lies in memory as squares of 8 rows and 64 columns, below one another, then beside.
    """
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    DOWN: gl.constexpr = KEYS // 8
    squares = tile._reinterpret(tile.dtype, [DIM // 64 * DOWN, 8, 64], tile.layout)
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, LINES))
    for i in range(gl.maximum(real, 0) // 8, DOWN):
        there = gl.expand_dims(i * 8 + row < real, 1)
        for beside in gl.static_range(DIM // 64):
            square = squares.index(beside * DOWN + i)
            square.store(gl.where(there, square.load(LINES), 0.0))
    fence_async_shared()


@gluon.jit
def _load(
    given, STEPS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr
):
    """What the loading warp does: the tiles of each step, into the next buffers.

    Values past the end of a tile may be no number: they are blanked before others may read.
    """
    key, value, rings, loaded, entries, counts, places = given
    k_row, k_column, v_row, v_column = places
    k_ring, v_ring, k_full, k_empty, v_full, v_empty = rings
    start, tokens, first = entries
    unmasked, count = counts
    BYTES: gl.constexpr = 2 * KEYS * DIM
    blanked = 0
    ahead = gl.load(start + first, mask=count > 0, other=0)
    for j in range(0, count):
        first_slot = j % STEPS * KEYS
        token = ahead + first_slot
        real = gl.load(tokens + first + j // STEPS, mask=j >= unmasked, other=STEPS * KEYS)
        real -= first_slot
        ahead = gl.load(start + first + (j + 1) // STEPS, mask=j + 1 < count, other=0)
        at = j % STAGES
        used = (j // STAGES + 1) & 1
        mbarrier.wait(k_empty.index(at), used)
        mbarrier.expect(k_full.index(at), BYTES)
        tma.async_copy_global_to_shared(
            key, [k_row + token, k_column], k_full.index(at), k_ring.index(at)
        )
        mbarrier.wait(v_empty.index(at), used)
        if real < KEYS:
            mbarrier.expect(loaded, BYTES)
            tma.async_copy_global_to_shared(
                value, [v_row + token, v_column], loaded, v_ring.index(at)
            )
            mbarrier.wait(loaded, blanked & 1)
            blanked += 1
            _blank(v_ring.index(at), real, KEYS, DIM)
            mbarrier.arrive(v_full.index(at), count=1)
        else:
            mbarrier.expect(v_full.index(at), BYTES)
            tma.async_copy_global_to_shared(
                value, [v_row + token, v_column], v_full.index(at), v_ring.index(at)
            )


@gluon.jit
def _add_values(
    acc, weight, decay, j, v_ring, v_full, STAGES: gl.constexpr, SUMS: gl.constexpr
):
    """Starts acc * decay + weight @ values of step j."""
    mbarrier.wait(v_full.index(j % STAGES), (j // STAGES) & 1)
    acc *= gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, SUMS)), 1)
    return warpgroup_mma(weight, v_ring.index(j % STAGES), acc, is_async=True)


@gluon.jit
def _step(
    acc, weight, decay, highest, total, j, count, q, slot, scale, rings, turns, masks,
    FIRST: gl.constexpr, MASKED: gl.constexpr, MINE: gl.constexpr, TILE: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, IN_TURN: gl.constexpr,
    SCORES: gl.constexpr, WEIGHTS: gl.constexpr, SUMS: gl.constexpr,
):
    """Weighs the keys of step j, and adds the values of step j - 1 unless it is the FIRST."""
    k_ring, v_ring, k_full, k_empty, v_full, v_empty = rings
    tokens, bitmap, words, first = masks
    if MASKED:
        e = first + j // (TILE // KEYS)
        first_slot = j % (TILE // KEYS) * KEYS
        real = gl.load(tokens + e) - first_slot
        keys = gl.expand_dims(gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES)), 0)
        slots = gl.expand_dims(slot, 1)
        bits = bits_at(words, gl.load(bitmap + e), slots, keys, first_slot, TILE, 32, KEYS)
        keep = gl.where(keys < real, bits, 0)
    else:
        keep = True
    at = j % STAGES
    if FIRST:
        mbarrier.wait(k_full.index(at), 0)
    if IN_TURN:
        mbarrier.wait(turns.index(MINE), j & 1)
    k = k_ring.index(at).permute((1, 0))
    none = gl.zeros([64, KEYS], gl.float32, SCORES)
    score = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
    if not FIRST:
        acc = _add_values(acc, weight, decay, j - 1, v_ring, v_full, STAGES, SUMS)
    if IN_TURN:
        mbarrier.arrive(turns.index(1 - MINE), count=1)
    score = warpgroup_mma_wait(0 if FIRST else 1, deps=(score,))
    mbarrier.arrive(k_empty.index(at), count=1)
    made, decay, highest, total = weigh(score, highest, total, 0.0, scale, keep, MASKED, False)
    made = gl.convert_layout(made.to(k_ring.dtype), WEIGHTS)
    # a wait in which the compiler moves no exponential past the one for the values
    more = j + 1 < count
    mbarrier.wait(k_full.index((j + 1) % STAGES), ((j + 1) // STAGES) & 1, pred=more)
    if not FIRST:
        acc, weight = warpgroup_mma_wait(0, deps=(acc, weight))
        mbarrier.arrive(v_empty.index((j - 1) % STAGES), count=1)
    return acc, made, decay, highest, total


@gluon.jit
def _write(
    acc, natural, to, to_lse, lines, rows, batch, strides, MINE: gl.constexpr, TILE: gl.constexpr,
    TOKENS: gl.constexpr, PACK: gl.constexpr, DIM: gl.constexpr, ALIGN: gl.constexpr,
    RUNNING: gl.constexpr, PIECE: gl.constexpr, SUMS: gl.constexpr,
):
    """Writes the results of 64 rows, of a PIECE or of a whole tile; see `forward_kernel`."""
    begin, stop, step, part, head, group = rows
    o_batch, o_head, lse_batch, lse_head = strides
    row = MINE * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))
    slot, position, heads, real = places_of(
        row, begin, stop, step, part, head, group, TILE, TOKENS, PACK
    )
    if PIECE:
        num_heads, num_slots, cut = lines
        place = ((batch * num_heads + heads) * num_slots + cut) * TILE + slot
        to_lse += place
        place *= DIM
    else:
        place = batch * elements(o_batch, ALIGN) + heads * elements(o_head, ALIGN)
        place += position.to(gl.int64) * DIM
        to_lse += batch * lse_batch + heads * lse_head + position
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, SUMS))
    to += gl.expand_dims(place, 1) + gl.expand_dims(dim, 0)
    kept = gl.expand_dims(real, 1)
    if RUNNING:
        acc, natural = merge(
            gl.load(to, mask=kept, other=0.0), gl.load(to_lse, mask=real, other=float("-inf")),
            acc, natural,
        )
    gl.store(to, acc.to(to.dtype.element_ty), mask=kept)
    gl.store(to_lse, natural, mask=real)


@gluon.jit
def _attend(
    given, MINE: gl.constexpr, TILE: gl.constexpr, TOKENS: gl.constexpr,
    PACK: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, ALIGN: gl.constexpr,
    RUNNING: gl.constexpr, STAGES: gl.constexpr, IN_TURN: gl.constexpr,
):
    """What a warpgroup does: 64 rows, from the queries to out and lse."""
    queries, buffers, masks, counts, rows, scale, batch, strides, results, pieces = given
    q_tile, rings, turns = buffers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    begin, stop, step, part, head, group = rows
    unmasked, count = counts
    query, q_batch, q_head, q_token = queries
    row = MINE * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    _, position, heads, real = places_of(
        row, begin, stop, step, part, head, group, TILE, TOKENS, PACK
    )
    dim = gl.expand_dims(gl.arange(0, DIM, layout=gl.SliceLayout(0, LINES)), 0)
    from_row = heads * elements(q_head, ALIGN) + position * elements(q_token, ALIGN)
    from_row += batch * elements(q_batch, ALIGN)
    kept = gl.expand_dims(real, 1)
    q = q_tile.slice(MINE * 64, 64)
    q.store(gl.load(query + (gl.expand_dims(from_row, 1) + dim), mask=kept, other=0.0))
    fence_async_shared()

    of_scores = MINE * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    slot = part * TOKENS + of_scores % TOKENS
    highest = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    decay = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, SCORES))
    weight = gl.zeros([64, KEYS], q_tile.dtype, WEIGHTS)
    acc = gl.zeros([64, DIM], gl.float32, SUMS)
    if count > 0:
        acc, weight, decay, highest, total = _step(
            acc, weight, decay, highest, total, 0, count, q, slot, scale, rings, turns,
            masks, True, True, MINE, TILE, KEYS, STAGES, IN_TURN, SCORES, WEIGHTS, SUMS,
        )
        for masked in gl.static_range(2):
            lower = gl.maximum(unmasked, 1) if masked else 1
            upper = count if masked else unmasked
            for j in range(lower, upper):
                acc, weight, decay, highest, total = _step(
                    acc, weight, decay, highest, total, j, count, q, slot, scale, rings,
                    turns, masks, False, masked == 1, MINE, TILE, KEYS, STAGES, IN_TURN,
                    SCORES, WEIGHTS, SUMS,
                )
        acc = _add_values(acc, weight, decay, count - 1, rings[1], rings[4], STAGES, SUMS)
        acc, weight = warpgroup_mma_wait(0, deps=(acc, weight))

    highest = gl.convert_layout(highest, gl.SliceLayout(1, SUMS))
    total = gl.convert_layout(total, gl.SliceLayout(1, SUMS))
    some = total != 0.0  # or NaN
    total = gl.where(some, total, 1.0)
    acc = acc / gl.expand_dims(total, 1)
    natural = gl.where(some, highest + gl.log(total), float("-inf"))
    out, lse = results
    piece_out, piece_lse, num_heads, num_slots, cut = pieces
    if cut >= 0:
        _write(
            acc, natural, piece_out, piece_lse, (num_heads, num_slots, cut), rows, batch, strides,
            MINE, TILE, TOKENS, PACK, DIM, ALIGN, False, True, SUMS,
        )
    else:
        _write(
            acc, natural, out, lse, (), rows, batch, strides, MINE, TILE, TOKENS, PACK, DIM, ALIGN,
            RUNNING, False, SUMS,
        )


def _kernel(function):
    return gluon.jit(function, do_not_specialize=integers_of(function))


@_kernel
def hopper_kernel(
    query, key_tiles, value_tiles, out, lse, piece_out, piece_lse,
    units, start, tokens, bitmap, words, tile_start, tile_stop,
    q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_side: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_side: tl.int64,
    o_batch: tl.int64, o_head: tl.int64, lse_batch: tl.int64, lse_head: tl.int64,
    step: tl.int64, num_units: tl.int64, num_entries: tl.int64,
    num_tiles: tl.int64, num_slots: tl.int64, num_heads: tl.int32, group: tl.int32,
    first_head: tl.int32, all_heads: tl.int32, tables: tl.int32, table_batches: tl.int32,
    axes: tl.int32, parts: tl.int32, scale: tl.float32,
    TILE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    PACK: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, ALIGN: tl.constexpr,
    RUNNING: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, IN_TURN: tl.constexpr,
):
    """Writes what `forward_kernel` writes; `key_tiles` and `value_tiles` are Gluon's."""
    GROUPS: gl.constexpr = ROWS // 64
    STEPS: gl.constexpr = TILE // KEYS
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
    cut = gl.load(units + 4)
    start, tokens, bitmap, _ = from_table(start, tokens, bitmap, bitmap, table, num_entries)
    kv_head = head // group
    _, k_row, k_column = head_of(batch, kv_head, k_batch, k_head, k_side, 0, ALIGN, True)
    _, v_row, v_column = head_of(batch, kv_head, v_batch, v_head, v_side, 0, ALIGN, True)

    KIND: gl.constexpr = key_tiles.dtype
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], KIND)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_tile = gl.allocate_shared_memory(KIND, [ROWS, HEAD_DIM], Q_LAYOUT)
    k_ring = gl.allocate_shared_memory(KIND, [STAGES, KEYS, HEAD_DIM], key_tiles.layout)
    v_ring = gl.allocate_shared_memory(KIND, [STAGES, KEYS, HEAD_DIM], value_tiles.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    loaded = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER).index(0)
    mbarrier.init(loaded, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    if IN_TURN:
        mbarrier.arrive(turns.index(0), count=1)

    rings = k_ring, v_ring, k_full, k_empty, v_full, v_empty
    entries = start, tokens, first
    counts = (masked - first) * STEPS, (end - first) * STEPS
    places = k_row, k_column, v_row, v_column
    copied = key_tiles, value_tiles, rings, loaded, entries, counts, places
    attended = (
        (query, q_batch, q_head, q_token), (q_tile, rings, turns),
        (tokens, bitmap, words, first), counts,
        (begin, stop, step.to(begin.dtype), part, head, group), scale, batch,
        (o_batch, o_head, lse_batch, lse_head),
        (out, lse), (piece_out, piece_lse, num_heads, num_slots, cut),
    )
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (attended, 0, TILE, TOKENS, PACK, KEYS, HEAD_DIM, ALIGN, RUNNING, STAGES,
                           IN_TURN)),
                (_attend, (attended, 1, TILE, TOKENS, PACK, KEYS, HEAD_DIM, ALIGN, RUNNING, STAGES,
                           IN_TURN)),
                (_load, (copied, STEPS, KEYS, HEAD_DIM, STAGES)),
            ],
            [4, 1],
            [240, 24],  # registers of a thread; the first warpgroup has 240 too
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (attended, 0, TILE, TOKENS, PACK, KEYS, HEAD_DIM, ALIGN, RUNNING, STAGES,
                           False)),
                (_load, (copied, STEPS, KEYS, HEAD_DIM, STAGES)),
            ],
            [1],
            [24],
        )
