"""The portable backend: gathers each query tile's keys and hands chunks of equal shape to batched
library kernels.

Forward is one scaled-dot-product call per chunk (torch's CPU flash kernel, which returns lse;
matmuls elsewhere), backward five batched matmuls per chunk. Scores exist for one chunk at a time:
extra memory is O(N) for accumulators and a workspace (`set_workspace`) that bounds the chunk. Any
device, any dtype; sums run in a fixed order.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout import BlockLayout
from ..merge import finite_or_zero
from .gather_plan import Chunk, chunks, plan

_MOST_JOINED_QUERIES = (
    2048  # tokens of one row forward: enough for the library kernels to run at full rate
)
_MOST_JOINED_QUERIES_BACKWARD = (
    256  # less where a row's scores exist as a whole, so that they stay in cache
)
_MOST_KEYS_BACKWARD = 1024
_workspace = {"bytes": 64 << 20}


def set_workspace(limit: int) -> int:
    """Sets how many bytes a call may gather at a time (default 64 MiB; at least one tile is).
    Returns the old limit.

    A smaller workspace saves memory, a larger one calls and merges. Accumulators of O(N) come on
    top.
    """
    if limit <= 0:
        raise ValueError(f"the workspace must be a positive number of bytes, got {limit}")
    old, _workspace["bytes"] = _workspace["bytes"], int(limit)
    return old


def forward(
    layout: BlockLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention over a layout.

    Args:
        query: [B, Hq, Nq, D]; key: [B, Hkv, Nk, D]; value: [B, Hkv, Nk, Dv].
        block_bias: [B, Hq, num_blocks] added to every score of an entry, or None.

    Returns: out [B, Hq, Nq, Dv] in the query's dtype, lse [B, Hq, Nq] float32 (float64 for
    float64).
    """
    batch, heads, q_len, _ = query.shape
    width = value.shape[-1]
    flash = query.device.type == "cpu"
    if flash and width != query.shape[-1]:  # that kernel takes one width
        widest = max(width, query.shape[-1])
        query, key, value = (F.pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))
    q, k, v, bias = _flat(query), _flat(key), _flat(value), _flat_bias(block_bias)
    dtype = _accumulator(query)
    out = torch.zeros(len(q), width, dtype=dtype, device=q.device)
    lse = torch.full((len(q),), -torch.inf, dtype=dtype, device=q.device)
    of_query, of_key, of_pair = (
        (q.shape[1] + 2 * v.shape[1]) * 4,
        (k.shape[1] + v.shape[1]) * k.itemsize,
        0,
    )
    if not flash:
        of_pair = 2 * lse.itemsize
    most_keys = max(1, _workspace["bytes"] // (2 * layout.block_size * of_key))
    for number, p in enumerate(layout.passes):
        joinable = max(1, _MOST_JOINED_QUERIES // layout.block_size) if bias is None else 1
        for group in plan(p, layout.block_size, joinable, most_keys):
            for chunk in chunks(
                layout, number, group, batch, _workspace["bytes"], (of_query, of_key, of_pair)
            ):
                rows = chunk.q.flatten()
                attend = _attend_flash if flash else _attend_matmul
                part, part_lse = attend(
                    q[rows].view(*chunk.q.shape, -1),
                    k[chunk.k][:, None],
                    v[chunk.k][:, None],
                    _additive(chunk, bias, q.dtype),
                    scale,
                )
                part, part_lse = (
                    part[..., :width].reshape(len(rows), width),
                    part_lse.reshape(len(rows)),
                )
                if group.fresh and number == 0:
                    out.index_copy_(0, rows, part.to(dtype))
                    lse.index_copy_(0, rows, part_lse.to(dtype))
                else:
                    _merge_rows(out, lse, rows, part, part_lse)
    return out.view(batch, heads, q_len, width).to(query.dtype), lse.view(batch, heads, q_len)


def backward(
    layout: BlockLayout,
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and block_bias.

    With the merged lse and `delta = rowsum(dO * O) - dlse`, every chunk of every pass computes `P
    = exp(s - lse)`, `dS = P * (dP - delta)`: no per-branch outputs are needed.
    """
    batch, dtype = len(query), _accumulator(query)
    q, k, v, do, bias = (
        _flat(query),
        _flat(key),
        _flat(value),
        _flat(grad_out),
        _flat_bias(block_bias),
    )
    delta = (do.to(dtype) * _flat(out).to(dtype)).sum(1) - grad_lse.reshape(-1).to(dtype)
    lse = torch.where(lse == -torch.inf, torch.inf, lse).reshape(
        -1
    )  # exp(s - inf) = 0 in rows without keys
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    dbias = None if bias is None else torch.zeros(bias.shape, dtype=dtype, device=bias.device)
    width = q.shape[1] + v.shape[1]
    bytes_per = (2 * width * dtype.itemsize, 2 * width * dtype.itemsize, 3 * dtype.itemsize)
    for number, p in enumerate(layout.passes):
        joinable = max(1, _MOST_JOINED_QUERIES_BACKWARD // layout.block_size) if bias is None else 1
        for group in plan(
            p, layout.block_size, joinable, max(1, _MOST_KEYS_BACKWARD // layout.block_size)
        ):
            for chunk in chunks(layout, number, group, batch, _workspace["bytes"], bytes_per):
                units, share, m = chunk.q.shape
                rows = chunk.q.flatten()
                cq, cdo = (
                    x[rows].to(dtype).view(units, share * m, -1) for x in (q, do)
                )  # [C, g * m, D]
                ck, cv = k[chunk.k].to(dtype), v[chunk.k].to(dtype)  # [C, n, D]
                score = _scores(cq * scale, ck, _additive(chunk, bias, dtype), share)
                weight = score.sub_(lse[rows].view(units, -1, 1)).exp_()  # P, [C, g * m, n]
                dv.index_add_(0, chunk.k.flatten(), (weight.mT @ cdo).flatten(0, 1))
                dscore = (cdo @ cv.mT).sub_(delta[rows].view(units, -1, 1)).mul_(weight)
                if chunk.cells is not None:
                    dscore.masked_fill_(
                        ~_grouped(chunk.cells, dscore, share), 0.0
                    )  # 0 * NaN of a masked key
                dq.index_add_(0, rows, (dscore @ ck).mul_(scale).flatten(0, 1))
                dk.index_add_(0, chunk.k.flatten(), (dscore.mT @ cq).mul_(scale).flatten(0, 1))
                if dbias is not None:
                    _add_bias_gradient(dbias, chunk, dscore.view(units, share, m, -1).sum(2))
    dq, dk, dv = (
        x.view(like.shape).to(like.dtype) for x, like in ((dq, query), (dk, key), (dv, value))
    )
    return (
        dq,
        dk,
        dv,
        None
        if dbias is None or block_bias is None
        else dbias.view(block_bias.shape).to(block_bias.dtype),
    )


def _attend_flash(
    q: Tensor, k: Tensor, v: Tensor, additive: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """[C, g, m, D] queries on [C, 1, n, D] keys by torch's CPU kernel; q and k as wide as v."""
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=additive, scale=scale
    )
    if additive is not None:  # that kernel says out = 0, lse = 0 for a row without keys
        lse = torch.where((additive == -torch.inf).all(-1), -torch.inf, lse)
    return out, lse


def _attend_matmul(
    q: Tensor, k: Tensor, v: Tensor, additive: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The same from matmuls, on any device."""
    units, share, m, _ = q.shape
    dtype = _accumulator(q)
    score = _scores(q.to(dtype).flatten(1, 2) * scale, k[:, 0].to(dtype), additive, share)
    highest = finite_or_zero(score.amax(-1, keepdim=True))
    weight = score.sub_(highest).exp_()
    total = weight.sum(-1, keepdim=True)
    out = (weight @ v[:, 0].to(dtype)) / torch.where(total == 0, 1.0, total)
    return out.view(units, share, m, -1), (highest + total.log()).view(units, share, m)


def _scores(q: Tensor, k: Tensor, additive: Tensor | None, share: int) -> Tensor:
    """[C, g * m, n] scores of scaled queries, masked pairs -inf whatever the keys hold."""
    score = q @ k.mT
    if additive is None:
        return score
    by_head = score.view(len(q), share, -1, k.shape[1])
    by_head.add_(additive.to(score.dtype)).masked_fill_(additive == -torch.inf, -torch.inf)
    return score


def _additive(chunk: Chunk, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to a chunk's scores, [C or 1, g or 1, m or 1, n]: the block bias, -inf where a
    pair is out.
    """
    additive = None
    if bias is not None:
        additive = (
            bias[chunk.entries]
            .gather(-1, chunk.slots[:, None].expand(-1, chunk.q.shape[1], -1))[:, :, None]
            .to(dtype)
        )
    if chunk.cells is not None:
        zero = torch.zeros((), dtype=dtype, device=chunk.q.device) if additive is None else additive
        additive = torch.where(chunk.cells[:, None], zero, -torch.inf)
    return additive


def _merge_rows(out: Tensor, lse: Tensor, rows: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges partial results into distinct rows of (out, lse), in place."""
    old = lse[rows]
    highest = finite_or_zero(torch.maximum(old, part_lse.to(lse.dtype)))
    a, b = (old - highest).exp(), (part_lse.to(lse.dtype) - highest).exp()
    total = torch.where(a + b == 0, 1.0, a + b)
    merged = out[rows].mul_((a / total)[:, None]).addcmul_(part.to(out.dtype), (b / total)[:, None])
    out.index_copy_(0, rows, merged)
    lse.index_copy_(0, rows, highest + (a + b).log())


def _add_bias_gradient(dbias: Tensor, chunk: Chunk, columns: Tensor) -> None:
    """Adds [C, g, n] sums over each key's scores to the entries that the keys belong to, each
    entry in one row only.
    """
    of_entry = columns.new_zeros(chunk.entries.shape)
    of_entry.scatter_add_(-1, chunk.slots[:, None].expand(columns.shape), columns)
    dbias.index_add_(0, chunk.entries.flatten(), of_entry.flatten())


def _grouped(cells: Tensor, scores: Tensor, share: int) -> Tensor:
    """[C or 1, m, n] cells for [C, g * m, n] scores."""
    return cells if share == 1 else cells.repeat(1, share, 1)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _flat_bias(block_bias: Tensor | None) -> Tensor | None:
    return None if block_bias is None else block_bias.reshape(-1)


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
