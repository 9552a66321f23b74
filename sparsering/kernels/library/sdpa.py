"""Adapter to torch's own fused attention, `scaled_dot_product_attention`, for dense calls only.

Torch chooses the kernel (flash, memory-efficient, cuDNN, or a plain formula) and computes the
gradients. It returns no lse, so it cannot serve caches and rings, which merge results by lse.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ...call import Call
from ...patterns.algebra import Frame
from ...patterns.positions import Causal, Full
from .derivatives import with_first_derivatives, with_positive_scale, without_keys

EXTRAS: frozenset[str] = frozenset()
"""Options of a call, other than its scale, that this backend computes."""


def refuses(call: Call) -> list[str]:
    """Returns why torch's attention cannot run a call of a pattern; [] if it can."""
    pattern, frame = call.pattern, call.frame
    if type(pattern) not in (Full, Causal):
        return ["it runs Full() and Causal(), and no other pattern"]
    if type(pattern) is Full or _sees_all(frame) or frame.q_start == 0 or _ends_in_keys(frame):
        return []
    return [
        "it runs Causal() where q_start is 0, or no query is before the first key or after the "
        f"last, got q_start={frame.q_start} of {frame.q_len} queries and {frame.kv_len} keys"
    ]


def attention(call: Call) -> tuple[Tensor, Tensor]:
    """Computes attention of `Full()` or `Causal()`, in a call that `refuses` accepts.

    Returns: out [B, Hq, Nq, Dv] in the query's dtype, and an empty tensor in place of lse.
    """
    query, key, value = with_first_derivatives(*call.inputs)
    pattern, frame, scale = call.pattern, call.frame, call.scale
    no_lse = query.new_empty(0)
    if not query.shape[3]:  # a column of zeros leaves the scores at 0
        query, key = pad(query, (0, 1)), pad(key, (0, 1))
    if not query.numel() or not key.numel() or not value.numel():
        return without_keys(query, key, value)[0], no_lse
    query, scale = with_positive_scale(query, scale)
    is_causal, mask = False, None
    if type(pattern) is Causal and not _sees_all(frame):
        is_causal = frame.q_start == 0  # torch aligns the first query with the first key
        if not is_causal:
            end = frame.q_start + frame.q_len
            key, value = key[:, :, :end], value[:, :, :end]  # no query sees later keys
            mask = _last_query_at_last_key(frame.q_len, end, query.device)
    is_grouped = key.shape[1] != query.shape[1]
    if is_grouped and query.is_cuda and query.itemsize > 2:
        # torch's fused kernels for these dtypes have no grouped heads; its formula stores all pairs
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        is_grouped = False
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
    )
    return out, no_lse


def _sees_all(frame: Frame) -> bool:
    """Whether every query of a causal call sees every key."""
    return not frame.q_len or frame.q_start >= frame.kv_len - 1


def _ends_in_keys(frame: Frame) -> bool:
    """Whether every query of a causal call is at the position of a key."""
    return 0 <= frame.q_start <= frame.kv_len - frame.q_len


def _last_query_at_last_key(q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """Returns a causal mask that aligns the last query with the last key, in a form for torch."""
    if device.type == "cuda" and not torch.compiler.is_compiling():
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(q_len, kv_len)  # a symbol, not a tensor of all pairs
    return torch.ones(q_len, kv_len, dtype=torch.bool, device=device).tril(kv_len - q_len)
