"""`BlockLayout`: a pattern compiled to tables of the tile pairs that kernels visit."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ground.arguments import checked_integer
from ..ground.keywords import class_with_hints, inner
from ..ground.once import once
from ..ground.streams import Built, moved, moved_together
from ..patterns.algebra import Frame
from .bitmaps import transposed, unpack
from .drawing import drawing
from .tiles import segment_length


class Transpose(NamedTuple):
    """The visited pairs of tiles of a `Pass`, sorted by key tile; `Pass` explains the dims."""

    row_ptr: Tensor  # [Bt, Ht, key tiles + 1] index of each key tile's first tile pair
    query_tile: Tensor  # [Bt, Ht, entries] query tile of each pair
    entry: Tensor  # [Bt, Ht, entries] index of the pair in `Pass.key_tile`


@dataclass(frozen=True, eq=False, repr=False)
class Pass:
    """One round of kernels over queries and keys: tiles, and a table of the tile pairs to visit.

    A layout has one pass for each way to cut tokens into tiles. A tile is the tokens `start, start
    + step, ...` below `stop`, at most block_size: query tiles in query *indices*, key tiles in key
    positions. An *entry* of a table is a visited pair of tiles. There are S sets of tiles (1, or
    one per kv head), and tables for Bt batch entries (1 or B) and Ht heads (1, Hkv or H). Query
    head h of H uses table h * Ht // H and the set of tiles h * S // H.

    In bitmaps, the first (query, key) pair is in the lowest bit; bits of tokens past `stop` have no
    meaning. `slot` is for masks with one selection, which has indices [R, k] (k key blocks for each
    of R query rows): the place in the flattened indices where the entry's query row lists its key
    block, or -1. It is None without a selection, or if an entry spans several rows or blocks.
    """

    step: int  # distance of neighbouring tokens in a tile
    query_start: Tensor  # [S, query tiles] int64, S = 1 or num_kv_heads
    query_stop: Tensor  # [S, query tiles] int64
    key_start: Tensor  # [S, key tiles] int64
    key_stop: Tensor  # [S, key tiles] int64
    row_ptr: Tensor  # [Bt, Ht, query tiles + 1] int32, index of each query tile's first entry
    key_tile: Tensor  # [Bt, Ht, entries] int32, ascending within a query tile; padded with 0
    bitmap: Tensor  # [Bt, Ht, entries] int32, index in `bitmaps`, or -1 if all pairs attend
    bitmaps: Tensor  # [bitmaps, block_size ** 2 / 8] uint8
    covers: tuple[bool, bool] = (False, False)  # do tiles contain every query, and every key?
    longest: tuple[int, int] | None = None  # most entries of any query tile, and of any key tile
    branch: int = 0  # index of the pass's mask in a mixture `a + b`
    query_origin: Tensor | None = None  # [S, query tiles] first positions, if positions restart
    key_origin: Tensor | None = None  # [S, key tiles] first positions, if `key_start` has others
    # Depths in a tree, which give distances there; None if positions do. The last dim has each
    # token of a tile, or only the first token if depths rise by `step` in every tile.
    query_depth: Tensor | None = None  # [B or 1, S, query tiles, block_size or 1]
    key_depth: Tensor | None = None  # [B or 1, S, key tiles, block_size or 1]
    stream: Tensor | None = None  # [S, query tiles] index of the dropout seed; None if all are 0
    # Results of `segments`, if they do not follow from `coordinates`.
    query_segment: Tensor | None = None  # [S, query tiles] int32, or empty
    key_segment: Tensor | None = None  # [S, key tiles] int32, or empty
    slot: Tensor | None = None  # [B or 1, H or 1, entries] int64 index in a selection's [R * k]
    # values that other modules derived from this pass, by name; copies and pickles drop them
    memo: dict[Hashable, Any] = field(default_factory=dict, init=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "memo": {}}

    def coordinates(self, q_start: int) -> tuple[Tensor, Tensor]:
        """Returns (query, key): position of the first token of each tile, int64 [S, tiles] each."""
        query = self.query_start + q_start if self.query_origin is None else self.query_origin
        return query, self.key_start if self.key_origin is None else self.key_origin

    def depths(self, q_start: int) -> tuple[Tensor, Tensor]:
        """Returns the positions that distances are computed from; in a tree they are depths.

        Returns: for query tiles and for key tiles [B or 1, S, tiles, block_size or 1]; the last dim
        has each token, or only the first one, from which the others follow by `step`.
        """
        if self.query_depth is None or self.key_depth is None:
            query, key = self.coordinates(q_start)
            return query[None, :, :, None], key[None, :, :, None]
        return self.query_depth, self.key_depth

    def depths_of_tokens(self, q_start: int, block_size: int) -> tuple[Tensor, Tensor]:
        """Returns `depths` of every token: [B or 1, S, tiles, block_size]."""
        slots = self.step * torch.arange(block_size, device=self.key_start.device)
        query, key = (x if x.shape[-1] == block_size else x + slots for x in self.depths(q_start))
        return query, key

    def segments(self, q_start: int, block_size: int) -> tuple[Tensor, Tensor]:
        """Returns the segment of each query tile and each key tile, [S, tiles] int32.

        Kernels first sum within a segment, then add up the segments in order. Segments depend on
        positions alone, so rounding errors stay small, threads can share the keys of a query, and
        the bits of a result do not depend on what else a call computes. A tensor is empty if all
        its tiles are in one segment.
        """
        if self.query_segment is not None and self.key_segment is not None:
            return self.query_segment, self.key_segment
        name = "segments", q_start, block_size
        if name not in self.memo:
            places, length = self.coordinates(q_start), segment_length(self.step, block_size)
            given = self.query_segment, self.key_segment
            self.memo[name] = tuple(
                if_several((x // length).int()) if segment is None else segment
                for x, segment in zip(places, given, strict=True)
            )
        found: tuple[Tensor, Tensor] = self.memo[name]
        return found

    def tensors(self) -> Iterator[Tensor]:
        return (value for value in vars(self).values() if isinstance(value, Tensor))

    def __repr__(self) -> str:
        tiles = f"{self.query_start.shape[-1]} x {self.key_start.shape[-1]}"
        return f"<Pass of step {self.step}, {tiles} tiles>"

    @once
    def num_entries(self) -> Tensor:
        """Number of visited pairs of tiles in each table, [Bt, Ht]."""
        return self.row_ptr[..., -1].long()

    def table_of(self, head: int, num_heads: int) -> int:
        """Returns a query head's index in dim 1 of `row_ptr`."""
        return head * self.row_ptr.shape[1] // max(1, num_heads)

    def query_tiles(self) -> Tensor:
        """Returns the query tile of each entry; for padding, the number of query tiles."""
        return row_of(self.row_ptr, self.key_tile.shape[-1])

    def visited_keys(self) -> Tensor:
        """Returns [S, key tiles] bool: True for a non-empty tile that some query head visits."""
        real = torch.arange(self.key_tile.shape[-1]) < self.num_entries[..., None]
        visits = torch.zeros(*real.shape[:2], self.key_start.shape[1], dtype=torch.int32)
        visits.scatter_reduce_(2, self.key_tile.long(), real.int(), "amax")
        return by_axis(visits.bool().any(0), len(self.key_start)) & (self.key_stop > self.key_start)

    @once
    def transpose(self) -> Transpose:
        """The tables sorted by key tile, then query tile, for backward; built on first use."""
        tiles, entries = self.key_start.shape[-1], self.key_tile.shape[-1]
        real = torch.arange(entries, device=self.key_tile.device) < self.num_entries[..., None]
        key = torch.where(real, self.key_tile.long(), tiles)
        sorted_key, order = key.sort(dim=-1, stable=True)
        edges = torch.arange(tiles + 1, device=key.device).expand(*key.shape[:-1], -1)
        row_ptr = torch.searchsorted(sorted_key, edges.contiguous())
        return Transpose(row_ptr.int(), self.query_tiles().gather(-1, order).int(), order.int())

    @once
    def transposed_bitmaps(self) -> Tensor:
        """`bitmaps` with queries instead of keys along the bits; built on first use."""
        return transposed(self.bitmaps)

    def like(self, **changes: Any) -> "Pass":
        """Returns a copy with some fields replaced, which shares the transposed bitmaps."""
        other = replace(self, **changes)
        if (turned := Pass.transposed_bitmaps.stored(self)) is not None:
            Pass.transposed_bitmaps.store(other, turned)
        return other

    def of_entries(self, entries: Tensor) -> "Pass":
        """Returns a copy for some batch entries; `entries` are their indices."""
        names = "row_ptr", "key_tile", "bitmap", "slot", "query_depth", "key_depth"
        tables = {name: getattr(self, name) for name in names}
        own = {name: x[entries] for name, x in tables.items() if x is not None and len(x) > 1}
        return self.like(**own)

    @property
    def walked_as(self) -> "Pass":
        """The pass whose order of tiles kernels follow: `whole` of `cut`, else this pass."""
        return self.memo.get("whole", self)

    def cut(self, query_stop: Tensor, key_stop: Tensor, whole: "Pass") -> "Pass":
        """Returns a copy with fewer queries and keys; kernels use the tile order of `whole`.

        `whole` has the same tile pairs, and bitmaps for all those that a cut may shorten, so
        launches that were prepared for it stay valid.
        """
        other = self.like(query_stop=query_stop, key_stop=key_stop)
        other.memo["whole"] = whole
        return other

    def from_slot(self, slot: int, block_size: int) -> "Pass":
        """Returns a copy whose bitmaps begin at query row `slot`; zeros fill their last rows."""
        rows = self.bitmaps.view(len(self.bitmaps), block_size, block_size // 8)
        rows = torch.nn.functional.pad(rows[:, slot:], (0, 0, 0, slot))
        return replace(self, bitmaps=rows.reshape(self.bitmaps.shape))

    def to(self, device: torch.device) -> "Pass":
        """Returns this pass, or a copy on another device; the host does not wait for a GPU."""
        if device == self.row_ptr.device:
            return self
        own: dict[str, Any] = {x.name: getattr(self, x.name) for x in fields(self)}
        own = {name: moved(x, device) for name, x in own.items() if isinstance(x, Tensor)}
        return replace(self, **own)


@class_with_hints
@dataclass(frozen=True, eq=False, repr=False)
class BlockLayout:
    """A pattern compiled for given lengths and heads; within a branch, passes share no pair.

    Attributes:
        frame: lengths, heads and the position of the first query.
        block_size: largest number of positions in a tile.
        passes: passes in the order in which kernels run them.
        pairs: number of (query, key) pairs, mean over batch entries and query heads; a tensor if
            it is computed on the device.
        built: point of a CUDA stream at which the tables are complete; other streams wait for it.
        memo: values that kernels derive from the layout, such as prepared launches, by name. Copies
            and pickles begin without any: some hold compiled kernels.
    """

    frame: Frame
    block_size: int
    passes: tuple[Pass, ...]
    pairs: float | Tensor
    built: Built | None = field(default=None, kw_only=True)
    memo: dict[Hashable, Any] = field(default_factory=dict, init=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "memo": {}}

    def shared(self, device: torch.device) -> "BlockLayout":
        """Returns a copy safe to share across CUDA streams; builds its shared tables first."""
        if device.type == "cpu":
            return self
        counts, first = self.entry_counts, self.first_entry
        copy = replace(self, built=Built.now(device))
        BlockLayout.entry_counts.store(copy, counts)
        BlockLayout.first_entry.store(copy, first)
        return copy

    def on_gpu(
        self, device: torch.device, memo: Mapping[str, Tensor] = MappingProxyType({})
    ) -> "BlockLayout":
        """Returns a copy on a GPU, safe to share across CUDA streams, by one transfer.

        The memo of each pass keeps the pass on the host, so that walks are built there. Tensors in
        `memo` travel with the tables, into the memo of the copy.
        """
        tables: dict[Any, Tensor] = {"counts": self.entry_counts, "first": self.first_entry}
        tables |= {("memo", name): x for name, x in memo.items()}
        for number, p in enumerate(self.passes):
            found = {x.name: getattr(p, x.name) for x in fields(p)}
            tables |= {(number, k): x for k, x in found.items() if isinstance(x, Tensor)}
        tables = moved_together(tables, device)
        passes = []
        for number, p in enumerate(self.passes):
            names = [x.name for x in fields(p) if (number, x.name) in tables]
            own: dict[str, Any] = {name: tables[number, name] for name in names}
            passes.append(replace(p, **own))
            passes[-1].memo["host"] = p
        copy = replace(self, passes=tuple(passes), built=Built.now(device))
        BlockLayout.entry_counts.store(copy, tables["counts"])
        BlockLayout.first_entry.store(copy, tables["first"])
        copy.memo.update((name, tables["memo", name]) for name in memo)
        return copy

    @inner
    def ready(self) -> "BlockLayout":
        """Makes the current CUDA stream wait until the tables are complete; returns the layout."""

        def shared() -> Iterator[Tensor]:
            tables = BlockLayout.entry_counts, BlockLayout.first_entry
            yield from (x for table in tables if (x := table.stored(self)) is not None)
            yield from (x for p in self.passes for x in p.tensors())

        if self.built is not None:
            self.built.wait(shared())
        return self

    @property
    def num_pairs(self) -> int | float:
        """Number of (query, key) pairs in all branches, mean over batch entries and query heads."""
        pairs = float(self.pairs)
        return int(pairs) if pairs.is_integer() else pairs

    @once
    def entry_counts(self) -> Tensor:
        """Number of visited pairs of tiles in each table, [passes, *table_shape]."""
        batch, heads = self.table_shape
        counts = [stretched(p.num_entries, batch, heads) for p in self.passes]
        return torch.stack(counts) if counts else torch.zeros(0, batch, heads, dtype=torch.int64)

    @once
    def first_entry(self) -> Tensor:
        """Index in `entries(...)` of each pass's first pair of tiles, [passes, *table_shape]."""
        return self.entry_counts.cumsum(0) - self.entry_counts

    @once
    def entry_slots(self) -> Tensor:
        """`Pass.slot` of the visited pairs of tiles, pass after pass; -1 if a pass has no slots."""
        if len(self.passes) == 1 and self.passes[0].slot is not None:
            return self.passes[0].slot
        shapes = [self.table_shape, *(p.slot.shape for p in self.passes if p.slot is not None)]
        batch, heads = (max(shape[dim] for shape in shapes) for dim in (0, 1))
        width, device = self.num_blocks, self.entry_counts.device
        slots = torch.full((batch, heads, width + 1), -1, device=device)
        for p, begin, counts in zip(self.passes, self.first_entry, self.entry_counts, strict=True):
            if p.slot is not None:
                first, count = (stretched(x, batch, heads)[..., None] for x in (begin, counts))
                number = torch.arange(p.slot.shape[-1], device=device)
                place = torch.where(number < count, first + number, width)
                slots.scatter_(-1, place, stretched(p.slot, batch, heads))
        return slots[..., :-1]

    @property
    def table_shape(self) -> tuple[int, int]:
        """Number of batch entries and of heads with separate tables; 1 if all share one."""
        shapes = [p.row_ptr.shape for p in self.passes]
        return max((s[0] for s in shapes), default=1), max((s[1] for s in shapes), default=1)

    @once
    def num_blocks(self) -> int:
        """Number of visited pairs of tiles; the maximum over heads and batch entries."""
        counts = self.entry_counts.sum(0)
        return int(counts.max()) if counts.numel() else 0

    @property
    def density(self) -> float:
        """Visited tile pairs x block_size ** 2 / (q_len x kv_len), mean over batch and heads.

        It counts whole tiles: above 1 where tiles are larger than the documents or nodes in them.
        """
        if not (dense := self.frame.q_len * self.frame.kv_len):
            return 0.0
        return float(self.entry_counts.sum(0).cpu().double().mean()) * self.block_size**2 / dense

    @property
    def nbytes(self) -> int:
        """Bytes of tables, bitmaps and transposes built so far; shared tensors count once."""
        tensors = [t for p in self.passes for t in p.tensors()]
        tensors += [t for p in self.passes for t in Pass.transpose.stored(p) or ()]
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())

    def entries(self, batch: int = 0, head: int = 0) -> Tensor:
        """Returns first query position, first key position, query count, key count of tile pairs.

        Returns: [n, 4] int64 for the n pairs of tiles that a head visits, pass after pass, in the
            order of `block_bias` and of `BlockWeights.values`.
        """
        rows = []
        tables = max((p.row_ptr.shape[0] for p in self.passes), default=1)
        batch = checked_integer("batch", batch, 0, tables - 1 if tables > 1 else None)
        head = checked_integer("head", head, 0, max(0, self.frame.num_heads - 1))
        for p in self.passes:
            row, key, _, axis = self.table(p, batch, head)
            q, k = p.query_start[axis][row], p.key_start[axis][key]
            ends = (q, p.query_stop[axis][row]), (k, p.key_stop[axis][key])
            counts = [tile_counts(*x, p.step, self.block_size) for x in ends]
            rows.append(torch.stack((q + self.frame.q_start, k, *counts), 1))
        return torch.cat(rows) if rows else torch.zeros(0, 4, dtype=torch.int64)

    def table(self, p: Pass, batch: int, head: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """Returns a head's visited tile pairs as indices: query tiles, key tiles, bitmaps [n] each.

        The last result is the index of its set of tiles in dim 0 of `query_start`.
        """
        b = batch if p.row_ptr.shape[0] > 1 else 0
        h = p.table_of(head, self.frame.num_heads)
        n = int(p.num_entries[b, h])
        row, key, bitmap = row_of(p.row_ptr[b, h], n), p.key_tile[b, h, :n], p.bitmap[b, h, :n]
        axis = head * p.query_start.shape[0] // max(1, self.frame.num_heads)
        return row, key.long(), bitmap.long(), axis

    def visits(self, batch: int, head: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Yields for each pass the pairs of tiles that one query head visits.

        Yields: index of the pass's first tile pair in `entries`; then, for its n tile pairs, query
        indices [n, b], key positions [n, b] and which pairs attend [n, b, b]; b = block_size.
        """
        first, slots = 0, torch.arange(self.block_size, device=self.entry_counts.device)
        for p in self.passes:
            q, k, cells = self.cells(p, batch, head, slots)
            yield first, q, k, cells
            first += len(q)

    def cells(
        self, p: Pass, batch: int, head: int, slots: Tensor, part: slice = slice(None)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns query indices [n, s], key positions [n, s] and which pairs attend [n, s, s].

        `part` selects n of the pairs of tiles that a head visits, `slots` s tokens of each tile, by
        their place in it. Past the end of a tile, the index is q_len and the position kv_len.
        """
        row, key, bitmap, axis = self.table(p, batch, head)
        row, key, bitmap = row[part], key[part], bitmap[part]
        q = p.query_start[axis][row, None] + p.step * slots
        k = p.key_start[axis][key, None] + p.step * slots
        real_q, real_k = q < p.query_stop[axis][row, None], k < p.key_stop[axis][key, None]
        pairs = real_q[:, :, None] & real_k[:, None, :]
        masked = bitmap >= 0
        numbers, inverse = bitmap[masked].unique(return_inverse=True)
        pairs[masked] &= unpack(p.bitmaps[numbers], self.block_size)[:, slots][:, :, slots][inverse]
        q, k = torch.where(real_q, q, self.frame.q_len), torch.where(real_k, k, self.frame.kv_len)
        return q, k, pairs

    def to_dense(self) -> Tensor:
        """Counts how often each query sees each key: [B or 1, H or 1, q_len, kv_len] int64."""
        shared = self.table_shape[1] == 1 and all(len(p.query_start) == 1 for p in self.passes)
        frame = self.frame if not shared else self.frame._replace(num_heads=1, num_kv_heads=1)
        return (replace(self, frame=frame).entry_of_pairs(self.table_shape[0]) >= 0).sum(0)

    def entry_of_pairs(self, batch: int) -> Tensor:
        """Returns for each (query, key) pair the index in `entries` of its tile pair, or -1.

        Returns: [passes, batch, H, q_len, kv_len] int64.
        """
        frame = self.frame
        shape = (len(self.passes), batch, frame.num_heads, frame.q_len + 1, frame.kv_len + 1)
        number = torch.full(shape, -1)
        for b in range(batch):
            for h in range(frame.num_heads):
                for i, (first, q, k, cells) in enumerate(self.visits(b, h)):
                    entry, row, column = (x.cpu() for x in torch.nonzero(cells, as_tuple=True))
                    places = q.cpu()[entry, row], k.cpu()[entry, column]
                    number[i, b, h, *places] = first + entry
        return number[..., :-1, :-1]

    def __repr__(self) -> str:
        tokens = f"{self.frame.q_len} x {self.frame.kv_len} tokens"
        return f"<BlockLayout {tokens}, blocks of {self.block_size}, {self.passes}>"

    def __str__(self) -> str:
        """Returns a line of figures, then a drawing of the first head, queries downwards."""
        whole = self.frame.q_len * self.frame.kv_len
        share = f" of whole tiles ({self.num_pairs / max(1, whole):.2g} of the pairs)"
        density = f"{self.density:.4g}{share * (self.density > 1)}"
        figures = (
            f"BlockLayout {self.frame.q_len} x {self.frame.kv_len} tokens, blocks of "
            f"{self.block_size}: {self.num_blocks} visited in {len(self.passes)} "
            f"{'pass' if len(self.passes) == 1 else 'passes'}, density {density}, "
            f"{self.num_pairs:.6g} pairs, {self.nbytes / 1e6:.3g} MB"
        )
        return "\n".join([figures, *drawing(self)])


def if_several(segments: Tensor) -> Tensor:
    """Returns segments of tiles, or an empty tensor if all are equal."""
    alike = not segments.numel() or bool((segments == segments.flatten()[0]).all())
    return segments.new_empty(0) if alike else segments.contiguous()


def slots_of(start: Tensor, stop: Tensor, step: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Returns the tokens of each tile [..., block_size], and whether each lies below `stop`."""
    tokens = start[..., None] + step * torch.arange(block_size, device=start.device)
    return tokens, tokens < stop[..., None]


def tile_counts(start: Tensor, stop: Tensor, step: int, block_size: int) -> Tensor:
    """Returns the number of positions in each tile."""
    return ((stop - start).clamp(min=0) + step - 1).floor_divide(step).clamp(max=block_size)


def by_axis(used: Tensor, axes: int) -> Tensor:
    """Converts bool [tables, tiles] to [axes, tiles]: True where any table of the axis has True."""
    if (tables := len(used)) <= axes:
        return used.repeat_interleave(axes // tables, 0)
    return used.view(axes, tables // axes, -1).any(1)


def stretched(table: Tensor, batch: int, heads: int) -> Tensor:
    """Expands [Bt, Ht, ...] to [batch, heads, ...] by repeating shared tables."""
    repeated = table.repeat_interleave(heads // table.shape[1], 1)
    return repeated.expand(batch, *repeated.shape[1:])


def row_of(row_ptr: Tensor, entries: int) -> Tensor:
    """Returns the row of each item 0 to entries - 1 of a CSR table; past its end, the row count."""
    position = torch.arange(entries, device=row_ptr.device).expand(*row_ptr.shape[:-1], -1)
    ends = row_ptr[..., 1:].long().contiguous()
    return torch.searchsorted(ends, position.contiguous(), right=True)
