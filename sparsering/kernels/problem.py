"""Input and output of a backend: `Problem` and `Gradients`, and helpers to prepare tensors."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..coordinates import CoordinateBias
from ..layouts.layout import BlockLayout
from ..layouts.lists import Lists
from .rounding import from_store

_LEAST_SCALE = torch.finfo(torch.float32).smallest_normal
_LEAST_DIVISOR = 2.0**-64

F = TypeVar("F", bound=Callable[..., Any])


ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function (score, batch entry, query head, query index, key index) -> changed score."""


class Problem(NamedTuple):
    """Attention of query, key and value over a layout: the input of a backend.

    `forward(problem) -> (out, lse)` of a backend computes out [B, Hq, Nq, Dv] in `result_dtype` and
    lse [B, Hq, Nq] in float32 (float64 for float64). `backward(problem, out, lse, grad_out,
    grad_lse) -> Gradients` needs no results of single passes: with the lse of all passes and `delta
    = rowsum(dO * O) - dlse`, each pair has `P = exp(s - lse)` and `dS = P * (dP - delta)`. Extras,
    None if not in use, apply in the order that `attention` documents. Dropped weights count in lse;
    dP is 0 for a dropped weight, and divided by 1 - p for others. Distances and dropout use the
    positions of `Pass.coordinates`, not the index of a token in its tensor.
    """

    layout: BlockLayout  # passes, each with tiles and a table of visited tile pairs
    query: Tensor  # [B, Hq, Nq, D]
    key: Tensor  # [B, Hkv, Nk, D]
    value: Tensor  # [B, Hkv, Nk, Dv]
    scale: float  # factor of the scores
    # [B, Hq, num_blocks], added to every score of an entry (a visited pair of tiles)
    block_bias: Tensor | None = None
    softcap: float | None = None  # scores become `softcap * tanh(s / softcap)`
    # [B, Hq, 2R + 1]; item `R + clamp(k - p, -R, R)` is added to the score of query position p and
    # key position k. Strides may be 0.
    distance_bias: Tensor | None = None
    sink: Tensor | None = None  # [B, Hq, Nq or 1] logit of one more key of each row, of value 0
    dropout_p: float | None = None  # probability that a weight is dropped
    # [B, streams] int64 seeds for `dropout.kept_pairs`. `Pass.stream` says which seed each query
    # tile uses; without it all use the first.
    dropout_seed: Tensor | None = None
    # [B or 1, Nk] bool, False for keys that no query sees, even if the layout has pairs with them.
    # These keys and values may be NaN, and must not change results.
    key_mask: Tensor | None = None
    # Changes each score after the scale, before the softcap.
    score_mod: ScoreMod | None = None
    # A score_mod of which the kernel reads the tensors, instead of calling it.
    coordinate_bias: CoordinateBias | None = None
    # For each pass, the bitmap row of the first query; () means row 0. Decoding builds one layout
    # for many later queries, and each call computes a few of them. A backend that does not read
    # them begins with `from_bitmap_row_0()`.
    first_bitmap_rows: tuple[int, ...] = ()
    learns_distances: bool = True  # whether the gradient of the distance bias is needed
    # Lists of single keys, which have pairs beside those of the layout. If there are lists, a block
    # bias is for them alone: [B, Hq, Nq, n] for one; for several, theirs flattened end to end,
    # [B, Hq, numbers].
    lists: tuple[Lists, ...] = ()
    captured: tuple[Tensor, ...] = ()  # tensors that a score_mod reads and that get gradients
    in_order: bool = False  # sum each row in an order that follows from its positions alone
    in_float32: bool = False  # return half precision results in float32, the dtype of sums

    @property
    def is_bare(self) -> bool:
        """True if `in_use` is empty; it is faster than to build the set."""
        return {*map(type, _extras(self))} == _NOTHING

    @property
    def in_use(self) -> set[str]:
        """Names of the optional tensors and numbers that are set, such as softcap or key_mask."""
        pairs = zip(_EXTRAS, _extras(self), strict=True)
        return {name for name, x in pairs if x is not None}

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.query.shape[1] // max(1, self.key.shape[1])

    @property
    def result_dtype(self) -> torch.dtype:
        """Dtype of out and of the gradients of query, key and value."""
        return torch.float32 if self.in_float32 and self.query.itemsize < 4 else self.query.dtype

    def with_dense_rows(self) -> "Problem":
        """Returns the problem with query, key and value contiguous in the head dim."""
        return self._replace(
            query=dense_rows(self.query), key=dense_rows(self.key), value=dense_rows(self.value)
        )

    def with_positive_scale(self) -> "Problem":
        """Returns a problem with equal scores but a scale above 0, which softmax kernels need."""
        if _is_zero(self.scale):  # in float32
            return self._replace(query=torch.zeros_like(self.query), scale=1.0)
        if self.coordinate_bias is not None and (factor := self._moved_factor) != 1.0:
            return self._replace(query=self.query * factor, scale=self.scale / factor)
        return self if self.scale > 0 else self._replace(query=-self.query, scale=-self.scale)

    @property
    def _moved_factor(self) -> float:
        """The power of two, with a sign, that `with_positive_scale` moves from a tiny scale.

        For calls with a coordinate bias: kernels divide its slopes by the scale, which must not
        overflow.
        """
        if abs(self.scale) >= _LEAST_DIVISOR:
            return 1.0
        return math.copysign(math.ldexp(1.0, math.frexp(self.scale)[1]), self.scale)

    def laid_coordinates(self) -> list[Tensor]:
        """Returns the tensors of a coordinate bias as kernels read them; [] without one.

        They are the coordinates of queries and of keys, float32 [B or 1, parts, dims, tokens], and
        the slopes [Hq] over the scale, so that kernels change products of query and key. A float64
        coordinate is the sum of two parts, so that a small distance of large numbers is right.
        """
        if (bias := self.coordinate_bias) is None:
            return []
        places, found = (bias.query_coords, bias.coords), []
        for x in places:
            x = x.detach().transpose(1, 2)
            parts = [x.float()]
            if any(y.dtype == torch.float64 for y in places):
                rest = x.double() - parts[0].double()
                parts.append(torch.where(parts[0].isfinite(), rest, 0.0).float())
            found.append(torch.stack(parts, 1).contiguous())
        return [*found, (bias.slopes.detach().double() / self.scale).float().contiguous()]

    def in_floats(self) -> "Problem":
        """Returns the problem with keys and values in the query's dtype, if they are in 8 bits."""
        if (dtype := self.query.dtype) == self.key.dtype:
            return self
        return self._replace(key=from_store(self.key, dtype), value=from_store(self.value, dtype))

    def from_bitmap_row_0(self) -> "Problem":
        """Moves the first query to bitmap row 0: an equivalent problem without the field."""
        if not self.first_bitmap_rows:
            return self
        if not any(self.first_bitmap_rows):
            return self._replace(first_bitmap_rows=())
        pairs = zip(self.layout.passes, self.first_bitmap_rows, strict=True)
        passes = tuple(p.from_slot(slot, self.layout.block_size) for p, slot in pairs)
        return self._replace(layout=replace(self.layout, passes=passes), first_bitmap_rows=())

    def of_lists(self) -> "Iterator[tuple[Lists, Problem]]":
        """Yields each `Lists` with a problem for its queries, and its part of the block bias.

        The block bias becomes [B, Hq, queries, slots]. Only `frame` of the problem's layout is
        valid.
        """
        first = 0
        for lists in self.lists:
            own, shape = self, lists.keys.shape[2:]
            if self.block_bias is not None and len(self.lists) > 1:
                # kernels read it as one piece of memory
                bias = self.block_bias.narrow(2, first, shape.numel()).contiguous()
                own = own._replace(block_bias=bias.unflatten(2, shape))
                first += shape.numel()
            if lists.queries is not None:
                frame = self.layout.frame._replace(q_len=shape[0])
                layout = replace(self.layout, frame=frame, passes=())
                own = own._replace(query=lists.of_queries(self.query), layout=layout)
                if (whole := self.coordinate_bias) is not None:
                    places = lists.of_queries(whole.query_coords[:, None])[:, 0]
                    of_queries = CoordinateBias(places, whole.coords, whole.slopes)
                    own = own._replace(coordinate_bias=of_queries)
            yield lists, own

    def query_gradient(self, grad: Tensor) -> Tensor:
        """Converts dQ of `with_positive_scale()`, whose query may be negated, to dQ of this one."""
        if _is_zero(self.scale):
            return torch.zeros_like(grad)
        if self.coordinate_bias is not None and (factor := self._moved_factor) != 1.0:
            return grad * factor
        return grad if self.scale > 0 else -grad


_EXTRAS = [name for name, default in Problem._field_defaults.items() if default is None]
_extras, _NOTHING = attrgetter(*_EXTRAS), {type(None)}


def bias_gradient(of_lists: list[Tensor]) -> Tensor:
    """Joins bias gradients of lists, [B, Hq, queries, slots] each, to that of `block_bias`."""
    return of_lists[0] if len(of_lists) == 1 else torch.cat([x.flatten(2) for x in of_lists], 2)


def captured_gradients(
    problem: "Problem", of_queries: Tensor, of_keys: Tensor
) -> tuple[Tensor, ...]:
    """Returns the gradients of the tensors that a coordinate bias reads, of `problem.captured`.

    Takes the gradients of each head: [B, Hq, Nq, dims + 1] of the queries' coordinates, and at the
    end of each row the sum of dS * distance; [B, Hkv, Nk, dims] of the keys'.
    """
    if not problem.captured or (bias := problem.coordinate_bias) is None:
        return ()
    *_, dims = bias.coords.shape
    found: dict[int, Tensor] = {}
    for x, grad in (
        (bias.slopes, -of_queries[..., dims].sum((0, 2), dtype=torch.float64)),
        (bias.query_coords, of_queries[..., :dims].sum(1)),
        (bias.coords, of_keys.sum(1)),
    ):
        grad = grad.sum(0, keepdim=True) if x.dim() == 3 and len(x) < len(grad) else grad
        grad = grad.to(x.dtype)
        found[id(x)] = found[id(x)] + grad if id(x) in found else grad
    return tuple(found[id(x)] for x in problem.captured)


class Gradients(NamedTuple):
    """Gradients of a problem's tensors, None for tensors that the problem does not have."""

    query: Tensor
    key: Tensor
    value: Tensor
    block_bias: Tensor | None = None
    distance_bias: Tensor | None = None
    sink: Tensor | None = None
    captured: tuple[Tensor | None, ...] = ()  # None for one that changes no score


class Tangents(NamedTuple):
    """Forward-mode tangents of a problem's tensors; None for a zero tangent."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    block_bias: Tensor | None = None
    distance_bias: Tensor | None = None
    sink: Tensor | None = None


class GradientRows(NamedTuple):
    """Values per query row from which pairs compute gradients, with the tangents of the values."""

    grad_out: Tensor  # [B, Hq, Nq, Dv]
    lse: Tensor  # [B, Hq, Nq]
    delta: Tensor  # [B, Hq, Nq] rowsum(dO * O) - dlse
    grad_out_t: Tensor | None  # None if it stays
    lse_t: Tensor
    delta_t: Tensor


class GradientTangents(NamedTuple):
    """Tangents of a problem's gradients, and of its out and lse, in the dtype of sums."""

    gradients: Gradients
    out: Tensor
    lse: Tensor


def sink_share(sink: Tensor, lse: Tensor) -> Tensor:
    """Returns the softmax weight of a sink [B, Hq, Nq or 1] in each row of lse: [B, Hq, Nq]."""
    share = (sink.to(lse.dtype) - lse).exp()
    return torch.where(lse == -torch.inf, 0.0, share)  # rows without keys and with a sink of -inf


def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Returns the gradient of a sink [B, Hq, Nq or 1].

    Takes lse [B, Hq, Nq] and delta = rowsum(dO * O) - dlse [B, Hq, Nq].
    """
    # dS = P * (dP - delta), and dP is 0 because the sink's value is 0
    return as_sink(-(sink_share(sink, lse) * delta), sink)


def as_sink(rows: Tensor, sink: Tensor) -> Tensor:
    """Sums values per row [B, Hq, Nq] to the shape of a sink, [B, Hq, Nq or 1]."""
    return (rows if sink.shape[2] == rows.shape[2] else rows.sum(2, keepdim=True)).to(sink.dtype)


def results_of_sums(
    sums: tuple[Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    sink_t: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns the tangents of (out, lse) from sums over all keys of a row, and that of a sink.

    The sums are `sum P z' v + sum P v'` [B, Hq, Nq, Dv] and `sum P z'` [B, Hq, Nq].
    """
    moved, lse_t = sums
    if sink is not None and sink_t is not None:
        lse_t = lse_t + sink_share(sink, lse) * sink_t.to(lse_t.dtype)
    return moved - lse_t[..., None] * out.to(moved.dtype), lse_t


def delta_tangent(
    out: Tensor,
    out_t: Tensor,
    grad_out: Tensor,
    grad_out_t: Tensor | None,
    grad_lse_t: Tensor | None,
) -> Tensor:
    """Returns the tangent of rowsum(dO * O) - dlse, [B, Hq, Nq], in the dtype of `out_t`."""
    dtype = out_t.dtype
    delta_t = (grad_out.to(dtype) * out_t).sum(-1)
    if grad_out_t is not None:
        delta_t += (grad_out_t.to(dtype) * out.to(dtype)).sum(-1)
    if grad_lse_t is not None:
        delta_t -= grad_lse_t.to(dtype)
    return delta_t


def gradient_rows(
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    moved: tuple[Tensor, Tensor],
    gradient_tangents: tuple[Tensor | None, Tensor | None],
) -> GradientRows:
    """Returns the values per row that the tangents of a call's gradients need.

    Args:
        results: out, lse, and the gradients of both.
        moved: the tangents of out and lse, in the dtype of sums.
        gradient_tangents: those of the gradients of out and lse.
    """
    out, lse, grad_out, grad_lse = results
    (out_t, lse_t), (grad_out_t, grad_lse_t) = moved, gradient_tangents
    dtype = out_t.dtype
    return GradientRows(
        grad_out=grad_out,
        lse=lse,
        delta=(grad_out.to(dtype) * out.to(dtype)).sum(-1) - grad_lse.to(dtype),
        grad_out_t=grad_out_t,
        lse_t=lse_t,
        delta_t=delta_tangent(out, out_t, grad_out, grad_out_t, grad_lse_t),
    )


def sink_gradient_tangent(sink: Tensor, sink_t: Tensor | None, rows: GradientRows) -> Tensor:
    """Returns the tangent of `sink_gradient`, for a sink [B, Hq, Nq or 1]."""
    share = sink_share(sink, rows.lse)
    share_t = -share * rows.lse_t
    if sink_t is not None:
        share_t = share_t + share * sink_t.to(share.dtype)
    return as_sink(-(share_t * rows.delta + share * rows.delta_t), sink)


def dense_rows(x: Tensor) -> Tensor:
    """Returns a tensor that is contiguous in its last dim; copies only if needed."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _is_zero(scale: float) -> bool:
    return abs(scale) < _LEAST_SCALE


def constant_in_graphs(function: F) -> F:
    """Marks a function so that torch.compile treats its results as constants.

    It avoids the slow import of torch._dynamo. A result must be immutable, because graphs share it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
