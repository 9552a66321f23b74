"""Predicts the bytes of a call: inputs, results, saved tensors, workspace, layout.

The compiled CPU kernel itself returns the size of its workspace. For the backends gather and
triton, formulas here add up the buffers that their code allocates.
"""

from typing import NamedTuple

import torch

from ..ground.numerics import sum_dtype
from ..kernels.cpu.build import build_failure, library
from ..kernels.cpu.call import is_walked_shape, takes_whole_heads
from ..kernels.gather import set_workspace
from ..kernels.triton.lists import queries_at_a_time, sums_heads_first
from ..patterns.algebra import Frame
from .counts import Counts, PassCounts


class Memory(NamedTuple):
    """Bytes that one call of `attention` needs, by purpose."""

    inputs: int  # query, key and value; with backward also the gradient of the result
    results: int  # the result; with backward also the three gradients
    saved: int  # lse, which the forward pass returns and backward reads
    workspace: int  # most bytes of temporary buffers at once
    layout: int  # tables and bitmaps, which the layout cache stores

    @property
    def peak(self) -> int:
        """Sum of all parts: the most memory in use at once."""
        return sum(self)


class CallSizes(NamedTuple):
    """Sizes of a call of `attention` that do not affect its layout."""

    batch_size: int
    head_dim: int
    dtype: torch.dtype


class Tensors(NamedTuple):
    """Bytes of a call's tensors: query, key and value together, the result, and the lse."""

    inputs: int
    out: int
    lse: int

    def memory(self, forward: int, layout: int, later: int | None = None) -> Memory:
        """Builds a `Memory` from the workspaces of forward and of backward (`later`), if any."""
        if later is None:
            return Memory(
                inputs=self.inputs,
                results=self.out,
                saved=self.lse,
                workspace=forward,
                layout=layout,
            )
        # The gradients, as large as the inputs, do not exist yet during forward.
        workspace = max(forward - self.inputs, later)
        return Memory(
            inputs=self.inputs + self.out,
            results=self.out + self.inputs,
            saved=self.lse,
            workspace=workspace,
            layout=layout,
        )


def tensors_of(frame: Frame, call: CallSizes) -> Tensors:
    """Returns the bytes of a call's tensors, which do not depend on the pattern."""
    per_token = call.batch_size * call.head_dim * call.dtype.itemsize
    out = per_token * frame.num_heads * frame.q_len
    lse = call.batch_size * frame.num_heads * frame.q_len * sum_dtype(call.dtype).itemsize
    return Tensors(out + 2 * per_token * frame.num_kv_heads * frame.kv_len, out, lse)


def cpu_memory(counts: Counts, call: CallSizes, backward: bool) -> Memory:
    """Predicts the bytes of a call on the CPU; the compiled kernel itself reports its workspace."""
    if build_failure():  # `attention` then runs the backend "gather"
        return gather_memory(counts, call, backward)
    sizes = tensors_of(counts.frame, call)
    forward = _cpu_workspace(counts, call, False) + counts.list_bytes
    layout = counts.layout_bytes + counts.bitmap_bytes
    if not backward:
        return sizes.memory(forward, layout)
    if not takes_heads(counts, call):
        layout += sum(
            4 * p.num_tables * int(2 * p.entries + p.key_tiles + 1) for p in counts.passes
        )
    return sizes.memory(
        forward, layout, 2 * sizes.lse + counts.list_bytes + _cpu_workspace(counts, call, True)
    )


def _cpu_workspace(counts: Counts, call: CallSizes, backward: bool) -> int:
    """Asks the compiled CPU library how large the workspace of a pass over these counts is."""
    frame = counts.frame
    query, key = (
        torch.empty(call.batch_size, heads, length, call.head_dim, dtype=call.dtype, device="meta")
        for heads, length in ((frame.num_heads, frame.q_len), (frame.num_kv_heads, frame.kv_len))
    )
    group = frame.num_heads // frame.num_kv_heads
    numbers = [
        float(x)
        for p in counts.passes
        for x in (
            p.step, p.query_tiles, p.key_tiles, p.tables, p.longest[0], is_walked(p, group),
            p.entries, p.key_tiles_seen, p.ragged, p.pieces, p.pieces_by_key, *p.segmented,
        )
    ]  # fmt: skip
    options = counts.block_size, numbers, backward, takes_heads(counts, call)
    return int(library().workspace_bytes(query, key, key, *options))


def gather_memory(counts: Counts, call: CallSizes, backward: bool) -> Memory:
    """Predicts the bytes of a call of "gather", as if it used all of its allowed workspace."""
    sizes = tensors_of(counts.frame, call)
    limit = set_workspace(1)  # returns the previous limit, which the next line restores
    set_workspace(limit)
    scale = sum_dtype(call.dtype).itemsize // call.dtype.itemsize
    forward = limit + counts.list_bytes + (sizes.out * scale if scale > 1 else 0)
    layout = counts.layout_bytes + int(48 * sum(p.entries * p.num_tables for p in counts.passes))
    if not backward:
        return sizes.memory(forward, layout)
    sums = sizes.inputs * scale if scale > 1 else 0
    product = sizes.out * scale * (3 if scale > 1 else 1)
    return sizes.memory(
        forward, layout, 3 * sizes.lse + counts.list_bytes + max(product, sums + limit)
    )


def triton_memory(counts: Counts, call: CallSizes, backward: bool) -> Memory:
    """Predicts the bytes of a call of the GPU kernels.

    Several passes, and lists of keys beside them, are added up in float32.
    """
    sizes = tensors_of(counts.frame, call)
    layout = counts.layout_bytes
    walks = int(sum(p.num_tables * (16 * p.entries + 20 * p.query_tiles) for p in counts.passes))
    several = len(counts.passes) + len(counts.list_shapes) > 1
    forward = 2 * sizes.out if call.dtype.itemsize < 4 and several else 0
    forward += counts.list_bytes
    if not backward:
        return sizes.memory(forward, layout + walks)
    layout += int(sum(4 * p.num_tables * (2 * p.entries + p.key_tiles) for p in counts.passes))
    sums = 4 // call.dtype.itemsize * sizes.inputs if several else 0
    items = max((items_memory(counts.frame, call, x) for x in counts.list_shapes), default=0)
    return sizes.memory(
        forward, layout + 2 * walks, 3 * sizes.lse + sums + counts.list_bytes + items
    )


def items_memory(frame: Frame, call: CallSizes, shape: tuple[int, ...]) -> int:
    """Returns the bytes by which the GPU kernels sum dK and dV over lists of one shape.

    They are the items sorted by key, and where many heads share a list, the items' dK and dV in
    float32, for some queries at a time.
    """
    batches, tables, queries, slots = shape
    batch, lists = call.batch_size, max(tables, frame.num_kv_heads)
    if not sums_heads_first(frame.num_heads // lists, call.head_dim, call.dtype):
        return 12 * batches * tables * queries * slots  # an int32 key and an int64 index of each
    query = batch * frame.num_heads * queries * call.head_dim * call.dtype.itemsize
    of_query = 8 * batch * lists * slots * call.head_dim
    most = queries_at_a_time(queries, query, of_query)
    sums = 8 * batch * frame.num_kv_heads * frame.kv_len * call.head_dim
    in_parts = most < queries and call.dtype.itemsize < 4
    return most * (of_query + 12 * batches * tables * slots) + sums * in_parts


MEMORY = {"cpu": cpu_memory, "gather": gather_memory, "triton": triton_memory}
"""For each backend, the function that computes the bytes of a call."""


def takes_heads(counts: Counts, call: CallSizes) -> bool:
    """Whether backward on the CPU gives each thread whole kv heads, instead of parts of them."""
    return takes_whole_heads(call.batch_size * counts.frame.num_kv_heads, torch.get_num_threads())


def is_walked(p: PassCounts, group: float) -> bool:
    """Whether the CPU kernel's outer loop over a pass is by key tiles, not by query tiles."""
    return is_walked_shape(p.longest, (p.query_tiles, p.key_tiles), p.entries, group)
