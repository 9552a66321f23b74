"""Tiles of an axis in closed form, on any device, and where among them a position lies.

Nothing here reads a tensor: how many tiles there are follows from the lengths alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..tiles import Axis, Grid

Number = int | Tensor


def axis_of(
    grid: Grid,
    low: int,
    high: int,
    block_size: int,
    offsets: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Axis:
    """The tiles that hold the positions [low, high), as `Grid.axis` has them; low < high.

    `start` and `last` are [offsets, tiles].
    """
    made: dict[str, Any] = {"device": device, "dtype": dtype}
    step, segment, reach = grid.step, grid.segment, grid.step * block_size
    tiles = -(-segment // reach)
    first_segment, last_segment = low // segment, (high - 1) // segment
    skipped = (low - first_segment * segment) // reach
    reached = min(high - last_segment * segment, segment)
    place = torch.arange(
        first_segment * tiles + skipped, last_segment * tiles - (-reached // reach), **made
    )
    if tiles == 1:
        start = place * segment
        end = start + segment
    elif segment % reach == 0:
        start = place * reach
        end = start + reach
    else:
        number = floor_divide(place, tiles)
        start = number * segment + (place - number * tiles) * reach
        end = torch.minimum((number + 1) * segment, start + reach)
    stop = end.clamp(max=high)
    residues = _residues(grid, low, high, segment if first_segment < last_segment else reached)
    residue = torch.zeros_like(place)
    if grid.residues > 1:
        residue = _spread([torch.arange(*part, **made) for part in residues], len(place))
        lanes = len(residue) // len(place)
        start, stop = start.repeat(lanes) + residue, stop.repeat(lanes)
    start = start[None] if offsets == (0,) else start + _column(offsets, made)
    cut = low > first_segment * segment + skipped * reach + residues[0][0] + min(offsets)
    if cut:
        lacking = (low - start).clamp(min=0)
        start = start + floor_divide(lacking + (step - 1), step) * step
    if step == 1 and not cut and offsets == (0,):  # every tile has a position
        return Axis(step, residue, start, stop, (stop - 1)[None])
    within = (stop - 1 - start).clamp(min=-1)
    return Axis(step, residue, start, stop, start + floor_divide(within, step) * step)


def _column(values: tuple[int, ...], made: dict[str, Any]) -> Tensor:
    """[values, 1], made on the device: by arithmetic where they are those of LongNet's heads."""
    count, rate = len(values), max(values) + 1
    number = torch.arange(count, **made)[:, None]
    if values == tuple(i % rate for i in range(count)):
        return number % rate
    if values == tuple(i // -(-count // rate) for i in range(count)):
        return number // -(-count // rate)
    return torch.cat([torch.full((1, 1), value, **made) for value in values])


def _residues(grid: Grid, low: int, high: int, longest: int) -> list[tuple[int, int]]:
    """The residues that are listed, as ranges; `longest` tokens has the longest segment."""
    if high - low < grid.residues:
        first, count = low % grid.residues, high - low
        if first + count <= grid.residues:
            return [(first, first + count)]
        return [(0, first + count - grid.residues), (first, grid.residues)]
    return [(0, min(grid.residues, max(1, longest)))]


def _spread(residues: list[Tensor], times: int) -> Tensor:
    listed = residues[0] if len(residues) == 1 else torch.cat(residues)
    return listed[:, None].expand(-1, times).flatten()


@dataclass(frozen=True, eq=False)
class Lanes:
    """The key tiles that each query tile may pair with: those of its residue, in a row.

    Tiles without a position are left out: tiles are counted as `tile_of` numbers them.

    Attributes:
        segment, reach, step: tokens of a segment, of a whole tile, between neighbours.
        tiles, empty: of a segment, tiles with and without a position.
        first: the lane's first position.
        begin, live: number of its first tile, and how many it has.
        last: its last position.
        spacing: tokens between tiles, where that is the same for all, else 0.
    """

    segment: int
    reach: int
    step: int
    tiles: int
    empty: int
    first: Number
    begin: Number
    live: Number
    last: Number
    spacing: int

    @classmethod
    def together(cls, lanes: "Sequence[Lanes]", rows: int, dtype: torch.dtype) -> "Lanes | None":
        """Those of several axes, of as many query tiles each; None where they count otherwise."""
        first = lanes[0]
        if len({(x.tiles, x.empty, x.spacing) for x in lanes}) > 1 or not first.tiles:
            return None
        names = ("first", "live", "last")
        found: Any = {name: torch.tensor([getattr(x, name) for x in lanes]) for name in names}
        found = {name: x.to(dtype).repeat_interleave(rows) for name, x in found.items()}
        return replace(first, **found, begin=torch.zeros_like(found["first"]))

    @classmethod
    def of(cls, grid: Grid, queries: Axis, kv_len: int, block_size: int, offset: int) -> "Lanes":
        """Those of all keys, for query tiles of the same grid and offset."""
        step, segment, reach = grid.step, grid.segment, grid.step * block_size
        all_tiles = -(-segment // reach)
        if grid.residues > 1:  # segments are whole tiles, of each residue as many
            first = queries.residue + offset
            live = floor_divide((kv_len - 1 - first).clamp(min=-1), reach) + 1
            begin = queries.residue.clamp(max=kv_len) * -(-kv_len // reach)
            last = first + floor_divide(kv_len - 1 - first, step) * step
            return cls(segment, reach, step, all_tiles, 0, first, begin, live, last, reach)
        tiles = -(-max(0, segment - offset) // reach)
        spacing = reach if segment % reach == 0 or kv_len <= segment else 0
        spacing = segment if all_tiles == 1 else spacing
        number, place = divmod(kv_len - 1, segment)
        if place < offset:  # the lane's last position is in an earlier segment
            number, place = number - 1, segment - 1
        end = number * segment + offset + (place - offset) // step * step
        count = number * tiles + ((place - offset) // reach + 1 if tiles else 0)
        return cls(segment, reach, step, tiles, all_tiles - tiles, offset, 0, count, end, spacing)

    def starting_by(self, position: Tensor, further: int = 0) -> Tensor:
        """The number past the lane's last tile that starts by a position, or some way further."""
        position = shifted(position, further)
        if self.spacing:
            count = floor_divide(shifted(position, self.first, -1), self.spacing) + 1
        else:
            number = floor_divide(position, self.segment)
            within = position - number * self.segment - self.first
            count = number * self.tiles
            count = count + (floor_divide(within, self.reach) + 1).clamp(0, self.tiles)
        return self._numbered(count)

    def ending_before(self, position: Tensor, further: int = 0) -> Tensor:
        """The number past the lane's last tile that ends before a position, or one further."""
        span: Any = self.reach - self.step
        if self.spacing:
            if self.spacing < self.reach:
                span = self._last_of_segment() - self.first
            shift = further + (self.spacing - 1 - span) - self.first
            count = floor_divide(shifted(position, shift), self.spacing)
            end: Any = self.first + (self.live - 1) * self.spacing + span  # of a whole last tile
            if isinstance(end, int) and end == self.last:
                return self._numbered(count)
            position = shifted(position, further)
        else:
            position = shifted(position, further)
            number = floor_divide(position, self.segment)
            place = position - number * self.segment
            count = floor_divide(place - self.first + (self.step - 1), self.reach)
            count = count.clamp(0, self.tiles)
            count = torch.where(place > self._last_of_segment(), self.tiles, count)
            count = count + number * self.tiles
        return self._numbered(torch.where(position > self.last, self.live, count))

    def _last_of_segment(self) -> Number:
        within: Any = self.segment - 1 - self.first
        if isinstance(within, int):
            return self.first + within // self.step * self.step
        return self.first + floor_divide(within, self.step) * self.step

    def _numbered(self, count: Tensor) -> Tensor:
        if isinstance(self.live, int):
            return count.clamp(0, self.live)
        return self.begin + torch.minimum(count.clamp(min=0), self.live)

    def whole(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(begin, end) of each lane, for as many query tiles as `rows` has."""
        if isinstance(self.live, int):
            return torch.zeros_like(rows), torch.full_like(rows, self.live)
        return self.begin, self.begin + self.live  # type: ignore[return-value]

    def tile_of(self, number: Tensor) -> Tensor:
        """Which tile of the axis a number is."""
        if not self.empty or not self.tiles:
            return number
        return number + floor_divide(number, self.tiles) * self.empty


def one_of(tiles: Axis, number: int) -> Axis:
    """The axis of one offset."""
    start, last = tiles.start[number], tiles.last[number]
    return Axis(tiles.step, tiles.residue, start, tiles.stop, last)


def scaled(x: Tensor, by: int) -> Tensor:
    """X * by."""
    return x if by == 1 else x * by


def shifted(x: Tensor, by: Number, sign: int = 1) -> Tensor:
    """X + sign * by."""
    if isinstance(by, int):
        return x + sign * by if by else x
    return x + by if sign == 1 else x - by


def floor_divide(x: Tensor, by: int) -> Tensor:
    """X // by, where `by` is a power of two by a shift, which is several times as fast."""
    if by == 1:
        return x
    if by & (by - 1) == 0:
        return x >> (by.bit_length() - 1)
    return torch.div(x, by, rounding_mode="floor")
