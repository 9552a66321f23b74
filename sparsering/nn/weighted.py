"""Dense attention that returns its weights, up to a limit on their number.

Alternatives: `attention` computes no weights; `attention_weights` has those of visited blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.reference import dense_softmax
from ..numerics import sum_dtype
from ..patterns.algebra import Pattern

MOST_WEIGHTS = 1 << 26


def weighted_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    scale: float,
    bias: Tensor | None = None,
    extra_keys: int = 0,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over a pattern, and its weights.

    Args:
        query, key, value: [B, H, N, D], as for `attention`; queries stand at positions from 0 on.
        pattern: covers all keys but the last `extra_keys`, which every query sees.
        bias: numbers that are added to the scores; broadcasts to [B, H, Nq, Nk - extra_keys].
        dropout: share of the weights that is dropped; the others are divided by 1 - dropout.

    Returns: out [B, H, Nq, D] and the weights [B, H, Nq, Nk] after dropout, in the query's dtype;
        0 where a query sees no key. Differentiable.

    Raises: ValueError for more than 2^26 weights.

    Cost: O(B H Nq Nk) time and memory.
    """
    shape = *query.shape[:3], key.shape[2]
    if query.shape[:3].numel() * key.shape[2] > MOST_WEIGHTS:
        raise ValueError(
            f"weights, and float masks of other numbers than 0 and -inf, take dense scores, up to "
            f"2^26 of them, got {' x '.join(map(str, shape))}; pass need_weights=False and bool "
            "masks, and look at sparsering.attention_weights for the weights of visited blocks"
        )
    heads, inner = query.shape[1], key.shape[2] - extra_keys
    counts = pattern.to_dense(query.shape[2], inner, num_heads=heads, q_start=0)
    dtype = sum_dtype(query)
    log_counts = counts.to(query.device, dtype).log()
    visible = F.pad(log_counts > -torch.inf, (0, extra_keys), value=True)
    bias = log_counts if bias is None else log_counts + bias.to(dtype)
    in_use = visible.any(-2)[..., None]  # a key that no query sees may hold NaN
    key, value = torch.where(in_use, key, 0.0), torch.where(in_use, value, 0.0)
    score = scale * (query @ key.mT).to(dtype) + F.pad(bias, (0, extra_keys))
    score = torch.where(visible, score, -torch.inf)
    weight, total, _ = dense_softmax(score)
    weights = F.dropout((weight / total).to(query.dtype), dropout)
    return weights @ value, weights
