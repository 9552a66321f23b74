"""One call of a backend: what it is given, what it gives back, what kernels ask of the tensors."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..layouts.layout import BlockLayout


class Problem(NamedTuple):
    """Attention of some tensors over a layout.

    A backend computes `forward(problem) -> (out, lse)`, out [B, Hq, Nq, Dv] in `result_dtype` and
    lse [B, Hq, Nq] in float32 (float64 for float64), and `backward(problem, out, lse, grad_out,
    grad_lse) -> Gradients`. With the merged lse and `delta = rowsum(dO * O) - dlse` every visited
    pair of every pass has `P = exp(s - lse)` and `dS = P * (dP - delta)`: the results of single
    passes are not needed.

    Attributes:
        layout: passes of tiles.
        query: [B, Hq, Nq, D].
        key: [B, Hkv, Nk, D].
        value: [B, Hkv, Nk, Dv].
        scale: of the scores.
        block_bias: [B, Hq, num_blocks], added to every score of an entry, or None.
        in_float32: give half precision's results and gradients in float32, as they were summed.
    """

    layout: BlockLayout
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    block_bias: Tensor | None = None
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

    def query_gradient(self, grad: Tensor) -> Tensor:
        """The gradient of the query itself from that of `with_positive_scale()`'s."""
        if _is_zero(self.scale):
            return torch.zeros_like(grad)
        return grad if self.scale > 0 else -grad


class Gradients(NamedTuple):
    """Gradients of a problem's tensors; `block_bias` None where there is none."""

    query: Tensor
    key: Tensor
    value: Tensor
    block_bias: Tensor | None = None


def dense_rows(x: Tensor) -> Tensor:
    """The same numbers with neighbours of the last dim side by side; a copy only where needed."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _is_zero(scale: float) -> bool:
    return abs(scale) < torch.finfo(torch.float32).smallest_normal
