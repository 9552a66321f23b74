"""MiniMax-M3: its indexer does not get the model's mask, so blocks are chosen in the attention."""

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import rows
from ..calls import SharedCall
from ..chosen import Chosen
from ..content_blocks import best_blocks, content_blocks
from ..moving import keys_so_far
from .wrapped import Wrapped


class UnchosenBlocks(NamedTuple):
    """Queries and keys of MiniMax-M3's indexer, which does not get the model's mask to choose."""

    indexer: Any
    query: Tensor  # [B, H, N, D]
    key: Tensor  # [B, 1, M, D]

    def choose(self, mask: Any, shared: SharedCall | None = None) -> Chosen:
        """Returns the best blocks of visible keys; blocks begin at a document's first token."""
        (batch, _, queries, _), size = self.query.shape, int(self.indexer.block_size)
        key, first = self.key[:, 0], None
        if shared is not None:
            key, first, queries = keys_so_far(key, shared), int(shared.tokens[0]), shared.length
        found = content_blocks(mask, batch, queries, size, self.query.device)
        counts = self.indexer.topk_blocks, self.indexer.local_blocks, rows.AT_A_TIME
        return Chosen(*best_blocks(self.query, key, found, *counts, first))


@torch.no_grad()
def _not_yet_chosen(
    _: Any,
    indexer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    past_key_values: Any,
    __: Tensor,
) -> UnchosenBlocks:
    """Computes the queries and keys of MiniMax-M3's indexer."""
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
    # query [B, H, N, D], key [B, 1, N, D]
    query, key = (
        norm(layer(hidden_states).unflatten(-1, (-1, indexer.head_dim))).transpose(1, 2)
        for layer, norm in ((indexer.q_proj, indexer.q_norm), (indexer.k_proj, indexer.k_norm))
    )
    query, key = rotate(query, key, *(x[..., : indexer.head_dim] for x in position_embeddings))
    if past_key_values is not None:
        key = past_key_values.layers[indexer.layer_idx].update_index(key)  # [B, 1, M, D]
    return UnchosenBlocks(indexer, query, key)


WRAPPED: dict[str, Wrapped] = {"MiniMaxM3VLIndexer": Wrapped("forward", _not_yet_chosen)}
"""By the name of a class of transformers."""
