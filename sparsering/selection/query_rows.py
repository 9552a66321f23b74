"""Rows: groups of queries that choose blocks together; row r begins at position r * query_block."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..ground.arguments import checked_integer, shortened

_TIMES_ON_DEVICE = 16  # a GPU computes so many times more at a time, as each part costs launches


def at_a_time(on_cpu: int, device: torch.device) -> int:
    """Returns how many numbers to compute at once: `on_cpu` on a CPU, 16 times as many on a GPU."""
    return on_cpu * (1 if device.type == "cpu" else _TIMES_ON_DEVICE)


class Span(NamedTuple):
    """Consecutive queries that are scored together; no row or key block is cut in its middle.

    It covers `blocks` key blocks, with `width` queries in each.
    """

    first: int  # index of the first query in the query tensor
    block: int  # index of the key block at the first query's position
    blocks: int  # number of key blocks that have the queries; above 1 only if queries fill them
    width: int  # queries in each of the `blocks` key blocks
    row: int  # queries in each row, a divisor of `width`
    offset: int  # number of positions in key block `block` before the first query

    @property
    def queries(self) -> int:
        return self.blocks * self.width

    @property
    def rows(self) -> int:
        return self.queries // self.row


def spans(q_start: int, q_len: int, query_block: int, block_size: int) -> list[Span]:
    """Cuts queries at row and block boundaries; only the first and last row may be partial."""
    end = q_start + q_len
    cuts = {end}
    for size in (query_block, block_size):
        cuts |= {-(-q_start // size) * size, end // size * size}
    pieces, start = [], q_start
    for stop in sorted(cut for cut in cuts if q_start < cut <= end):
        width = block_size if start % block_size == stop % block_size == 0 else stop - start
        row = query_block if start % query_block == stop % query_block == 0 else width
        block, offset = start // block_size, start % block_size  # Dynamo cannot trace divmod here
        pieces.append(
            Span(
                first=start - q_start,
                block=block,
                blocks=(stop - start) // width,
                width=width,
                row=row,
                offset=offset,
            )
        )
        start = stop
    return pieces


def num_rows(q_start: int, q_len: int, query_block: int) -> int:
    """Counts the rows of `query_block` positions that the queries lie in, also partial rows."""
    return -(-(q_start + q_len) // query_block) - q_start // query_block if q_len else 0


def checked_blocks(query_block: int, block_size: int) -> tuple[int, int]:
    """Returns both sizes as ints; ValueError unless query_block divides block_size."""
    block_size = checked_integer("block_size", block_size, 1)
    query_block = checked_integer("query_block", query_block, 1)
    if block_size % query_block:
        raise ValueError(
            f"query_block must divide block_size, {block_size}, got {shortened(repr(query_block))};"
            " with 1 every query chooses its own blocks"
        )
    return query_block, block_size


def current_blocks(
    first_row: int,
    rows: int,
    query_block: int,
    block_size: int,
    device: torch.device | None = None,
) -> Tensor:
    """Returns the key block at the position of each row's queries: int64 [rows] (default CPU)."""
    row = torch.arange(rows, device="cpu" if device is None else device)
    return (row + first_row) * query_block // block_size
