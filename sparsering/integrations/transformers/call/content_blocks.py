"""Blocks of visible tokens (those that are not padding); each document begins a new block.

A row has the same blocks alone, behind padding and packed with others.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....ground.arguments import is_shape_alone
from .once import once


class ContentBlocks(NamedTuple):
    """Tokens without padding, cut into blocks that restart in each document; L keys per row."""

    valid: Tensor  # bool [B, L], False for padding
    place: Tensor  # [B, L] number of visible tokens before each key
    outside: Tensor  # [B, L] number of visible tokens before the key's document
    block: Tensor  # [B, L] index of the block of each visible token
    blocks_outside: Tensor  # [B, L] number of blocks before the key's document
    in_order: Tensor  # [B, L] indices of the visible tokens, then of the padding
    starts: Tensor  # [B, blocks] index of each block's first token
    tokens: Tensor  # [B, blocks, size] indices of each block's tokens; a short block has others too
    real: Tensor  # bool [B, blocks, size], False where `tokens` has a token not of the block


def content_blocks(mask: Any, batch: int, queries: int, size: int, device: Any) -> ContentBlocks:
    """Returns the blocks of `size` visible tokens in a call, computed once for all layers."""
    return once(mask, ("blocks", size), lambda: _content_blocks(mask, batch, queries, size, device))


def _content_blocks(mask: Any, batch: int, queries: int, size: int, device: Any) -> ContentBlocks:
    """Computes `content_blocks` by counting visible tokens and blocks before each key."""
    length = mask.first_query + queries  # a static cache is empty from there on
    valid = mask.valid(length)
    every = torch.ones(batch, length, dtype=torch.bool, device=device)
    valid = every if valid is None else valid.bool().expand(batch, length)
    begins = torch.zeros_like(valid)
    if mask.documents is not None:
        begins[:, 1:] = mask.documents[:, :length].diff(dim=1) != 0

    def count(x: Tensor) -> tuple[Tensor, Tensor]:
        """Counts marks before each token, and those before its document."""
        before = x.cumsum(1) - x.long()
        return before, torch.where(begins, before, 0).cummax(1).values

    place, outside = count(valid)
    is_first = valid & ((place - outside) % size == 0)
    block, blocks_outside = is_first.cumsum(1) - 1, count(is_first)[1]
    blocks = -(-length // size)  # right for a single document, as in a call for shapes alone
    if not is_shape_alone(is_first):
        blocks = int(is_first.sum(1).max())
    blocks = max(1, blocks)
    in_order = (~valid).byte().argsort(dim=1, stable=True)
    starts = (~is_first).byte().argsort(dim=1, stable=True)[:, :blocks]
    tokens = place.gather(1, starts)[..., None] + torch.arange(size, device=device)
    inside = (tokens < length).flatten(1)
    tokens = in_order.gather(1, tokens.flatten(1).clamp(max=length - 1))
    number = torch.arange(blocks, device=device).repeat_interleave(size)
    real = inside & valid.gather(1, tokens) & (block.gather(1, tokens) == number)
    return ContentBlocks(
        valid=valid,
        place=place,
        outside=outside,
        block=block,
        blocks_outside=blocks_outside,
        in_order=in_order,
        starts=starts,
        tokens=tokens.unflatten(1, (blocks, size)),
        real=real.unflatten(1, (blocks, size)),
    )
