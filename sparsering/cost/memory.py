"""Computes the bytes of a call by arithmetic: inputs, results, saved tensors, workspace, layout.

The formulas follow the kernels' own buffers: kernels/cpu/forward.h, backward.h and walk/, gather's
accumulators and workspace. The part of a buffer that a kernel never touches does not count.
"""

from typing import NamedTuple

import torch

from ..kernels.cpu.call import is_walked_shape, takes_whole_heads
from ..kernels.gather import set_workspace
from ..numerics import round_up, sum_dtype
from .work import PassWork, Work

_NEAR = 1 << 19  # these constants repeat those of the CPU kernel's headers
_SMALL_WAVE = 4 << 20
_KEYS_OF_A_STEP = 256


class Memory(NamedTuple):
    """Bytes of a call.

    Attributes:
        inputs: query, key and value; with backward also the gradient of the result.
        results: the result; with backward also the three gradients.
        saved: lse, which the forward pass returns and backward needs.
        workspace: largest size of temporary buffers, in addition to the others.
        layout: tables and bitmaps, which the layout cache stores.
    """

    inputs: int
    results: int
    saved: int
    workspace: int
    layout: int

    @property
    def peak(self) -> int:
        """Sum of all parts: the most memory in use at once."""
        return sum(self)


class Call(NamedTuple):
    """Sizes of a call's tensors, and the number of threads that compute it."""

    batch_size: int
    head_dim: int
    dtype: torch.dtype
    threads: int


def cpu_memory(work: Work, call: Call, backward: bool) -> Memory:
    """Bytes of a call of the compiled CPU kernel."""
    sizes = _Sizes(work, call)
    forward = _cpu_forward(work, call, sizes)
    layout = work.layout_bytes + work.bitmap_bytes
    if not backward:
        return sizes.memory(forward, layout)
    by_head = takes_heads(work, call)
    if not by_head:
        layout += sum(4 * p.tables * int(2 * p.entries + p.key_tiles + 1) for p in work.passes)
    later = 2 * sizes.lse + _cpu_backward(work, call, sizes, by_head)
    return sizes.memory(forward, layout, later)


def gather_memory(work: Work, call: Call, backward: bool) -> Memory:
    """Bytes of a call of the portable backend."""
    sizes = _Sizes(work, call)
    limit = set_workspace(1)
    set_workspace(limit)
    exact = sum_dtype(call.dtype).itemsize
    scale = exact // call.dtype.itemsize
    converted = sizes.out * scale if scale > 1 else 0
    plans = int(48 * sum(p.entries * p.tables for p in work.passes))
    forward = limit + converted
    layout = work.layout_bytes + plans
    if not backward:
        return sizes.memory(forward, layout)
    sums = sizes.inputs * scale if scale > 1 else 0
    product = sizes.out * scale * (3 if scale > 1 else 1)
    return sizes.memory(forward, layout, 3 * sizes.lse + max(product, sums + limit))


def triton_memory(work: Work, call: Call, backward: bool) -> Memory:
    """Bytes of a call of the GPU kernels, with float32 sums of several passes and table walks."""
    sizes = _Sizes(work, call)
    layout = work.layout_bytes
    walks = int(sum(p.tables * (16 * p.entries + 20 * p.query_tiles) for p in work.passes))
    half = call.dtype.itemsize < 4 and len(work.passes) > 1
    forward = 2 * sizes.out if half else 0
    if not backward:
        return sizes.memory(forward, layout + walks)
    layout += int(sum(4 * p.tables * (2 * p.entries + p.key_tiles) for p in work.passes))
    sums = 4 // call.dtype.itemsize * sizes.inputs if len(work.passes) > 1 else 0
    return sizes.memory(forward, layout + 2 * walks, 3 * sizes.lse + sums)


MEMORY = {"cpu": cpu_memory, "gather": gather_memory, "triton": triton_memory}
"""Functions that compute the bytes of a call, by backend."""


def takes_heads(work: Work, call: Call) -> bool:
    """Whether threads of the CPU kernel's backward pass take whole kv heads."""
    return takes_whole_heads(call.batch_size * work.frame.num_kv_heads, call.threads)


def multiplies_bfloat16(dtype: torch.dtype) -> bool:
    """Whether this machine multiplies a dtype in bfloat16."""
    features: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    able = torch.backends.mkldnn.is_available() and features.get("avx512_f")
    return dtype == torch.bfloat16 and bool(able)


def is_walked(p: PassWork, group: float) -> bool:
    """Whether the CPU kernel computes a pass key tile by key tile."""
    return is_walked_shape(p.longest, (p.query_tiles, p.key_tiles), p.entries, group)


class _Sizes:
    """Bytes and counts that all formulas of a call share."""

    def __init__(self, work: Work, call: Call) -> None:
        q_len, kv_len, heads, kv_heads, _ = work.frame
        d, size = call.head_dim, call.dtype.itemsize
        self.out = call.batch_size * heads * q_len * d * size
        self.inputs = self.out + 2 * call.batch_size * kv_heads * kv_len * d * size
        self.lse = call.batch_size * heads * q_len * sum_dtype(call.dtype).itemsize
        self.num_kv = call.batch_size * kv_heads
        self.group = heads // max(1, kv_heads)
        self.operand = 2 if multiplies_bfloat16(call.dtype) else 4
        self.in_place = size == self.operand and d % 2 == 0
        self.width = d + d % 2
        self.apart = size < 4 and len(work.passes) > 1  # half precision needs float32 sums
        self.passes = [p for p in work.passes if not is_walked(p, self.group)]
        self.walked = [p for p in work.passes if is_walked(p, self.group)]

    def memory(self, forward: int, layout: int, later: int | None = None) -> Memory:
        """Builds the `Memory` of a call with `forward` bytes of workspace, and `later` in backward.

        Backward allocates the gradients, as large as the inputs, only after forward is done.
        """
        if later is None:
            return Memory(self.inputs, self.out, self.lse, forward, layout)
        workspace = max(forward - self.inputs, later)
        results = self.out + self.inputs
        return Memory(self.inputs + self.out, results, self.lse, workspace, layout)


def _cpu_forward(work: Work, call: Call, x: _Sizes) -> int:
    block, d, t = work.block_size, call.head_dim, x.operand
    columns = max((p.key_tiles for p in x.passes), default=0)
    near = columns * block * (x.width + d) * t  # packed keys and values of a kv head
    alone = columns and near <= _NEAR and _shares_evenly(x.num_kv, call.threads)
    rows = max((p.query_tiles * x.group for p in x.passes), default=0)
    wave = _wave(x.num_kv, rows, near, call.threads) if columns else x.num_kv
    threads = min(call.threads, x.num_kv) if alone else 1
    heads = threads if alone else wave
    packed = max((heads * p.key_tiles_seen * block * _packed(p, x, d) for p in x.passes), default=0)
    sums = heads * x.group * work.frame.q_len * d * 4 if x.apart else 0
    queries = round_up(block, 32)
    scratch = 4 * queries * (2 * d + max(_KEYS_OF_A_STEP, block) + 4) + t * queries * x.width
    if t == 2:
        scratch += t * queries * max(_KEYS_OF_A_STEP, block)
    if not x.in_place:
        scratch += t * queries * x.width
    pieces = max((heads * x.group * p.pieces * block * (d + 1) * 4 for p in x.passes), default=0)
    items = heads * rows * 56
    walks = max((_walk_rows(p, x) * (t * x.width + 4 * (d + 2)) for p in x.walked), default=0)
    return int(packed + sums + pieces + items + call.threads * (scratch + walks))


def _cpu_backward(work: Work, call: Call, x: _Sizes, by_head: bool) -> int:
    block, d, t, w = work.block_size, call.head_dim, x.operand, x.width
    q_len, kv_len = work.frame.q_len, work.frame.kv_len
    columns = max((p.key_tiles for p in x.passes), default=0)
    most_columns = max((p.key_tiles for p in work.passes), default=0)
    queries = round_up(block, 32)
    scratch = 4 * (2 * queries * queries + 4 * queries * w) + t * 3 * queries * w
    scratch += t * (3 * queries * queries + 2 * queries * w) if t == 2 else 0
    strided = any(p.step > 1 for p in x.passes)
    packed = columns * block * t * (w if x.in_place and not strided else 2 * w + d)
    sums = 4 * (x.group * q_len * d + 2 * kv_len * d) if x.apart else 0
    walk = max((_walk_rows(p, x) * (t * (w + d) + 4 * (w + 2)) for p in x.walked), default=0)
    if by_head:
        own = scratch + packed + sums + walk + most_columns * block * (w + d) * 4
        return int(min(call.threads, x.num_kv) * own)
    rows = max((p.query_tiles * x.group for p in x.passes), default=0)
    room = columns * block * t * (2 * w + d)
    wave = _wave(x.num_kv, rows, room, call.threads) if columns else x.num_kv
    pieces = max((max(p.pieces * w, p.pieces_by_key * (w + d)) for p in x.passes), default=0)
    parts = wave * x.group * pieces * block * 4
    items = wave * (rows + columns) * 60
    if x.walked:
        size = max(p.key_tiles for p in x.walked) * block * (w + d)
        parts = max(parts, 4.0 * min(1 << 26, 8 * size * wave))
    return int(wave * (packed + sums) + parts + items + call.threads * (scratch + walk))


def _packed(p: PassWork, x: _Sizes, d: int) -> int:
    """Bytes of a packed key and value; a key in a suitable memory layout is not copied."""
    stays = p.step == 1 and x.in_place
    return x.operand * (d if stays else x.width + d)


def _walk_rows(p: PassWork, x: _Sizes) -> int:
    """Number of rows in a chunk of a pass that runs key tile by key tile."""
    most = p.key_tiles * p.query_tiles / max(1.0, p.entries)
    wanted = max(min(256 * most, 4096), 64 * most, 1024)
    return int(min(wanted, p.query_tiles * p.longest[0] * x.group)) + 64


def _shares_evenly(num_kv: int, threads: int) -> bool:
    return num_kv >= threads and 10 * round_up(num_kv, threads) <= 11 * num_kv


def _wave(num_kv: int, rows: int, size: int, threads: int) -> int:
    """Number of kv heads that are packed at a time."""
    busy = 64 * threads // max(rows, 1) + 1
    small = _SMALL_WAVE // max(size, 1)
    return max(1, min(num_kv, max(min(busy, (num_kv + 1) // 2), small)))
