"""Attention of a layer whose tokens are shared by the ranks of a group: the rank's part of it."""

from typing import Any

import torch
from torch import Tensor

from ...distributed.ring import ring_attention
from ...patterns.algebra import Pattern
from .calls import SharedCall
from .config import pattern_of
from .masks import Inputs, ModelMask, once
from .override import looking_back, within


def attend_shared(
    module: Any,
    inputs: Inputs,
    mask: ModelMask | Tensor,
    used: Pattern | None,
    shared: SharedCall,
    extras: dict[str, Any],
) -> Tensor:
    """Attends with this rank's tokens over the batch's mask, or `used`, the pattern of a block.

    Returns: [B, Hq, n, Dv]; rows of a token that is not the rank's own are 0.
    """
    if used is None:
        used = _whole_pattern(module, mask)
    query, key, value = (x[:, :, : shared.num_tokens] for x in inputs)
    query = _at_whole_positions(module, query, shared)
    if not torch.compiler.is_compiling():
        sizes = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
        shared.shapes[getattr(module, "layer_idx", len(shared.shapes))] = (*sizes, query.dtype)
    out = ring_attention(
        query, key, value, used, group=shared.group, sharding=shared.sharding, **extras
    )
    assert isinstance(out, Tensor)
    missing = inputs[0].shape[2] - shared.num_tokens
    return torch.nn.functional.pad(out, (0, 0, 0, missing)) if missing else out


def _whole_pattern(module: Any, mask: ModelMask | Tensor) -> Pattern:
    """Returns the pattern of a layer for the whole batch, from `apply` or from the model's mask."""
    if not isinstance(mask, ModelMask) or mask.kind is None:
        got = "a function of the model's own" if isinstance(mask, ModelMask) else "one of all pairs"
        raise NotImplementedError(
            "a model that ranks share needs masks of causality, windows, chunks, documents and "
            f"padding, got {got}; run it with hf.parallelize(model, False), or write the mask as "
            "a pattern for hf.using"
        )
    length, pattern = mask.shape[3], pattern_of(module)
    if pattern is None:
        return once(mask, ("own", length), lambda: mask.pattern(0, length))
    if mask.kind.causal:
        pattern = looking_back(pattern)
    return within(pattern, mask, length)


def _at_whole_positions(module: Any, query: Tensor, shared: SharedCall) -> Tensor:
    """Corrects Llama 4's temperature: it scales queries by their index among the tokens it sees."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    scales = [
        torch.log1p(torch.floor((index.float() + 1) / module.floor_scale)) * module.attn_scale + 1
        for index in (shared.tokens, torch.arange(len(shared.tokens), device=query.device))
    ]
    factor = (scales[0].double() / scales[1].double())[: query.shape[2], None]
    return (query * factor).to(query.dtype)
