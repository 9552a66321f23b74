"""The compiled form of a pattern: passes of tiles that kernels run, their measures and drawing."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..patterns.algebra import Frame
from .bitmaps import unpack

_SHADES = " .:-=+*#%@"


class Transpose(NamedTuple):
    """Which query tiles visit each key tile: [Bt, Ht, key tiles + 1], and per entry the query tile
    and its entry.
    """

    row_ptr: Tensor
    query_tile: Tensor
    entry: Tensor


@dataclass(frozen=True, eq=False)
class Pass:
    """Tiles of one step and the table of which query tile visits which key tile.

    A tile is `start, start + step, ...` below `stop`, at most block_size of them: query tiles in
    query *indices*, key tiles in key positions. Tables of leading size 1 serve all; head h of H
    uses table h * Ht // H (tiles: h * S // H).

    Attributes:
        step: tokens between neighbours in a tile.
        query_start, query_stop: [S, query tiles] int64, S = 1 or num_kv_heads.
        key_start, key_stop: [S, key tiles] int64.
        row_ptr: [Bt, Ht, query tiles + 1] int32, where each query tile's entries begin.
        key_tile: [Bt, Ht, entries] int32, ascending within a query tile; padded with 0.
        mask: [Bt, Ht, entries] int32, number of the entry's bitmap in `bitmaps`, -1 where all
            pairs of real tokens are in.
        bitmaps: [bitmaps, block_size ** 2 / 8] uint8, the first cell in the lowest bit. Cells past
            `stop` mean nothing.
        covers: whether every query is in a query tile, and every key in a key tile.
        longest: most entries of a query tile, and of a key tile; None where the host cannot know.
    """

    step: int
    query_start: Tensor
    query_stop: Tensor
    key_start: Tensor
    key_stop: Tensor
    row_ptr: Tensor
    key_tile: Tensor
    mask: Tensor
    bitmaps: Tensor
    covers: tuple[bool, bool] = (False, False)
    longest: tuple[int, int] | None = None

    def tensors(self) -> Iterator[Tensor]:
        return (value for value in vars(self).values() if isinstance(value, Tensor))

    @cached_property
    def num_entries(self) -> Tensor:
        """[Bt, Ht] entries of each table."""
        return self.row_ptr[..., -1].long()

    def query_tiles(self) -> Tensor:
        """[Bt, Ht, entries] query tile of each entry; the number of query tiles where none is."""
        return _row_of(self.row_ptr, self.key_tile.shape[-1])

    @cached_property
    def transpose(self) -> Transpose:
        """The table by key tile, for backward: entries ascend by query tile. Built on first use
        and kept.
        """
        tiles, entries = self.key_start.shape[-1], self.key_tile.shape[-1]
        real = torch.arange(entries, device=self.key_tile.device) < self.num_entries[..., None]
        key = torch.where(real, self.key_tile.long(), tiles)
        sorted_key, order = key.sort(dim=-1, stable=True)
        edges = torch.arange(tiles + 1, device=key.device).expand(*key.shape[:-1], -1)
        row_ptr = torch.searchsorted(sorted_key, edges.contiguous())
        return Transpose(row_ptr.int(), self.query_tiles().gather(-1, order).int(), order.int())

    def to(self, device: torch.device) -> "Pass":
        own: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, x in own.items():
            own[name] = x.to(device) if isinstance(x, Tensor) else x
        return Pass(**own)


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """A pattern laid on given lengths and heads: `passes` of disjoint pairs (per branch of a
    mixture).

    Attributes:
        frame: lengths, heads and the position of the first query.
        block_size: most positions in a tile.
        passes: what kernels run, in order.
    """

    frame: Frame
    block_size: int
    passes: tuple[Pass, ...]
    pairs: float | Tensor

    @property
    def num_pairs(self) -> int | float:
        """Exact (query, key) pairs with multiplicity, mean over batch entries and query heads."""
        pairs = float(self.pairs)
        return int(pairs) if pairs.is_integer() else pairs

    @cached_property
    def entry_counts(self) -> Tensor:
        """[passes, Bt, Ht] visited entries of each table."""
        batch, heads = self.table_shape
        counts = [_stretch(p.num_entries, batch, heads) for p in self.passes]
        return torch.stack(counts) if counts else torch.zeros(0, batch, heads, dtype=torch.int64)

    @cached_property
    def first_entry(self) -> Tensor:
        """[passes, Bt, Ht] number of each pass's first entry in `entries` order."""
        return self.entry_counts.cumsum(0) - self.entry_counts

    @property
    def table_shape(self) -> tuple[int, int]:
        """(batch entries, heads) with tables of their own, 1 where all share one."""
        shapes = [p.row_ptr.shape for p in self.passes]
        return max((s[0] for s in shapes), default=1), max((s[1] for s in shapes), default=1)

    @property
    def num_blocks(self) -> int:
        """Visited entries; the largest count where tables differ by head or batch."""
        counts = self.entry_counts.sum(0)
        return int(counts.max()) if counts.numel() else 0

    @property
    def density(self) -> float:
        """Visited entries x block_size ** 2 / (Nq x Nk), mean over batch entries and heads."""
        dense = self.frame.q_len * self.frame.kv_len
        return (
            float(self.entry_counts.sum(0).double().mean()) * self.block_size**2 / dense
            if dense
            else 0.0
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tables, bitmaps and transposes built so far; tensors that passes share
        count once.
        """
        tensors = [t for p in self.passes for t in p.tensors()]
        tensors += [t for p in self.passes if "transpose" in vars(p) for t in p.transpose]
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())

    def entries(self, batch: int = 0, head: int = 0) -> Tensor:
        """[n, 4]: first query position, first key position, query count, key count of each entry.

        In table order, passes concatenated: the order of `block_bias` and of `BlockWeights.values`.
        """
        rows = []
        for p in self.passes:
            row, key, _, tiles = self.table(p, batch, head)
            q, k = p.query_start[tiles][row], p.key_start[tiles][key]
            counts = [
                tile_counts(start, stop, p.step, self.block_size)
                for start, stop in ((q, p.query_stop[tiles][row]), (k, p.key_stop[tiles][key]))
            ]
            rows.append(torch.stack((q + self.frame.q_start, k, *counts), 1))
        return torch.cat(rows) if rows else torch.zeros(0, 4, dtype=torch.int64)

    def first_entry_of(self, number: int, batch: int, head: int) -> int:
        """Number of a pass's first entry in what one head visits."""
        first = self.first_entry[number]
        h = table_of(head, first.shape[1], self.frame.num_heads)
        return int(first[batch if len(first) > 1 else 0, h])

    def table(self, p: Pass, batch: int, head: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """(query tile, key tile, mask) of each entry that one query head visits in a pass, and its
        row of tiles.
        """
        b = batch if p.row_ptr.shape[0] > 1 else 0
        h = table_of(head, p.row_ptr.shape[1], self.frame.num_heads)
        n = int(p.num_entries[b, h])
        tiles = table_of(head, p.query_start.shape[0], self.frame.num_heads)
        row, key, mask = _row_of(p.row_ptr[b, h], n), p.key_tile[b, h, :n], p.mask[b, h, :n]
        return row, key.long(), mask.long(), tiles

    def cells(self, p: Pass, batch: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of each entry that one head visits in a pass: query indices, key positions [n, b], pairs
        that are in [n, b, b].

        Slots past a tile's end point at q_len and kv_len.
        """
        row, key, mask, tiles = self.table(p, batch, head)
        steps = p.step * torch.arange(self.block_size, device=row.device)
        q, k = p.query_start[tiles][row, None] + steps, p.key_start[tiles][key, None] + steps
        real_q, real_k = q < p.query_stop[tiles][row, None], k < p.key_stop[tiles][key, None]
        cells = (real_q[:, :, None] & real_k[:, None, :]).clone()
        masked = mask >= 0
        cells[masked] &= unpack(p.bitmaps[mask[masked]], self.block_size)
        return (
            torch.where(real_q, q, self.frame.q_len),
            torch.where(real_k, k, self.frame.kv_len),
            cells,
        )

    def to_dense(self) -> Tensor:
        """[Bt, H or 1, Nq, Nk] int64 counts rebuilt from the tiles and bitmaps; for tests and
        small drawings.
        """
        shared = self.table_shape[1] == 1 and all(len(p.query_start) == 1 for p in self.passes)
        frame = self.frame if not shared else self.frame._replace(num_heads=1, num_kv_heads=1)
        return (replace(self, frame=frame).entry_of_pairs(self.table_shape[0]) >= 0).sum(0)

    def entry_of_pairs(self, batch: int) -> Tensor:
        """[passes, batch, H, Nq, Nk] number of the entry that holds each pair, -1 where none does.
        O(Nq Nk).
        """
        frame = self.frame
        number = torch.full(
            (len(self.passes), batch, frame.num_heads, frame.q_len + 1, frame.kv_len + 1), -1
        )
        for b in range(batch):
            for h in range(frame.num_heads):
                first = 0
                for i, p in enumerate(self.passes):
                    q, k, cells = self.cells(p, b, h)
                    entry = (first + torch.arange(len(q), device=q.device))[:, None, None].expand(
                        cells.shape
                    )
                    q, k = (
                        q[:, :, None].expand(cells.shape)[cells],
                        k[:, None, :].expand(cells.shape)[cells],
                    )
                    number[i, b, h, q.cpu(), k.cpu()] = entry[cells].cpu()
                    first += len(entry)
        return number[..., :-1, :-1]

    def __str__(self) -> str:
        """One line of figures, then the first head's pattern as shaded characters, queries
        downwards.
        """
        head = (
            f"BlockLayout {self.frame.q_len} x {self.frame.kv_len} tokens, block "
            f"{self.block_size}: "
            f"{self.num_blocks} blocks in {len(self.passes)} passes, density {self.density:.4g}, "
            f"{self.num_pairs:.6g} pairs, {self.nbytes / 1e6:.3g} MB"
        )
        return "\n".join([head, *self.drawing()])

    def drawing(self, rows: int = 32, columns: int = 64) -> list[str]:
        """Lines of characters, darker where more of the area is visited."""
        raster = self.raster(rows, columns)
        if not raster.numel():
            return []
        level = (raster / raster.max().clamp(min=1e-30) * (len(_SHADES) - 1)).ceil().long()
        return ["|" + "".join(_SHADES[x] for x in line) + "|" for line in level.tolist()]

    def raster(self, rows: int, columns: int, *, head: int = 0) -> Tensor:
        """[rows, columns] share of each area that one head's visited entries cover; O(entries),
        from sampled tokens.
        """
        rows, columns = min(rows, self.frame.q_len), min(columns, self.frame.kv_len)
        raster = torch.zeros(rows * columns)
        samples = torch.arange(min(8, self.block_size))
        for p in self.passes:
            row, key, _, tiles = self.table(p, 0, head)
            q, k = (
                _sample(start[tiles], stop[tiles], p.step, self.block_size, samples)[index]
                for start, stop, index in (
                    (p.query_start, p.query_stop, row),
                    (p.key_start, p.key_stop, key),
                )
            )
            cell = (q * rows // self.frame.q_len)[:, :, None] * columns + (
                k * columns // self.frame.kv_len
            )[:, None, :]
            raster += torch.bincount(cell.flatten(), minlength=len(raster))
        return raster.view(rows, columns)


def _sample(start: Tensor, stop: Tensor, step: int, block_size: int, samples: Tensor) -> Tensor:
    """[tiles, samples] positions spread evenly over each tile."""
    count = (
        ((stop - start).clamp(min=step) + step - 1)
        .div(step, rounding_mode="floor")
        .clamp(max=block_size)
    )
    return start[:, None] + step * (samples * count[:, None] // len(samples))


def tile_counts(start: Tensor, stop: Tensor, step: int, block_size: int) -> Tensor:
    """Real positions of each tile."""
    return ((stop - start).clamp(min=0) + step - 1).floor_divide(step).clamp(max=block_size)


def table_of(head: int, tables: int, num_heads: int) -> int:
    """Which of 1, num_kv_heads or num_heads tables a query head uses."""
    return head * tables // num_heads if num_heads else 0


def _stretch(table: Tensor, batch: int, heads: int) -> Tensor:
    """[Bt, Ht] to [batch, heads], each table repeated for the heads that it serves."""
    return table.repeat_interleave(heads // table.shape[1], 1).expand(batch, heads)


def _row_of(row_ptr: Tensor, entries: int) -> Tensor:
    position = torch.arange(entries, device=row_ptr.device).expand(*row_ptr.shape[:-1], -1)
    ends = row_ptr[..., 1:].long().contiguous()
    return torch.searchsorted(ends, position.contiguous(), right=True)
