"""Launches the GPU kernels of the forward and the backward over the passes of a layout.

Passes run one after another; each merges into the results of the earlier ones. With several passes
in half precision, float32 sums are kept for a few kv heads at a time. Triton is imported on first
use.
"""

import math
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..problem import Gradients, Problem, constant_in_graphs, dense_rows, sink_gradient
from . import extra_arguments
from .configs import Config, config_for
from .launch import launch, padded, power_of_2, processors, strides
from .operands import MOST_HEAD_DIM, Part, of_inputs, of_tiles, streamed
from .walk import Walk, walk

EXTRAS = frozenset(
    ("block_bias", "softcap", "distance_bias", "sink", "dropout_p", "dropout_seed", "key_mask")
)
"""Options of a call, other than its scale, that these kernels compute."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WRONG_INTERPRETED = (torch.bfloat16,)
_LEAST_PROGRAMS = 8  # programs per multiprocessor that fill the device
_ROWS = 64  # rows per program of the kernels that combine or prepare
_ALIGNED = 4  # float32 numbers of 16 bytes


def reasons(*tensors: Tensor) -> list[str]:
    """Lists why the kernels cannot run on these tensors, or on this machine."""
    found = _machine_reasons()
    wanted = "cpu" if interpreting() else "cuda"
    if any(x.device.type != wanted for x in tensors):
        found.append(f"it runs on {wanted} tensors" + " under TRITON_INTERPRET=1" * interpreting())
    if any(x.dtype not in _DTYPES for x in tensors):
        found.append("it computes in float32; float64 stays with gather")
    if interpreting() and any(x.dtype in _WRONG_INTERPRETED for x in tensors):
        found.append("Triton's interpreter gets bfloat16 products wrong")
    if any(x.dim() and x.shape[-1] > MOST_HEAD_DIM for x in tensors):
        found.append(f"it holds head dims up to {MOST_HEAD_DIM}")
    return found


@constant_in_graphs
def _machine_reasons() -> list[str]:
    found = [] if find_spec("triton") else ["the package triton is missing (pip install triton)"]
    if interpreting():
        return found
    if not torch.cuda.is_available():
        return [*found, "it needs a GPU (TRITON_INTERPRET=1 tries its kernels without one)"]
    if not torch.version.hip and torch.cuda.get_device_capability() < (8, 0):
        found.append("it needs compute capability 8.0")
    return found


@constant_in_graphs
def interpreting() -> bool:
    """Whether kernels run in Python on CPU tensors, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) over a layout; lse is float32. A sink is the lse that rows start from."""
    layout, query, value = problem.layout, problem.query, problem.value
    in_turn = _in_turn(problem)
    out = _blank(problem, (*query.shape[:3], value.shape[3]), overwritten=in_turn)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=query.device)
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
    """Gradients of the problem's tensors."""
    layout, sink = problem.layout, problem.sink
    bias = problem.block_bias
    table = problem.distance_bias if problem.learns_distances else None
    grad_out = dense_rows(grad_out)
    rows = _prepared(grad_out, grad_lse, out, lse, 1.0 if bias is not None else math.log2(math.e))
    in_turn, at_most = _in_turn(problem), None
    if table is not None:
        at_most = extra_arguments.kv_heads_at_a_time(problem, _config_for("query", problem))
    dq = _blank(problem, problem.query.shape, overwritten=in_turn)
    dk, dv = (_blank(problem, x.shape, by_key=True) for x in (problem.key, problem.value))
    dbias, dtable = (
        None if x is None else x.new_zeros(x.shape, dtype=torch.float32) for x in (bias, table)
    )
    for part in _parts(problem, in_turn, at_most):
        grads = [x[:, part.heads] for x in (grad_out, *rows)]
        to = dq[:, part.heads]
        sums = torch.zeros_like(to, dtype=torch.float32) if in_turn else to
        of_tables = [None if x is None else x[:, part.heads] for x in (dbias, dtable)]
        for number in range(len(layout.passes)):
            _query_pass(part, number, grads, sums, *of_tables)
        if in_turn:
            to.copy_(sums)
        _key_passes(part, grads, [x[:, part.kv_heads] for x in (dk, dv)])
    return Gradients(
        problem.query_gradient(dq), dk, dv,
        None if bias is None or dbias is None else dbias.to(bias.dtype),
        None if table is None or dtable is None else dtable.to(table.dtype),
        None if sink is None else sink_gradient(sink, lse, rows[0]),
    )  # fmt: skip


def _in_turn(problem: Problem) -> bool:
    """Whether results in half precision are first summed in float32, some heads at a time."""
    half = problem.query.itemsize < 4 and not problem.in_float32
    return half and len(problem.layout.passes) > 1


def _parts(problem: Problem, in_turn: bool, at_most: int | None = None) -> Iterator[Part]:
    """Yields the call by `at_most` kv heads; with `in_turn`, by as few as fill the device."""
    problem = problem.with_positive_scale().with_dense_rows()
    bias, table = (
        None if x is None else dense_rows(x.float())
        for x in (problem.block_bias, problem.distance_bias)
    )
    layout, query, key, value = problem[:4]
    num_kv_heads = key.shape[1]
    if not layout.passes or not query.shape[0] * num_kv_heads:
        return
    group, at_a_time = problem.group, min(num_kv_heads, at_most or num_kv_heads)
    if in_turn:
        tiles = max(p.query_start.shape[-1] for p in layout.passes)
        programs = max(1, len(query) * group * tiles)
        fewest = -(-_LEAST_PROGRAMS * processors(query.device) // programs)
        at_a_time = min(at_a_time, max(1, fewest))
    for first in range(0, num_kv_heads, at_a_time):
        kv_heads = slice(first, min(first + at_a_time, num_kv_heads))
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        own = problem._replace(
            query=query[:, heads], key=key[:, kv_heads], value=value[:, kv_heads],
            block_bias=None if bias is None else bias[:, heads],
            distance_bias=None if table is None else table[:, heads],
        )  # fmt: skip
        yield Part(own, heads, kv_heads)


def _forward_pass(part: Part, number: int, out: Tensor, lse: Tensor) -> None:
    """Merges the attention over one pass into `out` and `lse`."""
    from .combine import merge_kernel
    from .forward import forward_kernel

    config = _config_for("forward", part.problem)
    rows = _rows(part, number, config)
    w = _walk(part, number, rows["programs"], by_key=False)
    pieces = out.new_empty(_slots(part, out.shape[1], w, out.shape[3]), dtype=torch.float32)
    arguments = {
        **of_inputs(part, config), **rows,
        **of_tiles(part, number, w, config, by_key=False), "RUNNING": number > 0,
        "SINK": number == 0 and part.problem.sink is not None,
        "out": out, "lse": lse, "lse_batch": lse.stride(0), "lse_head": lse.stride(1),
        "piece_out": pieces, "piece_lse": pieces.new_empty(pieces.shape[:-1]),
        "num_heads": out.shape[1], "kv_len": part.key.shape[2],
        "bitmap_row": part.problem.slots[number] if part.problem.slots else 0,
        **strides(q=part.query, k=part.key, v=part.value, o=out),
    }  # fmt: skip
    of_keys = {"key": part.key, "value": part.value}
    arguments |= streamed(part, number, config, arguments["ALIGN"], {}, **of_keys)
    launch(forward_kernel, w.units.shape[2] * rows["programs"], config, arguments)
    _combine(merge_kernel, w, out, arguments)


def _query_pass(
    part: Part,
    number: int,
    grads: list[Tensor],
    dq: Tensor,
    dbias: Tensor | None,
    dtable: Tensor | None,
) -> None:
    """Adds the gradients of one pass to dQ, and to those of block bias and distance bias."""
    from .backward import query_kernel
    from .combine import sum_kernel

    config = _config_for("query", part.problem)
    rows = _rows(part, number, config)
    w = _walk(part, number, rows["programs"], by_key=False)
    grad_out, delta, row_lse = grads
    pieces = dq.new_empty(_slots(part, dq.shape[1], w, dq.shape[3]), dtype=torch.float32)
    arguments = {
        **of_inputs(part, config), **rows,
        **of_tiles(part, number, w, config, by_key=False), "RUNNING": number > 0,
        "grad_out": grad_out, "delta": delta, "row_lse": row_lse, "grad_query": dq,
        "row_batch": delta.stride(0), "row_head": delta.stride(1), "piece": pieces, "grad": dq,
        "num_heads": dq.shape[1], "kv_len": part.key.shape[2],
        **strides(q=part.query, k=part.key, v=part.value, g=grad_out, dq=dq, grad=dq),
    }  # fmt: skip
    if dbias is not None:
        tile = part.layout.block_size
        steps = rows["parts"] * -(-tile // (config.masked or config.streamed))
        of_steps = dbias.new_zeros(*dbias.shape, steps)
        arguments |= {"grad_bias": of_steps, "num_blocks": dbias.shape[2]}
    if dtable is not None:
        room = extra_arguments.room_for_diagonals(part.problem, w, rows, config)
        arguments |= room
    of_keys = {"key": part.key, "value": part.value}
    arguments |= streamed(part, number, config, arguments["ALIGN"], {}, **of_keys)
    launch(query_kernel, w.units.shape[2] * rows["programs"], config, arguments)
    _combine(sum_kernel, w, dq, arguments)
    if dbias is not None:
        dbias += of_steps.sum(-1)
    if dtable is not None:
        extra_arguments.add_diagonals(dtable, room, part.layout.passes[number].step)


def _key_passes(part: Part, grads: list[Tensor], results: list[Tensor]) -> None:
    """Writes dK and dV over all passes, [B, kv heads, Nk, D] and [.., Dv].

    It uses float32 sums if several passes, or several shares of a group, add to a key.
    """
    from .backward import key_kernel
    from .combine import sum_kernel

    config, layout = _config_for("key", part.problem), part.layout
    at_a_time = _heads_at_a_time(part)
    shares = -(-part.group // at_a_time)
    alone = len(layout.passes) == 1 and shares == 1
    batch, num_kv_heads, kv_len = part.key.shape[:3]
    dk, dv = results
    if not alone:
        dk, dv = (
            x.new_zeros(batch, num_kv_heads * shares, kv_len, x.shape[3], dtype=torch.float32)
            for x in results
        )
    programs = batch * dk.shape[1] * -(-layout.block_size // config.rows)
    grad_out, delta, row_lse = grads
    for number in range(len(layout.passes)):
        w = _walk(part, number, programs, by_key=True)
        pieces = [
            x.new_empty(_slots(part, x.shape[1], w, x.shape[3]), dtype=torch.float32)
            for x in (dk, dv)
        ]
        arguments = {
            **of_inputs(part, config), **of_tiles(part, number, w, config, by_key=True),
            "HEADS": at_a_time,
            "RUNNING": number > 0, "num_heads": part.query.shape[1],
            "grad_out": grad_out, "delta": delta, "row_lse": row_lse,
            "grad_key": dk, "grad_value": dv, "piece_key": pieces[0], "piece_value": pieces[1],
            "row_batch": delta.stride(0), "row_head": delta.stride(1),
            **strides(q=part.query, k=part.key, v=part.value, g=grad_out, dk=dk, dv=dv),
        }  # fmt: skip
        rows = {"delta": delta, "row_lse": row_lse}
        of_queries = {"query": part.query, "grad_out": grad_out}
        arguments |= streamed(part, number, config, arguments["ALIGN"], rows, **of_queries)
        launch(key_kernel, w.units.shape[2] * programs, config, arguments)
        arguments |= {"num_heads": dk.shape[1], "first_head": part.kv_heads.start * shares}
        arguments |= {"all_heads": layout.frame.num_kv_heads * shares}
        for grad, piece in zip((dk, dv), pieces, strict=True):
            arguments |= {"grad": grad, "piece": piece, **strides(grad=grad)}
            arguments |= {"HEAD_DIM": grad.shape[3], "PADDED_DIM": padded(grad)}
            _combine(sum_kernel, w, grad, arguments)
    if not alone:
        for to, sums in zip(results, (dk, dv), strict=True):
            to.copy_(sums.unflatten(1, (num_kv_heads, shares)).sum(2))


def _prepared(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, unit: float
) -> tuple[Tensor, Tensor]:
    """Returns (delta, lse for the kernels: +inf for rows without keys), both [B, Hq, Nq]."""
    from .prepare import prepare_kernel

    batch, heads, q_len = lse.shape
    apart = -(-q_len // _ALIGNED) * _ALIGNED  # a descriptor needs heads aligned to 16 bytes
    delta, row_lse = (lse.new_empty(batch, heads, apart)[..., :q_len] for _ in range(2))
    out = out.contiguous()
    arguments = {
        "grad_out": grad_out, "grad_lse": grad_lse.contiguous(), "out": out,
        "lse": lse.contiguous(), "delta": delta, "row_lse": row_lse,
        **strides(g=grad_out, o=out), "row_head": apart,
        "unit": unit, "num_heads": heads, "q_len": q_len,
        "ROWS": _ROWS, "VALUE_DIM": out.shape[3], "PADDED_VALUE_DIM": padded(out),
    }  # fmt: skip
    if lse.numel():
        launch(prepare_kernel, batch * heads * -(-q_len // _ROWS), None, arguments)
    return delta, row_lse


def _rows(part: Part, number: int, config: Config) -> dict[str, int]:
    """Chooses how many tokens of a query tile, and how many heads, each program computes.

    A program packs heads of a group if a tile has fewer tokens than the program has rows.
    """
    layout = part.layout
    most = min(layout.block_size, -(-layout.frame.q_len // layout.passes[number].step))
    tokens = min(config.rows, power_of_2(most))
    pack = 1 if _by_query_head(part) else min(part.group, config.rows // tokens)
    packs = -(-part.group // pack)
    pack = -(-part.group // packs)
    parts = -(-most // tokens)
    return {
        "parts": parts, "TOKENS": tokens, "PACK": pack,
        "ROWS": max(16, tokens * power_of_2(pack)),
        "programs": len(part.query) * part.key.shape[1] * packs * parts,
    }  # fmt: skip


def _heads_at_a_time(part: Part) -> int:
    """Number of query heads of a group that one program of `key_kernel` sums over.

    That is all of them, unless the device would idle, or query heads have tables of their own.
    """
    layout, group = part.layout, part.group
    if _by_query_head(part):
        return 1
    tiles = max(p.key_start.shape[-1] for p in layout.passes)
    programs = len(part.query) * part.key.shape[1] * tiles
    shares = min(group, -(-2 * processors(part.query.device) // max(1, programs)))
    return -(-group // shares)


def _by_query_head(part: Part) -> bool:
    """Whether query heads of a group have tables of their own."""
    return part.group > 1 and part.layout.table_shape[1] > part.layout.frame.num_kv_heads


def _walk(part: Part, number: int, programs: int, *, by_key: bool) -> Walk:
    shared_by = processors(part.query.device)
    return walk(part.layout, number, by_key=by_key, programs=programs, processors=shared_by)


def _slots(part: Part, heads: int, w: Walk, head_dim: int) -> tuple[int, ...]:
    return len(part.query), heads, w.slots, part.layout.block_size, head_dim


def _combine(kernel: Any, w: Walk, like: Tensor, arguments: dict[str, Any]) -> None:
    """Combines the pieces of tiles that were cut, if the walk may have cut any."""
    if w.slots:
        tile = arguments["TILE"]
        rows = min(_ROWS, power_of_2(tile))
        programs = w.cuts.shape[2] * like.shape[0] * like.shape[1] * -(-tile // rows)
        launch(kernel, programs, None, {**arguments, "ROWS": rows})


def _blank(
    problem: Problem, shape: Sequence[int], *, by_key: bool = False, overwritten: bool = False
) -> Tensor:
    """Allocates a result: zeros, unless the kernels will write all of it."""
    passes = problem.layout.passes
    covered = len(passes) == 1 and passes[0].covers[by_key]
    new = problem.query.new_empty if covered or overwritten else problem.query.new_zeros
    return new(*shape, dtype=problem.result_dtype)


def _config_for(kernel: str, problem: Problem) -> Config:
    head_dim = max(problem.query.shape[3], problem.value.shape[3])
    config = config_for(kernel, problem.query, head_dim, problem.layout.block_size)
    if problem.distance_bias is None:
        return config
    # a bias per pair needs more registers
    return config._replace(streamed=max(16, config.streamed // 2), masked=0)
