"""The condition of `Tree`: query and key lie on one path, and meet a condition on their depths."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ground.rows import expand_counts
from ..patterns.algebra import Frame
from ..patterns.tree import Nodes
from .leaves import EMPTY, FULL, VARIES, Condition
from .tiles import Axis, Origin, Spans, TilePairs

_MOST_PAIRS = 1 << 16  # tile pairs whose nodes are listed at a time, to bound memory


class _Side:
    """One side (query or key tiles) of n pairs in a tree: the nodes it spans, and depth bounds."""

    def __init__(self, nodes: Nodes, tokens: tuple[Tensor, Tensor]) -> None:
        most = int(nodes.start[-1]) - 1
        self.inside = (tokens[0] >= 0) & (tokens[1] <= most)  # whether all tokens are in the tree
        self.touches = (tokens[1] >= 0) & (tokens[0] <= most)
        begin, end = (x.clamp(0, most) for x in tokens)
        self.first, self.last = nodes.of_token(begin), nodes.of_token(end)
        self.several = self.last > self.first
        low, high = nodes.depth_of(begin), nodes.depth_of(end)
        # A tile over several nodes has the first one's last tokens and the last one's first tokens.
        self.low = torch.where(self.several, torch.minimum(low, self._least(nodes.depth, 1)), low)
        most_before = self._most(nodes.depth + nodes.start.diff(), 0, -1) - 1
        self.high = torch.where(self.several, torch.maximum(high, most_before), high)

    def _most(self, values: Tensor, after: int = 0, before: int = 0) -> Tensor:
        """Returns each tile's largest node value, over nodes first + after to last + before."""
        low, high = self.first + after, self.last + before
        low = torch.minimum(low, high.clamp(min=0))
        size = (high - low + 1).clamp(min=1)
        power = torch.searchsorted(1 << torch.arange(62), size, right=True) - 1
        tables = [values]
        for j in range(int(power.max()) if len(power) else 0):
            shifted = tables[-1][min(1 << j, len(values) - 1) :]
            tables.append(tables[-1].clone())
            tables[-1][: len(shifted)] = torch.maximum(tables[-1][: len(shifted)], shifted)
        table = torch.stack(tables)
        end = (high - (1 << power) + 1).clamp(min=0)
        return torch.maximum(table[power, low.clamp(min=0)], table[power, end])

    def _least(self, values: Tensor, after: int = 0) -> Tensor:
        """Returns each tile's smallest node value, over nodes first + after to last."""
        return -self._most(-values, after)

    def bounds(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the smallest and the largest of `values`, one per node, in each tile's nodes."""
        return self._least(values), self._most(values)

    def depths(self, step: int) -> Axis:
        """Returns the depths of each tile's tokens as tiles; over several nodes they are bounds."""
        return Axis(
            step=step,
            residue=torch.zeros_like(self.low),
            start=self.low,
            stop=self.high + 1,
            last=self.high,
        )


@dataclass(frozen=True, eq=False)
class OnPath(Condition):
    """Condition that the key's node is the query's or an ancestor; `inner` applies to depths."""

    nodes: Nodes
    inner: Condition
    settled = False

    def _sides(self, pairs: TilePairs) -> tuple[_Side, _Side]:
        q0, q1, k0, k1 = pairs.edges()
        return _Side(self.nodes, (q0, q1)), _Side(self.nodes, (k0, k1))

    def _relation(self, query: _Side, key: _Side) -> Tensor:
        """Returns whether all (FULL), some (VARIES) or no nodes of two tiles share a path."""
        first, last = query.bounds(self.nodes.enter)
        enter, leave = key.bounds(self.nodes.enter), key.bounds(self.nodes.leave)
        every = (enter[1] <= first) & (last < leave[0]) & query.inside & key.inside
        none = (enter[0] > last) | (leave[1] <= first) | ~query.touches | ~key.touches
        # These bounds decide little if nodes are not in depth-first order, so walk up the
        # ancestors.
        unknown = torch.nonzero(~none & ~every)[:, 0]
        for part in unknown.split(_MOST_PAIRS):
            pair, number = expand_counts(query.last[part] - query.first[part] + 1)
            pair, node = part[pair], query.first[part][pair] + number
            seen = self.nodes.nearest(node, key.last[pair]) >= key.first[pair]
            none[part] = True
            none[pair[seen]] = False
        return torch.where(none, EMPTY, torch.where(every, FULL, VARIES)).to(torch.int8)

    def _depth_pairs(self, query: _Side, key: _Side, q_step: int, k_step: int) -> TilePairs:
        """Returns tile pairs whose positions are depths, for the inner condition."""
        return TilePairs.of_sequence(query.depths(q_step), key.depths(k_step), self.nodes.longest)

    def status(self, pairs: TilePairs) -> Tensor:
        if not len(self.nodes.depth) or not len(pairs):
            return torch.zeros(len(pairs), dtype=torch.int8)
        query, key = self._sides(pairs)
        inner = self.inner.status(self._depth_pairs(query, key, pairs.q.step, pairs.k.step))
        several = query.several | key.several
        if pairs.q.step * pairs.k.step > 1 and several.any():
            loose = self.inner.status(self._depth_pairs(query, key, 1, 1))
            inner = torch.where(several, loose, inner)
        return torch.minimum(self._relation(query, key), inner.to(torch.int8))

    def signature(self, pairs: TilePairs) -> list[Tensor]:
        if not len(self.nodes.depth):
            return []
        query, key = self._sides(pairs)
        alone = query.several | key.several | ~query.inside | ~key.inside
        columns = self.inner.signature(self._depth_pairs(query, key, pairs.q.step, pairs.k.step))
        own = torch.where(alone, 1 + torch.arange(len(alone)), 0)
        return [own, *(torch.where(alone, 0, column) for column in columns)]

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        """Finds attending tile pairs by halving ranges of key tiles.

        It stops at a range when none or all of its pairs attend, or when one tile is left.
        """
        row, first = torch.arange(len(queries)), torch.minimum(keys.start, keys.stop)
        lanes = keys.residue.contiguous(), queries.residue.contiguous()
        low = torch.searchsorted(*lanes)
        high = torch.searchsorted(*lanes, right=True)
        begins, ends = [row[:0]], [row[:0]]
        while len(row := row[high > low]):
            low, high = low[high > low], high[high > low]
            stop = keys.stop[high - 1]
            tiles = Axis(
                step=1, residue=keys.residue[low], start=first[low], stop=stop, last=stop - 1
            )
            of_row = replace(queries[row], step=1)  # `tiles` joins several tiles, so it has step 1
            status = self.status(TilePairs(of_row, tiles, Origin(*(x[row] for x in origin))))
            found = (status != EMPTY) & ((status == FULL) | (high - low == 1))
            begins.append((row * len(keys) + low)[found])
            ends.append((row * len(keys) + high)[found])
            halved = (status != EMPTY) & ~found
            row, low, high = row[halved], low[halved], high[halved]
            middle = (low + high) // 2
            row = row.repeat(2)
            low, high = torch.cat((low, middle)), torch.cat((middle, high))
        return Spans(torch.cat(begins), torch.cat(ends))

    attending = candidates  # exact for tiles of one token, whose status is never VARIES

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
