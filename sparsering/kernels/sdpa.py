"""Adapter to torch's dense CPU kernel, for dense patterns and for small ones.

It uses no tiles. It computes every pair; the pairs of a small pattern are selected by a mask.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..layouts.layout import BlockLayout
from ..numerics import finite_or_zero, sum_dtype
from ..patterns.algebra import And, Frame, Mask, Or, Pattern, check_fits
from ..patterns.positions import Causal, Full, SlidingWindow
from .problem import Gradients, Problem, dense_rows

EXTRAS: frozenset[str] = frozenset()
"""Options of a call, other than its scale, that this backend computes."""

MOST_MASKED = 1 << 20
"""Upper bound of the pairs of a mask, over all tables of its pattern."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_CHANNELS = 16  # head dims that `backward` adds to carry the gradient of lse
_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def reasons(*tensors: Tensor) -> list[str]:
    """Returns why torch's dense kernel cannot run on these tensors."""
    found = []
    if any(x.device.type != "cpu" for x in tensors):
        found.append("it runs on the CPU alone, where its kernel tells lse and takes it back")
    if any(x.dtype not in _DTYPES for x in tensors):
        found.append("it computes in floating point of 2, 4 and 8 bytes")
    if tensors and any(x.dim() and x.shape[-1] != tensors[0].shape[-1] for x in tensors):
        found.append("its kernel wants one head dim for query, key and value")
    if any(x.dim() and not x.shape[-1] for x in tensors):
        found.append("its kernel wants a head dim of at least 1")
    return found


def form(pattern: Pattern, frame: Frame) -> str | None:
    """Returns how the kernel runs a pattern: "full", "causal", or "masked" if it is small.

    None if it cannot. Cost: depends on the size of the expression, not on the lengths.
    """
    if len(pattern.branches) == 1:
        least, most = frame.q_start - (frame.kv_len - 1), frame.q_start + frame.q_len - 1
        inner, outer = _bands(pattern.branches[0], least, most)
        low, high = inner if inner == outer else _NONE
        if high == math.inf and low == -math.inf:
            return "full"
        if high == math.inf and low == 0 and not frame.q_start:
            return "causal"
        if frame.q_len * frame.kv_len * _num_tables(pattern, frame) <= MOST_MASKED:
            return "masked"
    return None


def reasons_against_pattern(pattern: Pattern, frame: Frame) -> list[str]:
    """Returns why it cannot run a pattern on these lengths; [] if it can."""
    if len(pattern.branches) > 1:
        return ["it counts each pair once, this pattern is a mixture"]
    if form(pattern, frame) is None:
        return [
            "the pattern is neither full nor causal from the first token on, and "
            f"{frame.q_len} x {frame.kv_len} pairs are too many to be written out"
        ]
    return []


_EVERY = -math.inf, math.inf
_NONE = math.inf, -math.inf


def _bands(mask: Mask, least: int, most: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns two bands of distances `p - k`, one inside the mask and one around it.

    They are the widest and the narrowest that are known. Distances are between `least` and `most`;
    a limit of a band that is at or beyond them becomes infinite.
    """
    if isinstance(mask, And | Or):
        inner, outer = zip(*(_bands(part, least, most) for part in mask.masks), strict=True)
        if isinstance(mask, And):
            return _common(inner), _common(outer)
        widest = max(inner, key=lambda band: band[1] - band[0])
        return widest, (min(low for low, _ in outer), max(high for _, high in outer))
    low, high = _EVERY
    if type(mask) is Causal:
        low = 0
    elif type(mask) is SlidingWindow and mask.dilation == 1:
        low = -math.inf if mask.right is None else -mask.right
        high = math.inf if mask.left is None else mask.left
    elif type(mask) is not Full:
        return _NONE, _EVERY
    band = -math.inf if low <= least else low, math.inf if high >= most else high
    return band, band


def _common(bands: Sequence[tuple[float, float]]) -> tuple[float, float]:
    low, high = max(low for low, _ in bands), min(high for _, high in bands)
    return (low, high) if low <= high else _NONE


def _num_tables(pattern: Pattern, frame: Frame) -> int:
    heads = frame.num_heads if pattern.num_tables(frame) > 1 else 1
    return heads * (pattern.num_batches() or 1)


@dataclass(frozen=True, eq=False, repr=False)
class DenseLayout(BlockLayout):
    """Layout without tiles, in the form that torch's dense kernel takes.

    Attributes:
        causal: True if query i sees keys 0 to i.
        mask: [B or 1, H or 1, Nq, Nk] bool, True for the pattern's pairs; None for no mask.
    """

    causal: bool = False
    mask: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the mask, and of the tensors cached by `added`."""
        masks = [] if self.mask is None else [self.mask, *vars(self).get("_added", {}).values()]
        return sum(x.numel() * x.element_size() for x in masks)

    def added(self, dtype: torch.dtype) -> Tensor | None:
        """Returns the additive mask, 0 for pairs and -inf elsewhere; cached with the layout."""
        if self.mask is None:
            return None
        kept: dict[torch.dtype, Tensor] = vars(self).setdefault("_added", {})
        if dtype not in kept:
            zeros = torch.zeros(self.mask.shape, dtype=dtype)
            kept[dtype] = zeros.masked_fill(~self.mask, -torch.inf)
        return kept[dtype]

    @cached_property
    def empty(self) -> Tensor | None:
        """Marks queries without keys, bool [B or 1, H or 1, Nq, 1]; None if every query has one."""
        found = None if self.mask is None else ~self.mask.any(-1, keepdim=True)
        return found if found is not None and found.any() else None

    @cached_property
    def hidden(self) -> Tensor | None:
        """Marks keys that no query sees, bool [B or 1, Hkv or 1, Nk, 1]; None if all are seen."""
        if self.mask is None:
            return None
        seen = self.mask.any(-2)[..., None]
        if seen.shape[1] > 1:
            seen = seen.unflatten(1, (self.frame.num_kv_heads, -1)).any(2)
        return None if seen.all() else ~seen


def lay(pattern: Pattern, frame: Frame, block_size: int, device: torch.device) -> DenseLayout:
    """Builds the dense layout of a pattern.

    Raises: ValueError if the pattern does not fit the frame; NotImplementedError if it is neither
        dense nor small.
    """
    check_fits(pattern, frame)
    if found := reasons_against_pattern(pattern, frame):
        raise NotImplementedError(f"sdpa: {'; '.join(found)}; name another backend or none")
    kind, mask = form(pattern, frame), None
    if kind == "masked":
        heads = {"num_heads": frame.num_heads, "num_kv_heads": frame.num_kv_heads}
        dense = pattern.to_dense(frame.q_len, frame.kv_len, q_start=frame.q_start, **heads)
        mask = (dense if dense.dim() == 4 else dense[None]).to(device)
    return DenseLayout(frame, block_size, (), math.nan, kind == "causal", mask)


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Computes attention over a dense layout; lse is float32 (float64 for float64)."""
    layout, query, key, value = _as_the_kernel_takes_it(problem)
    if not query.numel() or not key.numel():
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=sum_dtype(query))
        return query.new_zeros(query.shape), lse
    added = layout.added(query.dtype)
    options = {"attn_mask": added, "scale": problem.scale}
    out, lse = _KERNEL(query, key, value, 0.0, layout.causal, **options)
    out, lse = out.contiguous(), lse.contiguous()
    if layout.empty is not None:
        out.masked_fill_(layout.empty, 0.0)
        lse.masked_fill_(layout.empty[..., 0], -torch.inf)
    pairwise = layout.causal or added is not None
    if pairwise and not math.isfinite(float(out.sum(dtype=sum_dtype(query)))):
        return _by_definition(problem)  # a NaN may have leaked, because 0 * NaN is NaN
    return out, lse


def backward(
    problem: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> Gradients:
    """Computes the gradients of query, key and value.

    The kernel's backward takes no gradient of lse, so one more channel carries it. There grad_out
    is grad_lse and values are 1, which adds grad_lse to `dP`; out is 0 there, which leaves `delta =
    rowsum(dO * O)` unchanged. Hence `dS = P * (dP + grad_lse - delta)`.
    """
    layout, query, key, value = _as_the_kernel_takes_it(problem)
    if not query.numel() or not key.numel():
        return Gradients(*map(torch.zeros_like, problem[1:4]))
    if layout.empty is not None:  # exp(-inf - -inf) is NaN, exp(-inf - 0) is 0
        lse = lse.masked_fill(layout.empty[..., 0], 0.0)
        grad_lse = grad_lse.masked_fill(layout.empty[..., 0], 0.0)
    width = query.shape[3]
    if grad_lse.any():
        query, key, out = (pad(x, (0, _CHANNELS)) for x in (query, key, out))
        value = pad(value, (0, _CHANNELS), value=1.0)
        of_lse = _in_parts(grad_lse, grad_out.dtype)
        grad_out = pad(torch.cat((grad_out, of_lse), -1), (0, _CHANNELS - of_lse.shape[-1]))
    options = {"attn_mask": layout.added(query.dtype), "scale": problem.scale}
    results = dense_rows(out), lse, 0.0, layout.causal
    found = _BACKWARD(dense_rows(grad_out), query, key, value, *results, **options)
    dq, dk, dv = (x[..., :width].contiguous() for x in found)
    if unseen := problem.key.shape[2] - dk.shape[2]:
        dk, dv = (pad(x, (0, 0, 0, unseen)) for x in (dk, dv))
    return Gradients(dq, dk, dv)


def _in_parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Splits x [...] into three numbers of a dtype, [..., 3]; their sum is x in float32."""
    parts, rest = [], x
    for _ in range(3):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].to(x.dtype)
    return torch.stack(parts, -1)


def _as_the_kernel_takes_it(problem: Problem) -> tuple[DenseLayout, Tensor, Tensor, Tensor]:
    """Returns the layout, and dense rows of query, key and value; unseen keys are cut or zeroed."""
    layout, query, key, value = problem.layout, problem.query, problem.key, problem.value
    if not isinstance(layout, DenseLayout):
        raise NotImplementedError(
            "sdpa: it runs whole patterns, not the layouts of a cache or a ring; name another "
            "backend or none"
        )
    if layout.causal and key.shape[2] > query.shape[2]:
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    elif layout.hidden is not None:
        key, value = (x.masked_fill(layout.hidden, 0.0) for x in (key, value))
    return layout, dense_rows(query), dense_rows(key), dense_rows(value)


def _by_definition(problem: Problem) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of tensors with infinities or NaN, by head, in O(Nq Nk) memory."""
    layout, query, key, value = _as_the_kernel_takes_it(problem)
    dtype, shape = sum_dtype(query), query.shape[:3]
    outs, lses = [], []
    for b in range(shape[0]):
        for h in range(shape[1]):
            kv = h // problem.group
            q, k, v = (x.to(dtype) for x in (query[b, h], key[b, kv], value[b, kv]))
            pairs = torch.ones(len(q), len(k), dtype=torch.bool).tril()
            if layout.mask is not None:
                pairs = layout.mask.expand(*shape[:2], -1, -1)[b, h]
            score = torch.where(pairs, problem.scale * (q @ k.mT), -torch.inf)
            lse = score.logsumexp(-1)
            weight = torch.where(pairs, (score - finite_or_zero(lse)[:, None]).exp(), 0.0)
            weight = torch.where(lse.isnan()[:, None], torch.nan, weight)
            finite = v.isfinite()
            reached = pairs.to(dtype) @ (~finite).to(dtype) > 0
            out = weight @ torch.where(finite, v, 0.0)
            outs.append(torch.where(reached, torch.nan, out).to(query.dtype))
            lses.append(lse)
    return torch.stack(outs).view(query.shape), torch.stack(lses).view(shape)
