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
from ..layouts.lists import ListedPairs, is_nothing, split
from ..patterns.algebra import And, Mask, Not, Pattern, parts_of
from ..patterns.keys import KeyMask, without_key_masks
from ..patterns.positions import intersection
from ..patterns.selected import SelectedBlocks


class ExportedTables(NamedTuple):
    """The pattern of a call in a program: its tiles as tables, and masks that are data."""

    tiles: GatheredTiles
    # `valid` of a KeyMask, bool [Nk] or [B, Nk]; `lengths` of a KeyPadding, int64 [B]; ids of runs,
    # int64 [B or 1, Nk]
    masks: tuple[Tensor, ...]
    has_lists: bool  # whether tiles leave the pattern's selections to lists

    def operands(self) -> tuple[Tensor, ...]:
        """Returns all tables, behind a tensor without numbers whose shape counts them."""
        with unseen():
            counts = torch.zeros(0, len(self.tiles.units), len(self.masks), int(self.has_lists))
        return counts, *self.tiles.operands(), *self.masks

    @classmethod
    def from_operands(cls, tensors: Sequence[Tensor], pattern: str) -> "ExportedTables | None":
        """Finds the tables among an operator's `tensors`; None if it has none."""
        if len(tables := tensors[own_operands(pattern) :]) == 0:
            return None
        _, _, masks, lists = tables[0].shape
        end = len(tables) - masks
        return cls(GatheredTiles.from_operands(tables[1:end]), tuple(tables[end:]), lists > 0)

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


def own_operands(pattern: str) -> int:
    """Returns how many tensors of an exported operator are those of its pattern's text."""
    return max(1, len(set(re.findall(r"\bt\d+\b", pattern))))


def is_exported() -> bool:
    """Whether `torch.export` traces the call, and not by a compiler, which sees no Python."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def tables_of(call: Call) -> tuple[Tensor, ...]:
    """Returns the tables of a call that `torch.export` traces, () outside of it.

    () also for calls that can have none: of a length that the program takes when it runs, and over
    a pattern whose tensors the program computes, other than masks of keys and ids of documents.
    """
    if not is_exported() or not all(type(x) is int for x in call.frame):
        return ()
    parts = taken_apart(call, has_computed_lists(call.pattern))
    if parts is None or not all(type(x) is Tensor for x in parts.tiles.tensors):
        return ()
    return exported_tables(call).operands()


def exported_tables(call: Call) -> ExportedTables:
    """Builds the tables of a call, or finds those of another call with the same pattern."""
    has_lists = has_computed_lists(call.pattern)
    parts = taken_apart(call, has_lists)
    assert parts is not None
    tiles = gathered_tiles(
        parts.tiles,
        call.frame,
        call.block_size,
        call.query.shape[3],
        has_distances="distance_bias" in call.options.in_use,
        has_blocks="block_bias" in call.options.in_use,
    )
    with unseen(*parts.masks):
        own = tuple(x if isinstance(x, Tensor) else torch.tensor(x) for x in parts.masks)
    return ExportedTables(tiles, own, has_lists)


def has_computed_lists(pattern: Pattern) -> bool:
    """Whether a program computes the lists of a pattern's selections from their indices.

    It does so for lists of single keys, and for indices without numbers at the export. Otherwise
    the selected blocks are tiles.
    """
    selections = [x for x in parts_of(pattern) if type(x) is SelectedBlocks]
    return any(x.block_size < 16 or type(x.indices) is not Tensor for x in selections)


class TakenApart(NamedTuple):
    """A pattern in the parts that a program computes apart."""

    tiles: Pattern  # what tables of tiles are built from
    masks: list[Tensor | tuple[int, ...]]  # as `ExportedTables.masks`
    # for each branch of `tiles`, the selection whose lists the program computes; () without lists
    lists: tuple[ListedPairs | None, ...] = ()


def taken_apart(call: Call, has_lists: bool) -> TakenApart | None:
    """Splits a pattern into its parts in a program; None if a program cannot compute its lists.

    It can if a branch has one selection of its own, outside documents and trees, and the rest of
    the branch is the same for all heads and batch entries. Block biases are for the tiles of the
    whole pattern.
    """
    pattern, masks = without_key_masks(call.pattern)
    found = [x.valid if isinstance(x, KeyMask) else x.lengths for x in masks]
    if "block_bias" in call.options.in_use:
        return TakenApart(call.pattern, found)
    # ids are those of keys at the queries' positions
    inside = 0 <= call.q_start <= call.frame.kv_len - call.frame.q_len
    if inside and isinstance(pattern, Mask):
        parts = pattern.masks if isinstance(pattern, And) else (pattern,)
        ids = [x.run_ids for x in parts]
        pattern = intersection([x for x, own in zip(parts, ids, strict=True) if own is None])
        found += [x for x in ids if x is not None]
    if not has_lists:
        return TakenApart(pattern, found)
    if call.q_start < 0 or not call.frame.q_len:  # queries without a row
        return None
    try:
        tiles, sources = split(pattern, lambda x: bool(selections_in(x)))
    except NotImplementedError:
        return None
    lists: list[ListedPairs | None] = []
    for own, of_branch in zip(tiles.branches, sources, strict=True):
        if not of_branch:
            lists.append(None)
            continue
        source, *others = of_branch
        if not is_nothing(own):
            if "slot_bias" in call.options.in_use:  # a bias of pairs that tiles serve
                return None
            source = source.within(Not(own))
        if others or source.inside or type(source.selection) is not SelectedBlocks:
            return None
        limit = source.limit
        if limit is not None and (limit.num_batches(), limit.num_tables(call.frame)) != (None, 1):
            return None
        lists.append(source)
    return TakenApart(tiles, found, tuple(lists))


def selections_in(pattern: Pattern) -> list[SelectedBlocks]:
    """Returns all selections in a pattern, also inside documents and trees."""
    return [x for x in parts_of(pattern) if isinstance(x, SelectedBlocks)]
