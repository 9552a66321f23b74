"""Launches the GPU kernels of the forward and the backward over the passes of a layout.

Each pass merges its results into those of earlier passes. With several passes in half precision,
sums are in float32, for a few kv heads at a time to save memory.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...coordinates import CoordinateBias
from ...ground.commands import program
from ...ground.numerics import power_of_2
from ..problem import (
    Gradients,
    Problem,
    bias_gradient,
    captured_gradients,
    constant_in_graphs,
    dense_rows,
    sink_gradient,
)
from . import extra_arguments
from .configs import Config, config_for, in_order
from .even_depths import of_whole_tiles, with_even_depths
from .launch import Launch, kept, kind_of, kinds, launch, padded, precision, processors, strides
from .lists import MOST_LIST_DIM, ListGradients, add_gradients, attend_lists, on_device
from .operands import (
    MOST_HEAD_DIM,
    HeadGroup,
    in_ping_pong,
    of_call,
    of_inputs,
    of_tiles,
    streamed,
)
from .walk import Walk, use, walk

EXTRAS = frozenset(
    (
        *("block_bias", "softcap", "distance_bias", "sink", "dropout_p", "dropout_seed"),
        *("key_mask", "coordinate_bias"),
    )
)
"""Options of a call, other than its scale, that these kernels compute."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WRONG_INTERPRETED = (torch.bfloat16,)  # dtypes that Triton's interpreter multiplies wrongly
_LEAST_PROGRAMS = 8  # programs per multiprocessor that keep the device busy
_ROWS = 64  # rows per program of `prepare_kernel`; fewer for head dims above 256
_COMBINED = 256  # numbers of a result per program of the kernels that combine pieces (combine.py)
_ALIGNED = 4  # float32 values in 16 bytes, the alignment that a descriptor needs
_Build = Callable[[Walk, dict[str, Any]], list[Launch]]


def reasons(*tensors: Tensor) -> list[str]:
    """Lists why the kernels cannot run on tensors like these, or on this machine.

    [] if they can.
    """
    return _reasons(tensors, (MOST_HEAD_DIM,) * 3)


def list_reasons(*tensors: Tensor) -> list[str]:
    """Lists why the kernels cannot run a pattern that is only lists of keys; [] if they can."""
    return _reasons(tensors, (MOST_LIST_DIM, MOST_LIST_DIM, MOST_HEAD_DIM))


def _reasons(tensors: Sequence[Tensor], most: Sequence[int]) -> list[str]:
    """Lists why kernels cannot run; `most` has the largest head dims of query, key and value."""
    found = [*_machine_reasons(tuple({x.device.index for x in tensors if x.is_cuda}) or (None,))]
    wanted = "cpu" if interpreting() else "cuda"
    if any(x.device.type != wanted for x in tensors):
        found.append(f"it runs on {wanted} tensors" + " under TRITON_INTERPRET=1" * interpreting())
    if any(x.dtype not in _DTYPES for x in tensors):
        found.append("it computes in float32; float64 stays with gather")
    if interpreting() and any(x.dtype in _WRONG_INTERPRETED for x in tensors):
        found.append("Triton's interpreter gets bfloat16 products wrong")
    if any(x.dim() and x.shape[-1] > limit for x, limit in zip(tensors, most, strict=False)):
        wider = f" (up to {MOST_LIST_DIM} of query and key over lists of single keys alone)"
        found.append(f"it holds head dims up to {MOST_HEAD_DIM}{wider}")
    return found


@constant_in_graphs
def _machine_reasons(gpus: tuple[int | None, ...]) -> tuple[str, ...]:
    """Lists why the kernels cannot run on GPUs with these indices; None is the current GPU."""
    missing = f"the package triton is missing ({program('pip', 'pip')} install triton)"
    found = () if find_spec("triton") else (missing,)
    if interpreting():
        return found
    if not torch.cuda.is_available():
        return (*found, "it needs a GPU (TRITON_INTERPRET=1 tries its kernels without one)")
    old = not torch.version.hip and min(map(torch.cuda.get_device_capability, gpus)) < (8, 0)
    return (*found, "it needs compute capability 8.0") if old else found


@constant_in_graphs
def interpreting() -> bool:
    """True if Triton's interpreter runs the kernels in Python on CPU tensors, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) over a layout; lse is float32.

    A sink is the initial lse of its rows.
    """
    problem = problem.in_floats()
    if problem.lists:
        return _forward_of_lists(problem)
    if problem.distance_bias is not None:
        problem, _ = with_even_depths(problem)
    layout, query, value = problem.layout, problem.query, problem.value
    in_turn = _in_turn(problem)
    out = _blank(problem, (*query.shape[:3], value.shape[3]), overwritten=in_turn)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    if not _covered(problem):
        lse.fill_(-torch.inf)
    if problem.sink is not None:
        lse.copy_(problem.sink)
    for part in _parts(problem, in_turn):
        to = out[:, part.heads]
        sums = torch.zeros_like(to, dtype=torch.float32) if in_turn else to
        for number in range(len(layout.passes)):
            _forward_pass(part, number, sums, lse[:, part.heads])
        if in_turn:
            to.copy_(sums)
    return out, lse


def backward(
    problem: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> Gradients:
    """Computes the gradients of a problem's tensors from (out, lse) and their gradients."""
    problem = problem.from_bitmap_row_0()
    if problem.lists:
        return _backward_of_lists(problem, out, lse, grad_out, grad_lse)
    if problem.distance_bias is None:
        return _gradients(problem, out, lse, grad_out, grad_lse)
    cut, entries = with_even_depths(problem)
    grads = _gradients(cut, out, lse, grad_out, grad_lse)
    return of_whole_tiles(grads, problem, entries)


def forward_in_order(problem: Problem) -> tuple[Tensor, Tensor]:
    """Computes `forward` so that a row's bits do not depend on the rest of the call.

    docs/invariance.md says for which calls.
    """
    return forward(problem._replace(in_order=True))


def backward_in_order(problem: Problem, *results: Tensor) -> Gradients:
    """Computes `backward` such that a row's bits do not depend on the rest of the call."""
    return backward(problem._replace(in_order=True), *results)


def _forward_of_lists(problem: Problem) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of tiles, if there are any, and merges those of each list into them."""
    query, fresh = problem.query, not _has_tiles(problem)
    if fresh:  # if the first list is for all queries, it writes all rows, so they need no zeros
        fresh = problem.lists[0].queries is None
        dtype = problem.result_dtype if fresh and len(problem.lists) == 1 else torch.float32
        out = query.new_empty(*query.shape[:3], problem.value.shape[3], dtype=dtype)
        out = out if fresh else out.zero_()
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
        lse = lse if problem.sink is None else lse.copy_(problem.sink)
    else:
        out, lse = forward(problem._replace(lists=(), block_bias=None, in_float32=True))
    for number, (lists, own) in enumerate(_for_lists(problem).of_lists()):
        rows = [lists.of_queries(x) for x in (out, lse)]
        attend_lists(own, on_device(own, lists), fresh and number == 0, *rows)
        for x, of_queries in zip((out, lse), rows, strict=True):
            lists.put(x, of_queries)
    return out.to(problem.result_dtype), lse


def _backward_of_lists(
    problem: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> Gradients:
    """Computes the gradients of tiles, if there are any, and adds those of each list to them."""
    inputs, sink, bias, table = (
        problem[1:4],
        problem.sink,
        problem.block_bias,
        problem.distance_bias,
    )
    grad_out = dense_rows(grad_out)
    rows = _prepared(grad_out, grad_lse, out, lse, 1.0)
    biases = []
    if fresh := not _has_tiles(problem):
        fresh = problem.lists[0].queries is None
        dtype = problem.result_dtype if fresh and len(problem.lists) == 1 else torch.float32
        dq, dk, dv = (x.new_empty(x.shape, dtype=dtype) for x in inputs)
        dq, dk, dv = (x if fresh else x.zero_() for x in (dq, dk, dv))
        dtable = (
            None
            if table is None or not problem.learns_distances
            else table.new_zeros(table.shape, dtype=torch.float32)
        )
        dsink = None if sink is None else sink_gradient(sink, lse, rows[0])
    else:
        rest = problem._replace(lists=(), block_bias=None, in_float32=True)
        dq, dk, dv, _, dtable, dsink, _ = backward(rest, out, lse, grad_out, grad_lse)
    for number, (lists, own) in enumerate(_for_lists(problem).of_lists()):
        of_query, of_out, *of_rows = (lists.of_queries(x) for x in (dq, grad_out, *rows))
        to = ListGradients(query=of_query, key=dk, value=dv, running=not fresh or number > 0)
        delta_and_lse = of_rows[0], of_rows[1]
        dbias, by_distance = add_gradients(own, on_device(own, lists), of_out, delta_and_lse, to)
        lists.put(dq, of_query)
        if dbias is not None:
            biases.append(dbias)
        if dtable is not None and by_distance is not None:
            dtable = dtable + by_distance
    return Gradients(
        query=dq.to(problem.result_dtype),
        key=dk.to(problem.result_dtype),
        value=dv.to(problem.result_dtype),
        block_bias=None if bias is None else bias_gradient(biases).to(bias.dtype),
        distance_bias=None if table is None or dtable is None else dtable.to(table.dtype),
        sink=dsink,
    )


def _has_tiles(problem: Problem) -> bool:
    """Whether the layout may visit tiles, by shapes alone: reading counts would wait for a GPU."""
    return any(p.key_tile.shape[-1] for p in problem.layout.passes)


def _for_lists(problem: Problem) -> Problem:
    """Returns the problem in the form that kernels over lists read: dense rows, float32 biases."""
    bias, table = problem.block_bias, problem.distance_bias
    return problem.with_dense_rows()._replace(
        block_bias=None if bias is None else bias.float().contiguous(),
        distance_bias=None if table is None else dense_rows(table.float()),
    )


def _gradients(
    problem: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> Gradients:
    """Computes the gradients over tiles alone; in a tile, depths must rise by the pass's step."""
    sink, bias = problem.sink, problem.block_bias
    table = problem.distance_bias if problem.learns_distances else None
    grad_out = dense_rows(grad_out)
    # kernels compute powers of 2; with a block bias, they subtract it from lse before this factor
    rows = _prepared(grad_out, grad_lse, out, lse, 1.0 if bias is not None else math.log2(math.e))
    in_turn, at_most = _in_turn(problem), None
    if table is not None:
        at_most = extra_arguments.kv_heads_at_a_time(problem, _config_for("query", problem))
    dq = _blank(problem, problem.query.shape, overwritten=in_turn)
    dk, dv = (_blank(problem, x.shape, by_key=True) for x in (problem.key, problem.value))
    dbias, dtable = (
        None if x is None else x.new_zeros(x.shape, dtype=torch.float32) for x in (bias, table)
    )
    dplaces = _place_gradients(problem)
    for part in _parts(problem, in_turn, at_most):
        grads = [x[:, part.heads] for x in (grad_out, *rows)]
        to = dq[:, part.heads]
        sums = torch.zeros_like(to, dtype=torch.float32) if in_turn else to
        of_biases = [None if x is None else x[:, part.heads] for x in (dbias, dtable, *dplaces[:1])]
        for number in range(len(problem.layout.passes)):
            _query_pass(part, number, grads, sums, of_biases)
        if in_turn:
            to.copy_(sums)
        _key_passes(part, grads, [x[:, part.kv_heads] for x in (dk, dv, *dplaces[1:])])
    return Gradients(
        query=problem.query_gradient(dq),
        key=dk,
        value=dv,
        block_bias=None if bias is None or dbias is None else dbias.to(bias.dtype),
        distance_bias=None if table is None or dtable is None else dtable.to(table.dtype),
        sink=None if sink is None else sink_gradient(sink, lse, rows[0]),
        captured=captured_gradients(problem, *dplaces) if dplaces else (),
    )


def _place_gradients(problem: Problem) -> list[Tensor]:
    """Allocates what `captured_gradients` takes; [] if coordinates and slopes get no gradient."""
    if not problem.captured or (bias := problem.coordinate_bias) is None:
        return []
    dims, of_keys = bias.coords.shape[2], problem.key.shape[:3]
    shapes = (*problem.query.shape[:3], dims + 1), (*of_keys, dims)
    return [problem.query.new_zeros(shape, dtype=torch.float32) for shape in shapes]


def _in_turn(problem: Problem) -> bool:
    """Whether several passes add to half-precision results, so that sums in float32 are needed.

    Groups of heads then run one after the other, with sums in float32, to save memory.
    """
    half = problem.query.itemsize < 4 and not problem.in_float32
    return half and len(problem.layout.passes) > 1


def _parts(problem: Problem, in_turn: bool, at_most: int | None = None) -> Iterator[HeadGroup]:
    """Splits a call into problems of some kv heads each, at most `at_most` at a time.

    If `in_turn`, a part has just enough heads to keep a GPU busy.
    """
    problem = problem.with_positive_scale().with_dense_rows()
    tables = problem.block_bias, problem.distance_bias
    bias, table = (None if x is None else dense_rows(x.float()) for x in tables)
    laid = [] if problem.coordinate_bias is None else problem.laid_coordinates()
    layout, query, key, value = problem[:4]
    num_kv_heads = key.shape[1]
    if not layout.passes or not query.shape[0] * num_kv_heads:
        return
    group, at_a_time = problem.group, min(num_kv_heads, at_most or num_kv_heads)
    if in_turn:
        programs = max(1, len(query) * group * max(p.query_start.shape[-1] for p in layout.passes))
        fewest = -(-_LEAST_PROGRAMS * processors(query.device) // programs)
        at_a_time = min(at_a_time, max(1, fewest))
    for first in range(0, num_kv_heads, at_a_time):
        kv_heads = slice(first, min(first + at_a_time, num_kv_heads))
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        own = problem._replace(block_bias=bias, distance_bias=table)
        if laid:
            own = own._replace(coordinate_bias=CoordinateBias(laid[0], laid[1], laid[2][heads]))
        if at_a_time < num_kv_heads:
            own = own._replace(
                query=query[:, heads],
                key=key[:, kv_heads],
                value=value[:, kv_heads],
                block_bias=None if bias is None else bias[:, heads],
                distance_bias=None if table is None else table[:, heads],
            )
        yield HeadGroup(own, heads, kv_heads)


def _forward_pass(part: HeadGroup, number: int, out: Tensor, lse: Tensor) -> None:
    """Computes attention over one pass and merges it into `out` and `lse`, in place."""
    from .combine import merge_kernel
    from .forward import forward_kernel

    problem = part.problem
    config = _config_for("forward", problem)

    def build(w: Walk, arguments: dict[str, Any]) -> list[Launch]:
        arguments |= {
            "SINK": number == 0 and problem.sink is not None,
            "lse_batch": lse.stride(0), "lse_head": lse.stride(1), "num_heads": out.shape[1],
            **strides(q=problem.query, k=problem.key, v=problem.value, o=out),
        }  # fmt: skip
        of_keys = {"key": problem.key, "value": problem.value}
        arguments |= streamed(part, number, config, arguments["ALIGN"], {}, **of_keys)
        programs = w.units.shape[2] * arguments["programs"]
        if (own := in_ping_pong(problem, config, arguments)) is not None:
            from .ping_pong import ping_pong_kernel

            whole = Launch(ping_pong_kernel, programs, config, arguments | own)
        else:
            plain = config._replace(ping_pong=False)
            whole = Launch(forward_kernel, programs, plain, arguments)
        return [whole, *_combined(merge_kernel, w, out, arguments)]

    w, tables, launches = _launches("forward", part, number, config, build, out, lse)
    pieces = piece_lse = lse  # placeholders: if no tile is cut, no program writes pieces
    if w.slots:
        pieces = lse.new_empty(_slots(problem, out, w))
        piece_lse = lse.new_empty(pieces.shape[:-1])
    tensors = {"out": out, "lse": lse, "piece_out": pieces, "piece_lse": piece_lse}
    launch(launches, tables | of_call(problem, number, w, by_key=False) | tensors, out.device)


def _query_pass(
    part: HeadGroup, number: int, grads: list[Tensor], dq: Tensor, of_biases: list[Tensor | None]
) -> None:
    """Adds the gradients of one pass to `dq`, and to those of the biases, in place."""
    from .backward import query_kernel
    from .combine import sum_kernel

    problem = part.problem
    config = _config_for("query", problem)
    (grad_out, delta, row_lse), (dbias, dtable, *dplaces) = grads, of_biases
    tensors = {"grad_out": grad_out, "delta": delta, "row_lse": row_lse, "grad_query": dq}
    rows = _rows(problem, number, config)
    if dbias is not None:
        steps = rows["parts"] * -(-problem.layout.block_size // (config.masked or config.streamed))
        tensors["grad_bias"] = dbias.new_zeros(*dbias.shape, steps)

    def build(w: Walk, arguments: dict[str, Any]) -> list[Launch]:
        arguments |= {
            "row_batch": delta.stride(0), "row_head": delta.stride(1),
            "num_heads": dq.shape[1], "num_blocks": 0 if dbias is None else dbias.shape[2],
            **strides(q=problem.query, k=problem.key, v=problem.value, g=grad_out, dq=dq, grad=dq),
        }  # fmt: skip
        of_keys = {"key": problem.key, "value": problem.value}
        arguments |= streamed(part, number, config, arguments["ALIGN"], {}, **of_keys)
        arguments |= _place_strides(dplaces)
        whole = Launch(query_kernel, w.units.shape[2] * rows["programs"], config, arguments)
        launches = [whole, *_combined(sum_kernel, w, dq, arguments, grad="grad_query")]
        return launches + _combined_places(sum_kernel, w, dplaces, arguments)

    w, tables, launches = _launches("query", part, number, config, build, *grads, dq)
    tensors["piece"] = dq.new_empty(_slots(problem, dq, w), dtype=torch.float32)
    tensors |= _room_for_places(problem, dplaces, w)
    if dtable is not None:
        room = extra_arguments.room_for_diagonals(problem, w, rows, config)
        tensors |= room
    launch(launches, tables | of_call(problem, number, w, by_key=False) | tensors, dq.device)
    if dbias is not None:
        dbias += tensors["grad_bias"].sum(-1)
    if dtable is not None:
        extra_arguments.add_diagonals(dtable, room, problem.layout.passes[number].step)


def _key_passes(part: HeadGroup, grads: list[Tensor], results: list[Tensor]) -> None:
    """Writes dK and dV over all passes, [B, kv heads, Nk, D] and [.., Dv].

    With several passes or shares, it sums them in float32 first.
    """
    from .backward import key_kernel
    from .combine import sum_kernel

    problem = part.problem
    config, layout = _config_for("key", problem), problem.layout
    at_a_time = _heads_at_a_time(problem)
    shares = -(-problem.group // at_a_time)
    alone = len(layout.passes) == 1 and shares == 1
    batch, num_kv_heads, kv_len = problem.key.shape[:3]
    sums = results
    if not alone:
        sums = [
            x.new_zeros(batch, num_kv_heads * shares, kv_len, x.shape[3], dtype=torch.float32)
            for x in results
        ]
    dk, dv, *dplaces = sums
    grad_out, delta, row_lse = grads

    def build(number: int, w: Walk, arguments: dict[str, Any]) -> list[Launch]:
        arguments |= {
            "HEADS": at_a_time, "num_heads": problem.query.shape[1],
            "row_batch": delta.stride(0), "row_head": delta.stride(1),
            **strides(q=problem.query, k=problem.key, v=problem.value, g=grad_out, dk=dk, dv=dv),
        }  # fmt: skip
        rows = {"delta": delta, "row_lse": row_lse}
        of_queries = {"query": problem.query, "grad_out": grad_out}
        arguments |= streamed(part, number, config, arguments["ALIGN"], rows, **of_queries)
        arguments |= _place_strides(dplaces)
        launches = [Launch(key_kernel, w.units.shape[2] * arguments["programs"], config, arguments)]
        arguments |= {"num_heads": dk.shape[1], "first_head": part.kv_heads.start * shares}
        arguments |= {"all_heads": layout.frame.num_kv_heads * shares}
        for name, grad in (("key", dk), ("value", dv)):
            arguments |= {"HEAD_DIM": grad.shape[3], "PADDED_DIM": padded(grad)}
            arguments |= strides(grad=grad)
            names = {"grad": f"grad_{name}", "piece": f"piece_{name}"}
            launches += _combined(sum_kernel, w, grad, arguments, **names)
        return launches + _combined_places(sum_kernel, w, dplaces, arguments)

    for number in range(len(layout.passes)):
        made = partial(build, number)
        w, tables, launches = _launches("key", part, number, config, made, *grads, dk, dv)
        pieces = [x.new_empty(_slots(problem, x, w), dtype=torch.float32) for x in (dk, dv)]
        tensors = {
            "grad_out": grad_out, "delta": delta, "row_lse": row_lse,
            "grad_key": dk, "grad_value": dv, "piece_key": pieces[0], "piece_value": pieces[1],
            **_room_for_places(problem, dplaces, w),
        }  # fmt: skip
        launch(launches, tables | of_call(problem, number, w, by_key=True) | tensors, dk.device)
    if not alone:
        for to, each in zip(results, sums, strict=True):
            to.copy_(each.unflatten(1, (num_kv_heads, shares)).sum(2))


def _place_strides(dplaces: Sequence[Tensor | None]) -> dict[str, int]:
    """Returns the strides of the gradient of coordinates, if there is one."""
    return {
        f"place_{what}": x.stride(dim)
        for x in dplaces
        if x is not None
        for dim, what in enumerate(("batch", "head"))
    }


def _room_for_places(
    problem: Problem, dplaces: Sequence[Tensor | None], w: Walk
) -> dict[str, Tensor]:
    """Returns the gradient of coordinates and memory for its pieces, if there is one."""
    found = {}
    for x in dplaces:
        if x is not None:
            found = {"grad_places": x, "piece_places": x.new_empty(_slots(problem, x, w))}
    return found


def _combined_places(
    kernel: Any, w: Walk, dplaces: Sequence[Tensor | None], arguments: dict[str, Any]
) -> list[Launch]:
    """Returns the launch that adds up pieces of the gradient of coordinates; [] if none is cut."""
    launches = []
    for x in dplaces:
        if x is not None:
            own = {"HEAD_DIM": x.shape[3], "PADDED_DIM": padded(x), **strides(grad=x)}
            names = {"grad": "grad_places", "piece": "piece_places"}
            launches += _combined(kernel, w, x, arguments | own, **names)
    return launches


def _prepared(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, unit: float
) -> tuple[Tensor, Tensor]:
    """Returns (delta, lse * unit), float32 [B, Hq, Nq]; lse is +inf in a row without keys.

    delta is rowsum(dO * O) - dlse.
    """
    from .prepare import prepare_kernel

    batch, heads, q_len = lse.shape
    apart = -(-q_len // _ALIGNED) * _ALIGNED  # a descriptor needs heads aligned to 16 bytes
    delta, row_lse = (lse.new_empty(batch, heads, apart)[..., :q_len] for _ in range(2))
    tensors = {
        "grad_out": grad_out, "grad_lse": grad_lse.contiguous(), "out": out.contiguous(),
        "lse": lse.contiguous(), "delta": delta, "row_lse": row_lse,
    }  # fmt: skip

    def build() -> list[Launch]:
        rows = min(_ROWS, _ROWS * 256 // padded(out))
        arguments = {
            **strides(g=grad_out, o=tensors["out"]), "row_head": apart,
            "unit": unit, "num_heads": heads, "q_len": q_len,
            "ROWS": rows, "VALUE_DIM": out.shape[3], "PADDED_VALUE_DIM": padded(out),
        }  # fmt: skip
        return [Launch(prepare_kernel, batch * heads * -(-q_len // rows), None, arguments)]

    kind = out.device, unit, *kind_of(*tensors.values())
    launch(kept(kind, build, out.device), tensors, out.device)
    return delta, row_lse


def _launches(
    kernel: str, part: HeadGroup, number: int, config: Config, build: _Build, *results: Tensor
) -> tuple[Walk, dict[str, Tensor], list[Launch]]:
    """Returns (work units, tables, launches) of one kernel for one pass; all are stored.

    Layouts of equal shapes share launches, so that preparing them takes time only once.
    """
    problem, by_key = part.problem, kernel == "key"
    layout = problem.layout
    query, key, value, scale, bias, softcap, table, sink, dropped, seed, mask = problem[1:12]
    extras = [x for x in (bias, table, seed, mask) if x is not None]
    places = problem.coordinate_bias
    if places is not None:
        extras += places.query_coords, places.coords, places.slopes
    p = layout.passes[number]
    whole = p.walked_as
    kind = (
        p if by_key else whole,
        whole is p,
        kernel,
        number,
        config,
        part.heads.start,
        scale,
        softcap,
        dropped,
        problem.learns_distances,
        places is not None,
        bool(problem.captured),
        precision(query.dtype),
        problem.in_order,
        bias is None,
        table is None,
        mask is None,
        sink is None,
        key.shape[:2],
        key.shape[3],
        value.shape[3],
        *(x[1:] for x in kind_of(key, value)),
        *kind_of(query, *results, *extras),
    )

    def of_layout() -> tuple[Walk, dict[str, Tensor], list[Launch]]:
        of_tile = len(query) * results[-1].shape[1] * -(-layout.block_size // config.rows)
        rows = {"programs": of_tile} if by_key else _rows(problem, number, config)
        cores = processors(query.device)
        w = walk(
            layout,
            number,
            by_key=by_key,
            programs=rows["programs"],
            processors=cores,
            in_order=problem.in_order,
        )
        tiles = rows | of_tiles(part, number, w, config, by_key=by_key)
        shared = layout.frame.num_heads, key.shape[2] > 0, query.device, *kind[1:], *kinds(tiles)
        launches = kept(shared, lambda: build(w, of_inputs(problem, config) | tiles), query.device)
        return w, {name: x for name, x in tiles.items() if isinstance(x, Tensor)}, launches

    own = layout.memo.setdefault("launches", {})
    w, tables, launches = kept(kind, of_layout, query.device, own)
    use(w, layout, number, by_key=by_key)
    return w, tables, launches


def _rows(problem: Problem, number: int, config: Config) -> dict[str, int]:
    """Returns how many tokens of a query tile and heads of a group a program computes, by name."""
    layout, group = problem.layout, problem.group
    most = min(layout.block_size, -(-layout.frame.q_len // layout.passes[number].step))
    tokens = min(config.rows, _compiled_tokens(most, layout.block_size))
    pack = 1 if _by_query_head(problem) else min(group, config.rows // tokens)
    packs = -(-group // pack)
    pack = -(-group // packs)
    parts = -(-most // tokens)
    return {
        "parts": parts, "TOKENS": tokens, "PACK": pack,
        "ROWS": config.rows if problem.in_order else max(16, tokens * power_of_2(pack)),
        "programs": len(problem.query) * problem.key.shape[1] * packs * parts,
    }  # fmt: skip


def _compiled_tokens(tokens: int, block_size: int) -> int:
    """Returns for how many tokens of a tile a kernel is compiled: 1, 16 or a whole tile.

    It is the smallest that suffices. A service meets every number of new tokens, in drafts and at
    the ends of prompts, and a kernel takes seconds to compile.
    """
    forms = (1, 16, power_of_2(block_size))
    return next((n for n in forms if tokens <= n), forms[-1])


def _heads_at_a_time(problem: Problem) -> int:
    """Returns over how many query heads a program of `key_kernel` sums: 1, or a kv head's group.

    The kernel is compiled for this number. It depends on lengths and batch, unless `in_order`.
    """
    layout, group = problem.layout, problem.group
    if _by_query_head(problem):
        return 1
    if problem.in_order:
        return group
    tiles = max(p.key_start.shape[-1] for p in layout.passes)
    programs = len(problem.query) * problem.key.shape[1] * tiles
    return group if programs >= 2 * processors(problem.query.device) else 1


def packed_rows(kernel: str, problem: Problem) -> int:
    """Returns how many rows a program computes if it packs several heads, at most 128; else 0.

    A row is one query of one head. The heads of a program share keys and a table. It is a part of
    the key under which a config is measured.
    """
    heads = problem.group & -problem.group  # divides the group, so that all programs are full
    if kernel == "key" or heads == 1 or _by_query_head(problem):
        return 0
    size = problem.layout.block_size
    return min(128, heads * _compiled_tokens(min(size, problem.query.shape[2]), size))


def _by_query_head(problem: Problem) -> bool:
    """Whether query heads of one kv head have tables of their own, so they cannot be packed."""
    return problem.group > 1 and problem.layout.table_shape[1] > problem.layout.frame.num_kv_heads


def _slots(problem: Problem, like: Tensor, w: Walk) -> tuple[int, ...]:
    """Returns the shape of a buffer for the partial results of cut tiles, each row as in `like`."""
    return len(problem.query), like.shape[1], w.slots, problem.layout.block_size, like.shape[3]


def _combined(
    kernel: Any, w: Walk, like: Tensor, arguments: dict[str, Any], **names: str
) -> list[Launch]:
    """Returns the launch that combines the partial results of cut tiles; [] if none is cut."""
    if not w.slots:
        return []
    tokens = arguments.get("parts", 1) * arguments.get("TOKENS", arguments["TILE"])
    rows = min(max(1, _COMBINED // padded(like)), power_of_2(tokens))
    own = {"parts": -(-tokens // rows), "ROWS": rows}
    programs = w.cuts.shape[2] * like.shape[0] * like.shape[1] * own["parts"]
    return [Launch(kernel, programs, None, arguments | own, **names)]


def _covered(problem: Problem, by_key: bool = False) -> bool:
    """Whether the kernels write all rows of out (of dK and dV if `by_key`), so none needs zeros."""
    passes = problem.layout.passes
    return len(passes) == 1 and passes[0].covers[by_key]


def _blank(
    problem: Problem, shape: Sequence[int], *, by_key: bool = False, overwritten: bool = False
) -> Tensor:
    """Allocates a result: with zeros, unless kernels will write all of it."""
    whole = overwritten or _covered(problem, by_key)
    new = problem.query.new_empty if whole else problem.query.new_zeros
    return new(*shape, dtype=problem.result_dtype)


def _config_for(kernel: str, problem: Problem) -> Config:
    """Returns the config of a kernel for a call; options that need registers shrink it.

    These are calls with a distance bias, dropout or a softcap, or of wide heads with a key mask.
    """
    head_dim = max(problem.query.shape[3], problem.value.shape[3])
    size, packed = problem.layout.block_size, packed_rows(kernel, problem)
    if problem.in_order:
        return in_order(kernel, problem.query.dtype, problem.query.device, head_dim)
    heads = _heads_at_a_time(problem) if kernel == "key" else 1
    config = config_for(kernel, problem.query, head_dim, size, packed, heads)
    # If loads wait for a key mask, Triton buffers one more step; wide heads leave no room for it.
    waits = head_dim > 256 and problem.key_mask is not None and kernel != "key"
    if waits or problem.distance_bias is not None or problem.coordinate_bias is not None:
        learns = bool(problem.captured) and kernel != "forward"  # sums of coordinates' gradients
        return config._replace(streamed=max(16, config.streamed // (4 if learns else 2)), masked=0)
    if kernel == "forward" and (problem.dropout_p or problem.softcap is not None):
        return config._replace(streamed=min(64, config.streamed), masked=min(32, config.masked))
    return config
