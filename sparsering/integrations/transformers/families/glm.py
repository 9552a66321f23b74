"""GLM-5: a mask of all pairs that is built from lists, and a mask of padding for its indexer."""

from typing import Any

import torch
from torch import Tensor

from ..call.calls import SharedCall
from ..call.chosen import Chosen
from .wrapped import Wrapped


def own_padding(mask: Tensor, shared: SharedCall) -> Tensor:
    """Returns which of this rank's tokens are not padding, bool [B, n].

    GLM-5's mask is of the last n tokens of the row, or without padding of no matter which.
    """
    if shared.valid is None:
        return torch.ones_like(mask)
    return shared.valid.index_select(1, shared.tokens).to(mask.dtype)


def _as_lists(_: Any, __: Any, topk_indices: Tensor, *___: Any, **____: Any) -> Chosen:
    """Takes the place of GLM-5's mask of all pairs, whose lists hold causality and padding."""
    return Chosen(topk_indices[:, None])


WRAPPED: dict[str, Wrapped] = {
    "Glm5NextTextAttention": Wrapped("build_attention_mask_from_topk", _as_lists),
}
"""By the name of a class of transformers."""
