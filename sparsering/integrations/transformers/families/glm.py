"""GLM-5: a mask of all pairs built from lists, and an indexer of pools with a mask of padding."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..call.calls import SharedCall, thread
from ..call.chosen import Chosen
from ..call.rows import KeysInParts
from .deepseek import KeysOfRanks
from .wrapped import Wrapped


def own_padding(mask: Tensor, shared: SharedCall) -> Tensor:
    """Returns which of this rank's tokens exist, bool [B, n]; False for padding.

    GLM-5 gives its indexer a mask of the last n tokens of the row, which may be another rank's.
    """
    if shared.valid is None:
        return torch.ones_like(mask)
    return shared.valid.index_select(1, shared.tokens).to(mask.dtype)


def _over_ranks(own: Callable[..., Any], indexer: Any, *args: Any, **options: Any) -> Any:
    """Runs GLM-5's indexer; in a call that ranks share, with the keys of earlier ranks."""
    if (shared := thread.shared) is None:
        return own(indexer, *args, **options)
    given = inspect.signature(own).bind(indexer, *args, **options)
    keys = KeysOfRanks(shared)
    given.arguments["past_key_values"] = SimpleNamespace(
        layers={indexer.layer_idx: keys}, update_indexer=keys.update_indexer
    )
    given.arguments["attention_mask"] = own_padding(given.arguments["attention_mask"], shared)
    return own(*given.args, **given.kwargs)


def _pooled(own: Callable[..., Any], indexer: Any, packed_states: Tensor) -> Any:
    """Returns pooled keys [B, P, D] that are scored in parts, and the other results unchanged."""
    keys, *places = own(indexer, packed_states)
    return KeysInParts(keys), *places


def _as_lists(_: Any, __: Any, topk_indices: Tensor, *___: Any, **____: Any) -> Chosen:
    """Returns the chosen keys as lists, where GLM-5's own method builds a mask of all pairs."""
    return Chosen(topk_indices[:, None])


WRAPPED: dict[str, tuple[Wrapped, ...]] = {
    "Glm5NextTextAttention": (Wrapped("build_attention_mask_from_topk", _as_lists),),
    "Glm5NextTextIndexer": (Wrapped("forward", _over_ranks), Wrapped("get_pooled_states", _pooled)),
}
"""By the name of a class of transformers."""
