"""`SecondOrder`: forward-mode and second derivatives of a backend over layouts.

Both are sums over the keys of a row, which add up over several arrays of keys. `of_sums` makes
whole rows of them; `over_tiles_and_lists` joins two backends, of which one has no lists.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
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

TangentSums = Callable[[Problem, Tensor, Tangents], tuple[Tensor, Tensor]]
GradientSums = Callable[[Problem, GradientRows, Tangents], Gradients]


class SecondOrder(NamedTuple):
    """Functions of a backend for forward-mode and second derivatives, over pairs of a problem."""

    # (problem, out, lse, tangents) -> the tangents of (out, lse), in the dtype of sums, if the
    # problem's tensors move by `tangents`
    tangent: Callable[[Problem, Tensor, Tensor, Tangents], tuple[Tensor, Tensor]]
    # (problem, (out, lse, grad_out, grad_lse), tangents, (grad_out_t, grad_lse_t)) -> the tangents
    # of a call's gradients and results; the last two are tangents of the gradients, or None
    tangent_of_gradients: Callable[..., GradientTangents]
    # (problem, lse, tangents) -> `sum P z' v + sum P v'` [B, Hq, Nq, Dv] and `sum P z'`
    # [B, Hq, Nq] of each row. P is by `lse`, which may be that of more keys than the problem has.
    # A sink is no key here.
    tangent_sums: TangentSums
    # (problem, rows, tangents) -> the tangents of the gradients of the problem's pairs, without
    # that of a sink. The numbers of `rows` may be those of rows with more keys.
    tangent_of_gradient_sums: GradientSums


def of_sums(tangent_sums: TangentSums, tangent_of_gradient_sums: GradientSums) -> SecondOrder:
    """Builds all four functions of a backend from its two that compute sums over keys."""
    return SecondOrder(
        tangent=partial(_tangent, tangent_sums),
        tangent_of_gradients=partial(_tangent_of_gradients, tangent_sums, tangent_of_gradient_sums),
        tangent_sums=tangent_sums,
        tangent_of_gradient_sums=tangent_of_gradient_sums,
    )


def over_tiles_and_lists(tiles: SecondOrder, lists: SecondOrder) -> SecondOrder:
    """Builds functions that compute tiles with one backend, and lists of keys with another."""
    joined = of_sums(
        partial(_joined_tangent_sums, tiles, lists), partial(_joined_gradient_sums, tiles, lists)
    )
    return joined._replace(
        tangent=partial(_unless_lists, tiles.tangent, joined.tangent),
        tangent_of_gradients=partial(
            _unless_lists, tiles.tangent_of_gradients, joined.tangent_of_gradients
        ),
    )


def _tangent(
    sums: TangentSums, problem: Problem, out: Tensor, lse: Tensor, tangents: Tangents
) -> tuple[Tensor, Tensor]:
    of_rows = sums(problem, lse, tangents)
    return results_of_sums(of_rows, out, lse, problem.sink, tangents.sink)


def _tangent_of_gradients(
    tangent_sums: TangentSums,
    gradient_sums: GradientSums,
    problem: Problem,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    tangents: Tangents,
    gradient_tangents: tuple[Tensor | None, Tensor | None],
) -> GradientTangents:
    out, lse, sink = results[0], results[1], problem.sink
    moved = _tangent(tangent_sums, problem, out, lse, tangents)
    rows = gradient_rows(results, moved, gradient_tangents)
    gradients = gradient_sums(problem, rows, tangents)
    if sink is not None:
        gradients = gradients._replace(sink=sink_gradient_tangent(sink, tangents.sink, rows))
    return GradientTangents(gradients=gradients, out=moved[0], lse=moved[1])


def _unless_lists(
    of_tiles: Callable[..., Any], joined: Callable[..., Any], problem: Problem, *rest: Any
) -> Any:
    return (joined if problem.lists else of_tiles)(problem, *rest)


def _joined_tangent_sums(
    tiles: SecondOrder, lists: SecondOrder, problem: Problem, lse: Tensor, tangents: Tangents
) -> tuple[Tensor, Tensor]:
    sums: list[tuple[Tensor, Tensor]] = [
        own.tangent_sums(part, lse, moves)
        for own, part, moves in _parts(tiles, lists, problem, tangents)
    ]
    for more in sums[1:]:
        for total, x in zip(sums[0], more, strict=True):
            total.add_(x)
    return sums[0]


def _joined_gradient_sums(
    tiles: SecondOrder, lists: SecondOrder, problem: Problem, rows: GradientRows, tangents: Tangents
) -> Gradients:
    sums, *rest = (
        own.tangent_of_gradient_sums(part._replace(in_float32=True), rows, moves)
        for own, part, moves in _parts(tiles, lists, problem, tangents)
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
    """Returns (backend, problem, tangents) for the listed keys and for the tiles of a call."""
    if not problem.lists:
        return [(tiles, problem, tangents)]
    problem = problem.from_bitmap_row_0()
    layout = replace(problem.layout, passes=())
    parts = [(lists, problem._replace(layout=layout), tangents)]
    if problem.layout.num_blocks:  # with lists, a block bias is theirs
        of_tiles = problem._replace(lists=(), block_bias=None)
        parts.insert(0, (tiles, of_tiles, tangents._replace(block_bias=None)))
    return parts
