"""Adapter to torch's dense CPU kernel, for comparison: all pairs, or a causal triangle.

It reads no tiles. It runs a pattern as a whole, not the layouts of a cache or a ring.
"""

import itertools
import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..layouts.layout import BlockLayout
from ..numerics import finite_or_zero, sum_dtype
from ..patterns.algebra import Pattern
from ..patterns.positions import Causal, Full
from .problem import Gradients, Problem, dense_rows

EXTRAS: frozenset[str] = frozenset()
"""Options of a call, other than its scale, that this backend computes."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_CHANNELS = 16  # head dims that `backward` adds to carry the gradient of lse
_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def reasons(*tensors: Tensor) -> list[str]:
    """Returns why torch's dense kernel cannot run on these tensors."""
    faults = []
    if any(x.device.type != "cpu" for x in tensors):
        faults.append("it runs on the CPU alone, where its kernel returns lse and takes it back")
    if any(x.dtype not in _DTYPES for x in tensors):
        faults.append("it computes in floating point of 2, 4 and 8 bytes")
    if tensors and any(x.dim() and x.shape[-1] != tensors[0].shape[-1] for x in tensors):
        faults.append("its kernel wants one head dim for query, key and value")
    if any(x.dim() and not x.shape[-1] for x in tensors):
        faults.append("its kernel wants a head dim of at least 1")
    return faults


def refuses(pattern: Pattern, q_start: int) -> list[str]:
    """Returns why it cannot run a pattern; [] if it can."""
    if type(pattern) is Full or (type(pattern) is Causal and q_start == 0):
        return []
    return ["it runs Full(), and Causal() with q_start=0, and no other pattern"]


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Computes attention over all pairs or a triangle; lse is float32 (float64 for float64)."""
    if not problem.query.numel() or not problem.key.numel():
        lse = problem.query.new_full(problem.query.shape[:3], -torch.inf)
        return torch.zeros_like(problem.query).contiguous(), lse.to(sum_dtype(problem.query))
    causal, query, key, value = _operands(problem)
    out, lse = _KERNEL(query, key, value, 0.0, causal, scale=problem.scale)
    if causal and not math.isfinite(float(out.sum(dtype=sum_dtype(query)))):
        return _by_definition(problem)  # a NaN may have leaked to earlier rows: 0 * NaN is NaN
    return out.contiguous(), lse.contiguous()


def backward(
    problem: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> Gradients:
    """Computes the gradients of query, key and value.

    The kernel's backward takes no gradient of lse, so one more channel carries it. There grad_out
    is grad_lse and values are 1, which adds grad_lse to `dP`; out is 0 there, which leaves `delta =
    rowsum(dO * O)` unchanged. Hence `dS = P * (dP + grad_lse - delta)`.
    """
    if not problem.query.numel() or not problem.key.numel():
        return Gradients(*map(torch.zeros_like, problem[1:4]))
    causal, query, key, value = _operands(problem)
    width = query.shape[3]
    if grad_lse.any():
        query, key, out = (pad(x, (0, _CHANNELS)) for x in (query, key, out))
        value = pad(value, (0, _CHANNELS), value=1.0)
        rest = grad_lse
        for _ in range(3):  # three numbers of a half-precision dtype add up to one of float32
            part = rest.to(grad_out.dtype)
            grad_out, rest = torch.cat((grad_out, part[..., None]), -1), rest - part.to(rest.dtype)
        grad_out = pad(grad_out, (0, _CHANNELS - 3))
    results = dense_rows(out), lse, 0.0, causal
    grads = _BACKWARD(dense_rows(grad_out), query, key, value, *results, scale=problem.scale)
    dq, dk, dv = (x[..., :width].contiguous() for x in grads)
    cut_keys = problem.key.shape[2] - dk.shape[2]
    return Gradients(dq, *(pad(x, (0, 0, 0, cut_keys)) for x in (dk, dv)))


def _operands(problem: Problem) -> tuple[bool, Tensor, Tensor, Tensor]:
    """Returns whether the call is causal, and dense rows of query, key and value.

    Keys after the last query of a triangle are cut off.
    """
    causal, (_, query, key, value, *_) = _is_causal(problem.layout), problem
    if causal:
        key, value = (x[:, :, : query.shape[2]] for x in (key, value))
    return causal, dense_rows(query), dense_rows(key), dense_rows(value)


def _is_causal(layout: BlockLayout) -> bool:
    """Tells a layout of `Causal()` from one of `Full()` by its number of pairs.

    Layouts of a cache, which do not count their pairs, raise NotImplementedError.
    """
    queries, keys = layout.frame.q_len, layout.frame.kv_len
    side = min(queries, keys)
    if layout.num_pairs == queries * keys:
        return False
    if layout.num_pairs == side * (side + 1) // 2 + (queries - side) * keys:
        return True
    raise NotImplementedError(
        "sdpa: it runs whole patterns, not the layouts of a cache; name another backend or none"
    )


def _by_definition(problem: Problem) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a triangle with infinities or NaN, by head, in O(Nq Nk) memory."""
    _, query, key, value = _operands(problem)
    dtype, shape = sum_dtype(query), query.shape[:3]
    out, lse = torch.empty_like(query), query.new_empty(shape, dtype=dtype)
    pairs = torch.ones(shape[2], key.shape[2], dtype=torch.bool).tril()
    for b, h in itertools.product(*map(range, shape[:2])):
        kv = h // problem.group
        q, k, v = (x.to(dtype) for x in (query[b, h], key[b, kv], value[b, kv]))
        score = torch.where(pairs, problem.scale * (q @ k.mT), -torch.inf)
        lse[b, h] = row = score.logsumexp(-1)
        weight = torch.where(pairs, (score - finite_or_zero(row)[:, None]).exp(), 0.0)
        weight = torch.where(row.isnan()[:, None], torch.nan, weight)
        finite = v.isfinite()
        spoilt = pairs.to(dtype) @ (~finite).to(dtype) > 0  # rows with a non-finite value
        mean = weight @ torch.where(finite, v, 0.0)
        out[b, h] = torch.where(spoilt, torch.nan, mean).to(query.dtype)
    return out, lse
