"""Second order over tiles by one backend and over lists of single keys by another.

`tiles` and `lists` are the functions of the two; sums over the keys of both add up.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from .problem import (
    GradientRows,
    Gradients,
    GradientTangents,
    Problem,
    Tangents,
    gradient_rows,
    results_of_sums,
    sink_gradient_tangent,
)


class SecondOrder(NamedTuple):
    """Functions of a backend for second order, as fields of `Backend` of these names."""

    tangent: Callable[..., Any]
    tangent_of_gradients: Callable[..., Any]
    tangent_sums: Callable[..., Any]
    tangent_of_gradient_sums: Callable[..., Any]


def tangent(
    tiles: SecondOrder,
    lists: SecondOrder,
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    tangents: Tangents,
) -> tuple[Tensor, Tensor]:
    """Returns the tangents of (out, lse) if the problem's tensors move by `tangents`."""
    if not problem.lists:
        moved: tuple[Tensor, Tensor] = tiles.tangent(problem, out, lse, tangents)
        return moved
    sums = tangent_sums(tiles, lists, problem, lse, tangents)
    return results_of_sums(sums, out, lse, problem.sink, tangents.sink)


def tangent_sums(
    tiles: SecondOrder, lists: SecondOrder, problem: Problem, lse: Tensor, tangents: Tangents
) -> tuple[Tensor, Tensor]:
    """Returns `sum P z' v + sum P v'` and `sum P z'` of each row, over the problem's keys."""
    sums: list[tuple[Tensor, Tensor]] = [
        package.tangent_sums(part, lse, moves)
        for package, part, moves in _parts(tiles, lists, problem, tangents)
    ]
    for more in sums[1:]:
        for total, x in zip(sums[0], more, strict=True):
            total.add_(x)
    return sums[0]


def tangent_of_gradients(
    tiles: SecondOrder,
    lists: SecondOrder,
    problem: Problem,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    tangents: Tangents,
    gradient_tangents: tuple[Tensor | None, Tensor | None],
) -> GradientTangents:
    """Returns the tangents of a call's gradients, and those of its results."""
    if not problem.lists:
        found: GradientTangents = tiles.tangent_of_gradients(
            problem, results, tangents, gradient_tangents
        )
        return found
    moved = tangent(tiles, lists, problem, *results[:2], tangents)
    rows = gradient_rows(results, moved, gradient_tangents)
    gradients = tangent_of_gradient_sums(tiles, lists, problem, rows, tangents)
    if problem.sink is not None:
        sink_t = sink_gradient_tangent(problem.sink, tangents.sink, rows)
        gradients = gradients._replace(sink=sink_t)
    return GradientTangents(gradients=gradients, out=moved[0], lse=moved[1])


def tangent_of_gradient_sums(
    tiles: SecondOrder,
    lists: SecondOrder,
    problem: Problem,
    given: GradientRows,
    tangents: Tangents,
) -> Gradients:
    """Returns the tangents of the gradients of the problem's pairs, without that of a sink."""
    sums, *rest = (
        package.tangent_of_gradient_sums(part._replace(in_float32=True), given, moves)
        for package, part, moves in _parts(tiles, lists, problem, tangents)
    )
    for more in rest:
        for name in ("query", "key", "value", "distance_bias"):
            if (total := getattr(sums, name)) is not None:
                total.add_(getattr(more, name))
        sums = sums._replace(block_bias=more.block_bias)
    query, key, value = (x.to(problem.result_dtype) for x in sums[:3])
    return sums._replace(query=query, key=key, value=value)


def _parts(
    tiles: SecondOrder, lists: SecondOrder, problem: Problem, tangents: Tangents
) -> list[tuple[SecondOrder, Problem, Tangents]]:
    """Returns each package with its part of a problem, and how the part's tensors move."""
    if not problem.lists:
        return [(tiles, problem, tangents)]
    problem = problem.from_bitmap_row_0()
    layout = replace(problem.layout, passes=())
    parts: list[tuple[SecondOrder, Problem, Tangents]] = [
        (lists, problem._replace(layout=layout), tangents)
    ]
    if problem.layout.num_blocks:  # with lists, a block bias is theirs
        of_tiles = problem._replace(lists=(), block_bias=None)
        parts.insert(0, (tiles, of_tiles, tangents._replace(block_bias=None)))
    return parts
