"""Key blocks chosen by content: a list of them for each row of queries."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..rows import expand_counts
from .algebra import And, Frame, Mask, Mixture, Or, Pattern
from .arguments import freeze_integer
from .blocks import BlockwiseMask, TensorMask


@dataclass(frozen=True, repr=False, eq=False)
class SelectedBlocks(TensorMask, BlockwiseMask):
    """Key blocks listed in `indices[..., r, :]`, r the row of the query: what a selection returns.

    A row is `query_block` consecutive queries; row r holds the positions from
    (first_row + r) * query_block on. Alone or with `Causal` it is laid out on the indices' device
    without a host sync, where the block size is a multiple of the layout's. (Layouts of patterns
    whose tensors are not on the CPU are never cached.)

    Args:
        indices: int64 [R, k], [H, R, k] or [B, H, R, k] with H = 1, Hkv or Hq, and B = 1 for all
            batch entries; copied. Numbers outside the key blocks (-1, say) list nothing; of
            repeated ones the first counts. `selection.select_blocks` makes them.
        block_size: keys to a block.
        query_block: queries to a row, a divisor of block_size; 1 = each chooses for itself, as
            NSA, MoBA and DSA do; default block_size.
        first_row: of all rows of the sequence, which is the first of `indices`: a decoding step
            lists its own row alone.

    Raises: ValueError at use where rows do not cover the queries.

    Source: NSA (arXiv 2502.11089), MoBA (2502.13189), DSA (2512.02556): rows of one token, shared
        by the query heads of a kv head or not.
    """

    indices: Tensor
    block_size: int
    query_block: int | None = None
    first_row: int = 0
    table_dims: ClassVar[tuple[int, ...]] = (2, 3, 4)
    dtype: ClassVar[torch.dtype] = torch.int64

    def _validate(self) -> None:
        super()._validate()
        freeze_integer(self, "block_size", 1)
        if self.query_block is None:
            object.__setattr__(self, "query_block", self.block_size)
        freeze_integer(self, "query_block", 1)
        freeze_integer(self, "first_row", 0)
        if self.block_size % self.row_size:
            raise ValueError(
                f"SelectedBlocks query_block must divide block_size {self.block_size}, got "
                f"{self.row_size}; 1 lets each query choose"
            )

    @property
    def row_size(self) -> int:
        assert self.query_block is not None
        return self.query_block

    def num_batches(self) -> int | None:
        return self.indices.shape[0] if self.indices.dim() == 4 and len(self.indices) != 1 else None

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        listed, _, blocks = self._listed(batch, head, frame)
        rows = self.block_size, self.row_size, self.first_row
        return _ListedBlocks(listed.unique_consecutive(), blocks, *rows)

    def slot_of_pairs(self, p: Tensor, k: Tensor, batch: int, head: int, frame: Frame) -> Tensor:
        """Which slot of [R, k] lists the pair's block for its row, the first that does, or -1."""
        listed, slot, blocks = self._listed(batch, head, frame)
        if not len(listed):
            return p * 0 + k * 0 - 1
        row, block = p // self.row_size - self.first_row, k // self.block_size
        place = torch.searchsorted(listed, row * blocks + block).clamp(max=len(listed) - 1)
        return torch.where((listed[place] == row * blocks + block) & (p >= 0), slot[place], -1)

    def inflation(self, queries: int, kv_len: int) -> Tensor:
        """How many more blocks as many neighbouring queries list together than one of their rows.

        [H] or [1] of the heads of the indices: the blocks in the union of the rows of a tile of
        `queries`, over the mean of its rows; 1 where rows agree, or are tiles. Costs O(R k).
        """
        blocks, rows = -(-kv_len // self.block_size), max(1, queries // self.row_size)
        chosen = self.indices.view((1,) * (4 - self.indices.dim()) + self.indices.shape)
        listed = torch.where((chosen >= 0) & (chosen < blocks), chosen, blocks)
        whole = pad(listed, (0, 0, 0, -listed.shape[2] % rows), value=blocks)
        tiles = whole.unflatten(2, (-1, rows))  # [B, H, tiles, rows, k]
        in_union, in_rows = (_distinct(x, blocks) for x in (tiles.flatten(3), tiles))
        used = (in_rows > 0).sum(-1).clamp(min=1)
        mean_of_rows = in_rows.sum(-1) / used
        return in_union.sum((0, 2)) / mean_of_rows.sum((0, 2)).clamp(min=1e-9)

    def _listed(self, batch: int, head: int, frame: Frame) -> tuple[Tensor, Tensor, int]:
        """What one head of one batch entry lists, ascending by row, block and slot.

        Returns: row * blocks + block and slot of each, and the number of blocks.
        """
        one = self.indices.dim() == 4 and len(self.indices) == 1
        chosen = self._table_of(0 if one else batch, head, frame)
        blocks = -(-frame.kv_len // self.block_size)
        slot = torch.nonzero(((chosen >= 0) & (chosen < blocks)).flatten())[:, 0]
        row = slot // max(1, chosen.shape[1])
        listed, order = (row * blocks + chosen.flatten()[slot]).sort(stable=True)
        return listed, slot[order], blocks

    def check(self, frame: Frame) -> None:
        super().check(frame)
        rows, size = self.indices.shape[-2], self.row_size
        last = -(-max(0, frame.q_start + frame.q_len) // size)
        if self.first_row + rows < last:
            raise ValueError(
                f"SelectedBlocks must cover {last - self.first_row} query blocks of {size} by "
                f"absolute position, got shape {tuple(self.indices.shape)}; for cross attention "
                "pass q_start=0"
            )
        if frame.q_len and last and max(0, frame.q_start) < self.first_row * size:
            raise ValueError(
                f"SelectedBlocks begins with row {self.first_row}, of the queries from "
                f"{self.first_row * size} on, got a first query at {frame.q_start}; pass the rows "
                f"from {max(0, frame.q_start) // size} on, or another first_row"
            )


@dataclass(frozen=True, repr=False, eq=False)
class _ListedBlocks(TensorMask, BlockwiseMask):
    """What one head of one batch entry selects: row * blocks + block of each, [n], ascending."""

    listed: Tensor
    blocks: int
    block_size: int
    query_block: int
    first_row: int
    table_dims: ClassVar[tuple[int, ...]] = (1,)
    dtype: ClassVar[torch.dtype] = torch.int64

    @property
    def row_size(self) -> int:
        return self.query_block

    def blocks_hold(self, q_block: Tensor, k_block: Tensor, kv_len: int | Tensor) -> Tensor:
        place = (q_block - self.first_row) * self.blocks + k_block
        if not len(self.listed):
            return place != place
        found = torch.searchsorted(self.listed, place).clamp(max=len(self.listed) - 1)
        return (self.listed[found] == place) & (k_block < self.blocks)

    def spans(self, q_block: Tensor, kv_len: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        begin = (q_block - self.first_row) * self.blocks
        first, last = (torch.searchsorted(self.listed, x) for x in (begin, begin + self.blocks))
        index, number = expand_counts(last - first)
        block = self.listed[first[index] + number] - begin[index]
        return index, block, block


def _distinct(listed: Tensor, nothing: int) -> Tensor:
    """How many distinct blocks each last dim lists."""
    ordered = listed.sort(-1).values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return (first & (ordered < nothing)).sum(-1)


def selections_of(pattern: Pattern) -> list[SelectedBlocks]:
    """The selections that a pattern is made of."""
    if isinstance(pattern, SelectedBlocks):
        return [pattern]
    parts = pattern.masks if isinstance(pattern, And | Or | Mixture) else ()
    return [found for part in parts for found in selections_of(part)]
