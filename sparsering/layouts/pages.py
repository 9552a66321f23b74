"""Layouts of requests whose keys lie anywhere in one tensor, such as the pages of a server.

A key tile names rows of the tensor, so kernels read keys where they are. Requests with one query
get a pass of their own: kernels read the keys of a few queries in place, and pack those of many.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..ground.rows import expand_counts
from ..patterns.algebra import And, Frame, Or, Pattern
from ..patterns.positions import Causal, Dilated, Full, GlobalTokens, SlidingWindow
from .bitmaps import pack
from .layout import BlockLayout, Pass

BLOCK = 128  # most tokens of a tile
_REQUEST = 1 << 40  # above all positions, so that request * _REQUEST + position is in order


class Reach(NamedTuple):
    """Says that a query at p sees keys `first(p)` to p, and those below `always` up to p."""

    left: int | None = None  # keys before p, for a window
    chunk: int | None = None  # the tokens of a chunk, in which p sees those up to itself
    always: int = 0

    @classmethod
    def of(cls, pattern: Pattern) -> "Reach | None":
        """Returns the reach of a pattern & Causal(); None if no reach has the pattern's pairs."""
        if isinstance(pattern, Causal | Full):
            return cls()
        if isinstance(pattern, SlidingWindow) and pattern.dilation == 1:
            return cls(left=pattern.left)
        if isinstance(pattern, Dilated) and pattern.dilation_rate == 1:
            return cls(chunk=pattern.segment_length)
        if isinstance(pattern, And):
            rest = [x for x in pattern.masks if not isinstance(x, Causal | Full)]
            return cls.of(rest[0]) if len(rest) == 1 else None
        if isinstance(pattern, Or):
            rest = [x for x in pattern.masks if not isinstance(x, GlobalTokens)]
            sinks = [x for x in pattern.masks if isinstance(x, GlobalTokens)]
            reach = cls.of(rest[0]) if len(rest) == 1 else None
            if reach is not None and all(x.columns for x in sinks):
                return reach._replace(always=max(reach.always, *(x.count for x in sinks)))
        return None

    def first(self, positions: Tensor) -> Tensor:
        """Returns, for positions of queries, that of the first key from which each sees all."""
        if self.left is not None:
            return (positions - self.left).clamp(min=0)
        if self.chunk is not None:
            return positions // self.chunk * self.chunk
        return torch.zeros_like(positions)


@dataclass(frozen=True)
class _RequestTiles:
    """Tiles of queries or keys; a tile has consecutive positions of one request."""

    start: Tensor  # row of the first token in its tensor, int64 [tiles] as all below
    count: Tensor
    request: Tensor
    first: Tensor  # position of the first token
    last: Tensor

    @classmethod
    def of(
        cls,
        lengths: Tensor,
        first: Tensor,
        rows: Tensor | None = None,
        edges: tuple[Tensor, ...] = (),
    ) -> "_RequestTiles":
        """Cuts the tokens of requests where a block, their rows or a request ends, and at edges.

        Args:
            lengths, first: of each request, its tokens and the position of the first, [requests].
            rows: of all tokens, end to end; None if they have the rows 0, 1, 2, ...
            edges: positions [requests] at which a tile begins.
        """
        end = lengths.cumsum(0)
        begin = end - lengths
        low, high = first // BLOCK + 1, (first + lengths - 1) // BLOCK  # multiples inside
        request, number = expand_counts((high - low + 1).clamp(min=0))
        cuts = [begin[lengths > 0], (begin - first)[request] + (low[request] + number) * BLOCK]
        if rows is not None:
            (jumps,) = (rows.diff() != 1).nonzero(as_tuple=True)
            cuts.append(jumps + 1)
        for edge in edges:
            place = edge - first
            cuts.append((begin + place)[(place > 0) & (place < lengths)])
        cut = torch.cat(cuts).unique()
        request = torch.searchsorted(end, cut, right=True)
        count = torch.cat((cut, end[-1:])).diff()
        position = first[request] + cut - begin[request]
        start = cut if rows is None else rows[cut]
        return cls(start, count, request, position, position + count - 1)

    def chosen(self, which: Tensor) -> "_RequestTiles":
        fields = (self.start, self.count, self.request, self.first, self.last)
        return _RequestTiles(*(x[which] for x in fields))


def layout_of_pages(
    frame: Frame,
    q_lengths: list[int],
    kv_lengths: list[int],
    rows: Tensor,
    ends: Tensor,
    reach: Reach,
) -> BlockLayout:
    """Builds the layout of several requests, whose queries see keys of their request alone.

    Args:
        frame: queries and heads of the call; `kv_len` counts all rows of the keys' tensor.
        q_lengths, kv_lengths: queries and keys of each request, which lie end to end: its queries
            in the query tensor, its keys in `rows`. Its last query is at its last key.
        rows: int64 [keys], the row of each key; ascending positions in each request.
        ends: int64 [requests], position of the last token of each request.
        reach: which keys a query sees. Those that no query sees need not be given.

    Returns: a layout of one pass for requests with one query, and one for others. Sums of a row
        have the segments of its positions, so its bits do not depend on where its keys lie.
    """
    nq, nk = (torch.tensor(x, dtype=torch.int64) for x in (q_lengths, kv_lengths))
    begin = ends - nq + 1
    of_query, number = expand_counts(nq)
    at = begin[of_query] + number
    first, always = reach.first(at), torch.full_like(ends, reach.always)
    least = torch.minimum(reach.first(begin), begin)
    queries = _RequestTiles.of(nq, begin)
    keys = _RequestTiles.of(nk, ends - nk + 1, rows, (least, always))
    keys = keys.chosen((keys.first >= least[keys.request]) | (keys.first < reach.always))
    passes = []
    for single in (True, False):
        own_queries, own_keys = (x.chosen((nq == 1)[x.request] == single) for x in (queries, keys))
        if len(own_queries.start):
            passes.append(_pass_of(own_queries, own_keys, first, reach.always))
    if len(passes) == 1 and len(at) == frame.q_len:
        passes[0] = passes[0].like(covers=(True, False))
    pairs = float((at - first + 1 + first.clamp(max=reach.always)).sum())
    return BlockLayout(frame, BLOCK, tuple(passes), pairs)


def _pass_of(queries: _RequestTiles, keys: _RequestTiles, first: Tensor, always: int) -> Pass:
    """Builds a pass: query tiles visit the key tiles of their request that one of them sees.

    `first` [queries] and `always` are those of `Reach`.
    """
    low = first[queries.start]  # of a tile's first query, and of its last one
    high = first[queries.start + queries.count - 1]
    # tiles before `stop` have keys that are seen always, those from `begin` to `end` others
    zero = torch.zeros_like(low)
    start = torch.searchsorted(_placed(keys, keys.first), _placed(queries, zero))
    stop = torch.searchsorted(_placed(keys, keys.first), _placed(queries, zero + always))
    begin = torch.searchsorted(_placed(keys, keys.last), _placed(queries, low))
    end = torch.searchsorted(_placed(keys, keys.first), _placed(queries, queries.last), right=True)
    sinks = (torch.minimum(torch.minimum(stop, begin), end) - start).clamp(min=0)
    row, number = expand_counts(sinks + (end - begin).clamp(min=0))
    column = torch.where(number < sinks[row], start[row], begin[row] - sinks[row]) + number
    whole = (keys.first[column] >= high[row]) | (keys.last[column] < always)
    whole &= keys.last[column] <= queries.first[row]
    (cut,) = (~whole).nonzero(as_tuple=True)
    bitmap = torch.full_like(row, -1)
    bitmap[cut] = torch.arange(len(cut))
    token = torch.arange(BLOCK)
    cut_row, cut_column = row[cut], column[cut]
    query = (queries.first[cut_row, None] + token)[:, :, None]
    place = (queries.start[cut_row, None] + token).clamp(max=len(first) - 1)
    key = (keys.first[cut_column, None] + token)[:, None, :]
    cells = (key <= query) & ((key >= first[place][:, :, None]) | (key < always))
    entries = torch.bincount(row, minlength=len(queries.start))
    row_ptr = torch.nn.functional.pad(entries.cumsum(0), (1, 0)).int()
    return Pass(
        step=1,
        query_start=queries.start[None],
        query_stop=(queries.start + queries.count)[None],
        key_start=keys.start[None],
        key_stop=(keys.start + keys.count)[None],
        row_ptr=row_ptr[None, None],
        key_tile=column.int()[None, None],
        bitmap=bitmap.int()[None, None],
        bitmaps=pack(cells),
        query_origin=queries.first[None],
        key_origin=keys.first[None],
    )


def _placed(tiles: _RequestTiles, positions: Tensor) -> Tensor:
    """Numbers that order positions by request, then by position."""
    return tiles.request * _REQUEST + positions
