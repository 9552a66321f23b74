"""One call of a backend: what it is given, what it gives back, what kernels ask of the tensors."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..layouts.layout import BlockLayout

_LEAST_SCALE = torch.finfo(torch.float32).smallest_normal


class Problem(NamedTuple):
    """Attention of some tensors over a layout.

    A backend computes `forward(problem) -> (out, lse)`, out [B, Hq, Nq, Dv] in `result_dtype` and
    lse [B, Hq, Nq] in float32 (float64 for float64), and `backward(problem, out, lse, grad_out,
    grad_lse) -> Gradients`. With the merged lse and `delta = rowsum(dO * O) - dlse` every visited
    pair of every pass has `P = exp(s - lse)` and `dS = P * (dP - delta)`: the results of single
    passes are not needed. Extras act in this order: `s = scale * q.k`, softcap, distance_bias and
    block_bias, which pairs there are, softmax, sink, dropout: dropped weights count in lse, and
    `dP` is 0 where P was dropped, else divided by 1 - p. Distances and dropout go by the positions
    that passes tell (`Pass.coordinates`), never by where a token lies.

    Attributes:
        layout: passes of tiles.
        query: [B, Hq, Nq, D].
        key: [B, Hkv, Nk, D].
        value: [B, Hkv, Nk, Dv].
        scale: of the scores.
        block_bias: [B, Hq, num_blocks], added to every score of an entry, or None.
        softcap: scores become `softcap * tanh(s / softcap)`; None for none.
        distance_bias: [B, Hq, 2R + 1], entry `R + clamp(k - p, -R, R)` is added to the score of
            query position p and key position k; None for none. Strides may be 0.
        sink: [B, Hq, Nq or 1] logit of one more key of each row, whose value is 0; None for none.
        dropout_p: share of the weights that is dropped; None for none.
        dropout_seed: [B, streams] int64, of `dropout.kept_pairs`, beside it: streams is 1, or what
            `Pass.stream` numbers.
        key_mask: [B or 1, Nk] bool, False for keys that no query sees, whatever the layout says,
            and whose numbers nothing may depend on; None for none.
        slots: of each pass, where in the bitmaps of its query tiles the first query is: a page of
            queries is laid out once, and called for a few at a time; () for 0. Kernels that do not
            take them are given `in_first_slots()`.
        learns_distances: whether the gradient of the distance bias is wanted.
        in_float32: give half precision's results and gradients in float32, as they were summed.
    """

    layout: BlockLayout
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    block_bias: Tensor | None = None
    softcap: float | None = None
    distance_bias: Tensor | None = None
    sink: Tensor | None = None
    dropout_p: float | None = None
    dropout_seed: Tensor | None = None
    key_mask: Tensor | None = None
    slots: tuple[int, ...] = ()
    learns_distances: bool = True
    in_float32: bool = False

    @property
    def group(self) -> int:
        """Query heads to a key/value head."""
        return self.query.shape[1] // max(1, self.key.shape[1])

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of out and of the gradients of query, key and value."""
        half = self.query.itemsize < 4
        return torch.float32 if self.in_float32 and half else self.query.dtype

    def with_dense_rows(self) -> "Problem":
        """The same numbers with neighbours of the head dim side by side, as kernels load them."""
        query, key, value = (dense_rows(x) for x in (self.query, self.key, self.value))
        return self._replace(query=query, key=key, value=value)

    def with_positive_scale(self) -> "Problem":
        """The same scores by a scale above 0, so that they only ever grow with the products.

        What float32 takes for 0 is 0.
        """
        if _is_zero(self.scale):
            return self._replace(query=torch.zeros_like(self.query), scale=1.0)
        if self.scale > 0:
            return self
        return self._replace(query=-self.query, scale=-self.scale)

    def in_first_slots(self) -> "Problem":
        """The same with bitmaps moved to where the queries are, as every kernel reads them."""
        if not any(self.slots):
            return self._replace(slots=())
        pairs = zip(self.layout.passes, self.slots, strict=True)
        passes = tuple(p.from_slot(slot, self.layout.block_size) for p, slot in pairs)
        return self._replace(layout=replace(self.layout, passes=passes), slots=())

    def query_gradient(self, grad: Tensor) -> Tensor:
        """The gradient of the query itself from that of `with_positive_scale()`'s."""
        if _is_zero(self.scale):
            return torch.zeros_like(grad)
        return grad if self.scale > 0 else -grad


class Gradients(NamedTuple):
    """Gradients of a problem's tensors; None where there is none."""

    query: Tensor
    key: Tensor
    value: Tensor
    block_bias: Tensor | None = None
    distance_bias: Tensor | None = None
    sink: Tensor | None = None


def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of a sink [B, Hq, Nq or 1], from lse and delta [B, Hq, Nq].

    The sink is a key of value 0: its dP is 0.
    """
    share = (sink.to(lse.dtype) - lse).exp()
    share = torch.where(lse == -torch.inf, 0.0, share)  # no key, and a sink that is none
    rows = -(share * delta)
    return (rows if sink.shape[2] == rows.shape[2] else rows.sum(2, keepdim=True)).to(sink.dtype)


def dense_rows(x: Tensor) -> Tensor:
    """The same numbers with neighbours of the last dim side by side; a copy only where needed."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _is_zero(scale: float) -> bool:
    return abs(scale) < _LEAST_SCALE
