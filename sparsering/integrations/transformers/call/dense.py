"""Attention over all pairs, for masks and biases of pairs that no pattern describes."""

import torch
from torch import Tensor

from ....functional import attention
from ....ground.arguments import is_shape_alone
from ....ground.numerics import capped, sum_dtype
from ....patterns.keys import KeyMask
from .masks import Inputs, Options
from .shapes import is_true

MOST_SCORES = 1 << 28  # upper bound of B x H x Nq x Nk in one call: 1 GiB of float32 scores


def attend_tensor(inputs: Inputs, mask: Tensor, bias: Tensor | None, extras: Options) -> Tensor:
    """Attends with a mask [B, H, Nq, Nk]: a pattern if it only hides keys, else over all pairs."""
    query, key, _ = inputs
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
    allowed = _as_bool(mask)
    hides_keys = allowed is not None and allowed.shape[1:3] == (1, 1)
    if bias is None and allowed is not None and hides_keys and not is_shape_alone(allowed):
        keys = KeyMask(allowed[:, 0, 0].expand(len(query), key.shape[2]))
        return attention(*inputs, keys, q_start=0, **extras)
    if allowed is None:
        bias = mask if bias is None else bias + mask
    return dense_attention("a 4-D attention_mask", *inputs, allowed, bias, **extras)


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


def _as_bool(mask: Tensor) -> Tensor | None:
    """Converts a mask of 0 and -inf to bool, True = attends; None if it has other numbers."""
    if mask.dtype == torch.bool:
        return mask
    if torch.compiler.is_compiling() or mask.requires_grad:
        return None
    allowed = mask == 0
    only_hides = (allowed | (mask <= torch.finfo(mask.dtype).min)).all()
    return allowed if is_true(only_hides, False) else None
