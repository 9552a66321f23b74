"""Cuts a sequence, or documents in which positions restart, into tiles (a `Ground`).

Tiles are cut by positions; `placed` converts these to indices in the tensors.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..patterns.algebra import And, Frame, Mask, Or, Pattern
from ..patterns.tree import Tree, common_tree
from ..patterns.varlen_mask import Varlen
from .tiles import Axis, Grid, Origin, Ranges


@dataclass(frozen=True)
class WholeSequence:
    """One sequence; only the positions in `query_ranges` and `key_ranges` are compiled."""

    frame: Frame
    block_size: int
    query_ranges: Ranges
    key_ranges: Ranges
    tree: Tree | None = None  # the pattern's only tree, whose depths give distances
    in_document = False

    @property
    def is_square(self) -> bool:
        """Whether the same positions are queries and keys."""
        return self.query_ranges == self.key_ranges

    def fitting(self, grid: Grid) -> Grid:
        return grid

    def queries(self, grid: Grid, tokens: int, offset: int) -> Axis:
        return grid.axis(self.query_ranges, tokens, offset)

    def keys(self, grid: Grid, offset: int) -> Axis:
        return grid.axis(self.key_ranges, self.block_size, offset)

    def origin(self, tiles: Axis) -> Origin:
        """Returns where masks count positions from in each tile: in a sequence, from 0."""
        return Origin.of_sequence(len(tiles), self.frame.kv_len)

    def placed(
        self, queries: list[Axis], keys: list[Axis]
    ) -> tuple[list[Axis], list[Axis], dict[str, Tensor]]:
        """Returns the tiles as they are, and, for a tree, `Pass` fields with the tiles' depths."""
        if self.tree is None:
            return queries, keys, {}
        depths = [_depths(self.tree, axes, self.block_size) for axes in (queries, keys)]
        return queries, keys, dict(zip(("query_depth", "key_depth"), depths, strict=True))


@dataclass(frozen=True, eq=False)
class RestartedDocuments:
    """Documents end to end, in each of which positions restart at 0, as `Varlen` defines them."""

    frame: Frame
    block_size: int
    q_lengths: Tensor
    kv_lengths: Tensor
    in_document = True
    is_square = False

    def fitting(self, grid: Grid) -> Grid:
        """Returns `grid`, or one of step 1 if `grid` cuts each document into further documents."""
        return grid if grid.documents is None else Grid(1, self.block_size)

    def queries(self, grid: Grid, tokens: int, offset: int) -> Axis:
        first = self.kv_lengths - self.q_lengths
        return grid.axis_of_documents(first, self.kv_lengths, tokens, offset)

    def keys(self, grid: Grid, offset: int) -> Axis:
        first = torch.zeros_like(self.kv_lengths)
        return grid.axis_of_documents(first, self.kv_lengths, self.block_size, offset)

    def document_of(self, tiles: Axis) -> Tensor:
        """Returns the document number of each tile; `axis_of_documents` put it into `residue`."""
        return tiles.residue % max(1, len(self.q_lengths))

    def origin(self, tiles: Axis) -> Origin:
        document = self.document_of(tiles)
        return Origin(tiles.start * 0, self.kv_lengths[document], self.q_lengths[document])

    def placed(
        self, queries: list[Axis], keys: list[Axis]
    ) -> tuple[list[Axis], list[Axis], dict[str, Tensor]]:
        """Converts tiles from positions to indices in the tensors.

        Adds `Pass` fields for positions.
        """
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
    pattern: Pattern, frame: Frame, size: int, queries: Ranges | None, keys: Ranges | None
) -> Ground:
    """Returns how tokens are laid out: documents, if positions restart in each, or one sequence."""
    if pattern.restarts is not None and queries is None and keys is None:
        lengths = (torch.tensor(x, dtype=torch.int64) for x in pattern.restarts)
        return RestartedDocuments(frame, size, *lengths)
    if queries is None:
        queries = [(frame.q_start, frame.q_start + frame.q_len)]
    if keys is None:
        keys = [(0, frame.kv_len)]
    return WholeSequence(
        frame=frame,
        block_size=size,
        query_ranges=queries,
        key_ranges=keys,
        tree=common_tree(pattern),
    )


def _depths(tree: Tree, axes: list[Axis], block_size: int) -> Tensor:
    """Returns the tree depths of tokens in query tiles or in key tiles, as `Pass.query_depth`.

    The last dim is 1 if each tile lies in one node, else it has each token of a tile.
    """
    first = torch.stack([tiles.start for tiles in axes])  # [S, tiles]
    last = torch.stack([tiles.last for tiles in axes])
    ends = tree.depths_of(torch.stack((first, torch.maximum(first, last))))  # [B or 1, 2, S, tiles]
    nodes = torch.stack([x.of_token(torch.stack((first, last))) for x in tree.nodes_of_entries])
    inside = (nodes[:, 0] == nodes[:, 1]) | (last <= first)
    if bool(inside.all()):
        return ends[:, 0, :, :, None]
    slots = torch.stack([tiles.positions(block_size) for tiles in axes])  # [S, tiles, block_size]
    return tree.depths_of(torch.minimum(slots, torch.maximum(first, last)[..., None]))


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
