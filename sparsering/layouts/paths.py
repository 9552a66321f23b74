"""The condition of `Tree`: query and key lie on one path, and meet a condition on their depths."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..patterns.algebra import Frame
from ..patterns.tree import Nodes
from ..rows import expand_counts
from .leaves import EMPTY, FULL, VARIES, Condition
from .tiles import Axis, Origin, Spans, TilePairs, spans_of_positions


class _Side:
    """The tokens of n tiles in a tree: their nodes `first` to `last`, and bounds of depths."""

    def __init__(self, nodes: Nodes, tokens: tuple[Tensor, Tensor]) -> None:
        most = int(nodes.start[-1]) - 1
        self.inside = (tokens[0] >= 0) & (tokens[1] <= most)  # whether all tokens are in the tree
        self.touches = (tokens[1] >= 0) & (tokens[0] <= most)
        begin, end = (x.clamp(0, most) for x in tokens)
        self.first, self.last = nodes.of_token(begin), nodes.of_token(end)
        self.several = self.last > self.first
        ends = nodes.depth + nodes.start.diff()
        low, high = nodes.depth_of(begin), nodes.depth_of(end)
        # Of several nodes, the first has its last tokens in the tile, and the last its first ones.
        self.low = torch.where(self.several, torch.minimum(low, self._least(nodes.depth, 1)), low)
        most_before = self._most(ends, 0, -1) - 1
        self.high = torch.where(self.several, torch.maximum(high, most_before), high)

    def _most(self, values: Tensor, after: int = 0, before: int = 0) -> Tensor:
        """Returns the maximum of node values from first + after to last + before."""
        low, high = self.first + after, self.last + before
        low = torch.minimum(low, high.clamp(min=0))
        size = (high - low + 1).clamp(min=1)
        power = torch.searchsorted(1 << torch.arange(62), size, right=True) - 1
        tables = [values]
        for j in range(int(power.max()) if len(power) else 0):
            shifted = tables[-1][min(1 << j, len(values) - 1) :]
            tables.append(tables[-1].clone())
            joined = torch.maximum(tables[-1][: len(shifted)], shifted)
            tables[-1][: len(shifted)] = joined
        table = torch.stack(tables)
        end = (high - (1 << power) + 1).clamp(min=0)
        return torch.maximum(table[power, low.clamp(min=0)], table[power, end])

    def _least(self, values: Tensor, after: int = 0) -> Tensor:
        return -self._most(-values, after)

    def bounds(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the minimum and the maximum of the values of each tile's nodes."""
        return self._least(values), self._most(values)

    def depths(self, step: int) -> Axis:
        """Returns the depths as tiles; those of several nodes are only bounds."""
        return Axis(step, torch.zeros_like(self.low), self.low, self.high + 1, self.high)


@dataclass(frozen=True, eq=False)
class OnPath(Condition):
    """Condition that the key's node is the query's or an ancestor, and `inner` on the depths."""

    nodes: Nodes
    inner: Condition
    settled = False

    def _sides(self, pairs: TilePairs) -> tuple[_Side, _Side]:
        q0, q1, k0, k1 = pairs.edges()
        return _Side(self.nodes, (q0, q1)), _Side(self.nodes, (k0, k1))

    def _relation(self, query: _Side, key: _Side) -> Tensor:
        """Returns whether all, some or none of the nodes of two tiles lie on one path."""
        first, last = query.bounds(self.nodes.enter)
        enter, leave = key.bounds(self.nodes.enter), key.bounds(self.nodes.leave)
        every = (enter[1] <= first) & (last < leave[0]) & query.inside & key.inside
        none = (enter[0] > last) | (leave[1] <= first) | ~query.touches | ~key.touches
        status = torch.where(every, FULL, VARIES)
        return torch.where(none, EMPTY, status).to(torch.int8)

    def _depth_pairs(self, query: _Side, key: _Side, q_step: int, k_step: int) -> TilePairs:
        return TilePairs.of_sequence(query.depths(q_step), key.depths(k_step), self.nodes.longest)

    def status(self, pairs: TilePairs) -> Tensor:
        if not len(self.nodes.depth) or not len(pairs):
            return torch.zeros(len(pairs), dtype=torch.int8)
        query, key = self._sides(pairs)
        relation = self._relation(query, key)
        inner = self.inner.status(self._depth_pairs(query, key, pairs.q.step, pairs.k.step))
        several = query.several | key.several
        if pairs.q.step * pairs.k.step > 1 and several.any():
            loose = self.inner.status(self._depth_pairs(query, key, 1, 1))
            inner = torch.where(several, loose, inner)
        return torch.minimum(relation, inner.to(torch.int8))

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        if not len(self.nodes.depth):
            return []
        query, key = self._sides(pairs)
        alone = query.several | key.several | ~query.inside | ~key.inside
        columns = self.inner.signature(self._depth_pairs(query, key, pairs.q.step, pairs.k.step))
        own = torch.where(alone, 1 + torch.arange(len(alone)), 0)
        return [own, *(torch.where(alone, 0, column) for column in columns)]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        row, low, high = self._key_ranges(queries, keys, origin)
        return spans_of_positions(
            queries, keys, row, low + origin.start[row], high + origin.start[row]
        )

    def _key_ranges(
        self, queries: Axis, keys: Axis, origin: Origin
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (query tile, first and last token) of ranges of keys that tiles may see."""
        nodes, none = self.nodes, torch.zeros(0, dtype=torch.int64)
        if not len(nodes.depth) or not len(queries) or not len(keys):
            return none, none, none
        tiles = _Side(nodes, (queries.start - origin.start, queries.last - origin.start))
        rows = torch.nonzero(tiles.touches)[:, 0]
        part, number = expand_counts((tiles.last - tiles.first + 1).clamp(min=0)[rows])
        row = rows[part]
        node = tiles.first[row] + number  # each part of a tile lies in one node
        first = torch.maximum(queries.start[row] - origin.start[row], nodes.start[node])
        last = torch.minimum(queries.last[row] - origin.start[row], nodes.start[node + 1] - 1)
        shift = nodes.depth[node] - nodes.start[node]
        zero = torch.zeros_like(row)
        depths = Axis(1, zero, first + shift, last + shift + 1, last + shift)
        size = max(1, int((keys.stop - keys.start).max()))
        begin = torch.arange(0, nodes.longest, size)
        end = (begin + size).clamp(max=nodes.longest)
        blocks = Axis(1, torch.zeros_like(begin), begin, end, end - 1)
        whole = Origin.of_sequence(len(row), nodes.longest)
        spans = self.inner.candidates(depths, blocks, whole)
        span, low, high = _by_row(spans, len(begin))
        node = node[span]
        ends = nodes.depth + nodes.start.diff()
        low, high = low * size, torch.minimum(high * size, ends[node])
        node = self._ancestor_above(node, high)
        ranges = []
        active = torch.nonzero(high > low)[:, 0]
        while len(active):  # from the lowest node of each range of depths up to the highest
            of = node[active]
            shift = nodes.start[of] - nodes.depth[of]
            top = torch.maximum(low[active], nodes.depth[of]) + shift
            bottom = torch.minimum(high[active], ends[of]) + shift - 1
            ranges.append((row[span[active]], top, bottom))
            above = nodes.depth[of] > low[active]
            node[active] = nodes.parent[of]
            active = active[above]
        if not ranges:
            return none, none, none
        found = [torch.cat(column) for column in zip(*ranges, strict=True)]
        return found[0], found[1], found[2]

    def _ancestor_above(self, node: Tensor, depth: Tensor) -> Tensor:
        """Returns the lowest of node and its ancestors that begins above a depth."""
        depths, leap = self.nodes.depth, self.nodes.parent
        leaps = []
        while (leap >= 0).any():
            leaps.append(leap)
            leap = torch.where(leap >= 0, leap[leap.clamp(min=0)], -1)
        for leap in reversed(leaps):  # leaps of 2^j ancestors, longest first
            far = leap[node]
            below = (far >= 0) & (depths[far.clamp(min=0)] >= depth)
            node = torch.where(below, far, node)
        above = torch.where(self.nodes.parent[node] >= 0, self.nodes.parent[node], node)
        return torch.where(depths[node] >= depth, above, node)

    def before(self, k: Tensor, x: Tensor, frame: Frame) -> Tensor:
        nodes = self.nodes
        if not len(nodes.depth):
            return torch.full_like(x, -1)
        x = x.clamp(max=int(nodes.start[-1]) - 1)
        query, key = nodes.of_token(x), nodes.of_token(k)
        of_path = frame.of_document(nodes.longest, nodes.longest)
        deepest = self.inner.before(nodes.depth_of(k), nodes.depth_of(x.clamp(min=0)), of_path)
        hit = nodes.sees(query, key) & (deepest >= nodes.depth[query])
        found = nodes.start[query] + deepest - nodes.depth[query]
        last = nodes.last[key]
        earlier = torch.where(query > last, nodes.start[last + 1], nodes.start[query]) - 1
        earlier = torch.where(query > key, earlier, -1)
        return torch.where(x < 0, -1, torch.where(hit, found, earlier))


def _by_row(spans: Spans, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (row, first column, exclusive end) of each range of a set, cut at row ends."""
    columns = max(1, columns)
    first, last = spans.begin // columns, (spans.end - 1) // columns
    span, number = expand_counts(last - first + 1)
    row = first[span] + number
    low = torch.maximum(spans.begin[span], row * columns) - row * columns
    return row, low, torch.minimum(spans.end[span], (row + 1) * columns) - row * columns
