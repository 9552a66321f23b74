"""Pools keys and values by learned weights, and scores blocks by the attention to pooled keys."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ground.numerics import sum_dtype, without_autocast

LEAST = 1e-30  # lower bound of the weight of a visible key, so that its log is finite
_AT_A_TIME = 1 << 22  # weights computed at a time, to bound memory


def gated_pool(gate: Tensor, x: Tensor, size: int, stride: int) -> Tensor:
    """Averages windows of x [B, H, N, D], weighted by the softmax of gate [B, H, N] in each window.

    Window c covers tokens c * stride to c * stride + size - 1, as in `pool_blocks`; stride <= size.
    Equal gates give plain means. Returns [B, H, Np, D], Np = ceil(max(0, N - size) / stride) + 1.
    Cost: O(N D size / stride) time and memory.
    """
    length = x.shape[2]
    count = -(-max(0, length - size) // stride) + 1
    missing = (count - 1) * stride + size - length
    dtype = sum_dtype(x)  # also of the sums over windows in the gradient of x
    gate = pad(gate.to(dtype), (0, missing), value=torch.finfo(dtype).min)
    weight = gate.unfold(2, size, stride).softmax(3)  # [B, H, Np, size]
    windows = pad(x.to(dtype), (0, 0, 0, missing)).unfold(2, size, stride)  # [B, H, Np, D, size]
    with without_autocast(x):
        return (windows @ weight[..., None])[..., 0].to(x.dtype)


@torch.no_grad()
def pooled_scores(
    query: Tensor,
    pooled_key: Tensor,
    block_size: int,
    pooled: tuple[int, int],
    kv_len: int,
    *,
    query_block: int,
    causal: bool,
    q_start: int = 0,
) -> Tensor:
    """Scores Nb key blocks by attention to pooled keys, for R rows of queries: [B, Hkv, R, Nb].

    `score[r, b] = log sum_i sum_c p_i[c] shared(c, b) / size`: i runs over the queries of row r in
    all query heads of the kv head, p_i[c] is the attention weight from query i to pooled key c, and
    shared(c, b) the number of tokens in both window c and block b; -inf if row r sees no window
    of block b.

    Args:
        query: [B, Hq, N, D], at positions from q_start on, a multiple of query_block.
        pooled_key: [B, Hkv, Np, D]; key c pools tokens c * stride to c * stride + size - 1.
        pooled: (size, stride) of the windows, in tokens.
        kv_len: number of keys before pooling.
        causal: whether a query at position i sees only windows that end at i or before.

    Source: NSA (arXiv 2502.11089), equations 8 to 10.
    """
    size, stride = pooled
    (batch, heads, q_len, dim), (kv_heads, count) = query.shape, pooled_key.shape[1:3]
    dtype, device = sum_dtype(query), query.device
    blocks, rows = -(-kv_len // block_size), -(-q_len // query_block)
    start = torch.arange(count, device=device) * stride
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))
    step = max(1, _AT_A_TIME // max(1, batch * heads * count * query_block)) * query_block
    shares = [query.new_zeros(batch, kv_heads, 0, count, dtype=dtype)]
    for first in range(0, q_len, step):
        part = grouped[:, :, :, first : first + step].to(dtype)
        with without_autocast(query):
            logits = dim**-0.5 * part @ pooled_key.to(dtype).mT[:, :, None]  # [B, Hkv, G, n, Np]
        hidden = torch.zeros(part.shape[3], count, dtype=torch.bool, device=device)
        if causal:
            position = q_start + first + torch.arange(part.shape[3], device=device)[:, None]
            hidden = position < start + size - 1
        share = logits.masked_fill(hidden, torch.finfo(dtype).min).softmax(-1)
        share = share.clamp(min=LEAST).masked_fill(hidden, 0.0)
        share = pad(share.sum(2), (0, 0, 0, -part.shape[3] % query_block))
        shares.append(share.unflatten(2, (-1, query_block)).sum(3))
    share = torch.cat(shares, 2)  # [B, Hkv, R, Np]
    # An extra last column collects shares past the last block of keys; the result drops it.
    total = share.new_zeros(batch, kv_heads, rows, blocks + 1)
    for after in range((size + block_size - 2) // block_size + 1):
        block = start // block_size + after
        end = (start + size).clamp(max=kv_len).minimum((block + 1) * block_size)
        shared = (end - start.maximum(block * block_size)).clamp(min=0).to(dtype) / size
        total.index_add_(3, block.clamp(max=blocks), share * shared)
    return total[..., :blocks].log()
