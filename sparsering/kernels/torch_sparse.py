"""Backend for comparison: sampled products of torch.sparse over a CSR matrix of (query, key) pairs.

It is experimental and slow: it stores the index of each pair, and runs one head of one pass at a
time. Each pass of a layout is a matrix of its own, because a matrix cannot have a pair twice.
"""

import itertools
import warnings
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..ground.dropout import kept_pairs
from ..ground.numerics import (
    capped,
    entry_of_distance,
    finite_or_zero,
    long_sum_dtype,
    merge_into,
    sum_dtype,
)
from ..layouts.layout import BlockLayout, Pass
from .problem import Gradients, Problem, sink_gradient

EXTRAS = frozenset(
    ("block_bias", "softcap", "distance_bias", "sink", "dropout_p", "dropout_seed", "key_mask")
)
"""Options of a call, other than its scale, that this backend computes."""


def reasons(*tensors: Tensor) -> list[str]:
    """Returns why torch.sparse cannot run on these tensors; [] if it can."""
    if any(x.device.type not in ("cpu", "cuda") for x in tensors):
        return ["torch.sparse has sampled products on the CPU and on cuda only"]
    return []


class Pairs(NamedTuple):
    """The n (query, key) pairs of one head in one pass, sorted by query, then by key."""

    query: Tensor  # [n] query indices, ascending
    key: Tensor  # [n] key positions, ascending for each query
    entry: Tensor  # [n] index in the head's block bias
    query_position: Tensor  # [n] absolute positions, as dropout counts them
    key_position: Tensor  # [n]
    distance: Tensor  # [n] key minus query, as distance biases count it
    stream: Tensor  # [n] index of the query's dropout seed

    def without(self, hidden: Tensor) -> "Pairs":
        """Returns the pairs where `hidden` [n] is False."""
        return Pairs(*(x[~hidden] for x in self))


class PairScores(NamedTuple):
    """The scores of `Pairs`, and the derivatives that the backward needs."""

    pairs: Pairs
    score: Tensor  # [n]
    slope: Tensor | None  # [n] derivative of the softcap
    kept: Tensor | None  # [n] factor of each weight: 0 if dropped, else 1 / (1 - p)


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of attention over a layout, as `Problem` says.

    Cost: O(pairs of one head) memory beyond the results.
    """
    problem = problem.from_bitmap_row_0().in_floats()
    query, value, sink = problem.query, problem.value, problem.sink
    dtype = sum_dtype(query)
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=dtype, device=query.device)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=dtype, device=query.device)
    if sink is not None:  # merging into a row with lse = sink and out = 0 adds the sink
        lse.copy_(sink)
    for p, b, h, every in _heads(problem):
        q, k, v = _rows(problem, b, h)
        pairs, score, _, kept = _scores(problem, p, b, h, every, q, k)
        first = _edges(pairs.query, len(q))
        highest = finite_or_zero(_by_query(score, first, "max", -torch.inf))
        weight = (score - highest[pairs.query]).exp()
        # in float64, because a sum of n weights one after the other has n roundings
        total = _by_query(weight.to(long_sum_dtype(weight.device)), first, "sum", 0.0)
        weight = weight if kept is None else weight * kept
        empty = first.diff() == 0
        total = torch.where(empty, 1.0, total)
        part = (_matrix(first, pairs.key, weight, len(k)) @ v / total[:, None]).to(dtype)
        part_lse = torch.where(empty, -torch.inf, highest + total.log()).to(dtype)
        merge_into(out[b, h], lse[b, h], part, part_lse)
    return out.to(problem.result_dtype), lse


def backward(
    problem: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> Gradients:
    """Computes the gradients of the problem's tensors.

    With `P = exp(s - lse)` and `delta = rowsum(dO * O) - dlse`, `dS = P * (dP - delta)`; each of
    dP, dQ, dK and dV is one product over the pairs.
    """
    problem = problem.from_bitmap_row_0()
    query, key, value, sink = problem.query, problem.key, problem.value, problem.sink
    bias, table, dtype = problem.block_bias, problem.distance_bias, sum_dtype(query)
    delta = (grad_out.to(dtype) * out.to(dtype)).sum(3) - grad_lse.to(dtype)
    dsink = None if sink is None else sink_gradient(sink, lse, delta)
    # in rows without keys, lse = +inf makes the weights exp(s - lse) 0
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (query, key, value))
    dbias = None if bias is None else bias.new_zeros(bias.shape, dtype=dtype)
    dtable = None
    if table is not None and problem.learns_distances:
        dtable = table.new_zeros(table.shape, dtype=long_sum_dtype(table.device))
    for p, b, h, every in _heads(problem):
        q, k, v = _rows(problem, b, h)
        pairs, score, slope, kept = _scores(problem, p, b, h, every, q, k)
        do = grad_out[b, h].to(dtype).contiguous()
        weight = (score - lse[b, h][pairs.query]).exp()
        dweight = _product_at(pairs, do, v)
        if kept is not None:
            dweight = dweight * kept
        dscore = weight * (dweight - delta[b, h][pairs.query])
        if dbias is not None:
            dbias[b, h].index_add_(0, pairs.entry, dscore)
        if dtable is not None:
            place = entry_of_distance(pairs.distance, dtable)
            dtable[b, h].index_add_(0, place, dscore.to(dtable.dtype))
        dscore = problem.scale * (dscore if slope is None else dscore * slope)
        weight = weight if kept is None else weight * kept
        kv = h // problem.group
        dq[b, h] += _matrix(_edges(pairs.query, len(q)), pairs.key, dscore, len(k)) @ k
        # Sort the pairs by key: the rows of the next two matrices are keys.
        order = pairs.key.argsort(stable=True)
        first, columns = _edges(pairs.key[order], len(k)), pairs.query[order]
        dk[b, kv] += _matrix(first, columns, dscore[order], len(q)) @ q
        dv[b, kv] += _matrix(first, columns, weight[order], len(q)) @ do
    return Gradients(
        query=dq.to(problem.result_dtype),
        key=dk.to(problem.result_dtype),
        value=dv.to(problem.result_dtype),
        block_bias=None if bias is None or dbias is None else dbias.to(bias.dtype),
        distance_bias=None if table is None or dtable is None else dtable.to(table.dtype),
        sink=dsink,
    )


def _heads(problem: Problem) -> Iterator[tuple[Pass, int, int, Pairs]]:
    """Yields (pass, batch entry, query head, its pairs) for each head that has pairs.

    Consecutive heads that share a table also share the work of listing its pairs.
    """
    layout, mask = problem.layout, problem.key_mask
    batch, heads = problem.query.shape[:2]
    batch_tables, head_tables = layout.table_shape
    for number, p in enumerate(layout.passes):
        table, pairs = None, None
        for b, h in itertools.product(range(batch), range(heads)):
            masked = None if mask is None else mask[b * (len(mask) > 1)]
            axis = h * len(p.query_start) // heads
            alike = masked is None and len(p.row_ptr) == len(p.depths(0)[0]) == 1
            own = b * (not alike), p.table_of(h, heads), axis
            if pairs is None or own != table:
                table, pairs = own, _pairs(layout, p, b, h, masked)
            place = b * (batch_tables > 1), h * head_tables // heads
            if len(pairs.query):
                first = layout.first_entry[number][place]  # other passes' entries come before
                yield p, b, h, pairs._replace(entry=pairs.entry + first)


def _pairs(layout: BlockLayout, p: Pass, b: int, h: int, mask: Tensor | None) -> Pairs:
    """Lists the pairs of a query head in one pass, without keys where `mask` [Nk] is False."""
    row, key_tile, _, axis = layout.table(p, b, h)
    slots = torch.arange(layout.block_size, device=p.row_ptr.device)
    queries, keys, cells = layout.cells(p, b, h, slots)
    if mask is not None:
        seen = torch.nn.functional.pad(mask, (0, 1))  # tokens past a tile's end are at index Nk
        cells = cells & seen[keys][:, None, :]
    entry, i, j = torch.nonzero(cells, as_tuple=True)
    query, key = queries[entry, i], keys[entry, j]
    order = (query * layout.frame.kv_len + key).argsort()
    query, key, entry = query[order], key[order], entry[order]
    row, key_tile = row[entry], key_tile[entry]

    first_query, first_key = p.coordinates(layout.frame.q_start)
    query_position = query + (first_query - p.query_start)[axis][row]
    key_position = key + (first_key - p.key_start)[axis][key_tile]
    query_slot = (query - p.query_start[axis][row]) // p.step
    key_slot = (key - p.key_start[axis][key_tile]) // p.step
    of_queries, of_keys = (
        x[b * (len(x) > 1), axis]
        for x in p.depths_of_tokens(layout.frame.q_start, layout.block_size)
    )
    query_depth, key_depth = of_queries[row, query_slot], of_keys[key_tile, key_slot]
    return Pairs(
        query=query,
        key=key,
        entry=entry,
        query_position=query_position,
        key_position=key_position,
        distance=key_depth - query_depth,
        stream=torch.zeros_like(query) if p.stream is None else p.stream[axis][row],
    )


def _scores(
    problem: Problem, p: Pass, b: int, h: int, pairs: Pairs, q: Tensor, k: Tensor
) -> PairScores:
    """Computes the scores of a head's pairs [n]; pairs with a bias of -inf are left out."""
    bias = None
    if problem.block_bias is not None:
        bias = problem.block_bias[b, h].to(q.dtype)[pairs.entry]
    if (table := problem.distance_bias) is not None:
        more = table[b, h].to(q.dtype)[entry_of_distance(pairs.distance, table)]
        bias = more if bias is None else bias + more
    if bias is not None and (hidden := bias == -torch.inf).any():
        pairs, bias = pairs.without(hidden), bias[~hidden]
    score, slope = problem.scale * _product_at(pairs, q, k), None
    if (cap := problem.softcap) is not None:
        slope = 1 - (score / cap).tanh() ** 2
        score = capped(score, cap)
    kept = None
    if (chance := problem.dropout_p) is not None and problem.dropout_seed is not None:
        seed = problem.dropout_seed[b][pairs.stream]
        places = torch.full_like(pairs.query, h), pairs.query_position, pairs.key_position
        kept = kept_pairs(seed, chance, *places, p.branch).to(q.dtype) / (1 - chance)
    score = score if bias is None else score + bias
    return PairScores(pairs=pairs, score=score, slope=slope, kept=kept)


def _rows(problem: Problem, b: int, h: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (query [Nq, D], key [Nk, D], value [Nk, Dv]) of one head, in the dtype of sums."""
    dtype, kv = sum_dtype(problem.query), h // problem.group
    rows = problem.query[b, h], problem.key[b, kv], problem.value[b, kv]
    q, k, v = (x.to(dtype).contiguous() for x in rows)
    return q, k, v


def _product_at(pairs: Pairs, left: Tensor, right: Tensor) -> Tensor:
    """Returns the dot product of `left[query]` and `right[key]` for each pair: [n]."""
    zeros = left.new_zeros(len(pairs.query))
    if not left.shape[1]:
        return zeros
    at = _matrix(_edges(pairs.query, len(left)), pairs.key, zeros, len(right))
    return torch.sparse.sampled_addmm(at, left, right.mT, beta=0.0).values()


def _matrix(first: Tensor, columns: Tensor, values: Tensor, width: int) -> Tensor:
    """Builds a CSR matrix [rows, width]; row r has the items first[r] to first[r + 1] - 1."""
    _take_warning()
    size = len(first) - 1, width
    return torch.sparse_csr_tensor(first, columns, values, size=size, check_invariants=False)


@cache
def _take_warning() -> None:
    """Triggers torch's one-time warnings about CSR tensors while they are hidden."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse (CSR tensor support is|invariant checks are)")
        none = torch.zeros(0, dtype=torch.int64)
        torch.sparse_csr_tensor(none.new_zeros(2), none, none.float(), size=(1, 1))


def _edges(ascending: Tensor, rows: int) -> Tensor:
    """Returns where each row's items begin in a sorted list of row indices: [rows + 1]."""
    return torch.searchsorted(ascending, torch.arange(rows + 1, device=ascending.device))


def _by_query(values: Tensor, first: Tensor, reduction: str, none: float) -> Tensor:
    """Reduces values of pairs [n] to one per query, in a fixed order; `none` without pairs."""
    return torch.segment_reduce(values, reduction, offsets=first, axis=0, initial=none)
