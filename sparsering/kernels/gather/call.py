"""The portable backend: gathers each query tile's keys and hands them to library kernels.

A unit is one row of `gather_plan`: a few query tiles and the keys that they all visit. Forward is
two matmuls and a softmax per unit, merged into (out, lse); backward five matmuls. Scores exist for
a few units at a time: extra memory is O(N) for accumulators and a workspace (`set_workspace`).
Any device, any dtype (half precision computes in float32); sums run in a fixed order.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...numerics import finite_or_zero, sum_dtype
from ..problem import Gradients, Problem
from .plan import Chunk, chunks, plan

EXTRAS = frozenset({"block_bias"})
"""Options of a call, beside its scale, that are computed here."""

_MOST_QUERIES = 512  # tokens of a unit: enough for the full rate of a matmul,
_MOST_KEYS = 2048  # while its scores stay in cache
_LEAST_PAIRS_ALONE = 1 << 15  # smaller units are batched
_workspace = {"bytes": 16 << 20}


def set_workspace(limit: int) -> int:
    """Sets how many bytes a call gathers at a time (at least one unit is). Returns the old limit.

    The default, 16 MiB, is where more stops to pay; less saves memory and costs calls. Accumulators
    of O(N) come on top.
    """
    if not isinstance(limit, int) or limit <= 0:
        raise ValueError(
            f"the workspace must be a positive number of bytes, got {limit!r}; pass an int"
        )
    old, _workspace["bytes"] = _workspace["bytes"], int(limit)
    return old


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Attention over a layout; see `Problem`."""
    query, value = problem.query, problem.value
    dtype = sum_dtype(query)
    q, k, v = _flat(query), _flat(problem.key), _flat(value)
    bias = _flat_bias(problem.block_bias)
    out = torch.zeros(len(q), v.shape[1], dtype=dtype, device=q.device)
    lse = torch.full((len(q),), -torch.inf, dtype=dtype, device=q.device)
    for fresh, chunk in _walk(problem):
        group, parts, part_lses = chunk.q.shape[1], [], []
        for unit, additive, product in _units(chunk, bias, dtype):
            uq = _take(q, chunk.q[unit], dtype).mul_(problem.scale).flatten(-3, -2)  # [.., g*m, D]
            uk, uv = (_take(x, chunk.k[unit], dtype) for x in (k, v))  # [..., n, D]
            weight, part_lse = _softmax(product(uq, uk), additive, group)
            parts.append(product(weight, uv.mT).flatten(0, -2))
            part_lses.append(part_lse.flatten())
        part, part_lse = torch.cat(parts), torch.cat(part_lses)
        rows = chunk.q.flatten()
        if fresh:
            out.index_copy_(0, rows, part)
            lse.index_copy_(0, rows, part_lse)
        else:
            _merge_rows(out, lse, rows, part, part_lse)
    shape = query.shape[:3]
    return out.to(problem.result_dtype).view(*shape, v.shape[1]), lse.view(shape)


def backward(
    problem: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> Gradients:
    """Gradients of the problem's tensors."""
    query, key, value = problem.query, problem.key, problem.value
    dtype = sum_dtype(query)
    q, k, v, do = _flat(query), _flat(key), _flat(value), _flat(grad_out)
    bias = _flat_bias(problem.block_bias)
    delta = (do.to(dtype) * _flat(out).to(dtype)).sum(1) - grad_lse.reshape(-1).to(dtype)
    # exp(s - inf) = 0 in rows without keys
    lse = torch.where(lse == -torch.inf, torch.inf, lse).reshape(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    dbias = None if bias is None else torch.zeros(bias.shape, dtype=dtype, device=bias.device)
    for _, chunk in _walk(problem):
        rows, columns = chunk.q.flatten(), chunk.k.flatten()
        clse, cdelta = (x[chunk.q].flatten(1, 2)[..., None] for x in (lse, delta))
        group, dqs, dks, dvs, dbiases = chunk.q.shape[1], [], [], [], []
        for unit, additive, product in _units(chunk, bias, dtype):
            uq, udo = (_take(x, chunk.q[unit], dtype).flatten(-3, -2) for x in (q, do))
            uk, uv = (_take(x, chunk.k[unit], dtype) for x in (k, v))
            score = _biased(product(uq.mul_(problem.scale), uk), additive, group)
            weight = score.sub_(clse[unit]).exp_()
            dscore = product(udo, uv).sub_(cdelta[unit]).mul_(weight)
            dvs.append(product(udo.mT, weight.mT).mT.flatten(0, -2))
            dqs.append(product(dscore, uk.mT).flatten(0, -2))
            dks.append(product(uq.mT, dscore.mT).mT.flatten(0, -2))
            if bias is not None:
                dbiases.append(dscore.unflatten(-2, (group, -1)).sum(-2))
        dq.index_add_(0, rows, torch.cat(dqs), alpha=problem.scale)
        dk.index_add_(0, columns, torch.cat(dks))
        dv.index_add_(0, columns, torch.cat(dvs))
        if dbias is not None and chunk.bias is not None:
            of_keys = torch.cat([x.reshape(-1, *x.shape[-2:]) for x in dbiases])  # [C, g, n]
            _add_bias_gradient(dbias, *chunk.bias, of_keys)
    dq, dk, dv = (
        x.view(like.shape).to(problem.result_dtype)
        for x, like in ((dq, query), (dk, key), (dv, value))
    )
    if dbias is None or problem.block_bias is None:
        return Gradients(dq, dk, dv)
    return Gradients(dq, dk, dv, dbias.view(problem.block_bias.shape).to(problem.block_bias.dtype))


def _walk(problem: Problem) -> Iterator[tuple[bool, Chunk]]:
    """Every chunk of every pass, and whether its query rows are met for the first time."""
    layout, query, biased = problem.layout, problem.query, problem.block_bias is not None
    b, size = layout.block_size, sum_dtype(query).itemsize
    per_token = 3 * size * (query.shape[-1] + problem.value.shape[-1])
    most_queries = 1 if biased else max(1, _MOST_QUERIES // b)
    for number, p in enumerate(layout.passes):
        for units in plan(p, b, most_queries, max(1, _MOST_KEYS // b)):
            pairs = units.num_queries * units.num_keys
            per_pair = 0 if _alone(pairs, query.device, sum_dtype(query)) else 4 * size
            limits = (_workspace["bytes"], per_token, per_pair)
            for chunk in chunks(layout, number, units, len(query), *limits, biased):
                yield units.fresh and number == 0, chunk


def _units(
    chunk: Chunk, bias: Tensor | None, dtype: torch.dtype
) -> Iterator[tuple[int | slice, Tensor | None, Callable[[Tensor, Tensor], Tensor]]]:
    """What is computed at a time: (unit index, what to add to its scores, the matmul a @ b^T).

    Large units run one by one, so that their scores stay in cache, smaller ones as one batch.
    """
    additive = _additive(chunk, bias, dtype)
    if not _alone(chunk.q[0].numel() * chunk.k.shape[1], chunk.q.device, dtype):
        yield slice(None), additive, _batched_product
        return
    for unit in range(len(chunk.q)):
        added = None if additive is None else additive[unit if len(additive) > 1 else 0]
        yield unit, added, _product


def _alone(pairs: int, device: torch.device, dtype: torch.dtype) -> bool:
    return (
        pairs >= _LEAST_PAIRS_ALONE
        and device.type == "cpu"
        and dtype == torch.float32
        and torch.backends.mkldnn.is_available()
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The product a @ b^T by oneDNN: up to twice the default BLAS's rate, on any vendor's CPU."""
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


def _batched_product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.mT


def _softmax(score: Tensor, additive: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
    """Softmax over the last dim and its lse; a row without pairs gets weights 0, lse -inf."""
    score = _biased(score, additive, group)
    highest = score.amax(-1, keepdim=True)
    weight = torch.softmax(score, -1)
    lse = highest - weight.amax(-1, keepdim=True).log()
    if (empty := highest == -torch.inf).any():
        weight.masked_fill_(empty, 0.0)
        lse.masked_fill_(empty, -torch.inf)
    return weight, lse


def _biased(score: Tensor, additive: Tensor | None, group: int) -> Tensor:
    """Adds [..., g or 1, m or 1, n] to scores [..., g * m, n], g = group, in place."""
    if additive is not None:
        score.unflatten(-2, (group, -1)).add_(additive)
    return score


def _additive(chunk: Chunk, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to a chunk's scores: the block bias, -inf where a pair is out.

    [C or 1, g or 1, m or 1, n], None for nothing.
    """
    additive = None
    if bias is not None and chunk.bias is not None:
        entries, slots = chunk.bias
        slots = slots[:, None].expand(-1, chunk.q.shape[1], -1)
        additive = bias[entries].gather(-1, slots)[:, :, None].to(dtype)
    if chunk.cells is not None:
        kept = torch.zeros((), dtype=dtype, device=chunk.q.device) if additive is None else additive
        additive = torch.where(chunk.cells[:, None], kept, -torch.inf)
    return additive


def _merge_rows(out: Tensor, lse: Tensor, rows: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges partial results into distinct rows of (out, lse), in place."""
    old = lse[rows]
    highest = finite_or_zero(torch.maximum(old, part_lse))
    a, b = (old - highest).exp(), (part_lse - highest).exp()
    total = torch.where(a + b == 0, 1.0, a + b)
    merged = (
        out.index_select(0, rows).mul_((a / total)[:, None]).addcmul_(part, (b / total)[:, None])
    )
    out.index_copy_(0, rows, merged)
    lse.index_copy_(0, rows, highest + (a + b).log())


def _add_bias_gradient(dbias: Tensor, entries: Tensor, slots: Tensor, of_keys: Tensor) -> None:
    """Adds [C, g, n] sums over each key's scores to the entries that the keys belong to."""
    of_entries = of_keys.new_zeros(entries.shape)
    of_entries.scatter_add_(-1, slots[:, None].expand(of_keys.shape), of_keys)
    dbias.index_add_(0, entries.flatten(), of_entries.flatten())


def _take(x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Copies of some rows, [*rows.shape, width]."""
    taken = x.index_select(0, rows.flatten()).view(*rows.shape, x.shape[-1])
    return taken.to(dtype)


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _flat_bias(block_bias: Tensor | None) -> Tensor | None:
    return None if block_bias is None else block_bias.flatten()
