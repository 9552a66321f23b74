"""Layouts of the last query of a growing sequence: decoding compiles nothing per token.

A page of queries is compiled at once and cached. Each query takes its row of tiles, cut to the keys
so far. A page costs about what one query costs, since compiling follows the pattern's edges.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..patterns.algebra import Frame, Pattern
from .cache import layout_cache
from .layout import BlockLayout, Pass

PAGE = 1024


def last_query_layout(
    pattern: Pattern, frame: Frame, block_size: int, device: torch.device
) -> tuple[BlockLayout, tuple[int, ...]] | None:
    """(layout, query's row in the bitmaps of each pass) for a frame with the last query alone.

    None where the frame is another one, or the pattern has tensors or depends on the length:
    compile these as they are.
    """
    last = frame.q_len == 1 and frame.q_start == frame.kv_len - 1
    if not last or pattern.tensors or not _positions_decide(pattern):
        return None
    first = frame.q_start // PAGE * PAGE
    of_page = Frame(PAGE, first + PAGE, frame.num_heads, frame.num_kv_heads, first)

    def build() -> _Page:
        return _Page.of(layout_cache.layout(pattern, of_page, block_size, device))

    return layout_cache.keep((pattern, of_page, block_size, device, "page"), build).query(frame)


@lru_cache(256)
def _positions_decide(pattern: Pattern) -> bool:
    """Whether a pair's two positions alone decide whether it attends, whatever the lengths."""
    return pattern.restarts is None and not any(x.asks_frame for x in pattern.branches)


@dataclass(eq=False)
class _Page:
    """The layout of a page of queries, and the place of each query in it.

    Attributes:
        rows: for each pass and row of query tiles, a pass with that row alone.
        row_of, slot_of: for each pass and query, its row (-1 for none) and its slot in the tile.
        stops: for each pass [queries, S, 1], 1 where an axis has the query, else 0.
        latest: the last request and its result, since all layers of a model ask for the same.
    """

    layout: BlockLayout
    rows: list[list[Pass]]
    row_of: list[list[int]]
    slot_of: list[list[int]]
    stops: list[Tensor]
    latest: tuple[Frame, tuple[BlockLayout, tuple[int, ...]]] | None = None

    @classmethod
    def of(cls, layout: BlockLayout) -> "_Page":
        rows, row_of, slot_of, stops = [], [], [], []
        for p in layout.passes:
            if p.bitmaps.device.type == "cpu":
                _ = p.transposed_bitmaps  # built here once, then shared by all rows
            tile, slot, in_axis = _places(p, layout.block_size)
            row_of.append(tile)
            slot_of.append(slot)
            stops.append(in_axis.t().long()[..., None].contiguous())
            rows.append([_row(p, number) for number in range(p.query_start.shape[1])])
        return cls(layout, rows, row_of, slot_of, stops)

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.stops)

    def query(self, frame: Frame) -> tuple[BlockLayout, tuple[int, ...]]:
        if self.latest is not None and self.latest[0] == frame:
            return self.latest[1]
        index = frame.q_start - self.layout.frame.q_start
        passes, slots = [], []
        for number, rows in enumerate(self.rows):
            if (row := self.row_of[number][index]) < 0:
                continue
            key_stop = rows[row].key_stop.clamp(max=frame.kv_len)
            passes.append(rows[row].like(query_stop=self.stops[number][index], key_stop=key_stop))
            slots.append(self.slot_of[number][index])
        # Decoding needs no number of pairs, so it is NaN here; `Pattern.layout` counts them.
        layout = BlockLayout(frame, self.layout.block_size, tuple(passes), math.nan)
        self.latest = frame, (layout, tuple(slots))
        return layout, tuple(slots)


def _places(p: Pass, block_size: int) -> tuple[list[int], list[int], Tensor]:
    """(row of tiles or -1, slot in it) of each query of a page; [S, queries] which axes have it.

    All axes are cut alike: a query has the same row and slot in each axis that has it.
    """
    query = p.query_start[..., None] + p.step * torch.arange(block_size, device=p.row_ptr.device)
    real = query < p.query_stop[..., None]
    axis, row, slot = torch.nonzero(real, as_tuple=True)
    query = query[real]
    in_axis = torch.zeros(len(p.query_start), PAGE, dtype=torch.bool, device=query.device)
    in_axis[axis, query] = True
    row_of, slot_of = (torch.full((PAGE,), -1, device=query.device) for _ in range(2))
    row_of[query], slot_of[query] = row, slot
    return row_of.tolist(), slot_of.tolist(), in_axis


def _row(p: Pass, row: int) -> Pass:
    """Pass with one row of query tiles alone, for a single query."""
    begin, end = p.row_ptr[..., row].long(), p.row_ptr[..., row + 1].long()
    count = end - begin
    place = torch.arange(int(count.max()) if count.numel() else 0, device=count.device)
    entry = torch.where(place < count[..., None], begin[..., None] + place, 0)
    row_ptr = torch.nn.functional.pad(count[..., None], (1, 0)).int()
    start = torch.zeros_like(p.query_start[:, :1])
    return p.like(
        query_start=start,
        query_stop=start + 1,
        row_ptr=row_ptr,
        key_tile=p.key_tile.gather(-1, entry) if len(place) else p.key_tile[..., :0],
        bitmap=p.bitmap.gather(-1, entry) if len(place) else p.bitmap[..., :0],
        covers=(len(start) == 1, p.covers[1]),
        longest=None,
    )
