"""What ranks need of each other, from the pattern: key tokens to the token, and pairs to compute.

Tiles are judged from coarse to fine by the conditions that also compile layouts: a pair of tiles
that holds wholly, or not at all, is settled at once, whatever its size; one that varies is cut into
smaller pairs, and the smallest are evaluated from the mask's definition. The cost follows the edges
of the pattern, not its area.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..layouts.bitmaps import unpack
from ..layouts.compile import evaluate, terms
from ..layouts.conditions import EMPTY, FULL, Condition, Origin, condition
from ..layouts.tiles import Axis, Grid, Ranges, Spans
from ..patterns.algebra import And, Frame, Mask, Not, Or
from ..patterns.blocks import block_masks
from ..rows import expand_counts, number_rows

_LEAF = 128  # tokens of the smallest tiles
_SPLIT = 4  # a tile that varies is cut into this many
_COARSE_TILES = 512  # of the whole sequence, to begin with
_AT_A_TIME = 1 << 15  # pairs of tiles
_ROWS_AT_A_TIME = 1 << 10  # query tiles whose partners are listed
_MOST_LANES = 4096

Found = tuple[Tensor, Tensor, Tensor, int]
"""Progressions of tokens: (group, first, last, step)."""


class Cut(NamedTuple):
    """An axis in pieces: ascending ranges, the rank that owns each, and a label for each."""

    ranges: Ranges
    rank: Tensor
    label: Tensor

    def piece_of(self, tiles: Axis) -> Tensor:
        """The range that holds each tile; tiles have positions, and none crosses its end."""
        ends = torch.tensor([stop for _, stop in self.ranges], dtype=torch.int64)
        return torch.searchsorted(ends, tiles.start, right=True)


@dataclass(frozen=True, eq=False)
class Runs:
    """Sets of tokens as disjoint progressions start, start + step, ... up to `last`.

    Attributes:
        step: of all of them.
        group: which set each belongs to, ascending.
        start, last: of each.
    """

    step: int
    group: Tensor
    start: Tensor
    last: Tensor

    @property
    def count(self) -> Tensor:
        return (self.last - self.start) // self.step + 1

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.group, self.start, self.last))

    def sizes(self, groups: int) -> Tensor:
        """[groups] tokens of each set."""
        return torch.zeros(groups, dtype=torch.int64).index_add_(0, self.group, self.count)

    def of(self, group: int) -> Tensor:
        """The tokens of one set, in the order of its progressions."""
        first, end = torch.searchsorted(self.group, torch.tensor([group, group + 1])).tolist()
        start, count = self.start[first:end], self.count[first:end]
        run, number = expand_counts(count)
        return start[run] + self.step * number


def needed_keys(masks: list[Mask], frame: Frame, queries: Cut, keys: Cut, world: int) -> Runs:
    """Key tokens that queries of one label visit and another rank owns. Sets are numbered query
    label * world + rank of the keys.
    """
    found: list[Found] = []
    for mask in masks:
        for size, grid, term in _coarse_terms(mask, frame):
            rule = condition(term, frame)
            for q, k in _pairs(rule, grid, size, frame, queries, keys):
                piece, sender = queries.piece_of(q), keys.rank[keys.piece_of(k)]
                away = queries.rank[piece] != sender
                group = (queries.label[piece] * world + sender)[away]
                _visited_keys(rule, term, q[away], k[away], group, size, frame, found)
    return union(found, frame.kv_len)


def count_pairs(
    branches: list[Mask], frame: Frame, queries: Cut, keys: Cut, world: int, labels: int
) -> Tensor:
    """[labels, world] pairs, with multiplicity, of queries of each label with keys of each rank."""
    total = torch.zeros(labels, world, dtype=torch.int64)
    for branch in branches:
        earlier: list[Mask] = []
        for size, grid, term in _coarse_terms(branch, frame):
            rest = And((term, Not(Or(tuple(earlier))))) if earlier else term
            rule = condition(rest, frame)
            for q, k in _pairs(rule, grid, size, frame, queries, keys):
                place = queries.label[queries.piece_of(q)] * world + keys.rank[keys.piece_of(k)]
                total.view(-1).index_add_(0, place, _pairs_of(rule, rest, q, k, size, frame))
            earlier.append(term)
    return total


def _coarse_terms(mask: Mask, frame: Frame) -> Iterator[tuple[int, Grid, Mask]]:
    """(size of the first tiles, grid, mask) of each term. Block masks begin with small tiles, whose
    partners they list themselves.
    """
    size = _LEAF
    while not block_masks(mask) and size * _COARSE_TILES < frame.q_len:
        size *= _SPLIT
    for grid, term in terms(mask, size):
        yield size, grid, term


def _pairs(
    rule: Condition, grid: Grid, size: int, frame: Frame, queries: Cut, keys: Cut
) -> Iterator[tuple[Axis, Axis]]:
    """Pairs of tiles where the rule may hold, some at a time."""
    offset = 0 if grid.anchor is None else grid.anchor.offset_of(0, 1)
    q, k = (grid.axis(cut.ranges, size, offset) for cut in (queries, keys))
    for rows in torch.arange(len(q)).split(_ROWS_AT_A_TIME):
        yield from _pairs_of_rows(rule, q[rows], k, frame)


def _pairs_of_rows(rule: Condition, q: Axis, k: Axis, frame: Frame) -> Iterator[tuple[Axis, Axis]]:
    spans = rule.candidates(q, k, Origin.of_sequence(len(q), frame.kv_len))
    span, number = expand_counts(-(-(spans.end - spans.begin) // _AT_A_TIME))
    begin = spans.begin[span] + number * _AT_A_TIME
    end = torch.minimum(spans.end[span], begin + _AT_A_TIME)
    batch = (end - begin).cumsum(0) // _AT_A_TIME
    sizes = torch.unique_consecutive(batch, return_counts=True)[1].tolist()
    for part in torch.arange(len(begin)).split(sizes):
        count = (end - begin)[part]
        own, number = expand_counts(count)
        pair = begin[part][own] + number
        row, column = pair // len(k), pair % len(k)
        real = (q.count[row] > 0) & (k.count[column] > 0)
        yield q[row[real]], k[column[real]]


def _visited_keys(
    rule: Condition,
    mask: Mask,
    q: Axis,
    k: Axis,
    group: Tensor,
    size: int,
    frame: Frame,
    found: list[Found],
) -> None:
    """Appends (group, first, last, step) of the key tokens that some query of each pair visits."""
    status = rule.status(q, k, Origin.of_sequence(len(q), frame.kv_len))
    full = status == FULL
    found.append((group[full], k.start[full], k.last[full], k.step))
    varies = torch.nonzero((status != FULL) & (status != EMPTY))[:, 0]
    if not len(varies):
        return
    q, k, group = q[varies], k[varies], group[varies]
    _, first = _kinds(rule, q, k, frame, group, k.start)  # alike for one set: look into one
    q, k, group = q[first], k[first], group[first]
    if size > _LEAF:
        for part in torch.arange(len(group)).split(_AT_A_TIME // _SPLIT**2):
            pair, q_part, k_part = _split(q[part], k[part], size)
            _visited_keys(
                rule, mask, q_part, k_part, group[part][pair], size // _SPLIT, frame, found
            )
        return
    kind, first = _kinds(rule, q, k, frame)
    bitmaps, _ = evaluate(mask, q[first], k[first], frame, size)
    slots = torch.arange(size)
    cells = unpack(bitmaps, size) & (slots < q[first].count[:, None])[:, :, None]
    visited = cells.any(1) & (slots < k[first].count[:, None])
    edge = torch.nn.functional.pad(visited, (1, 1)).to(torch.int8).diff(dim=1)
    owner, begin = torch.nonzero(edge == 1, as_tuple=True)
    end = torch.nonzero(edge == -1, as_tuple=True)[1] - 1
    runs = torch.bincount(owner, minlength=len(first))
    pair, number = expand_counts(runs[kind])
    run = (runs.cumsum(0) - runs)[kind][pair] + number
    start = k.start[pair]
    found.append((group[pair], start + begin[run] * k.step, start + end[run] * k.step, k.step))


def _pairs_of(rule: Condition, mask: Mask, q: Axis, k: Axis, size: int, frame: Frame) -> Tensor:
    """How many pairs each pair of tiles holds. Pairs of tiles with equal content are looked into
    once.
    """
    status = rule.status(q, k, Origin.of_sequence(len(q), frame.kv_len))
    pairs = torch.where(status == FULL, q.count * k.count, 0)
    varies = torch.nonzero((status != FULL) & (status != EMPTY))[:, 0]
    if not len(varies):
        return pairs
    q, k = q[varies], k[varies]
    kind, first = _kinds(rule, q, k, frame)
    q, k = q[first], k[first]
    if size == _LEAF:
        _, held = evaluate(mask, q, k, frame, size)
    else:
        held = torch.zeros(len(first), dtype=torch.int64)
        for part in torch.arange(len(first)).split(_AT_A_TIME // _SPLIT**2):
            pair, q_part, k_part = _split(q[part], k[part], size)
            parts = _pairs_of(rule, mask, q_part, k_part, size // _SPLIT, frame)
            held.index_add_(0, part[pair], parts)
    pairs[varies] = held[kind]
    return pairs


def _kinds(
    rule: Condition, q: Axis, k: Axis, frame: Frame, *further: Tensor
) -> tuple[Tensor, Tensor]:
    """Numbers pairs of tiles by their cells, and further columns: (kind of each, one of each)."""
    signature = rule.signature(q, k, Origin.of_sequence(len(q), frame.kv_len))
    return number_rows([q.count, k.count, *further, *signature])


def _split(q: Axis, k: Axis, size: int) -> tuple[Tensor, Axis, Axis]:
    """Every pair of a part of q[i] with a part of k[i]: (i, part, part)."""
    at = torch.cartesian_prod(torch.arange(_SPLIT), torch.arange(_SPLIT))
    pair = torch.arange(len(q)).repeat_interleave(len(at))
    number = at.repeat(len(q), 1)
    q_part = _part(q[pair], number[:, 0], size // _SPLIT)
    k_part = _part(k[pair], number[:, 1], size // _SPLIT)
    real = torch.nonzero((q_part.count > 0) & (k_part.count > 0))[:, 0]
    return pair[real], q_part[real], k_part[real]


def _part(tiles: Axis, number: Tensor, size: int) -> Axis:
    start = tiles.start + number * size * tiles.step
    last = torch.minimum(tiles.last, start + (size - 1) * tiles.step)
    return Axis(tiles.step, tiles.residue, start, last + 1, last)


def union(found: list[Found], length: int) -> Runs:
    """Disjoint progressions of one step that hold the same tokens below `length`."""
    steps = sorted({part[3] for part in found if len(part[0])})
    if len(steps) <= 1:
        return _merged(found, steps[0] if steps else 1, length)
    own = [_merged([part for part in found if part[3] == step], step, length) for step in steps]
    common = math.lcm(*steps)
    if common <= _MOST_LANES:
        return _merged([_in_lanes(runs, common) for runs in own], common, length)
    return _merged([_as_tokens(runs) for runs in own], 1, length)


def _merged(found: list[Found], step: int, length: int) -> Runs:
    """The union of progressions of one step: of spans on a line for each group and residue."""
    reach = length // step + 2  # lines never touch
    begin, end = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    for group, start, last, _ in found:
        line = (group * step + start % step) * reach
        begin.append(line + start // step)
        end.append(begin[-1] + (last - start) // step + 1)
    spans = Spans(torch.cat(begin), torch.cat(end))
    line = spans.begin // reach
    start = spans.begin % reach * step + line % step
    return Runs(step, line // step, start, start + (spans.end - spans.begin - 1) * step)


def _in_lanes(runs: Runs, step: int) -> Found:
    """Progressions as several ones of a multiple of their step."""
    lanes = step // runs.step
    group, start, last = (x.repeat_interleave(lanes) for x in (runs.group, runs.start, runs.last))
    start = start + runs.step * torch.arange(lanes).repeat(len(runs.start))
    return group, start, last, step  # one that begins after its last token is empty


def _as_tokens(runs: Runs) -> Found:
    run, number = expand_counts(runs.count)
    token = runs.start[run] + runs.step * number
    return runs.group[run], token, token, 1
