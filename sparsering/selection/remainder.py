"""Attention to all blocks: the selected ones exactly, each of the others as one pooled key."""

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..checks import check_inputs, checked_integer_or_none, checked_scale
from ..functional import attention
from ..numerics import merge_attention, sum_dtype, without_autocast
from ..patterns.algebra import Mask
from ..patterns.arguments import checked_flag
from ..patterns.positions import Causal, Full
from ..patterns.selected import SelectedBlocks
from .pool import pool_blocks
from .query_rows import checked_blocks, current_blocks
from .slots import listed_blocks

_AT_A_TIME = 1 << 24  # logits computed at a time, to bound memory


def remainder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    block_size: int,
    *,
    query_block: int = 1,
    causal: bool = True,
    scale: float | None = None,
    q_start: int | None = None,
) -> Tensor:
    """Attends to selected blocks exactly, and to all others through the means of their keys.

    One softmax covers both: `out_q ~ sum_{k selected} e^{s_k} v_k + sum_{b not selected} n_b
    e^{s_b} v_b`, `s_b = scale q.k_b`, with k_b and v_b the means over the n_b tokens of block b.
    So a block that is not selected contributes with an estimated mass, and gets gradients.

    Args:
        query, key, value: as `attention`.
        indices: int64 [R, k], [H, R, k] or [B, H, R, k] with H = 1, Hkv or Hq, as `select_blocks`
            returns them; the first row is the one that holds the first query.
        block_size, query_block: keys in a block, queries in a row.
        causal: True if a query sees no later keys. The block at a row's own position is then never
            pooled: the row attends to it only if it is selected.
        scale, q_start: as `attention`.

    Returns: [B, Hq, Nq, Dv], differentiable in query, key and value.

    Raises: ValueError if an argument is invalid.

    Cost: attention to the selected pairs plus 1 / block_size of dense attention, without waiting
        for the device; memory O(N + R Nb).

    Source: MRA-2 (arXiv 2207.10284), equation 5.
    """
    check_inputs(query, key, value, Full())
    q_start = checked_integer_or_none("q_start", q_start)
    checked_flag("causal", causal)
    query_block, block_size = checked_blocks(query_block, block_size)
    start = key.shape[2] - query.shape[2] if q_start is None else q_start
    first_row = start // query_block
    chosen = SelectedBlocks(indices, block_size, query_block, first_row)
    pattern: Mask = chosen & Causal() if causal else chosen
    exact, lse = attention(query, key, value, pattern, scale=scale, q_start=start, return_lse=True)
    if not query.numel() or not key.shape[2]:
        return exact
    rows, blocks = indices.shape[-2], -(-key.shape[2] // block_size)
    block = torch.arange(blocks, device=key.device)
    visible = ~listed_blocks(chosen.indices, blocks).to(key.device)  # [B or 1, H or 1, R, Nb]
    if causal:
        current = current_blocks(first_row, rows, query_block, block_size).to(key.device)
        visible = visible & (block < current[:, None])
    attend = _attend_pooled
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
    with without_autocast(query):
        keys, values = (pool_blocks(x.to(sum_dtype(x)), block_size) for x in (key, value))
        keys = keys * checked_scale(scale, query)
        log_tokens = (key.shape[2] - block * block_size).clamp(max=block_size).to(keys.dtype).log()
        position = start + torch.arange(query.shape[2], device=query.device)
        row = position // query_block - first_row
        step = max(1, _AT_A_TIME // (query.shape[0] * query.shape[1] * blocks))
        parts = [
            attend(queries, keys, values, log_tokens, visible[:, :, row_of_query])
            for queries, row_of_query in zip(query.split(step, 2), row.split(step), strict=True)
        ]
        out, pooled_lse = (torch.cat(x, 2) for x in zip(*parts, strict=True))
        return merge_attention((exact, out.to(exact.dtype)), (lse, pooled_lse))[0]


def _attend_pooled(
    query: Tensor, key: Tensor, value: Tensor, log_tokens: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """Attends to the pooled keys where `visible` [B or 1, H or 1, n, Nb]; returns (out, lse)."""
    kv_heads = key.shape[1]
    query = query.to(key.dtype).unflatten(1, (kv_heads, -1))  # [B, Hkv, G, n, D]
    heads = visible.shape[1]
    visible = visible.unflatten(1, (kv_heads, -1) if heads % kv_heads == 0 else (1, 1))
    empty = ~visible.any(-1, keepdim=True)
    logits = query @ key[:, :, None].mT + log_tokens
    lse = logits.masked_fill(~(visible | empty), -torch.inf).logsumexp(-1, keepdim=True)
    weight = torch.where(visible, (logits - lse).exp(), 0.0)
    lse = lse.masked_fill(empty, -torch.inf)[..., 0]
    return (weight @ value[:, :, None]).flatten(1, 2), lse.flatten(1, 2)
