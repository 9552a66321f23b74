"""Calls the compiled kernel: converts problems to the arguments of its operators."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ground.numerics import round_up
from ...layouts.layout import BlockLayout, Pass, tile_counts
from ...layouts.lists import Lists
from ..problem import (
    Gradients,
    Problem,
    bias_gradient,
    captured_gradients,
    dense_rows,
    sink_gradient,
)
from ..tuning_file import TuningFile, file_of, processor_name
from .build import build_failure, library, vectors

EXTRAS = frozenset(
    (
        *("block_bias", "softcap", "distance_bias", "sink", "dropout_p", "dropout_seed"),
        *("key_mask", "coordinate_bias"),
    )
)
"""Options of a call, other than its scale, that this backend computes."""
_BY_KEY = {"block_bias", "sink", "key_mask"}  # extras that the loop over key tiles computes, too
_WITHOUT_PLACES = {*_BY_KEY, "coordinate_bias"}  # extras that ask for no position of a token

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# must equal kFewQueries of layout.h; with more queries, the kernel has no use for `slots`
_FEW_QUERIES = 8
# limits in `is_walked_shape`: most queries of a tile (floats in a vector register), fewest queries
# of a pass, fewest query rows that visit a key tile
_MOST_WALKED_QUERIES, _LEAST_WALKED_QUERIES, _LEAST_WALKED_ROWS = 16, 32, 8
_MOST_REPEATED_WORK = 1.4  # 7 / 5: a thread that shares a kv head computes 7 products, not 5


def reasons(*tensors: Tensor) -> list[str]:
    """Returns why the kernel cannot run on tensors like these, or at all on this machine; or []."""
    faults = []
    if any(x.device.type != "cpu" for x in tensors):
        faults.append("it runs on the CPU alone")
    if any(x.dtype not in _DTYPES for x in tensors):
        faults.append("it computes in float32; float64 stays with gather")
    return faults or list(build_failure())


def forward(
    problem: Problem, new: tuple[Tensor, Tensor, Sequence[int]] | None = None
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a problem: [B, Hq, Nq, Dv] and float32 [B, Hq, Nq].

    For a cache, it first writes `new` into the problem's keys and values: new keys, new values, and
    the row where they begin, one for all kv heads or one for each.
    """
    if problem.lists:
        return _forward_of_lists(problem)
    if problem.first_bitmap_rows and problem.query.shape[2] > _FEW_QUERIES:
        problem = problem.from_bitmap_row_0()
    x = problem.with_positive_scale()
    kernels, new_rows = library(), () if new is None else new
    if x.is_bare and not x.in_float32:
        run = kernels.forward_laid if new is None else kernels.forward_laid_after
        layout = _checked_layout(x)
        out, lse = run(*new_rows, x.query, x.key, x.value, layout, x.in_order, x.first_bitmap_rows)
    else:
        run = kernels.forward if new is None else kernels.forward_after
        out, lse = run(*new_rows, *_arguments(x).values(), x.sink, x.first_bitmap_rows)
    return out, lse


def forward_in_order(
    problem: Problem, new: tuple[Tensor, Tensor, Sequence[int]] | None = None
) -> tuple[Tensor, Tensor]:
    """Computes `forward` such that a row's bits depend on the row alone, not on the whole call."""
    return forward(problem._replace(in_order=True), new)


def backward_in_order(problem: Problem, *results: Tensor) -> Gradients:
    """Computes `backward` such that a query's bits do not depend on the rest of the call."""
    return backward(problem._replace(in_order=True), *results)


def backward(
    problem: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> Gradients:
    """Computes a problem's gradients from (out, lse) of its forward pass and their gradients."""
    problem = problem.from_bitmap_row_0()
    if problem.lists:
        return _backward_of_lists(problem, out, lse, grad_out, grad_lse)
    by_head = takes_whole_heads(len(problem.key) * problem.key.shape[1], torch.get_num_threads())
    transposes: list[Tensor] = []
    passes = zip(problem.layout.passes, _walked(problem), strict=True)
    for p, walked in () if by_head else passes:
        # the kernel expects three tensors per pass, but ignores them if it loops over key tiles
        tables = 3 * (p.row_ptr,) if walked else p.transpose
        transposes += [x.contiguous() for x in tables]
    learns = problem.learns_distances
    dq, dk, dv, dbias, dtables, delta, *of_coordinates = library().backward(
        *_arguments(problem.with_positive_scale()).values(),
        dense_rows(out),
        lse.contiguous(),
        dense_rows(grad_out),
        grad_lse.contiguous(),
        transposes,
        learns,
        bool(problem.captured),
    )
    bias, table, sink = problem.block_bias, problem.distance_bias, problem.sink
    dbias = None if bias is None else dbias.to(bias.dtype)
    dtable = None if table is None or not learns else dtables.sum(2).to(table.dtype)
    dsink = None if sink is None else sink_gradient(sink, lse, delta)
    return Gradients(
        query=problem.query_gradient(dq),
        key=dk,
        value=dv,
        block_bias=dbias,
        distance_bias=dtable,
        sink=dsink,
        captured=captured_gradients(problem, *of_coordinates),
    )


def _forward_of_lists(problem: Problem) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of tiles, if there are any, and merges those of each list into them."""
    rest, fresh = problem._replace(lists=(), block_bias=None, in_float32=True), False
    if problem.layout.num_blocks:
        out, lse = forward(rest)
    else:  # no tiles: rows need no zeros if the first list has all queries and writes them
        query, sink = problem.query, problem.sink
        fresh = problem.lists[0].queries is None
        dtype = problem.result_dtype if fresh and len(problem.lists) == 1 else torch.float32
        out = query.new_empty(*query.shape[:3], problem.value.shape[3], dtype=dtype)
        out = out if fresh else out.zero_()
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
        lse = lse if sink is None else lse.copy_(sink)
    for number, (listed, own) in enumerate(problem.of_lists()):
        rows = [listed.of_queries(x) for x in (out, lse)]
        arguments = _list_arguments(own, listed)
        library().forward_lists(*arguments.values(), fresh and number == 0, *rows)
        for x, of_queries in zip((out, lse), rows, strict=True):
            listed.put(x, of_queries)
    return out.to(problem.result_dtype), lse


def _backward_of_lists(problem: Problem, *results: Tensor) -> Gradients:
    """Computes the gradients of tiles, if there are any, and adds those of each list to them."""
    rest, sums = problem._replace(lists=(), block_bias=None, in_float32=True), None
    if problem.layout.num_blocks or problem.sink is not None:
        sums = backward(rest, *results)
    out, lse, grad_out, grad_lse = results
    results = dense_rows(out), lse.contiguous(), dense_rows(grad_out), grad_lse.contiguous()
    biases = []
    for listed, own in problem.of_lists():
        rows = (listed.of_queries(x) for x in results)
        learns = problem.learns_distances, bool(problem.captured)
        arguments = *_list_arguments(own, listed).values(), *rows, *learns
        dq, dk, dv, dbias, dtables, of_queries, of_keys = library().backward_lists(*arguments)
        biases.append(dbias)
        dq = own.query_gradient(dq)
        if listed.queries is not None:
            own_dq, dq = dq, dq.new_zeros(problem.query.shape)
            listed.put(dq, own_dq)
        if problem.captured and listed.queries is not None:
            own_rows, shape = of_queries, (*problem.query.shape[:3], of_queries.shape[3])
            listed.put(of_queries := own_rows.new_zeros(shape), own_rows)
        captured = captured_gradients(problem, of_queries, of_keys.sum(0))
        table = problem.distance_bias if problem.learns_distances else None
        dtable = None if table is None else dtables.sum(2).to(table.dtype)
        if sums is None:
            sums = Gradients(query=dq, key=dk, value=dv, distance_bias=dtable, captured=captured)
        else:
            for total, grad in zip(sums.captured, captured, strict=True):
                assert total is not None
                total.add_(grad)
            for total, grad in zip(sums[:3], (dq, dk, dv), strict=True):
                total.add_(grad)
            if sums.distance_bias is not None and dtable is not None:
                sums.distance_bias.add_(dtable)
    assert sums is not None
    if problem.block_bias is not None:
        sums = sums._replace(block_bias=bias_gradient(biases))
    dq, dk, dv = (grad.to(problem.result_dtype) for grad in sums[:3])
    return sums._replace(query=dq, key=dk, value=dv)


def _list_arguments(problem: Problem, lists: Lists) -> dict[str, Any]:
    """Returns the arguments of the operators for one `Lists`, in the order of their schema."""
    problem = problem.with_positive_scale()
    bias, table, seeds = problem.block_bias, problem.distance_bias, problem.dropout_seed
    at = lists.coordinates
    return {
        "query": dense_rows(problem.query),
        "key": dense_rows(problem.key),
        "value": dense_rows(problem.value),
        "keys": lists.keys,
        "places": lists.place,
        "bias": None if bias is None else bias.float().contiguous(),
        "branch": lists.branch,
        "first": problem.layout.frame.q_start,
        "of_queries": None if at is None else at.query.contiguous(),
        "of_keys": None if at is None else at.key.contiguous(),
        "scale": problem.scale,
        "softcap": problem.softcap or 0.0,
        "distance_bias": None if table is None else dense_rows(table.float()),
        "dropout_p": problem.dropout_p or 0.0,
        "seeds": None if seeds is None else seeds.contiguous(),
        "coordinates": [] if problem.coordinate_bias is None else problem.laid_coordinates(),
        "ordered": problem.in_order,
    }


def takes_whole_heads(kv_heads: int, threads: int) -> bool:
    """Whether each thread of a backward pass should compute whole kv heads, instead of parts.

    That repeats less work than sharing a head, unless too many threads would idle.
    """
    return round_up(kv_heads, threads) <= _MOST_REPEATED_WORK * kv_heads


def entry_mass(problem: Problem, lse: Tensor, weight: Tensor | None = None) -> Tensor:
    """Sums `weight_i exp(s_ij - lse_i)` over the pairs (i, j) of each entry.

    Args:
        problem: the call; a sink is in `lse` already.
        lse: float32 [B, Hq, Nq], of these keys or of more; -inf for rows without keys, whose mass
            is 0.
        weight: float32 [B, Hq, Nq], a factor of each query; default 1.

    Returns: float32 [B, Hq, num_blocks], in the order of the layout's entries; tables of fewer
        entries have mass 0 behind them.

    Raises: NotImplementedError with softcap, distance bias or dropout.
    """
    problem = problem.from_bitmap_row_0()
    if _needs_query_walk(problem):
        raise NotImplementedError("cpu: entry_mass takes no softcap, distance_bias or dropout")
    layout, bias = problem.layout, problem.block_bias
    entries = layout.num_blocks if bias is None else bias.shape[2]
    if not layout.num_blocks:
        return lse.new_zeros(*problem.query.shape[:2], entries)
    x = problem.with_positive_scale()
    arguments = _arguments(x, counted=True)
    arguments["walked"] = [1] * len(layout.passes)  # `mass` has no loop over query tiles
    weight = None if weight is None else weight.float().contiguous()
    return library().mass(*arguments.values(), lse.float().contiguous(), weight, entries)


def block_shares(*tensors: Tensor | None, features: str, **numbers: Any) -> bool:
    """Writes the log of each key block's softmax share to `out`, float32 [B * Hkv, rows, blocks].

    `tensors` are (query, feature, key, last, out): the query of any strides and dtype, feature and
    key float32. For them and `numbers`, see selection/operands.h and shares.h.

    Returns: True if a share was too small for float32.
    """
    return library().shares(*tensors, kind={"gauss": 1, "bounds": 2}.get(features, 0), **numbers)


def _arguments(problem: Problem, counted: bool = False) -> dict[str, Any]:
    """Returns the arguments of the operators forward, backward and mass, in their order.

    Names are those of their schemas, as tests check; calls pass them by place, which takes a tenth
    less time. The scale of the problem is above 0. With `counted`, each pass has the index of its
    first block even if the call has no bias.
    """
    layout, bias, table = problem.layout, problem.block_bias, problem.distance_bias
    mask, laid, names = problem.key_mask, _laid(layout), problem.in_use
    by_query = not names <= _BY_KEY
    counted = counted or bias is not None
    seeds = problem.dropout_seed
    return {
        "query": problem.query,
        "key": problem.key,
        "value": problem.value,
        "bias": None if bias is None else bias.float().contiguous(),
        "first_entry": (
            layout.first_entry.contiguous() if counted else _no_entries(len(laid.steps))
        ),
        "passes": laid.tables,
        "places": _places(layout) if names - _WITHOUT_PLACES else [],
        "steps": laid.steps,
        "branches": laid.branches,
        "covers": laid.covers,
        "block": layout.block_size,
        "scale": problem.scale,
        "softcap": problem.softcap or 0.0,
        "distance_bias": None if table is None else dense_rows(table.float()),
        "dropout_p": problem.dropout_p or 0.0,
        "seeds": None if seeds is None else seeds.contiguous(),
        "key_mask": None if mask is None else mask.contiguous(),
        "coordinates": [] if problem.coordinate_bias is None else problem.laid_coordinates(),
        "in_float32": problem.in_float32,
        "ordered": problem.in_order,
        "walked": [0] * len(laid.steps) if by_query else _walked_passes(layout),
    }


def _walked(problem: Problem) -> list[int]:
    """Returns 1 for each pass whose key tiles the kernel loops over, 0 for one by query tiles."""
    by_query = _needs_query_walk(problem)
    return [0] * len(problem.layout.passes) if by_query else _walked_passes(problem.layout)


def _walked_passes(layout: BlockLayout) -> list[int]:
    """Returns `_walked` of a layout, which it stores; for calls that allow both loops."""
    walked: list[int] | None = layout.memo.get("walked")
    if walked is None:
        walked = layout.memo["walked"] = [_is_walked(layout, p) for p in layout.passes]
    return walked


def _is_walked(layout: BlockLayout, p: Pass) -> int:
    """Returns 1 if for a pass a loop over key tiles is faster than over query tiles, else 0."""
    if not p.key_tile.numel():
        return 0
    shape: tuple[tuple[int, int], float] | None = p.memo.get("walked shape")
    if shape is None:
        queries, keys = p.memo.get("most tokens") or (
            int(tile_counts(start, stop, p.step, layout.block_size).max())
            for start, stop in ((p.query_start, p.query_stop), (p.key_start, p.key_stop))
        )
        mean = float(p.num_entries.double().mean()) if queries <= _MOST_WALKED_QUERIES else 0.0
        shape = p.memo["walked shape"] = (queries, keys), mean
    longest, entries = shape
    tiles, frame = (p.query_start.shape[1], p.key_start.shape[1]), layout.frame
    group = frame.num_heads / max(1, frame.num_kv_heads)
    return int(is_walked_shape(longest, tiles, entries, group))


def is_walked_shape(
    longest: tuple[int, int], tiles: tuple[int, int], entries: float, group: float
) -> bool:
    """Whether, for a pass of this shape, a loop over key tiles is faster than over query tiles.

    `longest` is the most tokens of a (query tile, key tile), `tiles` their numbers, and `entries`
    the visited tile pairs per query head.
    """
    queries, keys = longest
    rows = entries * queries * group / max(1, tiles[1])  # mean queries that visit a key tile
    short = queries <= min(_MOST_WALKED_QUERIES, keys // 2)
    return short and queries * tiles[0] >= _LEAST_WALKED_QUERIES and rows >= _LEAST_WALKED_ROWS


def _needs_query_walk(problem: Problem) -> bool:
    """Whether a call has an option, such as softcap, that only the loop over query tiles has."""
    return not problem.in_use <= _BY_KEY


class _Laid(NamedTuple):
    """The tables of a layout in the form that the kernel's operators take."""

    tables: list[Tensor]  # the tensors of all passes, one pass after the other
    steps: list[int]
    branches: list[int]
    covers: bool  # whether each query is in a tile of the first pass


def _laid(layout: BlockLayout) -> _Laid:
    """Returns a layout's tables as the operators take them, and stores them in the layout."""
    laid: _Laid | None = layout.memo.get("laid")
    if laid is None:
        passes = layout.passes
        laid = layout.memo["laid"] = _Laid(
            tables=[x for p in passes for x in _tables(p, layout)],
            steps=[p.step for p in passes],
            branches=[p.branch for p in passes],
            covers=bool(passes) and passes[0].covers[0],
        )
    return laid


def _checked_layout(problem: Problem) -> Tensor:
    """Returns the C++ object of a layout, which has its tables checked, and stores it.

    The kernel checks the tables when it makes the object, so that calls need not.
    """
    layout, scale = problem.layout, problem.scale
    kept: tuple[float, Tensor] | None = layout.memo.get("checked layout")
    if kept is None or kept[0] != scale:
        walked = _walked_passes(layout)
        checked = library().lay(*_laid(layout), layout.block_size, scale, walked)
        kept = layout.memo["checked layout"] = scale, checked
    return kept[1]


def _path(_: torch.device) -> Path:
    return file_of("cpu", f"{processor_name()} {vectors()}", torch.__version__)


measured = TuningFile(_path)
"""Block sizes that `sparsering tune` measured for the kernel on this processor."""


@cache
def _no_entries(passes: int) -> Tensor:
    """Returns the argument `first_entry` for calls without block bias: zeros, cached."""
    return torch.zeros(passes, 1, 1, dtype=torch.int64)


def _tables(p: Pass, layout: BlockLayout) -> list[Tensor]:
    """Returns the tensors of a pass in the order in which the kernel reads them."""
    tiles = p.query_start, p.query_stop, p.key_start, p.key_stop
    tables = p.row_ptr, p.key_tile, p.bitmap, p.transposed_bitmaps, p.bitmaps
    segments = p.segments(layout.frame.q_start, layout.block_size)
    return [x.contiguous() for x in (*tiles, *tables, *segments)]


def _places(layout: BlockLayout) -> list[Tensor]:
    """Returns positions and depths of all passes' tiles, which distances and dropout need."""
    places: list[Tensor] | None = layout.memo.get("places")
    if places is None:
        q_start, places = layout.frame.q_start, []
        for p in layout.passes:
            stream = p.key_start.new_empty(0) if p.stream is None else p.stream
            found = *p.coordinates(q_start), stream, *p.depths(q_start)
            places += [x.contiguous() for x in found]
        layout.memo["places"] = places
    return places
