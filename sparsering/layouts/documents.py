"""Cuts a sequence, or documents in which positions restart, into tiles.

Tiles are cut in positions, as a pattern counts them. `placed` then converts these to indices in
the tensors, which differ from positions if positions restart in each document.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..patterns.algebra import And, Frame, Mask, Or, Restarts
from ..patterns.varlen_mask import Varlen
from .tiles import Axis, Grid, Origin, Ranges


@dataclass(frozen=True)
class WholeSequence:
    """One sequence, of which the positions in `query_ranges` and `key_ranges` are compiled."""

    kv_len: int
    query_ranges: Ranges
    key_ranges: Ranges
    in_document = False

    def fitting(self, grid: Grid, block_size: int) -> Grid:
        return grid

    def queries(self, grid: Grid, block_size: int, offset: int) -> Axis:
        return grid.axis(self.query_ranges, block_size, offset)

    def keys(self, grid: Grid, block_size: int, offset: int) -> Axis:
        return grid.axis(self.key_ranges, block_size, offset)

    def origin(self, tiles: Axis) -> Origin:
        """Returns the `Origin` of each tile: masks count positions from 0."""
        return Origin.of_sequence(len(tiles), self.kv_len)

    def placed(
        self, queries: list[Axis], keys: list[Axis]
    ) -> tuple[list[Axis], list[Axis], dict[str, Tensor]]:
        """Returns the tiles unchanged and no `Pass` fields, since positions do not restart."""
        return queries, keys, {}


@dataclass(frozen=True, eq=False)
class RestartedDocuments:
    """Documents end to end, in each of which positions restart at 0, as in `Varlen`."""

    q_lengths: Tensor
    kv_lengths: Tensor
    in_document = True

    @classmethod
    def of(cls, restarts: Restarts) -> "RestartedDocuments":
        q_lengths, kv_lengths = (torch.tensor(x, dtype=torch.int64) for x in restarts)
        return cls(q_lengths, kv_lengths)

    def fitting(self, grid: Grid, block_size: int) -> Grid:
        """Returns `grid`, or one of step 1 if `grid` cuts each document into further documents."""
        return grid if grid.documents is None else Grid(1, block_size)

    def queries(self, grid: Grid, block_size: int, offset: int) -> Axis:
        first = self.kv_lengths - self.q_lengths
        return grid.axis_of_documents(first, self.kv_lengths, block_size, offset)

    def keys(self, grid: Grid, block_size: int, offset: int) -> Axis:
        first = torch.zeros_like(self.kv_lengths)
        return grid.axis_of_documents(first, self.kv_lengths, block_size, offset)

    def document_of(self, tiles: Axis) -> Tensor:
        return tiles.residue % max(1, len(self.q_lengths))

    def origin(self, tiles: Axis) -> Origin:
        document = self.document_of(tiles)
        return Origin(tiles.start * 0, self.kv_lengths[document], self.q_lengths[document])

    def placed(
        self, queries: list[Axis], keys: list[Axis]
    ) -> tuple[list[Axis], list[Axis], dict[str, Tensor]]:
        of_query, of_key = self.document_of(queries[0]), self.document_of(keys[0])
        origins = {
            "query_origin": torch.stack([tiles.start for tiles in queries]),
            "key_origin": torch.stack([tiles.start for tiles in keys]),
            "stream": of_query.expand(len(queries), -1).contiguous(),
        }
        key_begin = self.kv_lengths.cumsum(0) - self.kv_lengths
        query_begin = self.q_lengths.cumsum(0) - self.kv_lengths  # index that position 0 would have
        shifted = [_shifted(tiles, query_begin[of_query]) for tiles in queries]
        return shifted, [_shifted(tiles, key_begin[of_key]) for tiles in keys], origins


Ground = WholeSequence | RestartedDocuments


def ground_of(
    restarts: Restarts | None, frame: Frame, queries: Ranges | None, keys: Ranges | None
) -> Ground:
    """Returns documents if positions restart, else one sequence with ranges (default: all)."""
    if restarts is not None:
        return RestartedDocuments.of(restarts)
    if queries is None:
        queries = [(frame.q_start, frame.q_start + frame.q_len)]
    if keys is None:
        keys = [(0, frame.kv_len)]
    return WholeSequence(frame.kv_len, queries, keys)


def laid_in_documents(mask: Mask) -> Mask:
    """Replaces each `Varlen` in a mask by the mask that it applies inside every document."""
    match mask:
        case Varlen(_, _, inner):
            return inner
        case And(masks) | Or(masks):
            return type(mask)(tuple(map(laid_in_documents, masks)))
    raise AssertionError(f"positions do not restart in {mask}")


def _shifted(tiles: Axis, by: Tensor) -> Axis:
    return replace(tiles, start=tiles.start + by, stop=tiles.stop + by, last=tiles.last + by)
