"""Layouts over keys that lie elsewhere than their positions say: those that a cache has kept.

Either keys in any order, each with its position, and a page of queries at once (`page_over`); or
the spans of positions that a layout visits, pushed together (`Spanned`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..patterns.algebra import Frame, Mask, Pattern
from ..patterns.arguments import MOST_TOKENS
from .bitmaps import pack
from .compile import CompiledPass, Table, assemble, share_tables
from .conditions import EMPTY, FULL, VARIES
from .layout import BlockLayout, Pass
from .lowering import condition
from .tiles import Axis, Grid, Spans, TilePairs

_MOST_CELLS = 1 << 21  # evaluated at a time


def page_over(
    pattern: Pattern,
    positions: Sequence[Tensor],
    starts: Sequence[int],
    frame: Frame,
    queries: int,
    block_size: int,
) -> tuple[Pass, ...]:
    """One tile of queries over keys at any positions; a pass for each branch.

    Args:
        pattern: causal.
        positions: of each batch entry, or one for all: [Hkv, keys] int64, -1 where there is none.
        starts: the position of the first query of each of them.
        frame: that the pattern is laid against, where it depends on one.
        queries: how many, at most `block_size`.

    Cost: O(queries keys) for each head and batch entry that differ, of tiles that vary.
    """
    return tuple(
        _pass_over(branch, number, positions, starts, frame, queries, block_size)
        for number, branch in enumerate(pattern.branches)
    )


def _pass_over(
    branch: Mask,
    number: int,
    positions: Sequence[Tensor],
    starts: Sequence[int],
    frame: Frame,
    queries: int,
    block_size: int,
) -> Pass:
    batches = branch.num_batches() or 1
    seen: list[list[tuple[Mask, int, int]]] = []  # by each head of each entry: those alike share
    wanted: dict[Mask, dict[tuple[int, int], None]] = {}
    for entry in range(max(batches, len(positions))):
        which = min(entry, len(positions) - 1)
        first_alike = _equal_rows(positions[which])
        masks = [branch.at(min(entry, batches - 1), h, frame) for h in range(frame.num_heads)]
        kv_heads = [first_alike[frame.kv_head(h)] for h in range(frame.num_heads)]
        seen.append([(mask, which, h) for mask, h in zip(masks, kv_heads, strict=True)])
        for mask, *row in seen[-1]:
            wanted.setdefault(mask, {})[row[0], row[1]] = None
    number_of: dict[tuple[Mask, int, int], int] = {}
    found: list[tuple[Table, Tensor]] = []
    for mask, rows in wanted.items():
        number_of |= {(mask, *row): len(found) + i for i, row in enumerate(rows)}
        first = torch.tensor([starts[which] for which, _ in rows])
        keys = torch.stack([positions[which][h] for which, h in rows])
        found += _tables(mask, first, keys, frame, queries, block_size)
    use = [[number_of[what] for what in row] for row in seen]
    bitmaps, tables = share_tables(found, use)
    num_keys = positions[0].shape[1]
    query, key = (_plain_axis(tokens, block_size) for tokens in (queries, num_keys))
    compiled = CompiledPass([query], [key], tables, bitmaps, math.nan, number)
    here = frame._replace(q_len=queries, kv_len=num_keys, q_start=0)
    return assemble(compiled, here, block_size)


def _plain_axis(tokens: int, block_size: int) -> Axis:
    return Grid(1, block_size).axis([(0, tokens)], block_size, 0)


def _equal_rows(x: Tensor) -> list[int]:
    """For each row the first one that is equal to it."""
    return [next(j for j in range(i + 1) if torch.equal(x[i], x[j])) for i in range(len(x))]


def _tables(
    mask: Mask, first: Tensor, positions: Tensor, frame: Frame, queries: int, block_size: int
) -> list[tuple[Table, Tensor]]:
    """Tables of the queries from `first` [rows] on over positions [rows, keys], with bitmaps.

    Tiles that vary are looked into, those of all rows together.
    """
    rows, keys = positions.shape
    tiles = -(-keys // block_size)
    k = torch.nn.functional.pad(positions, (0, tiles * block_size - keys), value=-1)
    k, p = k.view(rows * tiles, block_size), first.repeat_interleave(tiles)
    status = _status(mask, p, p + queries - 1, k, frame)
    varies = torch.nonzero(status == VARIES)[:, 0]
    bitmaps = torch.zeros(len(varies), block_size, block_size // 8, dtype=torch.uint8)
    for part in torch.arange(len(varies)).split(max(1, _MOST_CELLS // block_size**2)):
        key = k[varies[part], None]
        query = (p[varies[part], None] + torch.arange(queries))[:, :, None]
        held = mask.holds(query, key.clamp(min=0), frame)
        held = held & (key >= 0) if (key < 0).any() else held
        shape = (len(part), queries, block_size)
        bitmaps[part, :queries] = pack(held.expand(shape)).view(*shape[:2], block_size // 8)
    bitmaps = bitmaps.flatten(1)
    status[varies[~(bitmaps != 0).any(1)]] = EMPTY
    number = torch.full_like(status, -1, dtype=torch.int64)
    number[varies] = torch.arange(len(varies))
    begin = torch.searchsorted(varies, torch.arange(rows + 1) * tiles).tolist()
    found = []
    for row in range(rows):
        of_row = slice(row * tiles, (row + 1) * tiles)
        tile = torch.nonzero(status[of_row] != EMPTY)[:, 0]
        which = number[of_row][tile]
        which = torch.where(which < 0, -1, which - begin[row])
        table = Table(torch.tensor([0, len(tile)]), tile, which, 0)
        found.append((table, bitmaps[begin[row] : begin[row + 1]]))
    return found


def _status(mask: Mask, first: Tensor, last: Tensor, k: Tensor, frame: Frame) -> Tensor:
    """[tiles] EMPTY, VARIES or FULL of queries and tiles of keys, by the spans that they lie in."""
    there = k >= 0
    some = torch.nonzero(there.any(1))[:, 0]
    low, high = torch.where(there, k, MOST_TOKENS).amin(1)[some], k.amax(1)[some]
    none, first, last = torch.zeros_like(some), first[some], last[some]
    queries = Axis(1, none, first, last + 1, last)
    keys = Axis(1, none, low, high + 1, high)
    pairs = TilePairs.of_sequence(queries, keys, frame.kv_len)
    status = torch.full((len(k),), EMPTY, dtype=torch.int8)
    status[some] = condition(mask, frame).status(pairs).to(torch.int8)
    return torch.where((status == FULL) & ~there.all(1), VARIES, status)


@dataclass(frozen=True, eq=False)
class Spanned:
    """A layout over the spans of key positions that it visits, one after another.

    Attributes:
        layout: with key tiles where they now lie, their positions in `Pass.key_origin`.
        begin, end: the spans, ascending and disjoint.
    """

    layout: BlockLayout
    begin: Tensor
    end: Tensor

    @classmethod
    def of(cls, layout: BlockLayout) -> "Spanned":
        visited = [_visited_tiles(p) for p in layout.passes]
        edges = [
            (p.key_start[tiles], torch.maximum(p.key_stop, p.key_start)[tiles])
            for p, tiles in zip(layout.passes, visited, strict=True)
        ]
        none = torch.zeros(0, dtype=torch.int64)
        spans = Spans(
            torch.cat([none, *(start for start, _ in edges)]),
            torch.cat([none, *(stop for _, stop in edges)]),
        )
        made = cls(layout, spans.begin, spans.end)
        passes = tuple(
            made._moved(p, tiles) for p, tiles in zip(layout.passes, visited, strict=True)
        )
        frame = layout.frame._replace(kv_len=made.length)
        moved = BlockLayout(frame, layout.block_size, passes, math.nan)
        return replace(made, layout=moved)

    @property
    def length(self) -> int:
        """Tokens of all spans."""
        return int((self.end - self.begin).sum())

    def place_of(self, positions: Tensor) -> Tensor:
        """Where positions lie now; `length` where they are in no span."""
        if not len(self.begin):
            return torch.zeros_like(positions)
        first = (self.end - self.begin).cumsum(0) - (self.end - self.begin)
        span = (torch.searchsorted(self.begin, positions, right=True) - 1).clamp(min=0)
        inside = (positions >= self.begin[span]) & (positions < self.end[span])
        return torch.where(inside, positions - self.begin[span] + first[span], self.length)

    def _moved(self, p: Pass, visited: Tensor) -> Pass:
        start = torch.where(visited, self.place_of(p.key_start), 0)
        stop = torch.where(visited, start + p.key_stop - p.key_start, 0)
        covers = (p.covers[0], False)
        return p.like(key_start=start, key_stop=stop, key_origin=p.key_start, covers=covers)


def _visited_tiles(p: Pass) -> Tensor:
    """[S, key tiles] whether some head of an axis visits a tile."""
    axes, tiles = p.key_start.shape
    tables = p.row_ptr.shape[1]
    real = torch.arange(p.key_tile.shape[2]) < p.num_entries[..., None]
    seen = torch.zeros(*real.shape[:2], tiles + 1, dtype=torch.int64)
    seen.scatter_(2, torch.where(real, p.key_tile.long(), tiles), 1)
    of_table = seen[..., :-1].amax(0) > 0  # [Ht, tiles]
    if tables >= axes:
        of_table = of_table.unflatten(0, (axes, -1)).any(1)
    else:
        of_table = of_table.repeat_interleave(axes // tables, 0)
    return of_table & (p.key_stop > p.key_start)
