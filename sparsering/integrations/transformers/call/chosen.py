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
    """The keys that each query sees; where a family builds a mask of them, it stands for it."""

    indices: Tensor  # int64 [B, H or 1, N, k] blocks of keys; -1: none
    block_size: int = 1
    entries: int = 0  # keys behind the tokens, whose lists are joined to the model's own mask

    def mask(self, q_start: int, tokens: int = 0) -> Mask:
        """Returns the mask of the queries from q_start on; listed entries are behind `tokens`."""
        if is_shape_alone(self.indices):  # no shape depends on which keys were chosen
            return Full()
        blocks = self.indices.long()
        if self.entries:
            blocks = torch.where(blocks < 0, -1, blocks + tokens)
        return SelectedBlocks(blocks, self.block_size, 1, q_start)

    def of_rank(self, shared: SharedCall) -> SelectedBlocks:
        """Returns the mask of this rank's own queries; listed entries count from the first.

        Of large blocks it is the mask of all queries, which ring attention needs.
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
    """Stands for the choice of an indexer that does not get the model's mask: its layer chooses."""

    choose: Callable[[Any, SharedCall | None], Chosen]  # by the mask, and by the ranks' call
