"""What the host tells ahead of a layout that is made on a device: how much room each table needs.

It does the row arithmetic that the device does, on the host's own tensors: a few runs for each row
of tiles, and the pairs of tiles that vary, not all that are visited.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...patterns.algebra import And, Frame, Mask, Not, Or, Pattern
from ..conditions import Condition
from ..lowering import condition
from ..terms import terms
from ..tiles import Axis, Grid
from .axes import Lanes, axis_of, one_of
from .laid import Laid, Varying, cells_of, counts_within, digest, held, numbered, with_counts
from .reach import has_closed_form, known_of_lanes, same_kinds, simplified

_CPU = torch.device("cpu")
_MOST_BITMAPS = 1 << 12
_MOST_ENTRIES = (1 << 31) - 1
_MOST_COMPARED = 64  # kinds of cells that are evaluated to see whether heads share a table


@dataclass(frozen=True, eq=False)
class TablePlan:
    """A table ahead of its making.

    Attributes:
        mask, rule: what it holds; the same as a simplified condition.
        axis: which of the pass's axes its tiles are of.
        ragged: whether some of its query tiles have no position.
        entries: at most: those of pairs of tiles that the rule does not rule out.
        varying: how many of these hold in part, by the rule.
        kinds: how many kinds of cells these have.
        longest: most entries of a query tile, and of a key tile.
    """

    mask: Mask
    rule: Condition
    axis: int
    ragged: bool
    entries: int
    varying: int
    kinds: int
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


def plan(pattern: Pattern, frame: Frame, block_size: int) -> list[PassPlan] | None:
    """The passes of a pattern that fits the frame; None where some of it has no closed form."""
    if pattern.restarts is not None or pattern.num_batches() is not None:
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
    number_of: dict[Mask, int] = {}
    axis_of_table, rules, use = [], [], []
    for table in range(num_tables):
        head = table * frame.num_heads // num_tables
        seen, axis = mask.at(0, head, frame), frame.kv_head(head) if num_axes > 1 else 0
        if seen not in number_of:
            number_of[seen] = len(rules)
            rules.append(simplified(condition(seen, frame)))
            axis_of_table.append(axis)
            if not has_closed_form(rules[-1], grid, offsets[axis]):
                return None
        use.append(number_of[seen])

    queries, keys = axes_of(grid, frame, block_size, offsets, _CPU)
    planned = [
        _plan_table(*told, grid, offsets, queries, keys, frame, block_size)
        for told in zip(number_of, rules, axis_of_table, strict=True)
    ]
    tables = [table for table, _, _ in planned]
    if any(t.kinds > _MOST_BITMAPS or t.entries > _MOST_ENTRIES for t in tables):
        return None
    shared = _shared([*planned], frame, block_size) if len(tables) > 1 else 0
    if shared is not None:
        tables, use = [tables[shared]], [0]
    lengths = (queries, frame.q_len), (keys, frame.kv_len)
    covers = tuple(bool((x.count.clamp(min=0).sum(-1) == n).all()) for x, n in lengths)
    return PassPlan(grid, offsets, tuple(tables), tuple(use), covers, 0)  # type: ignore[arg-type]


def axes_of(
    grid: Grid, frame: Frame, block_size: int, offsets: tuple[int, ...], device: torch.device
) -> tuple[Axis, Axis]:
    """The query tiles and the key tiles of a pass."""
    ranges = (frame.q_start, frame.q_start + frame.q_len), (0, frame.kv_len)
    query, key = (axis_of(grid, *x, block_size, offsets, device) for x in ranges)
    return query, key


def lay(
    mask_rule: Condition,
    grid: Grid,
    offset: int,
    queries: Axis,
    keys: Axis,
    frame: Frame,
    block_size: int,
    ragged: bool,
) -> Laid:
    """A simplified condition on the tiles of one axis."""
    lanes = Lanes.of(grid, queries, frame.kv_len, block_size, offset)
    return Laid.of(mask_rule, grid, queries, keys, lanes, ragged)


_Planned = tuple[TablePlan, Laid, tuple[Varying, list[Tensor]]]


def _plan_table(
    mask: Mask,
    rule: Condition,
    axis: int,
    grid: Grid,
    offsets: tuple[int, ...],
    queries: Axis,
    keys: Axis,
    frame: Frame,
    block_size: int,
) -> _Planned:
    own, others = one_of(queries, axis), one_of(keys, axis)
    ragged = bool((own.last < own.start).any())
    laid = lay(rule, grid, offsets[axis], own, others, frame, block_size, ragged)
    counts = laid.some.counts().sum(1)
    varying = int(laid.varying.counts().sum())
    pairs = laid.varying_pairs(varying)
    columns = laid.kinds(pairs)
    kinds = _num_kinds(with_counts(columns, pairs.tiles, block_size)) if varying else 0
    of_keys = torch.zeros(len(others.stop) + 1, dtype=torch.int64)
    for edge, by in ((laid.some.begin, 1), (laid.some.end, -1)):
        of_keys.index_add_(0, edge.reshape(-1), torch.tensor(by).expand(edge.numel()))
    longest = int(counts.max()), int(of_keys.cumsum(0).max())
    entries = int(counts.sum())
    table = TablePlan(mask, rule, axis, ragged, entries, varying, kinds, longest)
    return table, laid, (pairs, columns)


def _num_kinds(columns: list[Tensor]) -> int:
    """How many distinct rows there are; more than are ever made where digests do not tell."""
    known, order = digest(columns).sort()
    new = known[1:] != known[:-1]
    rows = torch.stack(columns).index_select(1, order)
    differ = (rows[:, 1:] != rows[:, :-1]).any(0)
    return int(new.sum()) + 1 if torch.equal(new, differ) else _MOST_BITMAPS + 1


def _shared(planned: list[_Planned], frame: Frame, block_size: int) -> int | None:
    """The table that serves all heads, by tiles that hold those of each; None where none does."""
    _, first, (_, columns) = planned[0]
    for _, laid, (_, others) in planned[1:]:
        if laid.rows.lanes.tiles != first.rows.lanes.tiles:
            return None
        if len(columns) and len(columns[0]) and not _alike(laid, first):
            return None
        for mine, own in ((first.some, laid.some), (first.full, laid.full)):
            if not torch.equal(mine.begin, own.begin) or not torch.equal(mine.end, own.end):
                return None
        if not all(torch.equal(a, b) for a, b in zip(columns, others, strict=True)):
            return None
    counts = [torch.stack((pairs.tiles.q.count, pairs.tiles.k.count)) for *_, (pairs, _) in planned]
    most = torch.stack(counts).amax(0)
    if all(torch.equal(x, most) for x in counts):
        return 0
    largest = [i for i, x in enumerate(counts) if torch.equal(x, most)]
    if not largest:
        return None
    told = [_told(*x, frame, block_size) for x in planned]
    same = all(x is not None and torch.equal(x, told[0]) for x in told)  # type: ignore[arg-type]
    return largest[0] if same else None


def _alike(a: Laid, b: Laid) -> bool:
    """Whether what their conditions are made of differs in nothing that varies within tiles."""
    mine, others = a.reach.leaves(), b.reach.leaves()
    return len(mine) == len(others) and all(
        same_kinds(x.rule, y.rule) or (known_of_lanes(x, a.rows) and known_of_lanes(y, b.rows))
        for x, y in zip(mine, others, strict=True)
    )


def _told(
    table: TablePlan, laid: Laid, varying: tuple[Varying, list[Tensor]], frame: Frame, size: int
) -> Tensor | None:
    """Whether no pair of positions, some or all hold of each pair of tiles that varies."""
    pairs, columns = varying
    if table.kinds > _MOST_COMPARED:
        return None
    tiles = pairs.tiles
    number, first = numbered(with_counts(columns, tiles, size), table.kinds)
    corners = counts_within(cells_of(table.mask, tiles[first], frame, size))
    count = held(corners, number, tiles.q.count, tiles.k.count)
    return (count > 0).long() + (count == tiles.q.count * tiles.k.count)
