"""The condition of `Neighbourhood`: windows over a grid whose tokens are in any order of tiles."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..ground.rows import expand_counts, number_rows
from ..patterns.algebra import Frame
from ..patterns.grid import GridTiles
from ..patterns.neighbourhood import GridDim, Neighbourhood
from .leaves import EMPTY, VARIES, Condition
from .tiles import Axis, Origin, Spans, TilePairs, spans_of_positions


@dataclass(frozen=True, eq=False)
class InNeighbourhood(Condition):
    """Condition that a key is in the window of a query of a grid."""

    mask: Neighbourhood
    grid: GridTiles = field(init=False)
    dims: Sequence[GridDim] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", self.mask.grid)
        object.__setattr__(self, "dims", self.mask.dims)

    def _boxes(self, first: Tensor, last: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns each dim's bounds of coordinates of the positions from first to last."""
        most = self.mask.own_length - 1
        return self.grid.boxes(first.clamp(0, most), last.clamp(0, most))

    def status(self, pairs: TilePairs) -> Tensor:
        q0, q1, k0, k1 = pairs.edges()
        near = (q1 >= 0) & (q0 < self.mask.own_length)
        queries, keys = self._boxes(q0, q1), self._boxes(k0, k1)
        for dim, query, (first, last) in zip(self.dims, queries, keys, strict=True):
            low, high = dim.reach(*query)
            near = near & (last >= low) & (first <= high)
        return torch.where(near, VARIES, EMPTY).to(torch.int8)

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        # Where no border moves a window, a shift of both tiles by whole periods changes no pair.
        q0, q1, k0, k1 = pairs.edges()
        columns = [self._form(q0, q1, pairs.q.step), self._form(k0, k1, pairs.k.step)]
        most = self.mask.own_length - 1
        first, second = (self.grid.coordinates(x.clamp(0, most)) for x in (q0, k0))
        boxes = self._boxes(q0, q1)
        for dim, query, key, box in zip(self.dims, first, second, boxes, strict=True):
            place = torch.where(dim.repeats(*box), query % dim.period - dim.period, query)
            columns += [place, key - query]
        return columns

    def _form(self, first: Tensor, last: Tensor, step: int) -> Tensor:
        """Returns a number for each tile; tiles of one number are translations of one another."""
        tile, index = number_rows([first, last])
        first, last = first[index], last[index]
        longest = int((last - first).max()) // step + 1 if len(first) else 0
        places = first[:, None] + step * torch.arange(longest)
        inside = (places >= 0) & (places < self.mask.own_length) & (places <= last[:, None])
        coordinates = self.grid.coordinates(places.clamp(0, self.mask.own_length - 1))
        columns = [torch.where(inside, x - x[:, :1], 1 << 62) for x in coordinates]
        return number_rows(list(torch.cat(columns, 1).unbind(1)))[0][tile]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        first, last = queries.start - origin.start, queries.last - origin.start
        row = torch.nonzero((first < self.mask.own_length) & (last >= 0))[:, 0]
        boxes = self._boxes(first[row], last[row])
        reach = [dim.reach(*box) for dim, box in zip(self.dims, boxes, strict=True)]
        # Tiles of the grid in a row along the last dim follow one another in the sequence.
        low: list[Tensor] = []
        high: list[Tensor] = []
        for size in self.grid.sizes[:-1]:
            first, last = reach[len(low)]
            part, number = expand_counts(last // size - first // size + 1)
            corner = (first // size)[part].add(number) * size
            low = [*(x[part] for x in low), torch.maximum(first[part], corner)]
            high = [*(x[part] for x in high), torch.minimum(last[part], corner + size - 1)]
            row, reach = row[part], [(x[part], y[part]) for x, y in reach]
        begin, end = reach[-1]
        place = origin.start[row]
        begin, end = (self.grid.position([*x, y]) for x, y in ((low, begin), (high, end)))
        return spans_of_positions(queries, keys, row, place + begin, place + end)

    def before(self, k: Tensor, x: Tensor, frame: Frame) -> Tensor:
        # In each dim, the coordinates that see a key are a progression; the queries that see it are
        # the product of these. A position is a number whose digits are the tile in each dim, then
        # the place inside it. The last such query <= x equals x, or it has a first digit in which
        # it differs: there it is the next lower, and all later digits are the largest.
        x = x.clamp(max=self.mask.own_length - 1)
        own = self.grid.coordinates(x.clamp(min=0))
        bounds = [
            dim.queries(key) for dim, key in zip(self.dims, self.grid.coordinates(k), strict=True)
        ]
        corners = [c // size * size for c, size in zip(own, self.grid.sizes, strict=True)]

        def largest(d: int, most: Tensor) -> Tensor:
            """The largest coordinate <= most of dim d that sees the key; below 0 for none."""
            low, high = bounds[d]
            step = self.dims[d].dilation
            reached = torch.minimum(most, high)
            return torch.where(reached < low, -1, reached - (reached - low) % step)

        dims = range(len(self.dims))
        ends = [corners[d] + self.grid.sizes[d] - 1 for d in dims]
        in_tile = [largest(d, ends[d]) for d in dims]
        is_seen = [largest(d, own[d]) == own[d] for d in dims]
        found = torch.full_like(x, -1)
        tried = [[(c, y) for c, y in zip(own, is_seen, strict=True)]]
        for d in dims:  # the first other digit is the tile of dim d
            at = largest(d, corners[d] - 1)
            tried.append([(in_tile[e], in_tile[e] >= corners[e]) for e in dims[:d]])
            tried[-1].append((at, at >= 0))
            tried[-1] += [(bounds[e][1], bounds[e][1] >= 0) for e in dims[d + 1 :]]
        for d in dims:  # the first other digit is the place in the tile in dim d
            at = largest(d, own[d] - 1)
            tried.append([(own[e], is_seen[e]) for e in dims[:d]])
            tried[-1].append((at, at >= corners[d]))
            tried[-1] += [(in_tile[e], in_tile[e] >= corners[e]) for e in dims[d + 1 :]]
        for coordinates in tried:
            legal = torch.stack([y.expand_as(x) for _, y in coordinates]).all(0) & (x >= 0)
            place = self.grid.position([c.clamp(min=0) for c, _ in coordinates])
            found = torch.where(legal, torch.maximum(found, place), found)
        return found
