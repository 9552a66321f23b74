"""Adapter to torch's dense CPU kernel, for comparison. It runs `Full()` and `Causal()` only.

It reads no tiles of a layout, so it cannot run layouts of a cache or a ring.
"""

import itertools
import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..numerics import finite_or_zero, sum_dtype
from ..patterns.algebra import Pattern
from ..patterns.positions import Causal, Full
from .problem import Gradients, Problem, dense_rows

EXTRAS: frozenset[str] = frozenset()
"""Options of a call, other than its scale, that this backend computes."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_CHANNELS = 16  # columns that `backward` adds to the head dim, to pass on the gradient of lse
_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def reasons(*tensors: Tensor) -> list[str]:
    """Returns why torch's dense kernel cannot run on these tensors; [] if it can."""
    faults = []
    if any(x.device.type != "cpu" for x in tensors):
        faults.append("it runs on the CPU only, where torch's kernel returns lse")
    if any(x.dtype not in _DTYPES for x in tensors):
        faults.append("it computes in floating point of 2, 4 and 8 bytes")
    if tensors and any(x.dim() and x.shape[-1] != tensors[0].shape[-1] for x in tensors):
        faults.append("its kernel wants one head dim for query, key and value")
    if any(x.dim() and not x.shape[-1] for x in tensors):
        faults.append("its kernel wants a head dim of at least 1")
    return faults


def refuses(pattern: Pattern, q_start: int) -> list[str]:
    """Returns why this backend cannot run a pattern; [] if it can."""
    runs = type(pattern) is Full or (type(pattern) is Causal and q_start == 0)
    return [] if runs else ["it runs Full(), and Causal() with q_start=0, and no other pattern"]


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Computes `Full()` or `Causal()` attention; lse is float32 (float64 for float64)."""
    if not problem.query.numel() or not problem.key.numel():
        lse = problem.query.new_full(problem.query.shape[:3], -torch.inf)
        return torch.zeros_like(problem.query).contiguous(), lse.to(sum_dtype(problem.query))
    causal, query, key, value = _operands(problem)
    out, lse = _KERNEL(query, key, value, 0.0, causal, scale=problem.scale)
    if causal and not math.isfinite(float(out.sum(dtype=sum_dtype(query)))):
        return _by_definition(problem)  # 0 * NaN is NaN: a late key may have spoilt early rows
    return out.contiguous(), lse.contiguous()


def backward(
    problem: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> Gradients:
    """Computes the gradients of query, key and value.

    Torch's backward takes no gradient of lse. So this widens the head dim by columns in which
    grad_out sums to grad_lse, value is 1 and out is 0. They add grad_lse to `dP`, and leave `delta
    = rowsum(dO * O)` unchanged. Hence `dS = P * (dP + grad_lse - delta)`.
    """
    if not problem.query.numel() or not problem.key.numel():
        return Gradients(*map(torch.zeros_like, problem[1:4]))
    causal, query, key, value = _operands(problem)
    width = query.shape[3]
    if grad_lse.any():
        query, key, out = (pad(x, (0, _CHANNELS)) for x in (query, key, out))
        value = pad(value, (0, _CHANNELS), value=1.0)
        rest = grad_lse
        for _ in range(3):  # a sum of three half-precision numbers is as exact as float32
            part = rest.to(grad_out.dtype)
            grad_out, rest = torch.cat((grad_out, part[..., None]), -1), rest - part.to(rest.dtype)
        grad_out = pad(grad_out, (0, _CHANNELS - 3))
    results = dense_rows(out), lse, 0.0, causal
    grads = _BACKWARD(dense_rows(grad_out), query, key, value, *results, scale=problem.scale)
    dq, dk, dv = (x[..., :width].contiguous() for x in grads)
    cut_keys = problem.key.shape[2] - dk.shape[2]
    return Gradients(dq, *(pad(x, (0, 0, 0, cut_keys)) for x in (dk, dv)))


def _operands(problem: Problem) -> tuple[bool, Tensor, Tensor, Tensor]:
    """Returns whether the problem is `Causal()`, and its inputs without keys that no query sees."""
    layout, query, key, value, *_ = problem
    queries, keys = layout.frame.q_len, layout.frame.kv_len
    side = min(queries, keys)
    causal = layout.num_pairs != queries * keys
    if causal and layout.num_pairs != side * (side + 1) // 2 + (queries - side) * keys:
        # layouts of a cache or a ring do not know their number of pairs: it is NaN or 0
        raise NotImplementedError("sdpa: it runs no cache or ring layouts; pass another backend")
    if causal:
        key, value = (x[:, :, : query.shape[2]] for x in (key, value))
    return causal, dense_rows(query), dense_rows(key), dense_rows(value)


def _by_definition(problem: Problem) -> tuple[Tensor, Tensor]:
    """Computes `Causal()` for inputs with infinities or NaN, in O(Nq Nk) memory."""
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
        spoilt = pairs.to(dtype) @ (~finite).to(dtype) > 0  # rows that see an infinity or NaN
        mean = weight @ torch.where(finite, v, 0.0)
        out[b, h] = torch.where(spoilt, torch.nan, mean).to(query.dtype)
    return out, lse
