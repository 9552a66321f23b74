"""Compiles a pattern to passes of tiles, at the cost of the tile pairs that it visits.

1. `terms` splits a mask into unions of masks that one grid of tiles fits each (plain, dilated, per
document).
2. Each term becomes one pass, with the pairs of earlier passes taken out, so that passes are
disjoint.
3. Per head and batch entry that sees a mask of its own, `conditions` finds the pairs of tiles and
their status; the
   cells of those that vary are evaluated once per distinct signature, from the mask's definition.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .algebra import And, Frame, Mask, Or, Pattern
from .conditions import EMPTY, FULL, Not, Origin, condition
from .patterns import Dilated, Packed, SlidingWindow
from .permutation import mix
from .tiles import Axis, Grid, Ranges

_MOST_CELLS = 1 << 21  # cells evaluated at a time
_MOST_SPLIT = 256  # masks that the terms of a mask may repeat


@dataclass(frozen=True)
class Table:
    """What one head of one batch entry visits in one pass, ordered by query tile, then key tile.

    Attributes:
        row_ptr: [query tiles + 1], where each query tile's entries begin.
        key_tile: [entries].
        mask: [entries], number of the entry's bitmap, or -1 where all its pairs are in.
        num_pairs: (query, key) pairs of the table.
    """

    row_ptr: Tensor
    key_tile: Tensor
    mask: Tensor
    num_pairs: int


@dataclass(frozen=True)
class CompiledPass:
    """One term of one branch: axes per kv head that needs its own, tables [batch][head], distinct
    bitmaps.
    """

    queries: list[Axis]
    keys: list[Axis]
    tables: list[list[Table]]
    bitmaps: Tensor
    num_pairs: float


def compile_passes(
    pattern: Pattern,
    frame: Frame,
    block_size: int,
    queries: Ranges | None = None,
    keys: Ranges | None = None,
) -> list[CompiledPass]:
    """Passes of a pattern that fits the frame, one branch after another; their pairs are disjoint
    within a branch. `queries`, `keys`: which positions, default all.
    """
    if queries is None:
        queries = [(frame.q_start, frame.q_start + frame.q_len)]
    if keys is None:
        keys = [(0, frame.kv_len)]
    compiled = []
    for branch in pattern.branches:
        earlier: list[Mask] = []
        for grid, term in terms(branch, block_size):
            rest = And((term, Not(Or(tuple(earlier))))) if earlier else term
            compiled.append(_compile_pass(grid, rest, frame, block_size, queries, keys))
            earlier.append(term)
    return compiled


def terms(mask: Mask, block_size: int) -> list[tuple[Grid, Mask]]:
    """Masks whose union is `mask`, each with a grid whose tiles hold all its pairs; one term per
    distinct grid.
    """
    match mask:
        case Dilated():
            return [(_dilated_grid(mask, block_size), mask)]
        case SlidingWindow(_, _, dilation) if dilation > 1:
            return [(Grid(dilation, dilation * block_size, residues=dilation), mask)]
        case Packed(lengths, inner):
            return [
                (_in_documents(grid, lengths), Packed(lengths, part))
                for grid, part in terms(inner, block_size)
            ]
        case And(masks):
            found = terms(masks[0], block_size)
            for part in masks[1:]:
                found = _unite([
                    (max(grid, other, key=Grid.selectivity), And((left, right)))
                    for grid, left in found
                    for other, right in terms(part, block_size)
                ])  # fmt: skip
                if len(found) > 1 and (split := sum(_num_masks(m) for _, m in found)) > _MOST_SPLIT:
                    raise ValueError(
                        f"expected a pattern that splits into at most {_MOST_SPLIT} masks, got "
                        f"{split} or more; join fewer unions of dilated masks by &"
                    )
            return found
        case Or(masks):
            return _unite([term for part in masks for term in terms(part, block_size)])
    return [(Grid(1, block_size), mask)]


def _num_masks(mask: Mask) -> int:
    return sum(map(_num_masks, mask.masks)) if isinstance(mask, And | Or) else 1


def _unite(found: list[tuple[Grid, Mask]]) -> list[tuple[Grid, Mask]]:
    by_grid: dict[Grid, list[Mask]] = {}
    for grid, mask in found:
        by_grid.setdefault(grid, []).append(mask)
    return [
        (grid, masks[0] if len(masks) == 1 else Or(tuple(masks))) for grid, masks in by_grid.items()
    ]


def _dilated_grid(mask: Dilated, block_size: int) -> Grid:
    length, rate = mask.segment_length, mask.dilation_rate
    reach = rate * block_size
    if length < reach and length % rate == 0:
        length *= reach // length  # several whole segments to a tile
    if rate == 1 and length % block_size == 0:
        return Grid(1, block_size)
    return Grid(rate, length, anchor=mask if rate > 1 else None)


def _in_documents(grid: Grid, lengths: tuple[int, ...]) -> Grid:
    """The grid restarted in each document. Packed in Packed: every (non-empty) outer document
    repeats the inner ones.
    """
    if grid.documents is not None:
        lengths = grid.documents * sum(length > 0 for length in lengths)
    return replace(grid, documents=lengths)


def _compile_pass(
    grid: Grid, mask: Mask, frame: Frame, block_size: int, query_ranges: Ranges, key_ranges: Ranges
) -> CompiledPass:
    anchor = grid.anchor
    num_tables, num_batches = mask.num_tables(frame), mask.num_batches() or 1
    num_axes = 1 if anchor is None else anchor.num_tables(frame)
    offsets = [
        0 if anchor is None else anchor.offset_of(h, frame.num_kv_heads) for h in range(num_axes)
    ]
    queries = [grid.axis(query_ranges, block_size, s) for s in offsets]
    keys = [grid.axis(key_ranges, block_size, s) for s in offsets]

    seen: dict[Mask, int] = {}  # heads and batch entries that see one mask share one table
    found: list[tuple[Table, Tensor]] = []
    use: list[list[int]] = []
    for batch in range(num_batches):
        use.append([])
        for table in range(num_tables):
            head = table * frame.num_heads // num_tables
            own = mask.at(batch, head, frame)
            if own not in seen:
                seen[own] = len(found)
                axis = frame.kv_head(head) if num_axes > 1 else 0
                found.append(_table(own, queries[axis], keys[axis], frame, block_size))
            use[-1].append(seen[own])
    bitmaps, tables = _share_bitmaps(found)
    rows = [[tables[number] for number in row] for row in use]
    # heads may share a table and yet have tiles of different counts
    num_pairs = sum(table.num_pairs for row in rows for table in row) / (num_batches * num_tables)
    if all(_equal(table, row[0]) for row in rows for table in row[1:]):
        rows = [row[:1] for row in rows]
    if all(_equal(a, b) for row in rows[1:] for a, b in zip(row, rows[0], strict=True)):
        rows = rows[:1]
    return CompiledPass(queries, keys, rows, bitmaps, num_pairs)


def _table(
    mask: Mask, queries: Axis, keys: Axis, frame: Frame, block_size: int
) -> tuple[Table, Tensor]:
    """One table, its `mask` numbering the rows of the bitmaps returned beside it."""
    rule = condition(mask, frame)
    everywhere = Origin.of_sequence(len(queries), frame.kv_len)
    pairs = rule.candidates(queries, keys, everywhere).expand()
    row, column = pairs // max(1, len(keys)), pairs % max(1, len(keys))
    q_count, k_count = queries.count[row], keys.count[column]
    q, k = queries[row], keys[column]
    nowhere = Origin.of_sequence(len(row), frame.kv_len)
    status = torch.where((q_count > 0) & (k_count > 0), rule.status(q, k, nowhere), EMPTY)

    number = torch.full_like(row, -1)
    num_pairs = torch.where(status == FULL, q_count * k_count, 0)
    varies = torch.nonzero((status != EMPTY) & (status != FULL))[:, 0]
    bitmaps = torch.zeros(0, block_size * block_size // 8, dtype=torch.uint8)
    if len(varies):
        q, k, nowhere = q[varies], k[varies], Origin(*(x[varies] for x in nowhere))
        columns = [q_count[varies], k_count[varies], *rule.signature(q, k, nowhere)]
        group, first = number_rows(columns)
        bitmaps, held = evaluate(mask, q[first], k[first], frame, block_size)
        num_pairs[varies] = held[group]
        number[varies] = torch.where(held[group] == (q_count * k_count)[varies], -1, group)
    kept = num_pairs > 0
    row_ptr = torch.zeros(len(queries) + 1, dtype=torch.int64)
    row_ptr[1:] = torch.bincount(row[kept], minlength=len(queries)).cumsum(0)
    return Table(row_ptr, column[kept], number[kept], int(num_pairs.sum())), bitmaps


def number_rows(columns: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Numbers the distinct rows of some columns in order: (number of each row, one row of each
    number).
    """
    group = torch.zeros_like(columns[0])
    for column in columns:
        if (column != column[0]).any():
            _, rank = column.unique(return_inverse=True)
            _, group = (group * (int(rank.max()) + 1) + rank).unique(return_inverse=True)
    first = torch.zeros(int(group.max()) + 1, dtype=torch.int64, device=group.device)
    first[group] = torch.arange(len(group), device=group.device)
    return group, first


def evaluate(mask: Mask, q: Axis, k: Axis, frame: Frame, block_size: int) -> tuple[Tensor, Tensor]:
    """Bitmaps of pairs of tiles, packed, and how many real pairs each holds."""
    bitmaps, held = [], []
    at_a_time = max(1, _MOST_CELLS // block_size**2)
    slots = torch.arange(block_size)
    for begin in range(0, len(q), at_a_time):
        part = torch.arange(begin, min(begin + at_a_time, len(q)))
        queries, keys = q[part], k[part]
        p, x = queries.positions(block_size)[:, :, None], keys.positions(block_size)[:, None, :]
        cells = mask.holds(p, x, frame).expand(len(part), block_size, block_size)
        real = (slots < queries.count[:, None])[:, :, None] & (slots < keys.count[:, None])[
            :, None, :
        ]
        held.append((cells & real).sum((1, 2)))
        bitmaps.append(pack(cells))
    return torch.cat(bitmaps), torch.cat(held)


def pack(cells: Tensor) -> Tensor:
    """[n, b, b] bool to [n, b * b / 8] bytes, the first cell in the lowest bit."""
    weights = 1 << torch.arange(8, device=cells.device, dtype=torch.uint8)
    return (cells.reshape(len(cells), -1, 8) * weights).sum(-1, dtype=torch.uint8)


def unpack(bitmaps: Tensor, block_size: int) -> Tensor:
    """The inverse of `pack`: [n, b, b] bool."""
    bits = (bitmaps[..., None] >> torch.arange(8, device=bitmaps.device, dtype=torch.uint8)) & 1
    return bits.view(*bitmaps.shape[:-1], block_size, block_size).bool()


def _share_bitmaps(found: list[tuple[Table, Tensor]]) -> tuple[Tensor, list[Table]]:
    """Stores equal bitmaps once and drops those that no entry uses."""
    start, everything, used = 0, [], []
    for table, bitmaps in found:
        everything.append(torch.where(table.mask < 0, -1, table.mask + start))
        used.append(bitmaps)
        start += len(bitmaps)
    numbers, bitmaps = torch.cat(everything), torch.cat(used)
    masked = numbers >= 0
    kept, inverse = numbers[masked].unique(return_inverse=True)
    distinct, rank = _distinct_rows(bitmaps[kept])
    numbers[masked] = rank[inverse]
    split = numbers.split([len(table.mask) for table, _ in found])
    return distinct, [
        replace(table, mask=mask) for (table, _), mask in zip(found, split, strict=True)
    ]


def _distinct_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows of a byte matrix and the number of each row: found by hash, confirmed by
    comparison.
    """
    words = rows.view(torch.int64) if rows.shape[1] % 8 == 0 else rows.long()
    digest = (words * mix(torch.arange(words.shape[1]))).sum(1)
    _, rank = digest.unique(return_inverse=True)
    first = torch.zeros(int(rank.max()) + 1 if len(rank) else 0, dtype=torch.int64)
    first[rank.flip(0)] = torch.arange(len(rank)).flip(0)
    if not torch.equal(rows[first][rank], rows):  # two rows with one digest
        distinct, rank = rows.unique(dim=0, return_inverse=True)
        return distinct, rank
    return rows[first], rank


def _equal(a: Table, b: Table) -> bool:
    return a is b or all(
        torch.equal(x, y)
        for x, y in ((a.row_ptr, b.row_ptr), (a.key_tile, b.key_tile), (a.mask, b.mask))
    )
