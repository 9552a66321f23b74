"""Patterns of groups of heads: what a rank needs that computes some of a call's heads alone."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ..ground.arguments import shortened
from .algebra import Frame, Mask, Pattern, _Combination
from .blocks import TensorMask
from .custom import masks_of, with_masks
from .mask_mod import MaskMod
from .per_head import PerHead
from .positions import Dilated


@dataclass(frozen=True)
class HeadShard:
    """One of several equal groups of adjacent query heads, with the kv heads that they read.

    Attributes:
        num_heads, num_kv_heads: numbers of heads of the whole call.
        group, groups: index of this group, and the number of groups, which divides `num_heads`.
    """

    num_heads: int
    num_kv_heads: int
    group: int
    groups: int

    @property
    def repeats(self) -> int:
        """How often each kv head is repeated, so that the groups have equally many."""
        return math.lcm(self.num_kv_heads, self.groups) // max(1, self.num_kv_heads)

    @property
    def heads(self) -> slice:
        """The query heads of the group."""
        count = self.num_heads // self.groups
        return slice(self.group * count, (self.group + 1) * count)

    @property
    def kv_heads(self) -> list[int]:
        """The kv head of the whole call that each kv head of the group is."""
        count = self.num_kv_heads * self.repeats // self.groups
        first = self.group * count
        return [head // self.repeats for head in range(first, first + count)]

    def of(self, pattern: Pattern, length: int) -> Any:
        """Returns the pattern that the group's heads have in a call of their own.

        `pattern` is that of the whole call, on `length` tokens.

        Raises: ValueError if query heads that share a kv head have unlike masks, or masks differ by
            head and batch entry at once.
        """
        frame = Frame.build(length, length, self.num_heads, self.num_kv_heads, 0)
        return pattern if self.groups == 1 else self._of(pattern, frame)

    def _of(self, pattern: Any, frame: Frame) -> Any:
        match pattern:
            case _Combination(masks):
                return type(pattern)(tuple(self._of(mask, frame) for mask in masks))
            case PerHead(patterns):
                return PerHead(tuple(self._of(patterns[head], frame) for head in self.kv_heads))
            case TensorMask():
                return self._of_tables(pattern, frame)
        if parts := masks_of(pattern):
            return with_masks(pattern, {name: self._of(x, frame) for name, x in parts.items()})
        by_kv_head = isinstance(pattern, Dilated) and isinstance(pattern.offset, tuple)
        if pattern.num_tables(frame) == 1 and not by_kv_head:
            return pattern
        return self._by_head(pattern, frame)

    def _of_tables(self, mask: TensorMask, frame: Frame) -> TensorMask:
        """Cuts the tables of a mask that has one for each head."""
        tables = mask.num_tables(frame)
        if tables == 1:
            return mask
        own = self.kv_heads
        if tables == self.num_heads:
            own = list(range(self.num_heads))[self.heads]
        name = fields(mask)[0].name  # type: ignore[arg-type]
        place = torch.tensor(own, dtype=torch.int64, device=mask.table.device)
        return replace(mask, **{name: mask.table.index_select(-3, place)})  # type: ignore[type-var]

    def _by_head(self, mask: Mask, frame: Frame) -> Mask:
        """Writes a mask that differs by head as a mask for each kv head."""
        heads = range(self.num_heads)[self.heads]
        each = [_of_head(mask, head, frame) for head in heads]
        size = len(each) // max(1, len(self.kv_heads))
        alike = all(own == each[i // size * size] for i, own in enumerate(each))
        if (mask.num_batches() is not None and not isinstance(mask, MaskMod)) or not alike:
            why = "batch entry" if alike else "query head of a kv head"
            raise ValueError(
                f"a group of heads needs masks that are alike for each {why}, got "
                f"{shortened(str(mask))}; share the sequence over one axis, of tokens, instead"
            )
        return each[0] if len(set(each)) == 1 else PerHead(tuple(each[::size]))


def _of_head(mask: Mask, head: int, frame: Frame) -> Mask:
    """Returns the mask of a query head in each batch entry."""
    if isinstance(mask, MaskMod):  # whose `at` would also choose a batch entry
        return replace(mask, by_head=False, head=mask.at(0, head, frame).head)  # type: ignore[attr-defined]
    return mask.at(0, head, frame)
