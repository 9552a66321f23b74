"""DeepSeek-V4's compressed entries, in calls that ranks share.

The rank that owns the last token of a window computes its entry, from tokens of earlier ranks too.
"""

from typing import Any

import torch
from torch import Tensor

from ....distributed.fetching import Span, fetched
from ..call.calls import SharedCall
from ..ranks.moving import own_rank, own_spans


class CompressedKeysOfRanks:
    """Takes the place of a cache layer in a compressor, so that other ranks' tokens are "cached".

    A compressor asks its cache for the tokens of the windows that close in this call, for those of
    the window before, and for the entries of all windows. Every rank must run the compressor.
    """

    def __init__(self, compressor: Any, shared: SharedCall) -> None:
        indexer = getattr(compressor, "indexer", None)
        self.modules = {"compressor": compressor, "indexer": indexer}
        self.shared, self.rank = shared, own_rank(shared)
        self.tokens = own_spans(shared)
        rate = compressor.compress_rate
        self.closed: list[Span] = [(start // rate, stop // rate) for start, stop in self.tokens]
        # An entry with an indexer (CSA) is also computed from the window before its own.
        before = 0 if indexer is None else 1
        self.needed: list[Span] = [
            (max(0, first - before) * rate, stop * rate) if first < stop else (0, 0)
            for first, stop in self.closed
        ]
        self.first_token = self.closed[self.rank][0] * rate
        # By name, the tokens of the window before, and those of the windows that close here.
        self.rows: dict[str, tuple[Tensor, Tensor]] = {}

    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Returns values and gates [B, n, W] of the tokens in windows that close on this rank.

        The third result is the position of the first of them. They may be earlier ranks' tokens.
        """
        own = torch.cat((kv, gate), -1)[:, : self.shared.num_tokens]
        rows = fetched(own, self.tokens, self.needed, self.shared.group, "tokens of windows")
        before = max(0, self.first_token - self.needed[self.rank][0]) if rows.shape[1] else 0
        self.rows[name] = rows[:, :before], rows[:, before:]
        kv, gate = self.rows[name][1].chunk(2, -1)
        return kv, gate, self.first_token

    def update_overlap_state(
        self, name: str, _: Tensor, __: Tensor, head_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns values and gates [B, rate, head_dim] of the window before, None if there is none.

        Compressors take the first `head_dim` channels of that window, with the bias of positions.
        """
        rows = self.rows[name][0]
        if not rows.shape[1]:
            return None, None
        kv, gate = rows.chunk(2, -1)
        gate = gate + self.modules[name].position_bias
        return kv[..., :head_dim], gate[..., :head_dim]

    def update_compressor_states(self, name: str, own: Tensor) -> Tensor:
        """Returns entries [B, E, D] of all windows of the row; `own` [B, e, D] are this rank's."""
        if not own.shape[1]:
            # Other ranks' backward passes exchange messages with this rank's, so even 0 entries
            # must require a gradient. FSDP expects one for each weight that has one on another
            # rank; weights of indexers have none anywhere.
            own = own + self.rows[name][1][:, :0, : own.shape[2]]
            for path, weight in self.modules[name].named_parameters():
                if not path.startswith("indexer."):
                    own = own + weight.flatten()[:0].sum()
        every = (0, self.closed[-1][1])
        wanted = [every] * len(self.tokens)
        return fetched(own, self.closed, wanted, self.shared.group, "closed entries")
