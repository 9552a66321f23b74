"""Backend for comparison: torch's sampled matrix product over a CSR matrix of (query, key) pairs.

It is plain differentiable torch, one head at a time, and slow: it stores an index of each pair.
"""

import itertools

import torch
from torch import Tensor

from ..numerics import add_sink, capped, finite_or_zero, merge_attention, sum_dtype
from .problem import Problem

EXTRAS = frozenset(("block_bias", "softcap", "sink"))
"""Options of a call, other than its scale, that this backend computes."""


def reasons(*tensors: Tensor) -> list[str]:
    """Returns why the sampled product cannot run on these tensors; [] if it can."""
    empty = any(x.dim() and 0 in x.shape for x in tensors)
    return ["torch.sparse multiplies no matrices of size 0"] if empty else []


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Computes attention over a layout; differentiable.

    Cost: O(pairs) memory for each head, and twice that with gradients.
    """
    layout, query, group = problem.layout, problem.query, problem.group
    dtype = sum_dtype(query)
    q, k, v = (x.to(dtype) for x in (query, problem.key, problem.value))
    nothing = q.sum() * 0 + k.sum() * 0 + v.sum() * 0  # gives heads without pairs zero gradients
    empty = q.new_zeros(layout.frame.q_len, v.shape[3]), q.new_full(q.shape[2:3], -torch.inf)
    outs, lses, shape = [], [], query.shape[:3]
    for b, h in itertools.product(*map(range, shape[:2])):
        parts = [empty]
        for first, queries, keys, cells in layout.visits(b, h):
            entry, row, column = torch.nonzero(cells, as_tuple=True)
            pairs = torch.stack((queries[entry, row], keys[entry, column]))
            order = (pairs[0] * layout.frame.kv_len + pairs[1]).argsort()  # by query, then by key
            pairs, entry = pairs[:, order], entry[order]
            bias = None
            if problem.block_bias is not None:
                bias = problem.block_bias[b, h].to(dtype)[first + entry]
            if len(entry):
                rows = q[b, h], k[b, h // group], v[b, h // group]
                parts.append(_over_pairs(pairs, *rows, bias, problem.scale, problem.softcap))
        out, lse = merge_attention(
            *([x[None, None] for x in xs] for xs in zip(*parts, strict=True))
        )
        outs.append(out[0, 0] + nothing)
        lses.append(lse[0, 0] + nothing)
    out, lse = torch.stack(outs).view(*shape, -1), torch.stack(lses).view(shape)
    if problem.sink is not None:
        out, lse = add_sink(out, lse, problem.sink.to(dtype))
    return out.to(query.dtype, copy=True), lse.clone()  # no views, which autograd would guard


def _over_pairs(
    pairs: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Computes (out [Nq, Dv], lse [Nq]) of one head over distinct (query, key) pairs [2, n]."""
    rows, columns = pairs
    first = torch.searchsorted(rows, torch.arange(len(q) + 1, device=rows.device))
    size = len(q), len(k)
    zeros = torch.sparse_csr_tensor(
        first, columns, q.new_zeros(len(rows)), size=size, check_invariants=True
    )
    score = torch.sparse.sampled_addmm(zeros, q, k.mT, alpha=scale, beta=0.0).values()
    score = capped(score, softcap)
    score = score if bias is None else score + bias
    highest = q.new_full(size[:1], -torch.inf).scatter_reduce(0, rows, score.detach(), "amax")
    highest = finite_or_zero(highest)
    weight = (score - highest[rows]).exp()
    total = q.new_zeros(len(q)).index_add(0, rows, weight)
    weights = torch.sparse_csr_tensor(first, columns, weight, size=size, check_invariants=True)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    return weights @ v / total[:, None], torch.where(empty, -torch.inf, highest + total.log())
