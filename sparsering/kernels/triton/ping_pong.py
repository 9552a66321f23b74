"""The forward kernel for Hopper GPUs whose two warp groups take turns at the tensor cores.

A program computes a query tile of 128 tokens: two warp groups have 64 rows each, and a further warp
(the producer) copies tiles by TMA. While the products of one warp group run, the other computes its
softmax. Plain Triton cannot express this on Hopper, so the kernel is written in Gluon. It computes
what `forward_kernel` does, for calls without options, and runs only where a tuning file names it.

A *queue* is shared memory for some tiles of keys (or values), filled in turn. Each stage of a queue
has two barriers: `ready` completes when the copy has arrived, `free` when both warp groups have
read it. A barrier's phases alternate between 0 and 1; before the first one completes, phase 1
counts as complete. `turn` has a barrier for each warp group, which the other one completes.

No GPU has run this kernel. `tests/kernels/test_ping_pong.py` runs its source on a CPU, with threads
for warp groups and copies that arrive at random times.
"""

from functools import partial

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .combine import merge
from .device import (
    elements,
    head_of,
    kernel,
    program_of,
    span_of,
    table_of,
    unit_at,
    visible_among,
)
from .walk import UNIT

_UNIT = gl.constexpr(UNIT)
_LOG2_E = gl.constexpr(1.4426950408889634)
_ROWS = gl.constexpr(64)  # rows of a warp group, which its products compute at once
_WARPS = gl.constexpr(4)  # warps of a warp group
_PRODUCER_WARPS = gl.constexpr(1)
_OWN = gl.constexpr(2)  # stages of a warp group's own memory for keys, and for values
_REGISTERS = gl.constexpr(240)  # of a thread of the second warp group; the first gets the rest
_PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _softmax(score, highest, total, scale):
    """Runs a step of the online softmax, without its product, as `_attend` in forward.py does.

    Returns (weight [rows, keys], highest [rows], total [rows], decay [rows] of earlier weights).
    """
    most = gl.max(score, 1)
    scaled = most * scale
    now = gl.maximum(highest, scaled)
    base = gl.where(now == float("-inf"), 0.0, now)
    # Subtract the maximum before any rounding, so that the highest score gives exactly 0.
    most = gl.where(most == float("-inf"), 0.0, most)
    shift = (scaled - base) * _LOG2_E
    weight = gl.exp2((score - most[:, None]) * (scale * _LOG2_E) + shift[:, None])
    decay = gl.exp2((highest - base) * _LOG2_E)
    return weight, now, total * decay + gl.sum(weight, 1), decay


@gluon.jit
def _produce(
    descriptors, queues, corners, start, first, masked,
    TILE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):
    """Copies the query tile, and the key and value tiles that need no mask, to shared memory."""
    query_tiles, key_tiles, value_tiles = descriptors
    q, k, v, q_ready, k_ready, k_free, v_ready, v_free = queues
    q_row, q_column, k_row, k_column, v_row, v_column = corners
    STEPS: gl.constexpr = TILE // KEYS
    mbarrier.expect(q_ready, TILE * query_tiles.block_type.shape[1] * 2)
    for half in gl.static_range(TILE // _ROWS):
        tma.async_copy_global_to_shared(
            query_tiles, [q_row + half * _ROWS, q_column], q_ready, q.index(half)
        )
    for i in range((masked - first) * STEPS):
        stage = i % STAGES
        earlier = (i // STAGES & 1) ^ 1
        token = gl.load(start + first + i // STEPS) + i % STEPS * KEYS
        mbarrier.wait(k_free.index(stage), earlier)
        mbarrier.expect(k_ready.index(stage), key_tiles.block_type.nbytes)
        tma.async_copy_global_to_shared(
            key_tiles, [k_row + token, k_column], k_ready.index(stage), k.index(stage)
        )
        mbarrier.wait(v_free.index(stage), earlier)
        mbarrier.expect(v_ready.index(stage), value_tiles.block_type.nbytes)
        tma.async_copy_global_to_shared(
            value_tiles, [v_row + token, v_column], v_ready.index(stage), v.index(stage)
        )


@gluon.jit
def _release(free):
    """Tells the producer that this warp group has read a stage of a queue.

    The barrier of threads comes first, because a single thread speaks for the whole group.
    """
    gl.thread_barrier()
    mbarrier.arrive(free, count=1)


@gluon.jit
def _keys_of(
    i, last, start, tokens, kv_len, STEPS: gl.constexpr, KEYS: gl.constexpr, CUT: gl.constexpr
):
    """Returns the first token of step i of the entries with a mask, and how many of KEYS exist.

    None exist from step `last` on.
    """
    some, entry, first_slot = i < last, i // STEPS, i % STEPS * KEYS
    token = gl.load(start + entry, mask=some, other=0).to(gl.int64) + first_slot
    real = gl.load(tokens + entry, mask=some, other=0) - first_slot
    if CUT:
        real = gl.minimum(real.to(gl.int64), kv_len - token).to(gl.int32)
    return token, gl.where(some, real, 0)


@gluon.jit
def _copy_rows(to, source, token, stride, real, layout: gl.constexpr):
    """Starts to copy rows, from `token` on, to `to` [rows, dims]; from row `real` on, it has 0."""
    row = gl.arange(0, to.shape[0], gl.SliceLayout(1, layout))
    column = gl.arange(0, to.shape[1], gl.SliceLayout(0, layout))
    pointers = source + token * stride + row.to(gl.int64)[:, None] * stride + column[None, :]
    async_copy.async_copy_global_to_shared(to, pointers, mask=(row < real)[:, None])


@gluon.jit
def _consume(
    queues, turn, own_k, own_v, tensors, unit, addresses, numbers,
    GROUP: gl.constexpr, TILE: gl.constexpr, WORD: gl.constexpr, KEYS: gl.constexpr,
    MASKED: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, CUT: gl.constexpr,
    RUNNING: gl.constexpr, SINK: gl.constexpr,
):
    """Computes and stores 64 rows of a query tile, as warp group GROUP (0 or 1).

    Tiles without a mask come from the queues. The warp group reads the others by pointers into its
    own stages of `own_k` and `own_v`, MASKED keys at a time.
    """
    q, k, v, q_ready, k_ready, k_free, v_ready, v_free = queues
    key, value, out, lse, piece_out, piece_lse, start, tokens, bitmap, words = tensors
    begin, stop, first, masked, end, cut = unit
    k_offset, v_offset, k_token, v_token, to_row, to_lse, to_piece = addresses
    bitmap_row, kv_len, scale = numbers
    STEPS: gl.constexpr = TILE // KEYS
    MASKED_STEPS: gl.constexpr = TILE // MASKED
    dtype: gl.constexpr = q.dtype
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, KEYS, 16])
    OF_MASKED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, MASKED, 16])
    OF_OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, HEAD_DIM, 16])
    OF_WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OF_OUT, 2)
    ROWS_OF_OUT: gl.constexpr = gl.SliceLayout(1, OF_OUT)
    ROWS_OF_SCORES: gl.constexpr = gl.SliceLayout(1, OF_SCORES)
    ROWS_OF_MASKED: gl.constexpr = gl.SliceLayout(1, OF_MASKED)
    q = q.index(GROUP)
    mbarrier.wait(q_ready, 0)

    highest = gl.full([_ROWS], float("-inf"), gl.float32, ROWS_OF_SCORES)
    total = gl.full([_ROWS], 0.0, gl.float32, ROWS_OF_SCORES)
    acc = gl.zeros([_ROWS, HEAD_DIM], gl.float32, OF_OUT)
    steps = (masked - first) * STEPS
    if steps > 0:
        none = gl.zeros([_ROWS, KEYS], gl.float32, OF_SCORES)
        mbarrier.wait(k_ready.index(0), 0)
        score = warpgroup_mma(q, k.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=(score,))
        _release(k_free.index(0))
        weight, highest, total, decay = _softmax(score, highest, total, scale)
        weight = gl.convert_layout(weight.to(dtype), OF_WEIGHTS)
        mbarrier.wait(k_ready.index(1 % STAGES), 1 // STAGES & 1, pred=steps > 1)
        for i in range(1, steps):
            # This turn issues the scores of step i and the product of step i - 1.
            stage, before = i % STAGES, (i - 1) % STAGES
            mbarrier.wait(turn.index(GROUP), ((i - 1) & 1) ^ (1 - GROUP))
            score = warpgroup_mma(
                q, k.index(stage).permute((1, 0)), none, use_acc=False, is_async=True
            )
            mbarrier.wait(v_ready.index(before), (i - 1) // STAGES & 1)
            sums = warpgroup_mma(weight, v.index(before), acc, is_async=True)
            mbarrier.arrive(turn.index(1 - GROUP), count=1)
            score = warpgroup_mma_wait(1, deps=(score,))
            _release(k_free.index(stage))
            next_weight, highest, total, decay = _softmax(score, highest, total, scale)
            next_weight = gl.convert_layout(next_weight.to(dtype), OF_WEIGHTS)
            # The next keys are awaited here, because the assembler moves no exponential across the
            # loop of this wait: the product of step i - 1 runs during the softmax of step i.
            following = (i + 1) % STAGES
            mbarrier.wait(k_ready.index(following), (i + 1) // STAGES & 1, pred=i + 1 < steps)
            acc, weight, next_weight = warpgroup_mma_wait(0, deps=(sums, weight, next_weight))
            _release(v_free.index(before))
            acc *= gl.convert_layout(decay, ROWS_OF_OUT)[:, None]
            weight = next_weight
        stage = (steps - 1) % STAGES
        mbarrier.wait(v_ready.index(stage), (steps - 1) // STAGES & 1)
        sums = warpgroup_mma(weight, v.index(stage), acc, is_async=True)
        acc, weight = warpgroup_mma_wait(0, deps=(sums, weight))

    highest = gl.convert_layout(highest, ROWS_OF_MASKED)
    total = gl.convert_layout(total, ROWS_OF_MASKED)
    none_masked = gl.zeros([_ROWS, MASKED], gl.float32, OF_MASKED)
    COPIED: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [_WARPS, 1], [1, 0]
    )
    keys = gl.arange(0, MASKED, gl.SliceLayout(0, OF_MASKED))
    slot = GROUP * _ROWS + gl.arange(0, _ROWS, ROWS_OF_MASKED)
    step, last = masked * MASKED_STEPS, end * MASKED_STEPS
    own = GROUP * _OWN
    token, real = _keys_of(step, last, start, tokens, kv_len, MASKED_STEPS, MASKED, CUT)
    _copy_rows(own_k.index(own + step % _OWN), key + k_offset, token, k_token, real, COPIED)
    _copy_rows(own_v.index(own + step % _OWN), value + v_offset, token, v_token, real, COPIED)
    async_copy.commit_group()
    for i in range(step, last):
        keep = (keys < real)[None, :]
        token, real = _keys_of(i + 1, last, start, tokens, kv_len, MASKED_STEPS, MASKED, CUT)
        after = own + (i + 1) % _OWN
        _copy_rows(own_k.index(after), key + k_offset, token, k_token, real, COPIED)
        _copy_rows(own_v.index(after), value + v_offset, token, v_token, real, COPIED)
        async_copy.commit_group()
        async_copy.wait_group(1)  # for the copies of step i; those of step i + 1 may be on the way
        fence_async_shared()
        gl.thread_barrier()
        now = own + i % _OWN
        score = warpgroup_mma(
            q, own_k.index(now).permute((1, 0)), none_masked, use_acc=False, is_async=True
        )
        bits = visible_among(
            words, gl.load(bitmap + i // MASKED_STEPS), bitmap_row + slot, keys[None, :],
            i % MASKED_STEPS * MASKED, TILE, WORD, MASKED,
        )
        score = warpgroup_mma_wait(0, deps=(score,))
        score = gl.where((bits != 0) & keep, score, float("-inf"))
        weight, highest, total, decay = _softmax(score, highest, total, scale)
        acc *= gl.convert_layout(decay, ROWS_OF_OUT)[:, None]
        weight = gl.convert_layout(weight.to(dtype), OF_WEIGHTS)
        sums = warpgroup_mma(weight, own_v.index(now), acc, is_async=True)
        acc, weight = warpgroup_mma_wait(0, deps=(sums, weight))
        gl.thread_barrier()  # all warps have read this stage, which the next copies overwrite
    async_copy.wait_group(0)

    highest = gl.convert_layout(highest, ROWS_OF_OUT)
    total = gl.convert_layout(total, ROWS_OF_OUT)
    some = total != 0.0  # true for NaN, so that the result is NaN too
    total = gl.where(some, total, 1.0)
    acc /= total[:, None]
    natural = gl.where(some, highest + gl.log(total), float("-inf"))
    slot = GROUP * _ROWS + gl.arange(0, _ROWS, ROWS_OF_OUT)
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, OF_OUT))[None, :]
    position = begin + slot
    exists = position < stop
    kept = exists[:, None] & (dim < HEAD_DIM)
    if cut >= 0:
        place = to_piece + slot
        gl.store(piece_lse + place, natural, mask=exists)
        gl.store(piece_out + place[:, None] * HEAD_DIM + dim, acc, mask=kept)
    else:
        to_out = out + (to_row + position * HEAD_DIM)[:, None] + dim
        of_lse = lse + to_lse + position
        if RUNNING:
            acc, natural = merge(
                gl.load(to_out, mask=kept, other=0.0),
                gl.load(of_lse, mask=exists, other=float("-inf")), acc, natural,
            )
        elif SINK:
            acc, natural = merge(
                gl.zeros_like(acc), gl.load(of_lse, mask=exists, other=float("-inf")), acc, natural
            )
        gl.store(to_out, acc.to(out.dtype.element_ty), mask=kept)
        gl.store(of_lse, natural, mask=exists)


@partial(kernel, jit=gluon.jit)
def ping_pong_kernel(
    query_tiles, key_tiles, value_tiles, key, value, out, lse, piece_out, piece_lse,
    units, start, tokens, bitmap, words, tile_start, tile_stop,
    q_batch: gl.int64, q_head: gl.int64, q_side: gl.int64, q_token: gl.int64,
    k_batch: gl.int64, k_head: gl.int64, k_side: gl.int64, k_token: gl.int64,
    v_batch: gl.int64, v_head: gl.int64, v_side: gl.int64, v_token: gl.int64,
    o_batch: gl.int64, o_head: gl.int64, lse_batch: gl.int64, lse_head: gl.int64,
    num_units: gl.int64, num_entries: gl.int64, num_tiles: gl.int64, num_slots: gl.int64,
    num_heads: gl.int32, group: gl.int32, first_head: gl.int32, all_heads: gl.int32,
    tables: gl.int32, table_batches: gl.int32, axes: gl.int32, bitmap_row: gl.int32,
    kv_len: gl.int64, scale: gl.float32,
    TILE: gl.constexpr, WORD: gl.constexpr, KEYS: gl.constexpr, MASKED: gl.constexpr,
    HEAD_DIM: gl.constexpr, ALIGN: gl.constexpr, RUNNING: gl.constexpr, SINK: gl.constexpr,
    CUT: gl.constexpr, STAGES: gl.constexpr,
):
    """Writes out [B, heads, Nq, D] and lse [B, heads, Nq] of units, as `forward_kernel` does."""
    _, unit, head, batch = program_of(1, 1, num_units, num_heads, group)
    table, axis = table_of(batch, first_head + head, all_heads, tables, table_batches, axes)
    units += (table * num_units + unit) * _UNIT
    tile, first, masked, end = unit_at(units)
    if tile < 0:
        return
    begin, stop = span_of(tile_start, tile_stop, axis, num_tiles, tile, 0, 1, True)
    if begin >= stop:
        return
    cut = gl.load(units + 4)
    kv_head = head // group
    k_token, v_token = elements(k_token, ALIGN), elements(v_token, ALIGN)
    q_token = elements(q_token, ALIGN)
    _, q_row, q_column = head_of(batch, head, q_batch, q_head, q_side, q_token, ALIGN, True)
    k_offset, k_row, k_column = head_of(
        batch, kv_head, k_batch, k_head, k_side, k_token, ALIGN, True
    )
    v_offset, v_row, v_column = head_of(
        batch, kv_head, v_batch, v_head, v_side, v_token, ALIGN, True
    )
    q_row += begin.to(gl.int32)
    start += table * num_entries
    tokens += table * num_entries
    bitmap += table * num_entries
    wide_head = head.to(gl.int64)
    to_row = batch * elements(o_batch, ALIGN) + wide_head * elements(o_head, ALIGN)
    to_lse = batch * lse_batch + wide_head * lse_head
    to_piece = ((batch * num_heads + wide_head) * num_slots + cut) * TILE

    dtype: gl.constexpr = key_tiles.dtype
    q = gl.allocate_shared_memory(dtype, [TILE // _ROWS, _ROWS, HEAD_DIM], query_tiles.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], key_tiles.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], value_tiles.layout)
    own_k = gl.allocate_shared_memory(dtype, [2 * _OWN, MASKED, HEAD_DIM], key_tiles.layout)
    own_v = gl.allocate_shared_memory(dtype, [2 * _OWN, MASKED, HEAD_DIM], value_tiles.layout)
    OF_BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [1], OF_BARRIERS)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], OF_BARRIERS)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], OF_BARRIERS)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], OF_BARRIERS)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], OF_BARRIERS)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], OF_BARRIERS)
    mbarrier.init(q_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=2)
    for own in gl.static_range(2):
        mbarrier.init(turn.index(own), count=1)
    fence_async_shared()  # so that copies by TMA see the barriers too

    descriptors = query_tiles, key_tiles, value_tiles
    queues = q, k, v, q_ready, k_ready, k_free, v_ready, v_free
    tensors = key, value, out, lse, piece_out, piece_lse, start, tokens, bitmap, words
    of_unit = begin, stop, first, masked, end, cut
    addresses = k_offset, v_offset, k_token, v_token, to_row, to_lse, to_piece
    corners = q_row, q_column, k_row, k_column, v_row, v_column
    numbers = bitmap_row, kv_len, scale
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    queues, turn, own_k, own_v, tensors, of_unit, addresses, numbers, 0,
                    TILE, WORD, KEYS, MASKED, HEAD_DIM, STAGES, CUT, RUNNING, SINK,
                ),
            ),
            (
                _consume,
                (
                    queues, turn, own_k, own_v, tensors, of_unit, addresses, numbers, 1,
                    TILE, WORD, KEYS, MASKED, HEAD_DIM, STAGES, CUT, RUNNING, SINK,
                ),
            ),
            (_produce, (descriptors, queues, corners, start, first, masked, TILE, KEYS, STAGES)),
        ],
        [_WARPS, _PRODUCER_WARPS],
        [_REGISTERS, _PRODUCER_REGISTERS],
    )
