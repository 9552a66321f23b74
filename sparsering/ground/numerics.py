"""Numerics that the whole library shares: dtypes of sums, and merging of partial results."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from .keywords import with_hints

_Integers = TypeVar("_Integers", int, Tensor)


@with_hints()
def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges attention over several sets of keys; a key in several sets counts several times.

    `O = sum_i a_i O_i`, `a_i = exp(l_i - L)`, `L = log sum_i exp(l_i)`, for parts with out O_i and
    lse l_i. A part without keys (lse = -inf) adds nothing. A row without keys in any part has
    out = 0, lse = -inf and zero gradients. Differentiable, through lse too.

    Args:
        outs: tensors [B, H, N, Dv].
        lses: tensors [B, H, N], the natural log of each part's softmax denominator.

    Returns:
        out in the outs' dtype, lse in float32 (float64 for float64 outs).

    Raises: ValueError if there is no part, or shapes do not match.

    Example:
        >>> out, lse = merge_attention((out_1, out_2), (lse_1, lse_2))
    """
    arguments: tuple[Any, Any] = (outs, lses)
    if any(isinstance(x, Tensor) and x.is_nested for x in arguments):
        raise ValueError(
            "merge_attention needs outs and lses that are sequences of dense tensors, got nested "
            "ones; pad them with .to_padded_tensor(0.0)"
        )
    outs, lses = (
        list(x) if isinstance(x, Iterable) and getattr(x, "ndim", 1) > 0 else [x] for x in arguments
    )
    if kinds := {type(x).__name__ for x in (*outs, *lses) if not isinstance(x, Tensor)}:
        raise ValueError(
            "merge_attention needs two sequences of tensors, got some of "
            f"{', '.join(sorted(kinds))}; torch.as_tensor makes tensors of numbers, and to trace "
            "the call, use torch.export, or torch.fx.wrap a function of yours that makes it"
        )
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"merge_attention needs as many outs as lses, at least one, got {len(outs)} and "
            f"{len(lses)}"
        )
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
            raise ValueError(
                "merge_attention needs outs of one shape [B, H, N, Dv] and lses [B, H, N], got out "
                f"{tuple(out.shape)} and lse {tuple(lse.shape)}; the first out has shape "
                f"{tuple(outs[0].shape)}"
            )
    dtype = sum_dtype(outs[0])
    lse = torch.stack([part.to(dtype) for part in lses])  # [parts, B, H, N]
    highest = finite_or_zero(lse.detach().amax(0))
    weight = torch.where(lse == -torch.inf, 0.0, (lse - highest).exp())
    total = weight.sum(0)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    mixed = sum(w[..., None] * part.to(dtype) for w, part in zip(weight, outs, strict=True))
    out = torch.where(empty[..., None], 0.0, mixed / total[..., None])
    return out.to(outs[0].dtype), torch.where(empty, -torch.inf, highest + total.log())


def sum_dtype(x: Tensor | torch.dtype) -> torch.dtype:
    """Returns the dtype in which attention adds up: float64 for float64, else float32."""
    dtype = x.dtype if isinstance(x, Tensor) else x
    return torch.float64 if dtype == torch.float64 else torch.float32


def long_sum_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype for sums of many terms: float64, or float32 on devices without it (MPS)."""
    return torch.float64 if device.type in ("cpu", "cuda", "meta") else torch.float32


def autocasting(x: Tensor) -> bool:
    """True if autocast is on for the tensor's device; the meta device has no autocast."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Returns a context without autocast on the tensor's device: autocast would round scores."""
    return torch.autocast(x.device.type, enabled=False) if autocasting(x) else nullcontext()


def power_of_2(n: int) -> int:
    """Returns the least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def round_up(n: _Integers, unit: int) -> _Integers:
    """Returns the least multiple of `unit` that is at least n."""
    return -(-n // unit) * unit


def finite_or_zero(lse: Tensor) -> Tensor:
    """Replaces -inf by 0, so that exp(x - lse) of a row without keys is 0 instead of NaN."""
    return torch.where(lse == -torch.inf, 0.0, lse)


def capped(score: Tensor, softcap: float | None) -> Tensor:
    """Returns `softcap * tanh(score / softcap)`, or the score itself for None."""
    return score if softcap is None else softcap * (score / softcap).tanh()


def entry_of_distance(distance: Tensor, table: Tensor) -> Tensor:
    """Returns each distance's index into a bias table [.., 2R + 1].

    Far ones use its first or last.
    """
    radius = table.shape[-1] // 2
    return distance.clamp(-radius, radius) + radius


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges attention over further keys into (out, lse) in place.

    `part` is [..., Dv] and `part_lse` [...]; no key is in both.
    """
    highest = finite_or_zero(torch.maximum(lse, part_lse))
    a, b = (lse - highest).exp_(), (part_lse - highest).exp_()
    total = a + b
    share = torch.where(total == 0, 1.0, total).reciprocal_()
    out.mul_((a * share)[..., None]).addcmul_(part.to(out.dtype), (b * share)[..., None])
    lse.copy_(highest + total.log_())


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Adds an attention sink to a result: one more key, with logit `sink` and a value of zeros.

    Shapes: out [..., Dv], lse and sink [...], which may broadcast. Returns the new (out, lse).
    """
    none = (lse == -torch.inf) & (sink == -torch.inf)  # logaddexp has a NaN derivative here
    merged = torch.logaddexp(torch.where(none, 0.0, lse), torch.where(none, 0.0, sink))
    share = torch.where(lse == -torch.inf, 0.0, (finite_or_zero(lse) - merged).exp())
    return out * share[..., None], torch.where(none, -torch.inf, merged)
