"""Adapter to FlexAttention, for comparison and for devices that no other backend runs on.

Each pass becomes a `BlockMask` on a regular grid of blocks; tokens of dilated tiles are gathered
first. It is plain differentiable torch. On the CPU FlexAttention runs uncompiled, computes every
score and has no backward.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..layouts.bitmaps import unpack
from ..layouts.layout import BlockLayout, Pass, slots_of
from ..numerics import add_sink, capped, entry_of_distance, merge_attention, sum_dtype
from .problem import Problem

if TYPE_CHECKING:  # calls import it on first use, because it loads half of torch's compiler
    from torch.nn.attention.flex_attention import BlockMask

EXTRAS = frozenset(("softcap", "distance_bias", "sink"))
"""Options of a call, other than its scale, that this backend computes."""

_LEAST_HEAD_DIM = 16  # smallest head dim of FlexAttention's compiled kernel


def reasons(*tensors: Tensor) -> list[str]:
    """Returns why FlexAttention cannot run on these tensors; [] if it can."""
    faults = []
    if any(x.dim() and 0 in x.shape for x in tensors):
        faults.append("FlexAttention takes no dim of size 0")
    on_cpu = all(x.device.type == "cpu" for x in tensors)
    if tensors and on_cpu and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        faults.append("FlexAttention has no backward on the CPU; call it under torch.no_grad()")
    if not on_cpu and any(x.dtype == torch.float64 for x in tensors):
        faults.append("FlexAttention compiles no float64")
    if not on_cpu and any(x.dim() and x.shape[-1] < _LEAST_HEAD_DIM for x in tensors):
        faults.append(f"FlexAttention compiles head dims from {_LEAST_HEAD_DIM} on")
    return faults


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Computes attention over a layout; differentiable on GPUs.

    Cost: O((N / block_size)^2) memory for the block mask, and copies of the gathered tokens.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    layout, query, key, value = problem[:4]
    dtype = sum_dtype(query)
    outs = [query.new_zeros(*query.shape[:3], value.shape[3])]
    lses = [query.new_full(query.shape[:3], -torch.inf, dtype=dtype)]
    for p in layout.passes:
        if 0 in (p.query_start.shape[1], p.key_tile.shape[2], key.shape[2]):
            continue
        queries = _tokens(p.query_start, p.query_stop, p.step, layout.block_size)
        keys = _tokens(p.key_start, p.key_stop, p.step, layout.block_size)
        out, aux = _run(query.device.type)(
            _take(query, queries),
            _take(key, keys),
            _take(value, keys),
            score_mod=_score_mod(problem, p),
            block_mask=_block_mask(layout, p, queries >= 0, keys >= 0, query.shape[1]),
            scale=problem.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=True),
            kernel_options=kernel_options(layout.block_size, query.device.type),
        )
        slots = _slots_of_tokens(queries, query.shape[2])
        # for tokens that no tile contains, `slots` is -1, and `_take` takes the row added here
        lse = pad(aux.lse.to(dtype), (0, 1), value=-torch.inf)
        out = pad(torch.where((aux.lse == -torch.inf)[..., None], 0.0, out), (0, 0, 0, 1))
        outs.append(_take(out, slots))
        lses.append(_take(lse, slots))
    out, lse = merge_attention(outs, lses)
    if problem.sink is not None:
        merged, lse = add_sink(out.to(dtype), lse, problem.sink.to(dtype))
        out = merged.to(out.dtype)
    return out, lse


def _score_mod(problem: Problem, p: Pass) -> Callable[..., Tensor] | None:
    """Returns a score_mod for softcap and distance bias; None if the call has neither."""
    softcap, table, heads = problem.softcap, problem.distance_bias, problem.query.shape[1]
    if softcap is None and table is None:
        return None
    per_axis, size = heads // len(p.query_start), problem.layout.block_size
    origins = p.depths(problem.layout.frame.q_start)
    # positions [S, n] of all tokens; each of S groups of heads has its own tiles
    queries, keys = (slots_of(x, x, p.step, size)[0].flatten(1) for x in origins)

    def adjusted(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        score = capped(score, softcap)
        if table is not None:
            distance = keys[h // per_axis, k] - queries[h // per_axis, q]
            score = score + table[b, h, entry_of_distance(distance, table)]
        return score

    return adjusted


@cache
def _run(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=True)


def kernel_options(block_size: int, device: str) -> dict[str, Any] | None:
    """Returns options for kernel blocks that divide `block_size`; None if the default ones do."""
    divisor = block_size & -block_size
    if device == "cpu" or divisor >= 128:
        return None
    return {"BLOCK_M": divisor, "BLOCK_N": divisor}


def _tokens(start: Tensor, stop: Tensor, step: int, block_size: int) -> Tensor:
    """Lists the tokens of all tiles for each of S head groups: [S, n], padded with -1."""
    tokens, real = slots_of(start, stop, step, block_size)
    return torch.where(real, tokens, -1).flatten(1)


def _take(x: Tensor, tokens: Tensor) -> Tensor:
    """Gathers rows `tokens` [S, n] of x [B, H, N, ..] for S groups of heads; -1 is the last."""
    if torch.equal(tokens, torch.arange(x.shape[2], device=x.device)[None]):
        return x
    by_head = tokens.repeat_interleave(x.shape[1] // len(tokens), 0)
    index = torch.where(by_head < 0, x.shape[2] - 1, by_head).expand(x.shape[0], -1, -1)
    if x.dim() == 3:
        return x.gather(2, index)
    return x.gather(2, index[..., None].expand(*index.shape, x.shape[3]))


def _slots_of_tokens(tokens: Tensor, length: int) -> Tensor:
    """Returns [S, length]: index of each token in `tokens` [S, n], or -1 if it is missing."""
    slots = tokens.new_full((len(tokens), length + 1), -1)
    slot = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return slots.scatter(1, torch.where(tokens < 0, length, tokens), slot)[:, :-1]


def _block_mask(
    layout: BlockLayout, p: Pass, queries: Tensor, keys: Tensor, heads: int
) -> "BlockMask":
    """Builds a pass's BlockMask; `queries`, `keys` [axes, tokens] are False for padding."""
    from torch.nn.attention.flex_attention import BlockMask

    size, batch = layout.block_size, len(p.row_ptr)
    rows, columns = p.query_start.shape[1], p.key_start.shape[1]
    row = p.query_tiles().clamp(max=rows - 1)
    real = torch.arange(row.shape[2], device=row.device) < p.num_entries[..., None]
    block = torch.where(real, row * columns + p.key_tile, rows * columns)
    # index of each block's bitmap: -1 for all pairs, -2 for a block that is not visited
    number = p.bitmap.new_full((*row.shape[:2], rows * columns + 1), -2)
    number = number.scatter(2, block, p.bitmap)[..., :-1]
    number = number.repeat_interleave(heads // number.shape[1], 1).unflatten(2, (rows, columns))
    cells = unpack(p.bitmaps, size)
    cells = torch.cat((cells, cells.new_ones(1, size, size)))  # appends a bitmap of all pairs
    per_axis = heads // len(queries)

    def in_pattern(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        bitmap = number[b % batch, h, q // size, k // size]
        axis = h // per_axis
        index = torch.where(bitmap < 0, len(cells) - 1, bitmap)
        pairs = cells[index, q % size, k % size] & (bitmap > -2)
        return pairs & queries[axis, q] & keys[axis, k]

    visited, full = number > -2, number == -1
    whole = keys.unflatten(1, (columns, size)).all(-1)  # key tiles with padding need `in_pattern`
    full = full & whole.repeat_interleave(per_axis, 0)[None, :, None, :]
    partial = visited & ~full

    def lists(table: Tensor) -> tuple[Tensor, Tensor]:
        order = (~table).to(torch.int8).argsort(dim=-1, stable=True)
        return table.sum(-1, dtype=torch.int32), order.int()

    return BlockMask.from_kv_blocks(
        *lists(partial),
        *lists(full),
        BLOCK_SIZE=size,
        mask_mod=in_pattern,
        seq_lengths=(queries.shape[1], keys.shape[1]),
    )
