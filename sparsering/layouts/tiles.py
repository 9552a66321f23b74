"""Tiles of token positions, and sets of (query tile, key tile) pairs.

A tile is an arithmetic progression of positions start, start + step, ... below `stop`, at most
`block_size` of them. A `Grid` is the rule by which queries, and also keys, are cut into tiles.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..ground.kernel_library import kernel_operators
from ..ground.rows import expand_counts, number_rows
from ..patterns.algebra import Frame
from ..patterns.positions import Dilated

Ranges = Sequence[tuple[int, int]]
"""Ranges of positions (first, exclusive end), ascending and disjoint."""

SEGMENT, GROUP = 512, 8  # `GROUP` is kGroup of kernels/cpu/layout.h
"""Kernels first sum over `SEGMENT` keys, then over `GROUP` of these sums, then over the groups."""

MOST_TILES = 1 << 25
"""Most tiles of queries, or of keys, that are listed: 2^32 tokens in tiles of 128, some GB."""


def segment_length(step: int, block_size: int) -> int:
    """Returns how many positions kernels sum up together, for tiles of this step and block size."""
    return step * block_size * max(1, SEGMENT // block_size)


@dataclass(frozen=True)
class Grid:
    """Rule that cuts positions into segments of equal length, and each segment into tiles.

    All positions of a tile have one residue modulo `step`. `residues` says how many residue classes
    are cut into tiles: 1, or `step` for all. A query tile visits only key tiles of its own class.
    """

    step: int  # distance of neighboring positions in a tile
    segment: int  # tokens in a segment; segments begin at 0, or at each document's start
    residues: int = 1
    documents: tuple[int, ...] | None = None  # document lengths, if segments restart in each
    depths: tuple[int, ...] | None = None  # position of each document's first token, default 0
    anchor: Dilated | None = None  # a mask whose offset for a head shifts the tiles of the head

    def selectivity(self) -> tuple[int, bool, int]:
        """Returns a sort key: the tiles of a grid with a higher key fit a mask more closely."""
        return self.step, self.documents is not None, self.segment

    def offset_of(self, kv_head: int, num_kv_heads: int) -> int:
        """Returns the number of tokens from the start of a segment to a head's first tile."""
        return 0 if self.anchor is None else self.anchor.offset_of(kv_head, num_kv_heads)

    def segment_of(self, positions: Tensor, block_size: int) -> Tensor:
        """Returns in which segment of sums each position is, as `Pass.segments` explains."""
        length = segment_length(self.step, block_size)
        if self.documents:
            sizes = torch.tensor(self.documents, dtype=torch.int64)
            ends = sizes.cumsum(0)
            depths = torch.tensor(self.depths or [0] * len(sizes), dtype=torch.int64)
            document = torch.searchsorted(ends, positions.contiguous(), right=True)
            positions = positions - (ends - sizes - depths)[document.clamp(max=len(sizes) - 1)]
        if self.segment == self.step * block_size:
            return positions // length
        begin = positions // self.segment * self.segment
        return begin // length + (positions - begin) // length

    def axis(self, ranges: Ranges, block_size: int, offset: int) -> "Axis":
        """Returns tiles of the positions in `ranges`; no tile crosses the end of a range."""
        self._check_number(sum(high - low for low, high in ranges), block_size)
        if (kernel := kernel_operators()) is not None:
            cut = self.step, self.segment, self.residues, block_size, offset
            edges = [edge for pair in ranges for edge in pair]
            documents = (0,) if self.documents == () else self.documents or ()  # (): no documents
            a, b, c, d, tokens = kernel.tiles(*cut, edges, documents, self.depths or ())
            return Axis(
                step=self.step, residue=a, start=b, stop=c, last=d, tokens=tuple(tokens.tolist())
            )
        lows, highs = torch.tensor(ranges, dtype=torch.int64).view(-1, 2).T.contiguous()
        first, stop = (ranges[0][0], ranges[-1][1]) if ranges else (0, 0)
        begin, end, least = self._segments(first, stop) if ranges else (lows, highs, lows)
        bounds = begin, end, least.clamp(min=first), torch.tensor(stop)
        segment, start, end, longest = self._pieces(*bounds, block_size)
        least = torch.maximum(start, least[segment])
        nearest = torch.searchsorted(highs, least, right=True)  # first range that ends after it
        tile, number = expand_counts((torch.searchsorted(lows, end) - nearest).clamp(min=0))
        within = nearest[tile] + number
        ends = torch.minimum(end[tile], highs[within])
        residue = self._residues(ranges, longest)[:, None].expand(-1, len(tile))
        least = torch.maximum(lows[within], least[tile])
        return self._tiles(residue, start[tile] + residue + offset, least, ends)

    def axis_of_documents(self, low: Tensor, high: Tensor, block_size: int, offset: int) -> "Axis":
        """Returns tiles of positions low[d] to high[d] - 1 in document d, counted from its start.

        With n documents, a tile of residue class r in document d has `residue` r * n + d. A query
        tile visits only key tiles of equal `residue`, so only those of its own document.
        """
        self._check_number(int((high - low).clamp(min=0).sum()), block_size)
        documents, first = len(low), low // self.segment
        count = torch.where(high > low, -(-high // self.segment) - first, 0)
        document, number = expand_counts(count)
        begin = (first[document] + number) * self.segment
        low, high = low[document], high[document]
        end = torch.minimum(begin + self.segment, high)
        segment, start, stop, longest = self._pieces(begin, end, low, high, block_size)
        residue = torch.arange(min(self.residues, max(1, longest)))[:, None]
        number = residue * documents + document[segment]
        return self._tiles(number, start + residue + offset, low[segment], stop)

    def _check_number(self, tokens: int, block_size: int) -> None:
        """Raises ValueError, before any work, if positions would make more than `MOST_TILES`."""
        in_tile = min(block_size * self.step, self.segment)  # positions of a segment in a tile
        tiles = tokens * self.residues // in_tile
        if tiles > MOST_TILES:
            raise ValueError(
                f"a layout lists at most {MOST_TILES:,} tiles of queries or keys, got about "
                f"{tokens:,} tokens, which make at least {tiles:,}; pass fewer tokens, or a larger "
                "block_size"
            )

    def _pieces(
        self, begin: Tensor, end: Tensor, low: Tensor, high: Tensor, block_size: int
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """Cuts segments [begin, end) into pieces of `step * block_size` positions in [low, high).

        Returns: segment, begin and end of each piece; length of the longest segment below `high`.
        """
        reach = self.step * block_size
        length = (torch.minimum(end, high) - begin).clamp(min=0)
        skipped = (low - begin).clamp(min=0) // reach  # pieces that end before `low`
        segment, number = expand_counts((-(-length // reach) - skipped).clamp(min=0))
        start = begin[segment] + (skipped[segment] + number) * reach
        end = torch.minimum(end[segment], start + reach)
        return segment, start, end, int(length.max()) if len(length) else 0

    def _tiles(self, residue: Tensor, start: Tensor, low: Tensor, stop: Tensor) -> "Axis":
        """Cuts pieces into tiles, one per residue class; a tile begins at `low` or later."""
        start = start + (low - start).clamp(min=0).add(self.step - 1) // self.step * self.step
        start, stop = start.flatten(), stop.repeat(len(start))
        steps = (stop - 1 - start).clamp(min=-1) // self.step
        tokens = int((steps + 1).sum()), 1 + max(steps.tolist(), default=-1)
        return Axis(
            step=self.step,
            residue=residue.flatten(),
            start=start,
            stop=stop,
            last=start + steps * self.step,
            tokens=tokens,
        )

    def _residues(self, ranges: Ranges, longest: int) -> Tensor:
        """Returns the residue classes that occur in `ranges`; `longest` is the longest segment."""
        if self.documents is None and ranges and ranges[-1][1] - ranges[0][0] < self.residues:
            return (torch.arange(ranges[0][0], ranges[-1][1]) % self.residues).unique()
        return torch.arange(min(self.residues, max(1, longest)))

    def _segments(self, low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the start, end and first position of each segment.

        These are the segments of all documents if the grid has `documents`, else those that meet
        [low, high). The first position may lie after the start of a segment that another document
        shares.
        """
        if self.documents is None:
            first = low // self.segment
            begin = torch.arange(first, max(first, -(-high // self.segment))) * self.segment
            return begin, begin + self.segment, begin
        length = torch.tensor(self.documents, dtype=torch.int64)
        depth = torch.zeros_like(length)
        if self.depths is not None:
            depth = torch.tensor(self.depths, dtype=torch.int64)
        ends = length.cumsum(0)
        whole = depth // self.segment  # segments before the document's first position
        count = torch.where(length > 0, -(-(depth + length) // self.segment) - whole, 0)
        document, number = expand_counts(count)
        zero = (ends - length - depth)[document]  # where position 0 of the document would be
        begin = zero + (whole[document] + number) * self.segment
        stop = torch.minimum(begin + self.segment, ends[document])
        return begin, stop, torch.maximum(begin, (ends - length)[document])


@dataclass(frozen=True)
class Axis:
    """Query tiles or key tiles, sorted by residue class, then position; tensors are [tiles]."""

    step: int  # distance of neighboring positions in a tile
    residue: Tensor  # residue class; query tiles visit key tiles of equal `residue`
    start: Tensor  # first position
    stop: Tensor  # exclusive end
    last: Tensor  # last position; below `start` for a tile without positions
    tokens: tuple[int, int] = (0, 0)  # positions in all tiles, and in the largest; a `Grid` sets it

    def __len__(self) -> int:
        return len(self.start)

    @property
    def count(self) -> Tensor:
        return (self.last - self.start) // self.step + 1

    def __getitem__(self, index: Tensor) -> "Axis":
        residue, start, stop, last = self.residue, self.start, self.stop, self.last
        return Axis(
            step=self.step,
            residue=residue[index],
            start=start[index],
            stop=stop[index],
            last=last[index],
        )

    def runs(self, size: int) -> tuple["Axis", Tensor]:
        """Joins each `size` neighboring tiles; returns (joined tiles, whether each has no gap)."""
        first = torch.arange(len(self) // size) * size
        end = first + size - 1
        runs = replace(self[first], stop=self.stop[end], last=self.last[end])
        joined = self.count > 0
        joined[1:] &= self.residue[1:] == self.residue[:-1]
        joined[1:] &= self.start[1:] == self.last[:-1] + self.step
        joined[first] = self.count[first] > 0
        return runs, joined[: len(first) * size].view(-1, size).all(1)

    def positions(self, block_size: int) -> Tensor:
        """Returns positions [tiles, block_size]; those of a short tile continue past `stop`."""
        return self.start[:, None] + self.step * torch.arange(block_size)


class Origin(NamedTuple):
    """Where positions of each tile count from: its document or the sequence.

    Tensors are [tiles].
    """

    start: Tensor  # the position that a mask counts as 0
    kv_len: Tensor  # number of keys in the document or sequence
    q_len: Tensor  # number of queries in the document

    @classmethod
    def of_sequence(cls, tiles: int, kv_len: int) -> "Origin":
        lengths = torch.full((tiles,), kv_len)
        return cls(torch.zeros(tiles, dtype=torch.int64), lengths, lengths)

    def frames(self, frame: Frame, by_length: bool = True) -> Iterator[tuple[Tensor, Frame]]:
        """Yields (tile indices, `Frame`) per document length, or one for all unless `by_length`."""
        if not len(self.start):
            return
        if not by_length:
            yield torch.arange(len(self.start)), frame.of_documents(self.q_len, self.kv_len)
            return
        kind, first = number_rows([self.kv_len, self.q_len])
        kinds = zip(self.q_len[first].tolist(), self.kv_len[first].tolist(), strict=True)
        for number, (q_len, kv_len) in enumerate(kinds):
            yield torch.nonzero(kind == number)[:, 0], frame.of_document(q_len, kv_len)


@dataclass(frozen=True, eq=False)
class TilePairs:
    """Pairs of query tile q[i] and key tile k[i]; their masks count from `origin.start[i]`."""

    q: Axis
    k: Axis
    origin: Origin

    @classmethod
    def of_sequence(cls, q: Axis, k: Axis, kv_len: int) -> "TilePairs":
        return cls(q, k, Origin.of_sequence(len(q), kv_len))

    def __len__(self) -> int:
        return len(self.q)

    def __getitem__(self, index: Tensor) -> "TilePairs":
        return TilePairs(self.q[index], self.k[index], Origin(*(x[index] for x in self.origin)))

    def edges(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the first and last query of each pair of tiles, then its first and last key.

        Positions count from `origin.start`.
        """
        q, k, start = self.q, self.k, self.origin.start
        return q.start - start, q.last - start, k.start - start, k.last - start


class Spans:
    """A set of (query tile, key tile) pairs: sorted disjoint ranges of row * columns + column."""

    def __init__(self, begin: Tensor, end: Tensor) -> None:
        filled = end > begin
        begin, order = begin[filled].sort()
        end = end[filled][order].cummax(0).values
        head = torch.ones_like(begin, dtype=torch.bool)
        head[1:] = begin[1:] > end[:-1]
        self.begin, self.end = begin[head], end[head.roll(-1)]

    def __or__(self, other: "Spans") -> "Spans":
        return Spans(torch.cat((self.begin, other.begin)), torch.cat((self.end, other.end)))

    def __and__(self, other: "Spans") -> "Spans":
        first = torch.searchsorted(other.end, self.begin, right=True)
        count = (torch.searchsorted(other.begin, self.end) - first).clamp(min=0)
        left, number = expand_counts(count)
        right = first[left] + number
        begin = torch.maximum(self.begin[left], other.begin[right])
        return Spans(begin, torch.minimum(self.end[left], other.end[right]))

    def __sub__(self, other: "Spans") -> "Spans":
        begin = torch.cat((torch.zeros(1, dtype=torch.int64), other.end))
        return self & Spans(begin, torch.cat((other.begin, torch.tensor([1 << 62]))))

    def runs(self, columns: int, size: int) -> "Spans":
        """Returns all (row, r) for which the set has each column in [r * size, (r + 1) * size)."""
        most = columns // size

        def place(edge: Tensor, above: int) -> Tensor:
            run = (edge % max(1, columns) + above) // size
            return edge // max(1, columns) * most + run.clamp(max=most)

        return Spans(place(self.begin, size - 1), place(self.end, 0))

    def expand(self) -> Tensor:
        """Returns the integers row * columns + column of all pairs in the set, ascending."""
        count = self.end - self.begin
        base = self.begin - (count.cumsum(0) - count)
        return torch.arange(int(count.sum())) + base.repeat_interleave(count)


def spans_of_positions(queries: Axis, keys: Axis, row: Tensor, low: Tensor, high: Tensor) -> Spans:
    """Pairs query tile row[i] with key tiles of its residue class that meet [low[i], high[i]]."""
    if not len(keys) or not len(row):
        return Spans(none := torch.zeros(0, dtype=torch.int64), none)
    highest = int(keys.stop.max()) - 1
    stride = highest + keys.step + 1  # keeps the positions of residue classes apart
    low, high = low.clamp(min=0), high.clamp(max=highest)
    row, low, high = (x[low <= high] for x in (row, low, high))
    lane = queries.residue[row] * stride
    key_lane = keys.residue * stride
    key_start = torch.minimum(keys.start, keys.stop)  # an empty tile may begin after the next one
    begin = torch.searchsorted(key_lane + (keys.stop - 1), lane + low)
    end = torch.searchsorted(key_lane + key_start, lane + high, right=True)
    return Spans(row * len(keys) + begin, row * len(keys) + end)
