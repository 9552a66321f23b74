"""Lowers masks to conditions, which decide on whole tiles."""

import torch
from torch import Tensor

from ..patterns.algebra import And, Frame, Mask, Not, Or
from ..patterns.blocks import BlockwiseMask
from ..patterns.keys import KeyMask
from ..patterns.positions import (
    Causal,
    Dilated,
    Documents,
    Full,
    GlobalTokens,
    Packed,
    PooledCausal,
    SlidingWindow,
)
from .conditions import (
    AllOf,
    AnyOf,
    Condition,
    Congruent,
    Declared,
    InBlocks,
    InKeys,
    Linear,
    Negated,
    OnGrid,
    PerDocument,
    SameDocument,
    SameSegment,
)


def condition(mask: Mask, frame: Frame, in_document: bool = False) -> Condition:
    """Lowers the mask of one head and batch entry (`Mask.at`) to a condition.

    `in_document`: whether the mask applies inside documents, each a whole sequence to it.
    """
    match mask:
        case Full():
            return Linear(0, 0, 0)
        case Causal():
            return Linear(1, -1, 0)
        case PooledCausal(size, stride):
            return Linear(1, -stride, size - 1)
        case SlidingWindow(left, right, dilation):
            parts: list[Condition] = [Congruent(dilation)] if dilation > 1 else []
            parts += [] if left is None else [Linear(-1, 1, -left)]
            parts += [] if right is None else [Linear(1, -1, -right)]
            return AllOf(tuple(parts)) if parts else Linear(0, 0, 0)
        case GlobalTokens(count, rows, columns):
            parts = [AllOf((Linear(1, 0, 0), Linear(-1, 0, 1 - count)))] if rows else []
            parts += [Linear(0, -1, 1 - count)] if columns else []
            return AnyOf(tuple(parts)) if parts else Linear(0, 0, 1)
        case Dilated(length, rate, _):
            same = SameSegment(length)
            residue = mask.offset_of(0, 1)
            grids = [OnGrid(of_query, length, rate, residue) for of_query in (True, False)]
            return AllOf((same, *grids)) if rate > 1 else same
        case Documents():
            return SameDocument(_starts(mask))
        case Packed(_, inner):
            return PerDocument(SameDocument(_starts(mask.documents)), condition(inner, frame, True))
        case And(masks):
            return AllOf(tuple(condition(part, frame, in_document) for part in masks))
        case Or(masks):
            return AnyOf(tuple(condition(part, frame, in_document) for part in masks))
        case Not(part):
            return Negated(condition(part, frame, in_document))
        case BlockwiseMask():
            return InBlocks(mask)
        case KeyMask(valid):
            return InKeys.of(valid)
    return Declared(mask, frame, in_document)


def _starts(documents: Documents) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int64), documents.ends()))
