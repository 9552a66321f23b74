"""Dense attention, for masks and biases that no pattern describes, such as 4-D tensors."""

import torch
from torch import Tensor

from ...numerics import capped, sum_dtype

MOST_SCORES = 1 << 28  # upper bound of B x H x Nq x Nk in one call: 1 GiB of float32 scores


def dense_attention(
    why: str,  # the mask or bias that needs dense attention, named in the error
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,  # bool, broadcasts to [B, H, Nq, Nk], True where a pair attends
    bias: Tensor | None,  # added to scores, broadcasts to [B, H, Nq, Nk]
    *,
    scale: float,
    softcap: float | None,
    sink: Tensor | None,  # logit of an extra key of value 0: [H], or [B or 1, H, Nq or 1]
    dropout_p: float,
) -> Tensor:
    """Computes attention [B, H, Nq, Dv] over all pairs; raises ValueError above 2^28 scores."""
    batch, heads, q_len, _ = query.shape
    if not torch.compiler.is_compiling() and batch * heads * q_len * key.shape[2] > MOST_SCORES:
        raise ValueError(
            f"{why} is computed over all pairs, at most 2^28, got {batch} x {heads} x {q_len} "
            f"x {key.shape[2]}; write it as a pattern for apply(model, pattern), or use smaller "
            "batches"
        )
    group = heads // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in (key, value))
    dtype = sum_dtype(query)
    score = capped((query @ key.mT).to(dtype) * scale, softcap)
    if bias is not None:
        score = score + bias.to(dtype)
    empty = None  # marks queries that see no key
    if allowed is not None:
        score = score.masked_fill(~allowed, -torch.inf)
        empty = ~allowed.any(-1, keepdim=True)
        score = score.masked_fill(empty, 0.0)  # softmax of only -inf has NaN gradients
    if sink is not None:
        sink = sink[None, :, None] if sink.dim() == 1 else sink
        score = torch.cat((score, sink.to(dtype)[..., None].expand(*score.shape[:3], 1)), -1)
    weight = torch.softmax(score, -1)[..., : key.shape[2]]
    if empty is not None:
        weight = weight.masked_fill(empty, 0.0)
    weight = torch.nn.functional.dropout(weight, dropout_p)
    return weight.to(value.dtype) @ value


def as_bool(mask: Tensor) -> Tensor | None:
    """Converts a mask of only 0 and -inf (or the lowest number) to bool; None for other values."""
    if mask.dtype == torch.bool:
        return mask
    if torch.compiler.is_compiling() or mask.requires_grad:
        return None
    allowed = mask == 0
    blocked = mask <= torch.finfo(mask.dtype).min
    return allowed if bool((allowed | blocked).all()) else None


def check_mask(mask: Tensor, query: Tensor, key: Tensor) -> None:
    """Raises ValueError if a 4-D mask has a wrong dtype or shape."""
    shape = (*query.shape[:3], key.shape[2])
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            "a 4-D attention_mask must be bool (True = attends) or floating point (added to "
            f"scores), got {mask.dtype}; convert ones and zeros by .bool()"
        )
    if mask.dim() != 4 or any(a not in (1, b) for a, b in zip(mask.shape, shape, strict=True)):
        raise ValueError(
            f"attention_mask must broadcast to [batch, heads, queries, keys] {shape}, got "
            f"{tuple(mask.shape)}; slice it to these lengths"
        )
