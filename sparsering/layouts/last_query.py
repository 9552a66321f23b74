"""Layouts of the last query of a growing sequence, so that decoding compiles nothing per token.

A page of 1,024 queries is compiled at once, which takes about as long as for a single query, and
cached. The layout of one query is then the row of its query tile, cut to this query and its keys.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..ground.streams import Built, capturing, moved_together
from ..patterns.algebra import Frame, Pattern
from .cache import layout_cache
from .layout import BlockLayout, Pass

PAGE = 1024


def last_query_layout(
    pattern: Pattern, frame: Frame, block_size: int, device: torch.device
) -> tuple[BlockLayout, tuple[int, ...]] | None:
    """Returns the layout of the last query alone, and its row in each pass's bitmaps.

    A bitmap row is needed because the bitmaps of the page have all queries of a tile. Returns None
    if `frame` has other queries, or the pattern has tensors or depends on lengths.
    """
    last = frame.q_len == 1 and frame.q_start == frame.kv_len - 1
    if not last or pattern.tensors or not _positions_decide(pattern):
        return None
    first = frame.q_start // PAGE * PAGE
    of_page = Frame(
        q_len=PAGE,
        kv_len=first + PAGE,
        num_heads=frame.num_heads,
        num_kv_heads=frame.num_kv_heads,
        q_start=first,
    )

    def build() -> _Page:
        page = _Page.of(layout_cache.layout(pattern, of_page, block_size, torch.device("cpu")))
        return page if device.type == "cpu" else page.on_gpu(device)

    return layout_cache.keep((pattern, of_page, block_size, device, "page"), build).query(frame)


@lru_cache(256)
def _positions_decide(pattern: Pattern) -> bool:
    """Whether a pattern depends on positions alone, so that one page serves any sequence length."""
    return pattern.restarts is None and not any(x.asks_frame for x in pattern.branches)


@dataclass(eq=False)
class _Page:
    """The compiled layout of 1,024 queries, split into one small pass for each query tile.

    `rows[pass][query tile]` is a pass that has this tile alone, and a pass that tells kernels the
    order of key tiles (`Pass.walked_as`). `latest` is the latest result of `query`, because all
    layers of a model ask for the same query. `launches` keeps kernel launches for each query tile.
    """

    layout: BlockLayout
    rows: list[list[tuple[Pass, Pass]]]
    row_of: list[list[int]]  # [pass][query]: index of the query's tile, or -1 if no tile has it
    slot_of: list[list[int]]  # [pass][query]: place of the query in its tile
    stops: list[Tensor]  # per pass [queries, S, 1]: 1 if tiles of kv head s have the query, else 0
    latest: tuple[Frame, tuple[BlockLayout, tuple[int, ...]], Built | None] | None = None
    launches: dict[tuple[int, ...], dict[Hashable, Any]] = field(default_factory=dict)
    built: Built | None = None  # other CUDA streams wait for it before they read `rows`, `stops`

    @classmethod
    def of(cls, layout: BlockLayout) -> "_Page":
        rows, row_of, slot_of, stops = [], [], [], []
        for p in layout.passes:
            _ = p.transposed_bitmaps  # builds it once here, so that the passes in `rows` share it
            tile, slot, in_axis = _places(p, layout.block_size)
            row_of.append(tile)
            slot_of.append(slot)
            stops.append(in_axis.t().long()[..., None].contiguous())
            each = [_row(p, number) for number in range(p.query_start.shape[1])]
            rows.append([(x, _walked(x, p, n, layout)) for n, x in enumerate(each)])
        return cls(layout, rows, row_of, slot_of, stops)

    def on_gpu(self, device: torch.device) -> "_Page":
        passes = tuple(p for rows in self.rows for pair in rows for p in pair)
        each = iter(replace(self.layout, passes=passes).on_gpu(device).passes)
        rows = [[(next(each), next(each)) for _ in rows] for rows in self.rows]
        stops = list(moved_together(dict(enumerate(self.stops)), device).values())
        return replace(self, rows=rows, stops=stops, built=Built.now(device))

    def query(self, frame: Frame) -> tuple[BlockLayout, tuple[int, ...]]:
        """Returns the layout of the query at `frame.q_start`, and its row in each pass's bitmap."""
        if (latest := self.latest) is not None and latest[0] == frame:
            if latest[2] is not None:
                latest[2].wait(x.key_stop for x in latest[1][0].passes)
            return latest[1]
        if self.built is not None:
            self.built.wait((*self.stops, *(pair[1].key_tile for x in self.rows for pair in x)))
        index = frame.q_start - self.layout.frame.q_start
        passes, slots = [], []
        for number, rows in enumerate(self.rows):
            if (row := self.row_of[number][index]) < 0:
                continue
            stop, (p, whole) = self.stops[number][index], rows[row]
            passes.append(p.cut(stop, p.key_stop.clamp(max=frame.kv_len), whole))
            slots.append(self.slot_of[number][index])
        # Decoding does not need the number of pairs, so it is NaN.
        layout = BlockLayout(frame, self.layout.block_size, tuple(passes), math.nan)
        of_query = tuple(row[index] for row in self.row_of)
        layout.memo["launches"] = self.launches.setdefault(of_query, {})
        device = self.stops[0].device if self.stops else torch.device("cpu")
        if not capturing(device):  # memory of a captured graph is empty until the graph runs
            self.latest = frame, (layout, tuple(slots)), Built.now(device)
        return layout, tuple(slots)


def _places(p: Pass, block_size: int) -> tuple[list[int], list[int], Tensor]:
    """Returns for each query the index of its tile (-1 for none) and its place in this tile.

    Also returns bool [S, queries]: whether the tiles of each kv head have the query at all.
    """
    query = p.query_start[..., None] + p.step * torch.arange(block_size, device=p.row_ptr.device)
    real = query < p.query_stop[..., None]
    axis, row, slot = torch.nonzero(real, as_tuple=True)
    query = query[real]
    in_axis = torch.zeros(len(p.query_start), PAGE, dtype=torch.bool, device=query.device)
    in_axis[axis, query] = True  # all kv heads whose tiles have a query agree on tile and place
    row_of, slot_of = (torch.full((PAGE,), -1, device=query.device) for _ in range(2))
    row_of[query], slot_of[query] = row, slot
    return row_of.tolist(), slot_of.tolist(), in_axis


def _row(p: Pass, row: int) -> Pass:
    """Returns a pass with query tile `row` alone, as if the tile held one query, at index 0."""
    begin, end = p.row_ptr[..., row].long(), p.row_ptr[..., row + 1].long()
    count = end - begin
    place = torch.arange(int(count.max()) if count.numel() else 0, device=count.device)
    entry = torch.where(place < count[..., None], begin[..., None] + place, 0)
    start = torch.zeros_like(p.query_start[:, :1])
    return p.like(
        query_start=start,
        query_stop=start + 1,
        row_ptr=torch.nn.functional.pad(count[..., None], (1, 0)).int(),
        key_tile=p.key_tile.gather(-1, entry) if len(place) else p.key_tile[..., :0],
        bitmap=p.bitmap.gather(-1, entry) if len(place) else p.bitmap[..., :0],
        covers=(len(start) == 1, p.covers[1]),
        longest=None,
        query_segment=start.new_empty(0, dtype=torch.int32),
    )


def _walked(row: Pass, p: Pass, number: int, layout: BlockLayout) -> Pass:
    """Adds a full bitmap to each entry whose key tile may be cut at the query, so kernels mask it.

    `Pass.cut` may shorten tiles that end after the query tile's first query, so kernels that take
    their order from this pass must not read them as whole tiles.
    """
    last = torch.minimum(p.key_start + (layout.block_size - 1) * p.step, p.key_stop - 1)
    later = (last > layout.frame.q_start + p.query_start[:, number].min()).any(0)  # [key tiles]
    cut = (row.bitmap < 0) & later[row.key_tile.long()] if len(later) else row.bitmap < 0
    if not cut.any():
        return row
    every = row.bitmaps.new_full((1, row.bitmaps.shape[1]), 255)
    bitmap = torch.where(cut, len(row.bitmaps), row.bitmap)
    return replace(row, bitmap=bitmap, bitmaps=torch.cat((row.bitmaps, every)))
