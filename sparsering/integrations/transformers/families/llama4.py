"""Llama 4: a temperature by the number of tokens, and over ranks chunks within documents."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from ..call.calls import replacement, thread
from ..name import NAME


def at_whole_positions(module: Any, query: Tensor, positions: Callable[[], Tensor]) -> Tensor:
    """Corrects the temperature of queries [B, H, n, D] to their positions in the row.

    The layer has scaled each by its index in the call: among the tokens of a rank, or of requests
    that are served together. `positions` returns the positions [n or more].
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query

    def scale(index: Tensor) -> Tensor:
        steps = torch.floor((index.float() + 1) / module.floor_scale)
        return (torch.log1p(steps) * module.attn_scale + 1).double()

    whole = positions()[: query.shape[2]].to(query.device)
    own = torch.arange(len(whole), device=query.device)
    factor = (scale(whole) / scale(own))[:, None]
    return (query * factor).to(query.dtype)


def share_restarts() -> None:
    """Lets transformers restart chunks in the documents of the whole batch, if ranks share it."""
    restart = masking_utils.remap_positions_for_packed_sequence
    if hasattr(restart, NAME):
        return

    def of_whole_batch(given: dict[str, Any]) -> None:
        if (shared := thread.shared) is not None:
            given["position_ids"] = shared.position_ids.expand(len(given["position_ids"]), -1)

    masking_utils.remap_positions_for_packed_sequence = replacement(restart, of_whole_batch)


QUERIES_BY_INDEX: tuple[Callable[[Any, Tensor, Callable[[], Tensor]], Tensor], ...] = (
    at_whole_positions,
)
"""Functions that correct a layer's queries [B, H, n, D] to positions, which are not its indices."""

PREPARES_RANKS: tuple[Callable[[], None], ...] = (share_restarts,)
"""Functions that run before ranks share a first call."""
