"""Tables that an exported call carries, so that it can become operators of torch alone.

An operator finds its layout in Python. A program without Python needs it as tensors, and torch lets
a decomposition make none. So `torch.export` records the tables as further `tensors` of the
operator, which ignores them, and `sparsering.export.decompositions` reads them.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import Call
from ..ground.once import unseen
from ..layouts.gathered_tiles import GatheredTiles, gathered_tiles
from ..patterns.algebra import Pattern
from ..patterns.keys import KeyMask, KeyMasks, without_key_masks


class ExportedTables(NamedTuple):
    """The pattern of a call in a program: its tiles as tables, and masks of keys as data."""

    tiles: GatheredTiles
    # `valid` of a KeyMask, bool [Nk] or [B, Nk], or `lengths` of a KeyPadding, int64 [B]
    masks: tuple[Tensor, ...]

    def operands(self) -> tuple[Tensor, ...]:
        """Returns all tables, behind a tensor without numbers whose shape counts them."""
        with unseen():
            counts = torch.zeros(0, len(self.tiles.units), len(self.masks))
        return counts, *self.tiles.operands(), *self.masks

    @classmethod
    def from_operands(cls, tensors: Sequence[Tensor], pattern: str) -> "ExportedTables | None":
        """Finds the tables among an operator's `tensors`; None if it has none."""
        own = len(set(re.findall(r"\bt\d+\b", pattern)))  # those that the pattern's text names
        if len(tables := tensors[max(1, own) :]) == 0:
            return None
        _, _, masks = tables[0].shape
        end = len(tables) - masks
        return cls(GatheredTiles.from_operands(tables[1:end]), tuple(tables[end:]))


def tables_of(call: Call) -> tuple[Tensor, ...]:
    """Returns the tables of a call that `torch.export` traces, () outside of it.

    () also for calls that can have none: of a length that the program takes when it runs, and over
    a pattern whose tensors the program computes, other than masks of keys.
    """
    if not torch.compiler.is_exporting() or torch.compiler.is_dynamo_compiling():
        return ()
    if not all(type(x) is int for x in call.frame) or not _is_known(call):
        return ()
    return exported_tables(call).operands()


def _is_known(call: Call) -> bool:
    """Whether a call's pairs are known before it runs, but for masks of keys."""
    pattern, _ = _taken_apart(call)
    return all(type(x) is Tensor for x in pattern.tensors)


def _taken_apart(call: Call) -> tuple[Pattern, KeyMasks]:
    """Returns the pattern that tiles serve, and masks of keys that are data.

    Block biases are for the tiles of the whole pattern.
    """
    pattern, masks = without_key_masks(call.pattern)
    return (call.pattern if "block_bias" in call.options.in_use else pattern), masks


def exported_tables(call: Call) -> ExportedTables:
    """Builds the tables of a call, or finds those of another call with the same pattern."""
    pattern, masks = _taken_apart(call)
    tiles = gathered_tiles(
        pattern,
        call.frame,
        call.block_size,
        call.query.shape[3],
        has_distances="distance_bias" in call.options.in_use,
        has_blocks="block_bias" in call.options.in_use,
    )
    with unseen(*(mask.tensors for mask in masks)):
        numbers = [x.valid if isinstance(x, KeyMask) else x.lengths for x in masks]
        own = tuple(x if isinstance(x, Tensor) else torch.tensor(x) for x in numbers)
    return ExportedTables(tiles, own)
