"""The condition of `Neighbourhood`: windows over a grid, found line by line of the grid."""

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from ..ground.rows import expand_counts
from ..patterns.algebra import Frame
from ..patterns.neighbourhood import Neighbourhood
from .leaves import EMPTY, VARIES, Condition
from .tiles import Axis, Origin, Spans, TilePairs, spans_of_positions


@dataclass(frozen=True, eq=False)
class InNeighbourhood(Condition):
    """Condition that a key is in the window of a query of a grid."""

    mask: Neighbourhood

    def _rows(self, pairs: TilePairs) -> tuple[Tensor, Tensor]:
        """Returns the first and last coordinate of each query tile in the slowest dim."""
        first, last, _, _ = pairs.edges()
        slowest, most = self.mask.dims[0], self.mask.own_length - 1
        return slowest.coordinate(first.clamp(0, most)), slowest.coordinate(last.clamp(0, most))

    def status(self, pairs: TilePairs) -> Tensor:
        q0, q1, k0, k1 = pairs.edges()
        slowest, total = self.mask.dims[0], self.mask.own_length
        low, high = slowest.reach(*self._rows(pairs))
        near = (k1 >= low * slowest.stride) & (k0 < (high + 1) * slowest.stride)
        near = near & (q1 >= 0) & (q0 < total)
        return torch.where(near, VARIES, EMPTY).to(torch.int8)

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        # Away from the borders of the slowest dim, a shift by whole rows changes no pair.
        q0, q1, k0, _ = pairs.edges()
        slowest, (first, last) = self.mask.dims[0], self._rows(pairs)
        far = slowest.radius * slowest.dilation
        inside = (first >= far) & (last < slowest.size - far)
        inside = inside & (q0 >= 0) & (q1 < self.mask.own_length)
        return [k0 - q0, q0 % slowest.stride, torch.where(inside, -1, q0.clamp(min=0))]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        *outer, fastest = self.mask.dims
        width, total = fastest.size, self.mask.own_length
        first = (queries.start - origin.start).clamp(min=0)
        last = (queries.last - origin.start).clamp(max=total - 1)
        # Cut query tiles into parts that each lie in one line of the grid.
        lines = torch.where(first <= last, last // width - first // width + 1, 0)
        tile, number = expand_counts(lines)
        line = (first // width)[tile] + number
        begin = torch.where(number == 0, (first % width)[tile], 0)
        end = torch.where(number == lines[tile] - 1, (last % width)[tile], width - 1)
        low, high = fastest.reach(begin, end)
        seen = torch.zeros_like(line)[:, None]  # [parts, lines of keys]
        for dim in outer:
            own = dim.keys(dim.coordinate(line * width)) * dim.stride
            seen = (seen[:, :, None] + own[:, None]).flatten(1)
        place = (seen + origin.start[tile, None]).flatten()
        tile, low, high = (x.repeat_interleave(seen.shape[1]) for x in (tile, low, high))
        return spans_of_positions(queries, keys, tile, place + low, place + high)

    def before(self, k: Tensor, x: Tensor, frame: Frame) -> Tensor:
        # In each dim, the coordinates that see a key are a progression; the queries that see it are
        # the product of these. The last such query <= x equals x in its first dims, is below x in
        # the next dim, and has the largest coordinate in the remaining dims.
        dims, x = self.mask.dims, x.clamp(max=self.mask.own_length - 1)
        bounds = [dim.queries(dim.coordinate(k)) for dim in dims]
        largest = [high * dim.stride for dim, (_, high) in zip(dims, bounds, strict=True)]
        rest = reduce(torch.add, largest)
        equal, prefix, found = x >= 0, torch.zeros_like(x), torch.full_like(x, -1)
        for dim, (low, high), most in zip(dims, bounds, largest, strict=True):
            own, rest = dim.coordinate(x.clamp(min=0)), rest - most
            below = own - 1 - (own - 1 - low) % dim.dilation
            below = torch.minimum(below, high)
            found = torch.where(equal & (below >= low), prefix + below * dim.stride + rest, found)
            on_grid = (own - low) % dim.dilation == 0
            equal = equal & on_grid & (own >= low) & (own <= high)
            prefix = prefix + own * dim.stride
        return torch.where(equal, x, found)
