"""Qwen 4: blocks chosen by the mean of their keys, and the tokens behind the last whole block."""

import sys
from typing import Any

import torch
from torch import Tensor

from ....selection.indexer import top_tokens
from ..call.calls import thread
from ..call.chosen import Chosen
from ..call.content_blocks import content_blocks
from ..ranks.moving import keys_so_far
from .wrapped import Wrapped


@torch.no_grad()
def _pooled(
    _: Any,
    indexer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any,
    past_key_values: Any,
) -> Chosen:
    """Chooses keys as Qwen 4's indexer does, but for all queries together.

    A document's visible tokens are cut into blocks of `compress_ratio`. A query sees the whole
    blocks before it with the best mean keys, and the tokens behind its last whole block.
    """
    (batch, queries, _), size = hidden_states.shape, indexer.compress_ratio
    heads, dim = indexer.index_n_heads, indexer.index_head_dim
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
    cos, sin = position_embeddings
    # query [B, N, H * D], key [B, N, D]
    query, key = indexer.index_qk_proj(hidden_states).split((heads * dim, dim), -1)
    query = indexer.q_layernorm(query.unflatten(-1, (heads, dim)))  # [B, N, H, D]
    query = rotate(query, cos=cos[:, -queries:], sin=sin[:, -queries:], unsqueeze_dim=2)
    first_query, length = None, queries
    if (shared := thread.shared) is not None:
        first_query, length = int(shared.tokens[0]), shared.length
        cos, sin = (x.expand(batch, -1, -1) for x in (cos, sin))
        widths = dim, cos.shape[2], sin.shape[2]
        of_row = keys_so_far(torch.cat((key, cos, sin), 2), shared)
        key, cos, sin = of_row.split(widths, 2)  # [B, M, D] each
    elif past_key_values is not None:
        key = past_key_values.update_indexer(key, indexer.layer_idx)  # [B, M, D], cached ones too
    found = content_blocks(attention_mask, batch, length, size, key.device)
    valid, place, outside = found.valid, found.place, found.outside  # [B, M] each
    in_order = found.in_order  # [B, M]
    tokens, starts = found.tokens, found.starts  # [B, blocks, size] and [B, blocks]
    length, inside = valid.shape[1], torch.arange(size, device=key.device)
    entry = torch.arange(batch, device=key.device)[:, None, None]  # [B, 1, 1]
    of_block = key[entry, tokens]  # [B, blocks, size, D]
    pooled = indexer.k_layernorm(of_block.float().mean(2).to(key.dtype))  # [B, blocks, D]
    # the rotary position of a block is that of its first token: [B, blocks, D]
    cos, sin = (x.expand(batch, -1, -1)[entry[..., 0], starts] for x in (cos, sin))
    pooled = rotate(pooled[:, :, None], cos=cos, sin=sin, unsqueeze_dim=2)[:, :, 0]
    first_query = length - queries if first_query is None else first_query
    own = slice(first_query, first_query + queries)
    seen = (place - outside + valid)[:, own]  # [B, N] visible tokens of the query's document
    whole, first = seen // size, found.blocks_outside[:, own]  # [B, N] blocks
    weight = query.new_ones(batch, queries, heads)
    listed = top_tokens(
        query.transpose(1, 2),
        pooled,
        weight,
        indexer.block_topk,
        causal=False,
        first=first,
        stop=first + whole,
    )[:, 0]  # [B, N, k] blocks
    of_listed = tokens[entry, listed.clamp(min=0)]  # [B, N, k, size]
    listed = torch.where(listed[..., None] < 0, -1, of_listed).flatten(2)  # [B, N, k * size]
    behind = whole[..., None] * size + inside[:-1]  # [B, N, size - 1] after the whole blocks
    place = (outside[:, own, None] + behind).clamp(max=length - 1)
    tail = torch.where(behind < seen[..., None], in_order[entry, place], -1)
    return Chosen(torch.cat((listed, tail), 2)[:, None])  # [B, 1, N, k * size + size - 1]


WRAPPED: dict[str, tuple[Wrapped, ...]] = {
    "Qwen4ExpTextQSAIndexer": (Wrapped("forward", _pooled, own_in_graphs=False),),
}
"""By the name of a class of transformers."""
