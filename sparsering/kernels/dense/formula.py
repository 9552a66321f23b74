"""Dense attention by its formula, in plain torch."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...ground.numerics import capped, finite_or_zero, sum_dtype


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_counts: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    distance_bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_factor: Tensor | None = None,
    changed: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `p_k = m e^{s_k} / (e^{sink} + sum m e^{s})`, `s = scale * q.k`, over Nq x Nk pairs.

    It is as `Problem`, but these broadcast to [B, Hq, Nq, Nk]: `log_counts`, the log of the
    multiplicity m of each pair plus its block bias, -inf where there is no pair; `distance_bias`,
    of each pair; `dropout_factor` of p: 0, or 1 / (1 - dropout_p). `changed` maps scores [B, Hq,
    Nq, Nk] and which of them are pairs to the scores that the softcap gets.

    Returns: out [B, Hq, Nq, Dv] in the query's dtype, lse [B, Hq, Nq] in float32 (float64).

    Cost: O(B Hq Nq Nk) time and memory.
    """
    dtype = sum_dtype(query)
    group = query.shape[1] // max(1, key.shape[1])
    q = query.to(dtype)
    k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (key, value))
    pairs = (log_counts != -torch.inf).expand(*q.shape[:3], k.shape[2])
    k = torch.where(pairs.any(2)[..., None], k, 0.0)  # keys that no query sees may be NaN
    score = scale * (q @ k.mT)
    if changed is not None:
        score = changed(score, pairs)
    score = capped(score, softcap)
    if distance_bias is not None:
        score = score + distance_bias
    score = torch.where(pairs, score + torch.where(pairs, log_counts.to(dtype), 0.0), -torch.inf)
    if sink is not None:  # the sink is one more key of each row
        score = torch.cat((score, sink.to(dtype).expand(q.shape[:3])[..., None]), -1)
    weight, total, lse = dense_softmax(score)
    weight, pairs = weight[..., : k.shape[2]], score[..., : k.shape[2]] != -torch.inf
    weight = weight if dropout_factor is None else weight * dropout_factor
    finite = v.isfinite()
    # 0 * NaN is NaN even for keys that a row does not see. So set values that are not finite to 0,
    # and set the rows that see such a value to NaN.
    spoilt = pairs.to(dtype) @ (~finite).to(dtype) > 0
    out = weight @ torch.where(finite, v, 0.0) / total
    out = torch.where(lse[..., None] == -torch.inf, 0.0, out)
    return torch.where(spoilt, torch.nan, out).to(query.dtype), lse


def dense_softmax(score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns softmax weights before division [..., n], their sum [..., 1], and lse [...].

    A score of -inf stands for no pair. Rows without pairs have weights 0, sum 1, lse -inf and
    gradients 0.
    """
    pairs = score != -torch.inf  # a NaN score counts as a pair and makes its row NaN
    highest = finite_or_zero(score.detach().amax(-1, keepdim=True)) if score.shape[-1] else 0.0
    weight = torch.where(pairs, (score - highest).exp(), 0.0)
    empty = ~pairs.any(-1, keepdim=True)
    total = torch.where(empty, 1.0, weight.sum(-1, keepdim=True))
    return weight, total, torch.where(empty, -torch.inf, highest + total.log()).sum(-1)
