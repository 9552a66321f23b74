"""Sums of forward-mode and second derivatives over tiles and lists, in portable torch.

With P = exp(z - lse) of the logits z, and their tangents z', a row moves by `lse' = sum P z'` and
`out' = sum P z' v + sum P v' - lse' out`. The gradients of a call move with its tensors and with
the gradients of its results: `tangent_of_gradient_sums` differentiates the formula of backward,
`dZ = P (dP - delta)`, pair by pair. Both recompute P as backward does, in chunks, so memory stays
O(N). The functions are as `SecondOrder` says.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...ground.numerics import sum_dtype
from ..problem import GradientRows, Gradients, Problem, Tangents
from .call import _biased, _flat, _take, _units, _walk
from .chunk_extras import Extras, Unit
from .units import Chunk


class _Pairs(NamedTuple):
    """The pairs of a unit: m queries of g heads see the same n keys.

    Queries have been multiplied by the scale. Names with `_t` are tangents; a tangent of None is
    zero.
    """

    chunk: Chunk
    unit: Unit
    product: Callable[[Tensor, Tensor], Tensor]  # (a, b) -> a @ b^T for matrices of this unit
    query: Tensor  # [..., g * m, D]
    key: Tensor  # [..., n, D]
    value: Tensor  # [..., n, Dv]
    query_t: Tensor | None
    key_t: Tensor | None
    value_t: Tensor | None
    weight: Tensor  # [..., g * m, n] softmax weights before dropout
    logit_t: Tensor  # [..., g * m, n]
    product_t: Tensor  # [..., g * m, n] tangent of scale * q.k
    slope: Tensor | None  # first derivative of the softcap at scale * q.k; None without one
    bend: Tensor | None  # its second derivative

    def of_rows(self, x: Tensor) -> Tensor:
        """Gathers values per row [B * Hq * Nq] for the unit's queries: [..., g * m, 1]."""
        return x[self.chunk.q[self.unit]].flatten(-2, -1)[..., None]


def tangent_sums(problem: Problem, lse: Tensor, tangents: Tangents) -> tuple[Tensor, Tensor]:
    """Returns `sum P z' v + sum P v'` and `sum P z'` of each row, over the problem's keys."""
    problem = problem.from_bitmap_row_0().in_floats()
    dtype = sum_dtype(problem.query)
    extras = Extras(problem, dtype)
    value_dim = problem.value.shape[3]
    moved = lse.new_zeros(lse.numel(), value_dim, dtype=dtype)
    lse_t = lse.new_zeros(lse.numel(), dtype=dtype)
    for pairs in _moved_pairs(problem, lse, tangents, extras):
        rows = pairs.chunk.q[pairs.unit].flatten()
        weight, weight_t = pairs.weight, pairs.weight * pairs.logit_t
        lse_t.index_add_(0, rows, weight_t.sum(-1).flatten())
        extras.drop(weight_t, pairs.chunk, pairs.unit)
        part = pairs.product(weight_t, pairs.value.mT)
        if pairs.value_t is not None:
            extras.drop(weight, pairs.chunk, pairs.unit)
            part = part + pairs.product(weight, pairs.value_t.mT)
        moved.index_add_(0, rows, part.flatten(0, -2))
    return moved.view(*lse.shape, value_dim), lse_t.view(lse.shape)


def tangent_of_gradient_sums(
    problem: Problem, given: GradientRows, tangents: Tangents
) -> Gradients:
    """Returns the tangents of the gradients of the problem's pairs, without that of a sink."""
    problem = problem.from_bitmap_row_0().in_floats()
    query, key, value = problem.query, problem.key, problem.value
    dtype = sum_dtype(query)
    do, do_t = (
        None if x is None else _flat(x).to(dtype) for x in (given.grad_out, given.grad_out_t)
    )
    assert do is not None
    lse, rows_lse_t = given.lse, given.lse_t.flatten()
    delta, delta_t = given.delta.flatten(), given.delta_t.flatten()
    extras = Extras(problem, dtype)
    grads = [torch.zeros_like(_flat(x), dtype=dtype) for x in (query, key, value)]
    for pairs in _moved_pairs(problem, lse, tangents, extras):
        chunk, unit, product = pairs.chunk, pairs.unit, pairs.product
        rows, columns = chunk.q[unit].flatten(), chunk.k[unit].flatten()
        udo = _take(do, chunk.q[unit], dtype).flatten(-3, -2)
        weight, weight_t = pairs.weight, pairs.weight * (pairs.logit_t - pairs.of_rows(rows_lse_t))
        dweight, dweight_t = product(udo, pairs.value), None
        if pairs.value_t is not None:
            dweight_t = product(udo, pairs.value_t)
        if do_t is not None:
            udo_t = _take(do_t, chunk.q[unit], dtype).flatten(-3, -2)
            part = product(udo_t, pairs.value)
            dweight_t = part if dweight_t is None else dweight_t + part
        centred = extras.drop(dweight, chunk, unit) - pairs.of_rows(delta)
        dlogit, dlogit_t = weight * centred, weight_t * centred - weight * pairs.of_rows(delta_t)
        if dweight_t is not None:
            dlogit_t += weight * extras.drop(dweight_t, chunk, unit)
        part = product(udo.mT, extras.drop(weight_t, chunk, unit).mT)
        if do_t is not None:
            part = part + product(udo_t.mT, extras.drop(weight, chunk, unit).mT)
        grads[2].index_add_(0, columns, part.mT.flatten(0, -2))
        if problem.block_bias is not None:
            by_key = dlogit_t.unflatten(-2, (chunk.q.shape[1], -1)).sum(-2)
            extras.add_bias_gradient([by_key], chunk, unit)
        extras.add_distance_gradient(dlogit_t, chunk, unit)
        if pairs.slope is not None and pairs.bend is not None:
            dlogit_t = dlogit_t * pairs.slope + dlogit * pairs.bend * pairs.product_t
            dlogit = dlogit * pairs.slope
        of_query = product(dlogit_t, pairs.key.mT)
        if pairs.key_t is not None:
            of_query = of_query + product(dlogit, pairs.key_t.mT)
        of_key = product(pairs.query.mT, dlogit_t.mT)
        if pairs.query_t is not None:
            of_key = of_key + product(pairs.query_t.mT, dlogit.mT)
        grads[0].index_add_(0, rows, of_query.flatten(0, -2), alpha=problem.scale)
        grads[1].index_add_(0, columns, of_key.mT.flatten(0, -2))
    query_t, key_t, value_t = (
        x.view(like.shape).to(problem.result_dtype)
        for x, like in zip(grads, (query, key, value), strict=True)
    )
    block_t, distance_t = extras.gradients()
    return Gradients(
        query=query_t, key=key_t, value=value_t, block_bias=block_t, distance_bias=distance_t
    )


def _moved_pairs(
    problem: Problem, lse: Tensor, tangents: Tangents, extras: Extras
) -> Iterator[_Pairs]:
    """Yields each unit's pairs with softmax weights and the tangents of their logits."""
    dtype, scale, cap = extras.dtype, problem.scale, problem.softcap
    query, key, value = (_flat(x) for x in (problem.query, problem.key, problem.value))
    moves = [None if x is None else _flat(x) for x in (tangents[:3])]
    bias_t, table_t = (
        None if x is None else x.flatten().to(dtype)
        for x in (tangents.block_bias, tangents.distance_bias)
    )
    # in rows without keys, lse = +inf makes the weights exp(s - lse) 0
    lse = torch.where(lse == -torch.inf, torch.inf, lse).reshape(-1)
    for _, chunk in _walk(problem):
        group = chunk.q.shape[1]
        added_t = None
        if bias_t is not None and chunk.bias is not None:
            added_t = extras.of_keys(bias_t, chunk)
        for unit, product, added in _units(chunk, extras):
            uq = _take(query, chunk.q[unit], dtype).mul_(scale).flatten(-3, -2)
            uk, uv = (_take(x, chunk.k[unit], dtype) for x in (key, value))
            uq_t, uk_t, uv_t = (
                None if x is None else _take(x, at[unit], dtype)
                for x, at in zip(moves, (chunk.q, chunk.k, chunk.k), strict=True)
            )
            if uq_t is not None:
                uq_t = uq_t.mul_(scale).flatten(-3, -2)
            extras.clear(chunk, unit, uk, uv, *(x for x in (uk_t, uv_t) if x is not None))
            score = product(uq, uk)
            product_t = torch.zeros_like(score) if uq_t is None else product(uq_t, uk)
            if uk_t is not None:
                product_t = product_t + product(uq, uk_t)
            slope = bend = None
            logit_t = product_t
            if cap is not None:
                share = (score / cap).tanh_()
                slope = 1 - share * share
                bend = (-2 / cap) * share * slope
                logit_t = logit_t * slope
            if table_t is not None and chunk.places is not None:
                logit_t = logit_t + extras.of_pairs(table_t, chunk.places, unit)
            if added_t is not None:
                own = logit_t.unflatten(-2, (group, -1)) + added_t[unit]
                logit_t = own.flatten(-3, -2)
            score, _ = extras.adjust(score, chunk, unit)
            rows = lse[chunk.q[unit]].flatten(-2, -1)[..., None]
            weight = _biased(score, added, group).sub_(rows).exp_()
            yield _Pairs(
                chunk=chunk,
                unit=unit,
                product=product,
                query=uq,
                key=uk,
                value=uv,
                query_t=uq_t,
                key_t=uk_t,
                value_t=uv_t,
                weight=weight,
                logit_t=logit_t,
                product_t=product_t,
                slope=slope,
                bend=bend,
            )
