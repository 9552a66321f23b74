"""`Rearranged`: a pattern whose tokens stand in another order."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ground.arguments import not_a_pattern, shortened
from ..ground.keywords import class_with_hints
from .algebra import Frame, Mask, Mixture, Pattern, parts_of
from .selected import SelectedBlocks
from .varlen_mask import Varlen


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class Rearranged(Mask):
    """A pattern over tokens in another order: the token at place i stood at place `order[i]`.

    Tokens that attend to one another come to lie side by side, as those of a ball tree, of a
    space-filling curve or of a sphere; their tiles then hold more pairs, and fewer tiles are
    visited. Arrange query, key and value alike: `x[:, :, order]`. Distances, and the weights that
    dropout removes, count the new places.

    Args:
        mask: the mask or mixture in the old order.
        order: int64 [N], a permutation, copied; a call has N keys.

    Returns: a mask, or a mixture if `mask` is one.

    Raises: TypeError for what is no pattern; ValueError for what is no permutation, for a
        `SelectedBlocks` (arrange its indices instead), or when used with another number of keys.

    Cost: a layout takes time and memory in proportion to the pairs of `mask`, once; calls cost the
        visited tiles.

    Example: `Rearranged(Neighbourhood((64, 128), 3), curve)` of `curve = codes.argsort()`.

    Source: ball trees, as Erwin has them (arXiv 2502.17019); Point Transformer V3 (2312.10035).
    """

    mask: Mask
    order: Tensor
    moves_tokens = True

    def __new__(cls, mask: Pattern, order: Tensor) -> Any:  # `Rearranged` or a `Mixture`
        if isinstance(mask, Mixture):
            return Mixture(tuple(cls(branch, order) for branch in mask.masks))
        return super().__new__(cls)

    def _validate(self) -> None:
        mask: Any = self.mask
        order: Any = self.order
        if not isinstance(mask, Mask):
            raise TypeError(f"Rearranged needs a pattern, {not_a_pattern(mask)}")
        if any(isinstance(part, SelectedBlocks | Varlen) for part in parts_of(mask)):
            raise ValueError(
                f"Rearranged takes no SelectedBlocks, got {shortened(str(mask))}; give the indices "
                "of the new order, such as those of SelectedBlocks.from_edges"
            )
        if not isinstance(order, Tensor) or order.dtype != torch.int64 or order.dim() != 1:
            kind = type(order).__name__
            if isinstance(order, Tensor):
                kind = f"{order.dtype} {tuple(order.shape)}"
            raise ValueError(
                f"Rearranged needs an order of the tokens, int64 [N], got {kind}; for example "
                "GridTiles(...).order or codes.argsort()"
            )
        own = order.detach().cpu().clone()
        if not torch.equal(own.sort().values, torch.arange(len(own))):
            raise ValueError(
                f"Rearranged needs a permutation, each of 0 to {len(own) - 1} once, got "
                f"{shortened(str(own.tolist()))}; argsort() makes one"
            )
        object.__setattr__(self, "order", own)

    def _components(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def _frames(self, frame: Frame) -> Iterable[Frame]:
        return (self.old_frame(frame),)

    def old_frame(self, frame: Frame) -> Frame:
        """Returns the frame of `mask`: all tokens are queries."""
        length = len(self.order)
        return frame._replace(q_len=length, kv_len=length, q_start=0)

    @property
    def own_length(self) -> int:
        return len(self.order)

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        own = self.mask.at(batch, head, self.old_frame(frame))
        return self if own is self.mask else Rearranged(own, self.order)

    def check(self, frame: Frame) -> None:
        if frame.kv_len != len(self.order):
            raise ValueError(
                f"Rearranged with an order of {len(self.order)} tokens got {frame.kv_len} keys; "
                "pass the order of all keys"
            )
        super().check(frame)

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        most = len(self.order) - 1
        if most < 0:
            return (p < k) & (p > k)
        order = self.order.to(p.device)
        inside = (p >= 0) & (p <= most) & (k >= 0) & (k <= most)
        query, key = (order[x.clamp(0, most)] for x in (p, k))
        return inside & self.mask.holds(query, key, self.old_frame(frame))
