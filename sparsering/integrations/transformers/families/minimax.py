"""MiniMax-M3: its indexer does not get the model's mask, so blocks are chosen in the attention.

In transformers its blocks count places of a row, which is right only without padding and documents.
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..call import rows
from ..call.calls import SharedCall
from ..call.chosen import Chosen, Unchosen
from ..call.content_blocks import ContentBlocks, content_blocks
from ..call.shapes import is_true
from ..ranks.moving import keys_so_far
from .wrapped import Wrapped


def _choose(
    indexer: Any, query: Tensor, key: Tensor, mask: Any, shared: SharedCall | None
) -> Chosen:
    """Chooses the best blocks of visible keys; blocks restart in each document.

    Args:
        query: [B, H, N, D]. key: [B, 1, M, D].
    """
    (batch, _, queries, _), size = query.shape, int(indexer.block_size)
    of_row, first = key[:, 0], None
    if shared is not None:
        of_row, first, queries = keys_so_far(of_row, shared), int(shared.tokens[0]), shared.length
    found = content_blocks(mask, batch, queries, size, query.device)
    counts = indexer.topk_blocks, indexer.local_blocks, rows.AT_A_TIME
    return Chosen(*best_blocks(query, of_row, found, *counts, first))


@torch.no_grad()
def best_blocks(
    query: Tensor,
    key: Tensor,
    found: ContentBlocks,
    most: int,
    local: int,
    at_a_time: int,
    first: int | None = None,
) -> tuple[Tensor, int]:
    """Lists blocks for each query by the best score of a visible key in each.

    Args:
        query: [B, H, N, D] of the N tokens from `first` on, default the last ones.
        key: [B, M, D], M at least the tokens of `found`.
        most: number of blocks that a query lists.
        local: number of blocks, the query's own and those before it, that are always listed.
        at_a_time: scores in memory at a time.

    Returns: (int64 [B, H, N, k], size): blocks of keys, or single tokens (size 1) if blocks do not
        begin at multiples of their size; -1 for none.
    """
    batch, heads, queries, _ = query.shape
    blocks, size = found.tokens.shape[1:]
    length, device = found.valid.shape[1], query.device
    entry = torch.arange(batch, device=device)[:, None]
    key = key.float()[entry, found.tokens.flatten(1)][:, None].mT  # [B, 1, D, blocks * size]
    tokens = torch.where(found.real, found.tokens, -1)  # [B, blocks, size]
    number = torch.arange(blocks, device=device)
    start = length - queries if first is None else first
    places = torch.arange(start, start + queries, device=device)
    step = max(1, at_a_time // max(1, batch * heads * blocks * size))
    lists = []
    for part, here in zip(query.float().split(step, 2), places.split(step), strict=True):
        own, outside = found.block[:, here, None], found.blocks_outside[:, here, None]
        of_document = (number >= outside) & (number <= own)  # [B, n, blocks]
        hidden = (
            ~of_document[..., None] | ~found.real[:, None] | (tokens[:, None] > here[:, None, None])
        )
        scores = (part @ key).unflatten(3, (blocks, size))
        scores = scores.masked_fill(hidden[:, None], -torch.inf).amax(-1)
        nearest = of_document & (number > own - local)
        scores = scores.masked_fill(nearest[:, None], torch.inf)
        best, listed = scores.topk(min(most, blocks), dim=-1)
        lists.append(listed.masked_fill(best == -torch.inf, -1))
    listed = torch.cat(lists, 2)
    aligned = torch.arange(blocks * size, device=device).view(blocks, size)
    if not is_true((found.real & (found.tokens != aligned)).any(), False):
        return listed, size
    of_row = tokens[entry[..., None, None], listed.clamp(min=0)]  # [B, H, N, k, size]
    return torch.where(listed[..., None] < 0, -1, of_row).flatten(3), 1


@torch.no_grad()
def _not_yet_chosen(
    _: Any,
    indexer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    past_key_values: Any,
    __: Tensor,
) -> Unchosen:
    """Computes queries and keys of MiniMax-M3's indexer; the layer's attention chooses later.

    The layer's attention, which has the mask, then calls `_choose` with them.
    """
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
    # query [B, H, N, D], key [B, 1, N, D]
    query, key = (
        norm(layer(hidden_states).unflatten(-1, (-1, indexer.head_dim))).transpose(1, 2)
        for layer, norm in ((indexer.q_proj, indexer.q_norm), (indexer.k_proj, indexer.k_norm))
    )
    query, key = rotate(query, key, *(x[..., : indexer.head_dim] for x in position_embeddings))
    if past_key_values is not None:
        key = past_key_values.layers[indexer.layer_idx].update_index(key)  # [B, 1, M, D]
    return Unchosen(partial(_choose, indexer, query, key))


WRAPPED: dict[str, tuple[Wrapped, ...]] = {
    "MiniMaxM3VLIndexer": (Wrapped("forward", _not_yet_chosen),)
}
"""By the name of a class of transformers."""

LAYER_TYPES = ("minimax_m3_sparse",)
"""Types of layers that attend within one of the model's masks."""
