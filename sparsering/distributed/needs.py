"""Finds the key tokens that ranks need from each other, and counts the pairs that they compute.

It tests pairs of a query tile and a key tile. If only some of a tile pair's (query, key) pairs
attend, it is split into smaller ones; in the smallest, the mask is evaluated for each pair. So the
cost grows with the borders between masked and visited areas, not with the areas.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..ground.rows import expand_counts, number_rows
from ..layouts.bitmaps import count_pairs as count_bits
from ..layouts.bitmaps import unpack
from ..layouts.compile import evaluate
from ..layouts.leaves import EMPTY, FULL, VARIES, Condition, Origin, TilePairs
from ..layouts.lower import condition, native_table
from ..layouts.terms import disjoint_terms, terms
from ..layouts.tiles import Axis, Grid, Ranges, Spans
from ..patterns.algebra import Frame, Mask, joined_masks
from ..patterns.blocks import BlockwiseMask
from .sharding import without

_LEAF = 128  # tokens in the smallest tiles
_SPLIT = 4  # number of smaller tiles that a tile is split into
_COARSE_TILES = 512  # queries are first cut into about this many tiles at most
_AT_A_TIME = 1 << 15  # tile pairs that are tested at once
_ROWS_AT_A_TIME = 1 << 10  # query tiles whose key tiles are listed at once
_MOST_LINES = 4096  # if the lcm of all steps is larger, `union` lists single tokens


class Cut(NamedTuple):
    """Ranges of positions, ascending, with the rank that owns each and the group that it is in.

    `label` is the index of the group. With P ranks, group r < P has the rows that stay on rank r.
    Group P + i has the rows of `travellers[i]` (see `cut`), which may be sent to other ranks.
    """

    ranges: Ranges
    rank: Tensor  # [ranges] the rank that owns each range
    label: Tensor  # [ranges] the group of each range

    def piece_of(self, tiles: Axis) -> Tensor:
        """Returns the index of the range that each tile lies in; no tile crosses a range's end."""
        return self.piece_at(tiles.start)

    def piece_at(self, position: Tensor) -> Tensor:
        """Returns the index of the range that contains each position."""
        ends = torch.tensor([stop for _, stop in self.ranges], dtype=torch.int64)
        return torch.searchsorted(ends, position, right=True)


def cut(ranges: Sequence[Ranges], travellers: Sequence[tuple[int, Ranges]] = ()) -> Cut:
    """Cuts the positions of all ranks into ranges; `travellers` are rows that go to other ranks.

    Args: the positions that each rank owns; (rank, some of its rows that may be sent to others) for
    each traveller.
    """
    pieces = []
    for rank, owned in enumerate(ranges):
        marked = sorted(row for owner, rows in travellers if owner == rank for row in rows)
        pieces += [(piece, rank, rank) for piece in without(owned, marked)]
    for number, (owner, rows) in enumerate(travellers):
        pieces += [(row, owner, len(ranges) + number) for row in rows]
    pieces.sort()
    of_pieces = torch.tensor([piece[1:] for piece in pieces], dtype=torch.int64).view(-1, 2)
    return Cut([piece for piece, _, _ in pieces], *of_pieces.unbind(1))


@dataclass(frozen=True, eq=False)
class TokenRanges:
    """Numbered sets of tokens, stored as progressions start, start + step, ..., last."""

    step: int
    number: Tensor  # the index of each progression's set; `union` sorts by it
    start: Tensor  # first token of each progression
    last: Tensor  # last token of each progression

    @property
    def count(self) -> Tensor:
        return (self.last - self.start) // self.step + 1

    def sizes(self, sets: int) -> Tensor:
        """Returns the number of tokens in each of the sets 0, 1, ..., sets - 1."""
        return torch.zeros(sets, dtype=torch.int64).index_add_(0, self.number, self.count)

    def of(self, number: int) -> Tensor:
        """Returns the tokens of one set, in the order of its progressions."""
        first, end = torch.searchsorted(self.number, torch.tensor([number, number + 1])).tolist()
        columns = (x[first:end] for x in (self.number, self.start, self.last))
        return TokenRanges(self.step, *columns).tokens()[1]

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Lists the tokens of all progressions: (index of each token's set, token)."""
        run, place = expand_counts(self.count)
        return self.number[run], self.start[run] + self.step * place


class Visits(NamedTuple):
    """Result of `visits`: the keys that queries see on other ranks, and the number of pairs.

    Set `label * world + owner` of `keys` has the keys of rank `owner` that the rows of group
    `label` visit.
    """

    keys: list[TokenRanges]  # one item per step of progressions; items may have the same tokens
    pairs: Tensor  # [labels, world]: (query, key) pairs by the query's label and the key's rank


def needed_keys(
    masks: list[Mask], frame: Frame, queries: Cut, keys: Cut, world: int
) -> TokenRanges:
    """Returns the keys on other ranks that each group of queries sees under any of the masks.

    Set `label * world + owner` has the keys of rank `owner` that the rows of group `label` visit.
    """
    found = [visits(mask, frame, queries, keys, world, 0, count=False).keys for mask in masks]
    return union([part for parts in found for part in parts], frame.kv_len)


def count_pairs(
    branches: list[Mask], frame: Frame, queries: Cut, keys: Cut, world: int, labels: int
) -> Tensor:
    """Counts (query, key) pairs of all branches, by the query's label and the key's rank.

    The result is int64 [labels, world].
    """
    total = torch.zeros(labels, world, dtype=torch.int64)
    for branch in branches:
        total += visits(branch, frame, queries, keys, world, labels, list_keys=False).pairs
    return total


def visits(
    mask: Mask,
    frame: Frame,
    queries: Cut,
    keys: Cut,
    world: int,
    labels: int,
    *,
    list_keys: bool = True,
    count: bool = True,
) -> Visits:
    """Finds the `Visits` of one mask; with list_keys=False or count=False only the other half."""
    total = torch.zeros(labels, world, dtype=torch.int64)
    needed: list[TokenRanges] = []
    size = _first_size(mask, frame)
    for (grid, term), (_, rest) in zip(terms(mask, size), disjoint_terms(mask, size), strict=True):
        # `rest` has those pairs of `term` that no earlier term has, so that each pair counts once
        rule, rule_of_rest = condition(term, frame), condition(rest, frame)
        for pairs, found in _pairs(rule, grid, size, frame, queries, keys):
            piece, sender = queries.piece_of(pairs.q), keys.rank[keys.piece_of(pairs.k)]
            place = queries.label[piece] * world + sender
            status = found
            if status is None and (list_keys or rest is term):
                status = rule.status(pairs)
            if count:
                known = status if rest is term else None
                number_of_pairs = _pairs_of(rule_of_rest, rest, pairs, size, frame, known)
                total.view(-1).index_add_(0, place, number_of_pairs)
            if list_keys and status is not None:
                foreign = queries.rank[piece] != sender
                some, number, known = pairs[foreign], place[foreign], status[foreign]
                needed += _visited_keys(rule, term, some, number, size, frame, known)
    return Visits(_joined_by_step(needed, frame.kv_len), total)


class FineVisits:
    """Visits between small pieces of a sequence, from which several shardings are compared.

    Pieces are cut at the edges of all shardings, so each tile is tested once for all of them.
    `needed_keys` and `count_pairs` return what the functions of these names do.
    """

    def __init__(
        self,
        masks: Iterable[Mask],
        frame: Frame,
        shardings: Sequence[Sequence[Ranges]],
        rows: Ranges,
    ) -> None:
        """Tests all tiles.

        Queries are also cut at the edges of `rows`, which may be sent to others.
        """
        owned = [edge for parts in shardings for part in parts for piece in part for edge in piece]
        keys = _between(owned)
        queries = _between([*owned, *(edge for row in rows for edge in row)])
        self.length = frame.kv_len
        self.query_starts, self.key_starts = map(_starts, (queries, keys))
        key_numbers, labels = torch.arange(len(keys)), torch.arange(len(queries))
        of_keys = Cut(keys, rank=key_numbers, label=key_numbers)
        of_queries = Cut(queries, rank=of_keys.piece_at(self.query_starts), label=labels)
        self.of_mask = {
            mask: visits(mask, frame, of_queries, of_keys, len(keys), len(queries))
            for mask in masks
        }

    def needed_keys(
        self, masks: Iterable[Mask], queries: Cut, keys: Cut, world: int
    ) -> TokenRanges:
        """Returns what `needs.needed_keys` finds for one sharding, without testing tiles again."""
        piece, sender = queries.piece_at(self.query_starts), self._senders(keys)
        needed: list[TokenRanges] = []
        for runs in (runs for mask in masks for runs in self.of_mask[mask].keys):
            of_query = piece[runs.number // len(sender)]
            of_key = sender[runs.number % len(sender)]
            foreign = queries.rank[of_query] != of_key
            number = (queries.label[of_query] * world + of_key)[foreign]
            needed.append(TokenRanges(runs.step, number, runs.start[foreign], runs.last[foreign]))
        return union(needed, self.length)

    def count_pairs(
        self, branches: Iterable[Mask], queries: Cut, keys: Cut, world: int, labels: int
    ) -> Tensor:
        """Returns what `needs.count_pairs` finds for one sharding, without testing tiles again."""
        label = queries.label[queries.piece_at(self.query_starts)]
        place = (label[:, None] * world + self._senders(keys)).flatten()
        total = torch.zeros(labels * world, dtype=torch.int64)
        for branch in branches:
            total.index_add_(0, place, self.of_mask[branch].pairs.flatten())
        return total.view(labels, world)

    def _senders(self, keys: Cut) -> Tensor:
        """Returns the rank that owns each small piece of keys."""
        return keys.rank[keys.piece_at(self.key_starts)]


def _starts(ranges: Ranges) -> Tensor:
    return torch.tensor([start for start, _ in ranges], dtype=torch.int64)


def _between(edges: list[int]) -> list[tuple[int, int]]:
    """Returns the ranges between consecutive edges: [3, 1, 5] gives [(1, 3), (3, 5)]."""
    return list(itertools.pairwise(sorted(set(edges))))


def _first_size(mask: Mask, frame: Frame) -> int:
    """Returns how many tokens the first tiles of a search have.

    A long sequence begins with more.
    """
    size = _LEAF  # a blockwise mask keeps it, because it lists its blocks fast at any size
    blockwise = any(isinstance(part, BlockwiseMask) for part in joined_masks(mask))
    while not blockwise and size * _COARSE_TILES < frame.q_len:
        size *= _SPLIT
    return size


def _pairs(
    rule: Condition, grid: Grid, size: int, frame: Frame, queries: Cut, keys: Cut
) -> Iterator[tuple[TilePairs, Tensor | None]]:
    """Yields batches of tile pairs that may contain an attending (query, key) pair.

    With each batch it yields the status of the pairs, if the compiled kernel has found them, or
    None. The kernel lists the smallest tiles, of masks that it can express.
    """
    offset = grid.offset_of(0, 1)
    every_q, k = (grid.axis(pieces.ranges, size, offset) for pieces in (queries, keys))
    for rows in torch.arange(len(every_q)).split(_ROWS_AT_A_TIME):
        q = every_q[rows]
        if size == _LEAF and (table := native_table(rule, q, k, size)) is not None:
            row_ptr, column, bitmap, _, _ = table
            row = torch.repeat_interleave(row_ptr.diff())
            for part in torch.arange(len(row)).split(_AT_A_TIME):
                pairs = TilePairs.of_sequence(q[row[part]], k[column[part]], frame.kv_len)
                yield pairs, torch.where(bitmap[part] < 0, FULL, VARIES).to(torch.int8)
            continue
        spans = rule.candidates(q, k, Origin.of_sequence(len(q), frame.kv_len))
        span, number = expand_counts(-(-(spans.end - spans.begin) // _AT_A_TIME))
        begin = spans.begin[span] + number * _AT_A_TIME
        count = torch.minimum(spans.end[span] - begin, torch.tensor(_AT_A_TIME))
        batch = count.cumsum(0) // _AT_A_TIME
        sizes = torch.unique_consecutive(batch, return_counts=True)[1].tolist()
        for part in torch.arange(len(begin)).split(sizes):
            span, number = expand_counts(count[part])
            pair = begin[part][span] + number
            row, column = pair // len(k), pair % len(k)
            real = (q.count[row] > 0) & (k.count[column] > 0)
            yield TilePairs.of_sequence(q[row[real]], k[column[real]], frame.kv_len), None


def _visited_keys(
    rule: Condition,
    mask: Mask,
    pairs: TilePairs,
    set_number: Tensor,
    size: int,
    frame: Frame,
    status: Tensor | None = None,
) -> Iterator[TokenRanges]:
    """Yields the keys that queries of tile pairs see; pair i adds to the set `set_number[i]`.

    `status` is the status of the pairs, if the caller has it already.
    """
    status = rule.status(pairs) if status is None else status
    full = status == FULL
    step = pairs.k.step
    yield TokenRanges(step, set_number[full], pairs.k.start[full], pairs.k.last[full])
    varies = torch.nonzero((status != FULL) & (status != EMPTY))[:, 0]
    if not len(varies):
        return
    pairs, set_number = pairs[varies], set_number[varies]
    # Tile pairs that add equal keys to the same set form a group; one pair of it is enough.
    _, first = _kinds(rule, pairs, set_number, pairs.k.start)
    pairs, set_number = pairs[first], set_number[first]
    if size > _LEAF:
        for part in torch.arange(len(set_number)).split(_AT_A_TIME // _SPLIT**2):
            pair, parts = _split(pairs[part], size)
            numbers = set_number[part][pair]
            yield from _visited_keys(rule, mask, parts, numbers, size // _SPLIT, frame)
        return
    kind, first = _kinds(rule, pairs)
    bitmaps = evaluate(mask, pairs[first], frame, size)
    slots = torch.arange(size)
    real_q, real_k = (slots < tile.count[first, None] for tile in (pairs.q, pairs.k))
    visited = (unpack(bitmaps, size) & real_q[:, :, None]).any(1) & real_k
    edge = torch.nn.functional.pad(visited, (1, 1)).to(torch.int8).diff(dim=1)
    owner, begin = torch.nonzero(edge == 1, as_tuple=True)
    end = torch.nonzero(edge == -1, as_tuple=True)[1] - 1
    runs = torch.bincount(owner, minlength=len(first))
    pair, place = expand_counts(runs[kind])
    run = (runs.cumsum(0) - runs)[kind][pair] + place
    start = pairs.k.start[pair]
    yield TokenRanges(step, set_number[pair], start + begin[run] * step, start + end[run] * step)


def _pairs_of(
    rule: Condition,
    mask: Mask,
    pairs: TilePairs,
    size: int,
    frame: Frame,
    status: Tensor | None = None,
) -> Tensor:
    """Counts the attending (query, key) pairs in each tile pair.

    `status` is the status of the pairs, if the caller has it already.
    """
    status = rule.status(pairs) if status is None else status
    total = torch.where(status == FULL, pairs.q.count * pairs.k.count, 0)
    varies = torch.nonzero((status != FULL) & (status != EMPTY))[:, 0]
    if not len(varies):
        return total
    pairs = pairs[varies]
    kind, first = _kinds(rule, pairs)
    pairs = pairs[first]
    if size == _LEAF:
        bitmaps = evaluate(mask, pairs, frame, size)
        counts = count_bits(bitmaps, torch.arange(len(pairs)), pairs.q.count, pairs.k.count)
    else:
        counts = torch.zeros(len(first), dtype=torch.int64)
        for part in torch.arange(len(first)).split(_AT_A_TIME // _SPLIT**2):
            pair, parts = _split(pairs[part], size)
            counts.index_add_(0, part[pair], _pairs_of(rule, mask, parts, size // _SPLIT, frame))
    total[varies] = counts[kind]
    return total


def _kinds(rule: Condition, pairs: TilePairs, *further: Tensor) -> tuple[Tensor, Tensor]:
    """Groups tile pairs with equal bitmaps, counts and `further`, to examine one pair of each.

    Returns: the group of each pair; the index of one pair of each group.
    """
    return number_rows([pairs.q.count, pairs.k.count, *further, *rule.signature(pairs)])


def _split(pairs: TilePairs, size: int) -> tuple[Tensor, TilePairs]:
    """Splits each tile pair into 4 x 4 smaller ones.

    Returns (index of the large pair, small pairs).
    """
    at = torch.cartesian_prod(torch.arange(_SPLIT), torch.arange(_SPLIT))
    pair = torch.arange(len(pairs)).repeat_interleave(len(at))
    whole, size = pairs[pair], size // _SPLIT
    parts = []
    for tiles, index in zip((whole.q, whole.k), at.repeat(len(pairs), 1).unbind(1), strict=True):
        start = tiles.start + index * size * tiles.step
        last = torch.minimum(tiles.last, start + (size - 1) * tiles.step)
        parts.append(
            Axis(step=tiles.step, residue=tiles.residue, start=start, stop=last + 1, last=last)
        )
    q, k = parts
    real = torch.nonzero((q.count > 0) & (k.count > 0))[:, 0]
    return pair[real], TilePairs(q, k, whole.origin)[real]


def union(parts: list[TokenRanges], length: int) -> TokenRanges:
    """Joins sets of tokens from several parts, so that each set has each of its tokens once.

    Returns progressions that all have one step; no two of a set share a token.
    """
    by_step = _joined_by_step(parts, length)
    if len(by_step) <= 1:
        return by_step[0] if by_step else _merged(parts, 1, length)
    steps = [part.step for part in by_step]
    if (common := math.lcm(*steps)) <= _MOST_LINES:
        return _merged([_with_step(runs, common) for runs in by_step], common, length)
    tokens = map(TokenRanges.tokens, by_step)
    return _merged([TokenRanges(1, number, x, x) for number, x in tokens], 1, length)


def _joined_by_step(parts: list[TokenRanges], length: int) -> list[TokenRanges]:
    """Joins progressions that have the same step; returns one `TokenRanges` for each step."""
    steps = sorted({part.step for part in parts if len(part.number)})
    return [_merged([x for x in parts if x.step == step], step, length) for step in steps]


def _merged(parts: list[TokenRanges], step: int, length: int) -> TokenRanges:
    """Joins progressions of one step into longer ones, which share no token within a set."""
    # Each (set, token % step) has `reach` integers of its own; the last one stays unused as a gap.
    reach = length // step + 2
    begin, end = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    for part in parts:
        line = (part.number * step + part.start % step) * reach
        begin.append(line + part.start // step)
        end.append(begin[-1] + (part.last - part.start) // step + 1)
    spans = Spans(torch.cat(begin), torch.cat(end))
    line = spans.begin // reach
    start = spans.begin % reach * step + line % step
    return TokenRanges(step, line // step, start, start + (spans.end - spans.begin - 1) * step)


def _with_step(runs: TokenRanges, step: int) -> TokenRanges:
    """Splits progressions into ones of a larger step, a multiple of theirs, so that steps agree."""
    lines = step // runs.step
    number, start, last = (x.repeat_interleave(lines) for x in (runs.number, runs.start, runs.last))
    start = start + runs.step * torch.arange(lines).repeat(len(runs.start))
    return TokenRanges(step, number, start, last)
