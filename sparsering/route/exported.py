"""Tables that an exported call carries, so that it can become operators of torch alone.

An operator finds its layout in Python. A program without Python needs it as tensors, and torch lets
a decomposition make none. So `torch.export` records the tables as further `tensors` of the
operator, which ignores them, and `sparsering.export.decompositions` reads them.
"""

import re
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import Call
from ..ground.once import unseen
from ..layouts.gathered_tiles import GatheredTiles, gathered_tiles
from ..patterns.algebra import And, Mask, Pattern
from ..patterns.keys import KeyMask, without_key_masks
from ..patterns.positions import intersection


class ExportedTables(NamedTuple):
    """The pattern of a call in a program: its tiles as tables, and masks that are data."""

    tiles: GatheredTiles
    # `valid` of a KeyMask, bool [Nk] or [B, Nk]; `lengths` of a KeyPadding, int64 [B]; ids of runs,
    # int64 [B or 1, Nk]
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

    def key_mask(self, kv_len: int) -> Tensor | None:
        """Returns bool [B or 1, Nk], False for keys that no query sees; None if there are none."""
        found = None
        for x in self.masks:
            if x.dtype == torch.bool:
                own = x if x.dim() == 2 else x[None]
            elif x.dim() == 1:
                own = torch.arange(kv_len, device=x.device) < x[:, None]
            else:
                continue
            found = own if found is None else found & own
        return found

    def runs(self) -> Tensor | None:
        """Numbers the runs of tokens whose pairs attend, [B or 1, Nk]; None for one run."""
        ids = [x for x in self.masks if x.dtype != torch.bool and x.dim() == 2]
        if not ids:
            return None
        begins = reduce(torch.logical_or, (x[:, 1:] != x[:, :-1] for x in ids))
        return torch.nn.functional.pad(begins.long(), (1, 0)).cumsum(1)


def tables_of(call: Call) -> tuple[Tensor, ...]:
    """Returns the tables of a call that `torch.export` traces, () outside of it.

    () also for calls that can have none: of a length that the program takes when it runs, and over
    a pattern whose tensors the program computes, other than masks of keys and ids of documents.
    """
    if not torch.compiler.is_exporting() or torch.compiler.is_dynamo_compiling():
        return ()
    if not all(type(x) is int for x in call.frame):
        return ()
    pattern, _ = _taken_apart(call)
    if not all(type(x) is Tensor for x in pattern.tensors):
        return ()
    return exported_tables(call).operands()


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
    with unseen(*masks):
        own = tuple(x if isinstance(x, Tensor) else torch.tensor(x) for x in masks)
    return ExportedTables(tiles, own)


def _taken_apart(call: Call) -> tuple[Pattern, list[Tensor | tuple[int, ...]]]:
    """Splits a pattern into the one that tiles serve, and what masks are data.

    Block biases are for the tiles of the whole pattern.
    """
    pattern, masks = without_key_masks(call.pattern)
    found = [x.valid if isinstance(x, KeyMask) else x.lengths for x in masks]
    if "block_bias" in call.options.in_use:
        return call.pattern, found
    outside = not 0 <= call.q_start <= call.frame.kv_len - call.frame.q_len
    if outside or not isinstance(pattern, Mask):  # ids are those of keys at the queries' positions
        return pattern, found
    parts = pattern.masks if isinstance(pattern, And) else (pattern,)
    ids = [x.run_ids for x in parts]
    others = [x for x, own in zip(parts, ids, strict=True) if own is None]
    return intersection(others), found + [x for x in ids if x is not None]
