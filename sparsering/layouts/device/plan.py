"""What the host tells ahead of a layout that is made on a device: how much room each table needs.

It does the row arithmetic that the device does, on the host's own tensors: a few runs for each row
of tiles, and the pairs of tiles that vary, not all that are visited.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...patterns.algebra import And, Frame, Mask, Not, Or, Pattern
from ...patterns.selected import selections_of
from ..conditions import Condition
from ..lowering import condition
from ..terms import terms
from ..tiles import Axis, Grid
from .axes import Lanes, axis_of, one_of
from .laid import Laid, Slots, cells_of, counts_within, held, numbered, with_counts
from .reach import Pairs, Rows, digest, picked
from .rules import alike, far_apart, has_closed_form, largest_number, simplified
from .runs import Runs
from .sample import sampled

_CPU = torch.device("cpu")
_MOST_BITMAPS = 1 << 12
_MOST_ENTRIES = (1 << 31) - 1
_MOST_INT32 = 1 << 30
_MOST_COMPARED = 64  # kinds of cells that are evaluated to see whether heads share a table


@dataclass(frozen=True, eq=False)
class TablePlan:
    """A table ahead of its making.

    Attributes:
        mask, rule: what it holds; the same as a simplified condition.
        axis: which of the pass's axes its tiles are of.
        ragged: whether some of its query tiles have no position.
        slots: which runs its rows have.
        entries: at most: those of pairs of tiles that the rule does not rule out.
        varying: how many of these hold in part, by the rule.
        even: whether these are of whole tiles.
        kinds: how many kinds of cells these have, which `digest` tells apart by `factors`.
        longest: most entries of a query tile, and of a key tile.
    """

    mask: Mask
    rule: Condition
    axis: int
    ragged: bool
    slots: Slots
    entries: int
    varying: int
    even: bool
    kinds: int
    factors: tuple[int, ...]
    longest: tuple[int, int]


@dataclass(frozen=True, eq=False)
class PassPlan:
    """A pass ahead of its making.

    Attributes:
        grid, offsets: of its axes.
        tables: distinct ones.
        use: which of them each table of the pass is; one where all heads share it.
        covers: whether every query is in a query tile, and every key in a key tile.
        branch: of the mixture.
    """

    grid: Grid
    offsets: tuple[int, ...]
    tables: tuple[TablePlan, ...]
    use: tuple[int, ...]
    covers: tuple[bool, bool]
    branch: int


class _Told(NamedTuple):
    """What one head sees, and on which axis."""

    mask: Mask
    rule: Condition
    axis: int


def plan(pattern: Pattern, frame: Frame, block_size: int) -> list[PassPlan] | None:
    """The passes of a pattern that fits the frame; None where some of it has no closed form."""
    if pattern.restarts is not None or pattern.num_batches() is not None:
        return None
    if selections_of(pattern):  # whose entries are told which slot they are of
        return None
    if not frame.q_len or not frame.kv_len or not frame.num_heads:
        return None
    found = []
    for number, branch in enumerate(pattern.branches):
        earlier: list[Mask] = []
        for grid, term in terms(branch, block_size):
            rest = And((term, Not(Or(tuple(earlier))))) if earlier else term
            made = _plan_pass(grid, rest, frame, block_size)
            if made is None:
                return None
            found.append(replace(made, branch=number))
            earlier.append(term)
    return found


def _plan_pass(grid: Grid, mask: Mask, frame: Frame, block_size: int) -> PassPlan | None:
    anchor, num_tables = grid.anchor, mask.num_tables(frame)
    num_axes = 1 if anchor is None else anchor.num_tables(frame)
    offsets = tuple(
        0 if anchor is None else anchor.offset_of(h, frame.num_kv_heads) for h in range(num_axes)
    )
    distinct: dict[Mask, _Told] = {}
    use = []
    for table in range(num_tables):
        head = table * frame.num_heads // num_tables
        seen, axis = mask.at(0, head, frame), frame.kv_head(head) if num_axes > 1 else 0
        if seen not in distinct:
            rule = simplified(condition(seen, frame), frame, grid, offsets[axis])
            if not has_closed_form(rule, grid, offsets[axis]):
                return None
            distinct[seen] = _Told(seen, rule, axis)
        use.append(list(distinct).index(seen))

    heads = list(distinct.values())
    most = max(
        *(largest_number(x.rule, frame) for x in heads), grid.segment, grid.step * block_size
    )
    dtype = torch.int32 if most + far_apart(frame) < _MOST_INT32 else torch.int64
    tiles = axes_of(grid, frame, block_size, offsets, _CPU, dtype)
    span = grid.step * (block_size - 1)
    even = all(int((x.last - x.start).min()) == span for x in tiles)
    axes = _Axes(grid, offsets, frame, block_size, *tiles, even)
    together = axes.plan_together(heads) if len(heads) > 1 and num_axes > 1 else None
    tables = [axes.plan(told) for told in heads] if together is None else [together]
    use = use if len(tables) > 1 else [0]
    if any(t.kinds > _MOST_BITMAPS or t.entries > _MOST_ENTRIES for t in tables):
        return None
    query_covers, key_covers = (
        len(x.stop) * block_size == length
        if even
        else bool((x.count.clamp(min=0).sum(-1) == length).all())
        for x, length in ((axes.queries, frame.q_len), (axes.keys, frame.kv_len))
    )
    return PassPlan(grid, offsets, tuple(tables), tuple(use), (query_covers, key_covers), 0)


def axes_of(
    grid: Grid,
    frame: Frame,
    block_size: int,
    offsets: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> tuple[Axis, Axis]:
    """The query tiles and the key tiles of a pass."""
    ranges = (frame.q_start, frame.q_start + frame.q_len), (0, frame.kv_len)
    query, key = (axis_of(grid, *x, block_size, offsets, device, dtype) for x in ranges)
    return query, key


@dataclass(frozen=True, eq=False)
class _Axes:
    """The tiles of a pass, on the host."""

    grid: Grid
    offsets: tuple[int, ...]
    frame: Frame
    block_size: int
    queries: Axis
    keys: Axis
    even: bool

    def plan(self, told: _Told) -> TablePlan:
        """A table of one head alone."""
        rows, keys = self._rows(told), one_of(self.keys, told.axis)
        ragged = not self.even and _any_empty(rows.queries)
        sample = sampled(
            told.rule, self.grid, rows.offset, rows.lanes, self.frame, len(rows.queries)
        )
        if sample is not None:
            queries = picked(rows.queries, sample.rows)
            rows = Rows.of(self.grid, rows.offset, self.frame, queries, rows.lanes)
        laid = Laid.of(told.rule, rows, keys, ragged=ragged)
        counts = laid.varying.counts().sum(1)
        pairs = laid.varying_pairs(int(counts.sum()))
        columns = laid.kinds(pairs) if len(pairs.row) else []
        table = self._planned(told, ragged, laid.slots, laid.some, pairs.tiles, columns)
        if sample is None:
            return table
        entries, varying = sample.total(laid.some.counts().sum(1)), sample.total(counts)
        longest = table.longest[0], sample.most_of_keys(laid.some, len(keys.start))
        return replace(table, entries=entries, varying=varying, longest=longest)

    def plan_together(self, heads: list[_Told]) -> TablePlan | None:
        """A table that serves all heads, by tiles that hold those of each; None where none does.

        Their rows are laid out in one go, end to end.
        """
        first, num_heads, dtype = heads[0], len(heads), self.queries.start.dtype
        rows_of = [self._rows(told) for told in heads]
        lanes = Lanes.together([x.lanes for x in rows_of], self.queries.start.shape[1], dtype)
        if lanes is None or not all(
            alike(told.rule, first.rule, self.grid, rows.offset, rows_of[0].offset)
            for told, rows in zip(heads, rows_of, strict=True)
        ):
            return None
        which = torch.tensor([told.axis for told in heads])
        queries, keys = (
            Axis(x.step, x.residue, x.start[which].flatten(), x.stop, x.last[which].flatten())
            for x in (self.queries, self.keys)
        )
        begin = torch.arange(num_heads, dtype=dtype) * self.keys.start.shape[1]
        of_row = begin.repeat_interleave(self.queries.start.shape[1])
        rows, ragged = (
            Rows.of(self.grid, rows_of[0].offset, self.frame, queries, lanes),
            _any_empty(queries),
        )
        laid = Laid.of(first.rule, rows, keys, ragged=ragged, of_row=of_row)
        pairs = laid.varying_pairs(int(laid.varying.counts().sum()))

        def of_heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (num_heads, -1))

        columns = laid.kinds(pairs)
        runs = [x for y in (laid.some, laid.full) for x in (y.begin, y.end)]
        if len(pairs.row) % num_heads or not all(_same(of_heads(x)) for x in (*runs, *columns)):
            return None
        counts = [of_heads(x.count) for x in (pairs.tiles.q, pairs.tiles.k)]
        largest = [(x == x.amax(0)).all(1) for x in counts]
        chosen = torch.nonzero(largest[0] & largest[1])[:1, 0].tolist()
        if not chosen:
            return None
        own = slice(chosen[0] * len(counts[0][0]), (chosen[0] + 1) * len(counts[0][0]))
        told, tiles = heads[chosen[0]], pairs.tiles[torch.arange(len(pairs.row))[own]]
        columns = [x[own] for x in columns]
        begin, end = (of_heads(x)[:, chosen[0]] for x in (laid.some.begin, laid.some.end))
        some = Runs(begin, end)
        table = self._planned(told, ragged, laid.slots, some, tiles, columns)
        alone = all(_same(x) for x in counts) or self._says_alike(table, tiles, columns, counts)
        return table if alone else None

    def _rows(self, told: _Told) -> Rows:
        queries, offset = one_of(self.queries, told.axis), self.offsets[told.axis]
        lanes = Lanes.of(self.grid, queries, self.frame.kv_len, self.block_size, offset)
        return Rows.of(self.grid, offset, self.frame, queries, lanes)

    def _says_alike(
        self, table: TablePlan, tiles: Pairs, columns: list[Tensor], counts: list[Tensor]
    ) -> bool:
        """Whether none, some or all pairs of positions hold in tiles of each head's counts."""
        if table.kinds > _MOST_COMPARED:
            return False
        if not table.even:
            columns = with_counts(columns, tiles, self.block_size)
        number, first = numbered(columns, table.factors, table.kinds)
        cells = cells_of(table.mask, tiles[first], self.frame, self.block_size)
        count = held(counts_within(cells), number, *counts)
        return _same((count > 0).long() + (count == counts[0] * counts[1]))

    def _planned(
        self,
        told: _Told,
        ragged: bool,
        slots: Slots,
        some: Runs,
        tiles: Pairs,
        columns: list[Tensor],
    ) -> TablePlan:
        counts = some.counts().sum(1)
        kinds: int = 0
        factors: tuple[int, ...] = ()
        if len(tiles):
            columns = columns if self.even else with_counts(columns, tiles, self.block_size)
            kinds, factors = _num_kinds(columns)
        of_keys = torch.zeros(self.keys.start.shape[1] + 1, dtype=torch.int32)
        for edge, by in ((some.begin, 1), (some.end, -1)):
            of_keys.index_add_(
                0, edge.reshape(-1), torch.tensor(by, dtype=torch.int32).expand(edge.numel())
            )
        longest = int(counts.max()), int(of_keys.cumsum(0).max())
        entries = int(counts.sum())
        return TablePlan(
            *told, ragged, slots, entries, len(tiles), self.even, kinds, factors, longest
        )


def _any_empty(tiles: Axis) -> bool:
    return bool((tiles.last < tiles.start).any())


def _same(x: Tensor) -> bool:
    """Whether the rows of the last two dims are equal."""
    return torch.equal(x[..., :1, :].expand_as(x), x)


def _num_kinds(columns: list[Tensor]) -> tuple[int, tuple[int, ...]]:
    """How many distinct rows there are, and the factors by which `digest` tells them apart.

    More than are ever made where no factors do.
    """
    edges = [[int(edge) for edge in column.aminmax()] for column in columns]
    factors = tuple(high - low + 1 for low, high in edges)
    if math.prod(factors) >= 1 << 62:
        return _MOST_BITMAPS + 1, factors[1:]
    known = digest(columns, factors[1:]).sort().values
    return int((known[1:] != known[:-1]).sum()) + 1, factors[1:]
