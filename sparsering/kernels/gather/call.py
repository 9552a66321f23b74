"""Forward and backward of the portable backend.

A unit is a few query tiles and the keys that all of them visit. Forward computes two matmuls and a
softmax per unit, and merges the results; backward computes five matmuls. A chunk is several units
that together fit into the workspace (`set_workspace`). Sums need O(N) more memory. The backend runs
on any device and dtype; half precision is computed in float32. Sums run in a fixed order.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...ground.arguments import checked_integer
from ...ground.keywords import with_hints
from ...ground.numerics import merge_into, sum_dtype
from ..problem import Gradients, Problem, sink_gradient
from .chunk_extras import Extras
from .scored import Scores
from .units import Chunk, chunks, list_chunks, plan

EXTRAS = frozenset(
    (
        *("block_bias", "softcap", "distance_bias", "sink", "dropout_p", "dropout_seed"),
        *("key_mask", "score_mod", "coordinate_bias"),
    )
)
"""Options of a call, other than its scale, that this backend computes."""

_MOST_QUERIES = 512  # most queries of a unit; more would not make its matmuls faster
_MOST_KEYS = 2048  # most keys of a unit, so that its scores stay in cache
_LEAST_PAIRS_ALONE = 1 << 15  # units with fewer (query, key) pairs run in batches
_workspace = {"bytes": 16 << 20}


@with_hints()
def set_workspace(limit: int) -> int:
    """Sets how many bytes a call uses for copied keys and scores at a time. Returns the old limit.

    The default is 16 MiB; more is hardly faster. Less saves memory, but needs more matmuls. A call
    also needs O(N) memory for sums, and at least the bytes of 512 queries and 2,048 keys.

    Raises: ValueError if the limit is not a positive int.
    """
    limit = checked_integer("limit", limit, 1)
    old, _workspace["bytes"] = _workspace["bytes"], limit
    return old


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of attention over a layout, as `Problem` says."""
    problem = problem.from_bitmap_row_0().in_floats()
    query, value, sink = problem.query, problem.value, problem.sink
    dtype = sum_dtype(query)
    q, k, v = _flat(query), _flat(problem.key), _flat(value)
    extras, scores = Extras(problem, dtype), Scores(problem)
    shape = query.shape[:3]
    results = (  # allocated in full shape: autograd would forbid in-place changes of views
        torch.zeros(*shape, v.shape[1], dtype=dtype, device=q.device),
        torch.full(shape, -torch.inf, dtype=dtype, device=q.device),
    )
    if sink is not None:  # merging into a row with lse = sink and out = 0 adds the sink
        results[1].copy_(sink)
    out, lse = _flat(results[0]), results[1].flatten()
    for fresh, chunk in _walk(problem):
        group, parts, part_lses = chunk.q.shape[1], [], []
        for unit, product, added in _units(chunk, extras):
            # uq [.., g*m, D]: m queries of g heads; uk and uv [.., n, D]: the n keys of all g heads
            uq = _take(q, chunk.q[unit], dtype).mul_(problem.scale).flatten(-3, -2)
            uk, uv = (_take(x, chunk.k[unit], dtype) for x in (k, v))
            extras.clear(chunk, unit, uk, uv)
            score = scores.changed(product(uq, uk), chunk, unit, added)
            score, _ = extras.adjust(score, chunk, unit)
            weight, part_lse = _softmax(score, added, group)
            extras.drop(weight, chunk, unit)
            parts.append(product(weight, uv.mT).flatten(0, -2))
            part_lses.append(part_lse.flatten())
        part, part_lse = torch.cat(parts), torch.cat(part_lses)
        rows = chunk.q.flatten()
        if fresh and sink is None:
            out.index_copy_(0, rows, part)
            lse.index_copy_(0, rows, part_lse)
        else:
            _merge_rows(out, lse, rows, part, part_lse)
    return results[0].to(problem.result_dtype), results[1]


def backward(
    problem: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> Gradients:
    """Computes the gradients of the problem's tensors from (out, lse) and their gradients."""
    problem = problem.from_bitmap_row_0()
    query, key, value, sink = problem.query, problem.key, problem.value, problem.sink
    dtype = sum_dtype(query)
    q, k, v, do = _flat(query), _flat(key), _flat(value), _flat(grad_out)
    extras, scores = Extras(problem, dtype), Scores(problem)
    delta = (do.to(dtype) * _flat(out).to(dtype)).sum(1) - grad_lse.reshape(-1).to(dtype)
    dsink = None if sink is None else sink_gradient(sink, lse, delta.view(lse.shape))
    # in rows without keys, lse = +inf makes the weights exp(s - lse) 0
    lse = torch.where(lse == -torch.inf, torch.inf, lse).reshape(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    for _, chunk in _walk(problem):
        rows, columns = chunk.q.flatten(), chunk.k.flatten()
        clse, cdelta = (x[chunk.q].flatten(1, 2)[..., None] for x in (lse, delta))
        group, dqs, dks, dvs, dbiases = chunk.q.shape[1], [], [], [], []
        for unit, product, added in _units(chunk, extras):
            uq, udo = (_take(x, chunk.q[unit], dtype).flatten(-3, -2) for x in (q, do))
            uk, uv = (_take(x, chunk.k[unit], dtype) for x in (k, v))
            extras.clear(chunk, unit, uk, uv)
            product_of_pairs = product(uq.mul_(problem.scale), uk)
            leaf, changed = scores.recorded(product_of_pairs, chunk, unit, added)
            score = changed if problem.score_mod is None else changed.detach().clone()
            score, slope = extras.adjust(score, chunk, unit)
            weight = _biased(score, added, group).sub_(clse[unit]).exp_()
            dscore = extras.drop(product(udo, uv), chunk, unit).sub_(cdelta[unit]).mul_(weight)
            extras.drop(weight, chunk, unit)
            dvs.append(product(udo.mT, weight.mT).mT.flatten(0, -2))
            if problem.block_bias is not None:
                dbiases.append(dscore.unflatten(-2, (group, -1)).sum(-2))
            extras.add_distance_gradient(dscore, chunk, unit)
            if slope is not None:
                dscore.mul_(slope)
            dscore = scores.gradient(leaf, changed, dscore)
            dqs.append(product(dscore, uk.mT).flatten(0, -2))
            dks.append(product(uq.mT, dscore.mT).mT.flatten(0, -2))
        dq.index_add_(0, rows, torch.cat(dqs), alpha=problem.scale)
        dk.index_add_(0, columns, torch.cat(dks))
        dv.index_add_(0, columns, torch.cat(dvs))
        extras.add_bias_gradient(dbiases, chunk)
    pairs = (dq, query), (dk, key), (dv, value)
    dq, dk, dv = (x.view(like.shape).to(problem.result_dtype) for x, like in pairs)
    return Gradients(dq, dk, dv, *extras.gradients(), dsink, captured=scores.gradients())


def entry_mass(problem: Problem, lse: Tensor, weight: Tensor) -> Tensor:
    """Sums `weight e^{s - lse}` over the pairs of each visited tile pair.

    `lse` and `weight` are [B, Hq, Nq], in float32 (float64 if the query is float64).

    Returns: [B, Hq, num_blocks], in the order of the layout's entries.
    """
    problem = problem.from_bitmap_row_0()
    dtype = sum_dtype(problem.query)
    q, k = _flat(problem.query), _flat(problem.key)
    extras = Extras(problem, dtype)
    lse = torch.where(lse == -torch.inf, torch.inf, lse).reshape(-1)
    weight = weight.reshape(-1)
    for _, chunk in _walk(problem):
        clse, cweight = (x[chunk.q].flatten(1, 2)[..., None] for x in (lse, weight))
        group, masses = chunk.q.shape[1], []
        for unit, product, added in _units(chunk, extras):
            uq = _take(q, chunk.q[unit], dtype).mul_(problem.scale).flatten(-3, -2)
            uk = _take(k, chunk.k[unit], dtype)
            extras.clear(chunk, unit, uk, uk)
            score, _ = extras.adjust(product(uq, uk), chunk, unit)
            mass = _biased(score, added, group).sub_(clse[unit]).exp_()
            masses.append(mass.mul_(cweight[unit]).unflatten(-2, (group, -1)).sum(-2))
        extras.add_bias_gradient(masses, chunk)
    masses_of_entries, _ = extras.gradients()
    assert masses_of_entries is not None
    return masses_of_entries


def _walk(problem: Problem) -> Iterator[tuple[bool, Chunk]]:
    """Yields every chunk of the passes and lists, and whether it is the first to write its rows.

    `fresh` is True if no earlier chunk has a query of this chunk, so that results need no merge.
    """
    query, b, dtype = problem.query, problem.layout.block_size, sum_dtype(problem.query)
    per_token = 3 * dtype.itemsize * (query.shape[-1] + problem.value.shape[-1])
    most_queries = 1 if problem.block_bias is not None else max(1, _MOST_QUERIES // b)
    for number, p in enumerate(problem.layout.passes):
        for units in plan(p, b, most_queries, max(1, _MOST_KEYS // b)):
            alone = _alone(units.num_queries * units.num_keys, query.device, dtype)
            per_pair = 0 if alone else 4 * dtype.itemsize
            if problem.score_mod is not None:  # indices of pairs, and what autograd records
                per_pair += 128
            for chunk in chunks(problem, number, units, _workspace["bytes"], per_token, per_pair):
                yield units.fresh and number == 0, chunk
    first = 0  # index of the lists' first number in a head's bias
    for lists in problem.lists:
        for chunk in list_chunks(problem, lists, first, _workspace["bytes"], per_token):
            yield False, chunk
        first += lists.keys.shape[2:].numel()


def _units(
    chunk: Chunk, extras: Extras
) -> Iterator[tuple[int | slice, Callable[[Tensor, Tensor], Tensor], Tensor | None]]:
    """Yields (unit or all units, matmul, added scores): what to compute of a chunk at once.

    Yields: (index of a unit, or a slice of all; function that computes a @ b^T; tensor to add to
    the scores, or None).
    """
    added = extras.added(chunk)
    if not _alone(chunk.q[0].numel() * chunk.k.shape[1], chunk.q.device, extras.dtype):
        yield slice(None), lambda a, b: a @ b.mT, added
        return
    for unit in range(len(chunk.q)):
        yield unit, _product, None if added is None else added[unit if len(added) > 1 else 0]


def _alone(pairs: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a unit with so many (query, key) pairs is computed alone, not in a batch."""
    large = pairs >= _LEAST_PAIRS_ALONE and device.type == "cpu" and dtype == torch.float32
    return large and torch.backends.mkldnn.is_available()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b^T with oneDNN, up to twice as fast on a CPU as torch's default BLAS."""
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


def _softmax(score: Tensor, additive: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
    """Returns (softmax weights, lse) over the last dim; rows without any pair get 0 and -inf."""
    score = _biased(score, additive, group)
    highest = score.amax(-1, keepdim=True)
    weight = torch.softmax(score, -1)
    lse = highest - weight.amax(-1, keepdim=True).log()
    if (empty := highest == -torch.inf).any():
        weight.masked_fill_(empty, 0.0)
        lse.masked_fill_(empty, -torch.inf)
    return weight, lse


def _biased(score: Tensor, additive: Tensor | None, group: int) -> Tensor:
    """Adds `additive` [..., g or 1, m or 1, n] to scores [..., g * m, n] in place."""
    if additive is not None:
        score.unflatten(-2, (group, -1)).add_(additive)
    return score


def _merge_rows(out: Tensor, lse: Tensor, rows: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges partial results into the rows `rows` of (out, lse), in place; no row occurs twice."""
    merged, merged_lse = out.index_select(0, rows), lse[rows]
    merge_into(merged, merged_lse, part, part_lse)
    out.index_copy_(0, rows, merged)
    lse.index_copy_(0, rows, merged_lse)


def _take(x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Copies the rows with indices `rows` of x [n, width] to [*rows.shape, width] in a dtype."""
    return x.index_select(0, rows.flatten()).view(*rows.shape, x.shape[-1]).to(dtype)


def _flat(x: Tensor) -> Tensor:
    """Reshapes [B, H, N, D] to [B * H * N, D], whose rows are tokens of heads."""
    return x.flatten(0, -2)
