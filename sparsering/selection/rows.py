"""Rows of a selection: runs of queries by absolute position, and which blocks they see."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..patterns.arguments import checked_integer, shortened


class Span(NamedTuple):
    """Queries that are computed together: `blocks` blocks of `width` of them each.

    Attributes:
        first: index of the first query.
        block: number of its key block.
        blocks: consecutive key blocks that the queries lie in; more than 1 where all are whole.
        width: queries in each.
        row: queries in each row of the selection, a divisor of `width`.
        offset: place of the first query in its block.
    """

    first: int
    block: int
    blocks: int
    width: int
    row: int
    offset: int

    @property
    def queries(self) -> int:
        return self.blocks * self.width

    @property
    def rows(self) -> int:
        return self.queries // self.row


def spans(q_start: int, q_len: int, query_block: int, block_size: int) -> list[Span]:
    """Cuts queries where rows and blocks do; only the first and the last row may be short."""
    end = q_start + q_len
    cuts = {end}
    for size in (query_block, block_size):
        cuts |= {-(-q_start // size) * size, end // size * size}
    found, start = [], q_start
    for stop in sorted(cut for cut in cuts if q_start < cut <= end):
        whole = start % block_size == stop % block_size == 0
        width = block_size if whole else stop - start
        row = query_block if start % query_block == stop % query_block == 0 else width
        block, offset = start // block_size, start % block_size  # Dynamo has no divmod of SymInts
        found.append(Span(start - q_start, block, (stop - start) // width, width, row, offset))
        start = stop
    return found


def num_rows(q_start: int, q_len: int, query_block: int) -> int:
    """Rows that queries touch, the first and the last in part."""
    return -(-(q_start + q_len) // query_block) - q_start // query_block if q_len else 0


def checked_blocks(query_block: int, block_size: int) -> tuple[int, int]:
    """Both as ints; ValueError where rows do not lie inside blocks."""
    block_size = checked_integer("block_size", block_size, 1)
    query_block = checked_integer("query_block", query_block, 1)
    if block_size % query_block:
        raise ValueError(
            f"query_block must divide block_size, {block_size}, got {shortened(repr(query_block))};"
            " 1 lets every query choose for itself"
        )
    return query_block, block_size


def current_blocks(first_row: int, rows: int, query_block: int, block_size: int) -> Tensor:
    """[rows] the block that each row's queries lie in; on the CPU, known ahead."""
    return (torch.arange(rows) + first_row) * query_block // block_size
