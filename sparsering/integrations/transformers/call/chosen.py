"""The keys that a family's indexer or compressor has chosen for each query of a call."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....distributed.fetching import fetched
from ....ground.arguments import is_shape_alone
from ....patterns.algebra import Mask
from ....patterns.positions import Full
from ....patterns.selected import SelectedBlocks, has_lists
from ..ranks.moving import own_spans
from .calls import SharedCall


class Chosen(NamedTuple):
    """Blocks of keys that a model's own indexer or compressor has chosen for each query.

    A family that would build a mask of all pairs from the choice passes this on in its place. If
    there are compressed entries, queries see those they list and the tokens of the model's mask.
    """

    indices: Tensor  # int64 [B, H or 1, N, k] indices of blocks; -1 lists nothing
    block_size: int = 1
    entries: int = 0  # number of compressed entries behind the tokens' keys; `indices` lists these

    def mask(self, q_start: int, tokens: int = 0) -> Mask:
        """Returns the choice as a mask for queries at positions q_start, q_start + 1, ...

        `tokens` is the number of keys before the entries, if `indices` lists entries.
        """
        if is_shape_alone(self.indices):  # no shape depends on which keys were chosen
            return Full()
        blocks = self.indices.long()
        if self.entries:
            blocks = torch.where(blocks < 0, -1, blocks + tokens)
        return SelectedBlocks(blocks, self.block_size, 1, q_start)

    def of_rank(self, shared: SharedCall) -> SelectedBlocks:
        """Returns the choice of this rank's queries as a mask for ring attention.

        Small blocks give a mask of the rank's own queries. Large ones give the mask of all queries,
        fetched from the other ranks, because rings need it whole. Entries are numbered from 0.
        """
        own = self.indices[:, :, : shared.num_tokens].long()
        first = 0 if self.entries or not shared.num_tokens else int(shared.tokens[0])
        found = SelectedBlocks(own, self.block_size, 1, first)
        if has_lists(found):
            return found
        spans = own_spans(shared)
        wanted = [(0, shared.length)] * len(spans)
        table = fetched(own.transpose(1, 2), spans, wanted, shared.group, "chosen blocks")
        return replace(found, indices=table.transpose(1, 2), first_row=0)


class Unchosen(NamedTuple):
    """A choice that an indexer postpones: its layer's attention makes it, which has the mask."""

    choose: Callable[[Any, SharedCall | None], Chosen]  # gets the mask and the ranks' call, if any
