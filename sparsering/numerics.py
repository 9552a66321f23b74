"""Numbers that all of the library computes by: dtypes of sums, and merging of partial results.

Softmaxes over disjoint (or repeated) sets of keys become one by `merge_attention`.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

_Integers = TypeVar("_Integers", int, Tensor)


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges attention over several sets of keys into attention over their multiset union.

    `O = sum_i a_i O_i`, `a_i = exp(l_i - L)`, `L = log sum_i exp(l_i)`; parts without any key (lse
    = -inf) add nothing, and a row that no part reaches has out = 0, lse = -inf and zero gradients.
    Differentiable, through lse too.

    Args:
        outs: tensors [B, H, N, Dv].
        lses: tensors [B, H, N], the natural log of each part's softmax denominator.

    Returns:
        out in the outs' dtype, lse in float32 (float64 for float64 outs).

    Raises: ValueError where there is no part, or shapes do not match.

    Example:
        >>> out, lse = merge_attention((out_1, out_2), (lse_1, lse_2))
    """
    given: list[Any] = [outs, lses]
    nested = [isinstance(x, Tensor) and x.is_nested for x in given]
    if any(nested):
        raise ValueError(
            "merge_attention needs outs and lses that are sequences of dense tensors, got nested "
            "ones; pad them with .to_padded_tensor(0.0)"
        )
    is_list = [isinstance(x, Iterable) and getattr(x, "ndim", 1) > 0 for x in given]
    parts = [list(x) if many else [x] for x, many in zip(given, is_list, strict=True)]
    if kinds := {type(x).__name__ for some in parts for x in some if not isinstance(x, Tensor)}:
        raise ValueError(
            "merge_attention needs two sequences of tensors, got some of "
            f"{', '.join(sorted(kinds))}; torch.as_tensor makes tensors"
        )
    outs, lses = parts
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"merge_attention needs as many outs as lses, at least one, got {len(outs)} and "
            f"{len(lses)}"
        )
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
            raise ValueError(
                "merge_attention needs outs of one shape [B, H, N, Dv] and lses [B, H, N], "
                f"got out {tuple(out.shape)} "
                f"and lse {tuple(lse.shape)} beside out {tuple(outs[0].shape)}"
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
    """What sums, lse and merged results are kept in: float64 for float64, else float32."""
    dtype = x.dtype if isinstance(x, Tensor) else x
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocasting(x: Tensor) -> bool:
    """Whether autocast is on for the tensor's device; "meta" knows none."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """No autocast on the tensor's device: it would round scores."""
    return torch.autocast(x.device.type, enabled=False) if autocasting(x) else nullcontext()


def power_of_2(n: int) -> int:
    """The least power of two that is no less than n."""
    return 1 << max(0, n - 1).bit_length()


def round_up(n: _Integers, unit: int) -> _Integers:
    """The least multiple of a unit that is no less than n."""
    return -(-n // unit) * unit


def finite_or_zero(lse: Tensor) -> Tensor:
    """Lse with -inf replaced by 0: a shift that keeps exp(-inf - shift) = 0 instead of NaN."""
    return torch.where(lse == -torch.inf, 0.0, lse)


def capped(score: Tensor, softcap: float | None) -> Tensor:
    """Scores as `softcap` leaves them."""
    return score if softcap is None else softcap * (score / softcap).tanh()


def entry_of_distance(distance: Tensor, table: Tensor) -> Tensor:
    """Where a table [.., 2R + 1] of distances -R to R has them; what is further counts as R."""
    radius = table.shape[-1] // 2
    return distance.clamp(-radius, radius) + radius


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges one more part into (out, lse), in place: of any shapes [..., Dv] and [...]."""
    highest = finite_or_zero(torch.maximum(lse, part_lse))
    a, b = (lse - highest).exp_(), (part_lse - highest).exp_()
    total = a + b
    share = torch.where(total == 0, 1.0, total).reciprocal_()
    out.mul_((a * share)[..., None]).addcmul_(part.to(out.dtype), (b * share)[..., None])
    lse.copy_(highest + total.log_())


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of rows that see one more key, of logit `sink` and value 0; they broadcast."""
    none = (lse == -torch.inf) & (sink == -torch.inf)  # whose derivative would be no number
    merged = torch.logaddexp(torch.where(none, 0.0, lse), torch.where(none, 0.0, sink))
    share = torch.where(lse == -torch.inf, 0.0, (finite_or_zero(lse) - merged).exp())
    return out * share[..., None], torch.where(none, -torch.inf, merged)
