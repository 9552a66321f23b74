"""Calls the compiled kernel for forward-mode and second derivatives over tiles.

The functions are as `SecondOrder` says, but a problem must have no lists of single keys. They all
compute in float32.
"""

from typing import Any

import torch
from torch import Tensor

from ..problem import (
    GradientRows,
    Gradients,
    GradientTangents,
    Problem,
    Tangents,
    gradient_rows,
    sink_gradient_tangent,
    sink_share,
)
from .build import library
from .call import _arguments


def tangent(
    problem: Problem, out: Tensor, lse: Tensor, tangents: Tangents
) -> tuple[Tensor, Tensor]:
    """Returns the forward-mode tangents of (out, lse), given those of the problem's tensors."""
    problem, lse_t = _on_tiles(problem), _of_sink(problem, lse, tangents)
    whole = len(problem.layout.passes) == 1  # then the kernel subtracts lse' out itself
    arguments = _moved_arguments(problem, lse, lse_t, tangents, out if whole else None)
    moved = library().tangent(*arguments)
    if not whole:
        moved.addcmul_(lse_t[..., None], out.to(moved.dtype), value=-1)
    return moved, lse_t


def tangent_sums(problem: Problem, lse: Tensor, tangents: Tangents) -> tuple[Tensor, Tensor]:
    """Returns `sum P z' v + sum P v'` and `sum P z'` of each row, over the problem's keys."""
    problem, lse_t = _on_tiles(problem), _zeros(lse)
    return library().tangent(*_moved_arguments(problem, lse, lse_t, tangents, None)), lse_t


def tangent_of_gradients(
    problem: Problem,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    tangents: Tangents,
    gradient_tangents: tuple[Tensor | None, Tensor | None],
) -> GradientTangents:
    """Returns the tangents of a call's gradients, and those of its results.

    Over a layout of one pass, the kernel walks a query tile twice, so that the second walk finds
    what the first one computed.
    """
    problem = _on_tiles(problem)
    out, lse, grad_out, grad_lse = results
    if len(problem.layout.passes) == 1:
        grad_out_t, grad_lse_t = gradient_tangents
        # the kernel adds rowsum(dO * O), and its tangent
        delta = -grad_lse.float()
        delta_t = torch.zeros_like(delta) if grad_lse_t is None else -grad_lse_t.float()
        rows = GradientRows(
            grad_out=grad_out,
            lse=lse,
            delta=delta.contiguous(),
            grad_out_t=grad_out_t,
            lse_t=_of_sink(problem, lse, tangents),
            delta_t=delta_t.contiguous(),
        )
        gradients, out_t = _gradients(problem, rows, tangents, out)
    else:
        out_t, lse_t = tangent(problem, out, lse, tangents)
        rows = gradient_rows(results, (out_t, lse_t), gradient_tangents)
        gradients = tangent_of_gradient_sums(problem, rows, tangents)
    if problem.sink is not None:
        sink_t = sink_gradient_tangent(problem.sink, tangents.sink, rows)
        gradients = gradients._replace(sink=sink_t)
    return GradientTangents(gradients=gradients, out=out_t, lse=rows.lse_t)


def tangent_of_gradient_sums(
    problem: Problem, given: GradientRows, tangents: Tangents
) -> Gradients:
    """Returns the tangents of the gradients that the problem's pairs give, except a sink's."""
    return _gradients(_on_tiles(problem), given, tangents, None)[0]


def _gradients(
    problem: Problem, rows: GradientRows, tangents: Tangents, out: Tensor | None
) -> tuple[Gradients, Tensor]:
    """Runs the kernel for the tangents of gradients.

    Given `out`, it returns that of out as well.
    """
    bias, table, learns = problem.block_bias, problem.distance_bias, problem.learns_distances
    query_t, key_t, value_t, bias_t, tables_t, out_t = library().tangent_of_gradients(
        *_moved_arguments(problem, rows.lse, rows.lse_t.contiguous(), tangents, out),
        rows.grad_out,
        rows.grad_out_t,
        rows.delta.contiguous(),
        rows.delta_t.contiguous(),
        learns,
    )
    gradients = Gradients(
        query=problem.query_gradient(query_t),
        key=key_t,
        value=value_t,
        block_bias=None if bias is None else bias_t.to(bias.dtype),
        distance_bias=None if table is None or not learns else tables_t.sum(2).to(table.dtype),
    )
    return gradients, out_t


def _on_tiles(problem: Problem) -> Problem:
    assert not problem.lists
    return problem.from_bitmap_row_0().in_floats()


def _zeros(lse: Tensor) -> Tensor:
    return torch.zeros_like(lse, memory_format=torch.contiguous_format)


def _of_sink(problem: Problem, lse: Tensor, tangents: Tangents) -> Tensor:
    """Returns the part of lse's tangent that comes from the sink: float32 [B, Hq, Nq]."""
    if problem.sink is None or tangents.sink is None:
        return _zeros(lse)
    return (sink_share(problem.sink, lse) * tangents.sink.to(lse.dtype)).contiguous()


def _moved_arguments(
    problem: Problem, lse: Tensor, lse_t: Tensor, tangents: Tangents, out: Tensor | None
) -> list[Any]:
    """Returns the arguments that both second-order operators begin with, in schema order."""
    positive = problem.with_positive_scale()
    if positive is not problem and tangents.query is not None:
        query_t = problem._replace(query=tangents.query).with_positive_scale().query
        tangents = tangents._replace(query=query_t)
    arguments = _arguments(positive)
    arguments["walked"] = [0] * len(problem.layout.passes)
    biases = tangents.block_bias, tangents.distance_bias
    rows = tangents.query, tangents.key, tangents.value
    biases_t = (None if x is None else x.float().contiguous() for x in biases)
    return [*arguments.values(), lse.contiguous(), lse_t, *rows, *biases_t, out]
