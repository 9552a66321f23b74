"""Key blocks chosen by content: each row of queries has a list of them."""

import os
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.functional import pad

from ..ground.arguments import checked_integer, freeze_integer, is_traced
from ..ground.keywords import class_with_hints
from ..ground.rows import expand_counts, first_in_row
from .algebra import Frame, Mask, Pattern, joined_masks, parts_of
from .blocks import BlockwiseMask, TensorMask
from .edges import listed_edges

CHECK = "SPARSERING_CHECK"  # environment variable; "1" makes each call check its lists


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class SelectedBlocks(TensorMask, BlockwiseMask):
    """A query in row r sees the key blocks listed in `indices[..., r, :]`.

    A row is `query_block` consecutive queries; the positions of row r begin at
    (first_row + r) * query_block. Blocks below 16 keys are read as lists, without a layout, by the
    backends cpu, triton and gather. If the pattern is this mask, alone or `& Causal()`, and its
    block size is a multiple of the layout's, the layout is built on the indices' device without a
    host sync. The triton backend stores a layout of GPU indices as long as they live, for the
    backward pass.

    Args:
        indices: int64 [R, k], [H, R, k] or [B, H, R, k] with H = 1, Hkv or Hq, and B = 1 for all
            batch entries; copied. -1 is no block. Numbers beyond the last block are ignored, but
            `explain` counts them, and with `SPARSERING_CHECK=1` in the environment each call
            refuses them. If a row repeats a block, its first slot counts.
            `selection.select_blocks` computes them.
        block_size: keys in a block.
        query_block: queries in a row, a divisor of block_size; default block_size. With 1, each
            query chooses for itself, as in NSA, MoBA and DSA.
        first_row: row of the sequence at which `indices` begin; decoding passes its token's row.

    Raises: ValueError for numbers below -1, if the indices are on a CPU; and when used, if the rows
        do not cover the queries of the call.

    Source: NSA (arXiv 2502.11089), MoBA (2502.13189), DSA (2512.02556): rows of one token, which
        the query heads of a kv head may share.
    """

    indices: Tensor
    block_size: int
    query_block: int | None = None
    first_row: int = 0
    has_complement = False
    table_dims: ClassVar[tuple[int, ...]] = (2, 3, 4)
    dtype: ClassVar[torch.dtype] = torch.int64
    # (slot of each edge, number of bias heads) of a mask from `from_edges`; `==` ignores it
    _edges: ClassVar["tuple[Tensor, int] | None"] = None

    @classmethod
    def from_edges(cls, index: Tensor, num_queries: int, *, num_heads: int = 1) -> "SelectedBlocks":
        """Builds the lists of single keys that a graph's edges are: a query sees its neighbours.

        Its `slots`, int64 [E], are each edge's place in `slot_bias.flatten(-2)`, so a bias per edge
        is one scatter, which is differentiable; its `slot_shape` is the shape of that bias,
        (1, num_heads, num_queries, k), k the largest number of edges of a query.

        If few queries have most of the edges, as the hubs of a graph do, such a table would be
        mostly padding. From four slots for each edge on, lists stand one behind the other instead:
        `indices` are [E, 1], a slot for each edge, and `slot_shape` is (1, num_heads, E, 1).

        Args:
            index: int64 [2, E] of (query, key), in any order, each edge once. Edges that point from
                a source to a target, as torch_geometric's `edge_index`, are flipped first:
                `index.flip(0)`, since the target is the query.
            num_queries: number of queries; those without edges have out 0.
            num_heads: heads of the bias. The lists are the same for all heads.

        Returns: `SelectedBlocks(lists, 1, query_block=1)`, keys ascending, -1 behind them; of a
            graph with hubs, a subclass of it. Give `q_start=0` to the call where the keys are not
            as many as the queries.

        Raises: ValueError if `index` is no such tensor, has an edge twice, a key below 0, or a
            query beyond `num_queries`.

        Cost: O(E log E) time, once for a graph; O(E + num_queries) memory.

        Example:
            >>> graph = SelectedBlocks.from_edges(edge_index.flip(0), nodes, num_heads=4)
            >>> bias = torch.zeros(graph.slot_shape).flatten(-2)
            >>> bias = bias.index_copy(-1, graph.slots, edge_bias).view(graph.slot_shape)
            >>> out = attention(query, key, value, graph, slot_bias=bias)
        """
        heads = checked_integer("from_edges num_heads", num_heads, 1)
        rows = checked_integer("from_edges num_queries", num_queries, 0)
        listed = listed_edges(index, rows)
        if listed.starts is None:
            graph = cls(listed.keys, 1, query_block=1)
        else:
            graph = EdgeLists(listed.keys, 1, 1, 0, listed.starts)
        object.__setattr__(graph, "_edges", (listed.slots, heads))
        return graph

    @property
    def slots(self) -> Tensor:
        """Place of each edge of `from_edges` in `slot_bias.flatten(-2)`, int64 [E]."""
        return self._of_edges("slots")[0]

    @property
    def slot_shape(self) -> tuple[int, int, int, int]:
        """Shape of a bias per edge, (1, num_heads, R, k) of `indices` [R, k]; see `from_edges`."""
        heads = self._of_edges("slot_shape")[1]
        rows, slots = self.indices.shape[-2:]
        return 1, heads, rows, slots

    def _of_edges(self, name: str) -> tuple[Tensor, int]:
        if self._edges is None:
            raise AttributeError(
                f"SelectedBlocks has {name} if from_edges made it; a bias of other lists has the "
                "shape of their indices"
            )
        return self._edges

    def __reduce__(self) -> tuple[Any, ...]:
        kind, arguments, state = super().__reduce__()
        return kind, arguments, {**(state or {}), "_edges": self._edges}

    def _validate(self) -> None:
        super()._validate()
        if _has_numbers(self.indices) and int(self.indices.min()) < -1:
            wrong = self.indices < -1
            raise ValueError(
                "SelectedBlocks must list numbers of blocks from 0 on, or -1 for none, got "
                f"{_first_of(self.indices, wrong)}; indices.clamp(min=-1) makes them -1"
            )
        if self.query_block is None:
            object.__setattr__(self, "query_block", self.block_size)
        freeze_integer(self, "query_block", 1)
        freeze_integer(self, "first_row", 0)
        if self.block_size % self.row_size:
            raise ValueError(
                f"SelectedBlocks query_block must divide block_size {self.block_size}, got "
                f"{self.row_size}; with query_block=1 each query chooses its own blocks"
            )

    @property
    def row_size(self) -> int:
        assert self.query_block is not None
        return self.query_block

    @property
    def num_rows(self) -> int:
        """Number of rows, each of which has a list."""
        return self.indices.shape[-2]

    @property
    def mean_slots(self) -> float:
        """Mean number of slots of a row."""
        return self.indices.shape[-1]

    def of_rows(self, rows: Tensor) -> Tensor:
        """Returns the lists of some rows [n], as [..., n, k] on the device of the indices."""
        return self.indices[..., rows.to(self.indices.device), :]

    def without_rows(self) -> "SelectedBlocks":
        """Returns the mask without lists, a cache key for results that do not depend on them."""
        return replace(self, indices=self.indices[..., :0, :], first_row=0)

    def num_batches(self) -> int | None:
        return self.indices.shape[0] if self.indices.dim() == 4 and len(self.indices) != 1 else None

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        listed, _, blocks = self._listed(batch, head, frame)
        rows = self.block_size, self.row_size, self.first_row
        return _ListedBlocks(listed.unique_consecutive(), blocks, *rows)

    def slot_of_pairs(self, p: Tensor, k: Tensor, batch: int, head: int, frame: Frame) -> Tensor:
        """Returns for each pair the first slot of one head that lists its key block.

        -1 if none does.

        A slot is an index into the flattened [R, k]; p and k are positions that broadcast. Layouts
        use it to place a bias per slot, and the dense reference does too.
        """
        listed, slot, blocks = self._listed(batch, head, frame)
        if not len(listed):
            return p * 0 + k * 0 - 1
        row, block = p // self.row_size - self.first_row, k // self.block_size
        place = torch.searchsorted(listed, row * blocks + block).clamp(max=len(listed) - 1)
        return torch.where((listed[place] == row * blocks + block) & (p >= 0), slot[place], -1)

    def inflation(self, queries: int, kv_len: int) -> Tensor:
        """Returns by how much a tile's rows together list more distinct blocks than one row does.

        A tile has `queries` queries. The result is the ratio (distinct blocks of a tile) / (of one
        row), where both counts are means over tiles: 1 if all rows of a tile list the same blocks.
        It is [H], or [1] if heads share `indices`. It is costly, because it sorts `indices`.
        """
        blocks, rows = -(-kv_len // self.block_size), max(1, queries // self.row_size)
        chosen = self.indices.view((1,) * (4 - self.indices.dim()) + self.indices.shape)
        whole = pad(chosen, (0, 0, 0, -chosen.shape[2] % rows), value=-1)
        tiles = whole.unflatten(2, (-1, rows))  # [B, H, tiles, rows, k]
        in_union, in_rows = (first_in_row(x, blocks).sum(-1) for x in (tiles.flatten(3), tiles))
        used = (in_rows > 0).sum(-1).clamp(min=1)
        mean_of_rows = in_rows.sum(-1) / used
        return in_union.sum((0, 2)) / mean_of_rows.sum((0, 2)).clamp(min=1e-9)

    def _listed(self, batch: int, head: int, frame: Frame) -> tuple[Tensor, Tensor, int]:
        """Returns the listed (row, key block) pairs of one head, sorted by row and then by block.

        Returns: for each pair row * blocks + block and its slot in the flattened [R, k]; and
        `blocks`, the number of key blocks.
        """
        one = self.indices.dim() == 4 and len(self.indices) == 1
        chosen = self._table_of(0 if one else batch, head, frame)
        blocks = -(-frame.kv_len // self.block_size)
        slot = torch.nonzero(((chosen >= 0) & (chosen < blocks)).flatten())[:, 0]
        row = self._row_of(slot)
        listed, order = (row * blocks + chosen.flatten()[slot]).sort(stable=True)
        return listed, slot[order], blocks

    def _row_of(self, slot: Tensor) -> Tensor:
        """Returns the row to which each slot belongs.

        A slot is an index into one head's flat [R, k].
        """
        return slot // max(1, self.indices.shape[-1])

    def check(self, frame: Frame) -> None:
        super().check(frame)
        rows, size = self.num_rows, self.row_size
        last = -(-max(0, frame.q_start + frame.q_len) // size)
        if self.first_row + rows < last:
            way_out = "pass more rows, or q_start=0 for cross attention"
            if not self.first_row and rows == -(-frame.q_len // size):  # a step of decoding
                way_out = f"pass first_row={last - rows}, the row of the first query"
            raise ValueError(
                f"SelectedBlocks must cover {last - self.first_row} query blocks of {size}, from "
                f"first_row={self.first_row} to the last query, got {rows} rows in shape "
                f"{tuple(self.indices.shape)}; {way_out}"
            )
        if frame.q_len and last and max(0, frame.q_start) < self.first_row * size:
            raise ValueError(
                f"SelectedBlocks must have a row for the first query, at position {frame.q_start}, "
                f"got first_row={self.first_row}, which begins at {self.first_row * size}; pass "
                f"the rows from {max(0, frame.q_start) // size} on, or a smaller first_row"
            )
        checked = os.environ.get(CHECK) == "1" and type(self.indices) is Tensor
        if checked and (found := self.listed_outside(frame)):
            raise ValueError(
                f"SelectedBlocks must list numbers from {self.numbers(frame)}, or -1 for none, got "
                f"{found}; without {CHECK}=1 such numbers are ignored"
            )

    def listed_outside(self, frame: Frame) -> str:
        """Describes, for an error, listed numbers that are neither a key block nor -1; "" if none.

        It reads the numbers, so the host waits for a GPU.
        """
        first = max(0, max(0, frame.q_start) // self.row_size - self.first_row)
        last = -(-max(0, frame.q_start + frame.q_len) // self.row_size) - self.first_row
        rows = self.indices[..., first:last, :]
        blocks = -(-frame.kv_len // self.block_size)
        if not rows.numel() or -1 <= int(rows.min()) <= int(rows.max()) < blocks:
            return ""
        return _first_of(rows, (rows < -1) | (rows >= blocks), first)

    def numbers(self, frame: Frame) -> str:
        """Returns text for an error: which block numbers are valid in a frame."""
        blocks = -(-frame.kv_len // self.block_size)
        of = "" if self.block_size == 1 else f"the {blocks} blocks of {self.block_size} in "
        return f"0 to {blocks - 1}, of {of}{frame.kv_len} keys"


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class EdgeLists(SelectedBlocks):
    """Lists of different lengths, stored one behind the other, for a graph with hubs.

    A query in row r sees the keys `indices[starts[r] : starts[r + 1], 0]`. `from_edges` makes it.

    Args:
        indices: int64 [E, 1], the keys of row 0, then those of row 1, and so on.
        block_size, query_block: 1, single keys and a list for each query.
        first_row: as `SelectedBlocks`.
        starts: int64 [R + 1], rising from 0 to E.
    """

    starts: Tensor | None = None
    table_dims: ClassVar[tuple[int, ...]] = (2,)

    def _validate(self) -> None:
        super()._validate()
        assert isinstance(self.starts, Tensor) and self.starts.dim() == 1
        assert self.block_size == 1 and self.indices.shape[1] == 1

    @property
    def begin(self) -> Tensor:
        """Index of each row's first slot, int64 [R + 1]; the last item is the number of slots."""
        assert self.starts is not None
        return self.starts

    @property
    def num_rows(self) -> int:
        return len(self.begin) - 1

    @property
    def mean_slots(self) -> float:
        return len(self.indices) / max(1, self.num_rows)

    def of_rows(self, rows: Tensor) -> Tensor:
        slot = self.slots_of(rows)
        return torch.where(slot < 0, -1, self.indices[slot.clamp(min=0), 0])

    def slots_of(self, rows: Tensor) -> Tensor:
        """Returns the slots of rows [..., n] as [..., n, most], padded with -1 at the end."""
        count = self.counts_of(rows)
        most = int(count.max()) if count.numel() else 0
        number = torch.arange(most, device=count.device)
        first = self.begin[rows.to(count.device)]
        return torch.where(number < count[..., None], first[..., None] + number, -1)

    def counts_of(self, rows: Tensor) -> Tensor:
        """Returns how many slots each of some rows has, on the device of the indices."""
        rows = rows.to(self.begin.device)
        return self.begin[rows + 1] - self.begin[rows]

    def without_rows(self) -> SelectedBlocks:
        return SelectedBlocks(self.indices[:0], self.block_size, self.query_block, self.first_row)

    def _row_of(self, slot: Tensor) -> Tensor:
        return torch.searchsorted(self.begin.to(slot.device), slot, right=True) - 1

    def inflation(self, queries: int, kv_len: int) -> Tensor:
        rows, tiles = max(1, queries), -(-self.num_rows // max(1, queries))
        key = self.indices[:, 0]
        row = self._row_of(torch.arange(len(key), device=key.device))
        pairs = (row * kv_len + key)[(key >= 0) & (key < kv_len)].unique()
        row, key = pairs // max(1, kv_len), pairs % max(1, kv_len)
        in_union = len((row // rows * kv_len + key).unique())
        used = (row.unique() // rows).bincount(minlength=tiles).clamp(min=1)
        in_rows = (row // rows).bincount(minlength=tiles) / used
        return (in_union / in_rows.sum().clamp(min=1e-9))[None]

    def listed_outside(self, frame: Frame) -> str:
        first, last = (
            min(self.num_rows, max(0, max(0, end) - self.first_row))
            for end in (frame.q_start, frame.q_start + frame.q_len)
        )
        begin, end = self.begin[[first, max(first, last)]].tolist()
        keys = self.indices[begin:end, 0]
        wrong = torch.nonzero((keys < -1) | (keys >= frame.kv_len))[:, 0]
        if not len(wrong):
            return ""
        slot = begin + wrong[:1]
        row = int(self._row_of(slot))
        where = f"{int(self.indices[slot, 0])} in row {row}, slot {int(slot - self.begin[row])}"
        return where + f", and {len(wrong) - 1} more slots" * (len(wrong) > 1)


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class KeyLists(SelectedBlocks):
    """The keys that each query of a call sees, listed before the call for its forward and backward.

    No other mask limits them. The library alone makes these lists.

    Args:
        indices: int32 [B or 1, H, Nq, n], -1 for no key; H divides Hq.
        block_size, query_block: 1, single keys and a list for each query.
        first_row: position of the first query.
        counts: int32 [B or 1, H, Nq], the number of keys of each query, if its keys ascend, have no
            repeats and stand before every -1; None for lists of another order.
    """

    counts: Tensor | None = None
    table_dims: ClassVar[tuple[int, ...]] = (4,)
    dtype: ClassVar[torch.dtype] = torch.int32

    def _validate(self) -> None:
        """Copies and checks nothing: no caller has these lists."""


def _has_numbers(x: Tensor) -> bool:
    """Whether a tensor's numbers can be read now without waiting for a GPU or asking a tracer.

    True on a CPU, if no tracer and no functorch transform wraps the tensor.
    """
    known = x.device.type == "cpu" and type(x) is Tensor and x.numel() > 0
    return known and not (is_traced(x) or is_functorch_wrapped_tensor(x))


def _first_of(table: Tensor, wrong: Tensor, first_row: int = 0) -> str:
    """Describes, for an error, the first number of a table [..., R, k] that `wrong` marks.

    Rows of the table are numbered from `first_row`.
    """
    place = wrong.nonzero()[0].tolist()
    number, others = int(table[tuple(place)]), int(wrong.sum()) - 1
    place[-2] += first_row
    names = ("batch entry", "head", "row", "slot")[-len(place) :]
    where = ", ".join(f"{name} {x}" for name, x in zip(names, place, strict=True))
    return f"{number} in {where}" + f", and {others} more slots" * (others > 0)


@dataclass(frozen=True, repr=False, eq=False)
class _ListedBlocks(TensorMask, BlockwiseMask):
    """The mask of one head of a `SelectedBlocks`, as its method `at` returns it.

    `listed` has row * blocks + block of each listed pair, ascending without repeats.
    """

    listed: Tensor
    blocks: int
    block_size: int
    query_block: int
    first_row: int
    table_dims: ClassVar[tuple[int, ...]] = (1,)
    dtype: ClassVar[torch.dtype] = torch.int64

    @property
    def row_size(self) -> int:
        return self.query_block

    def blocks_hold(self, q_block: Tensor, k_block: Tensor, kv_len: int | Tensor) -> Tensor:
        place = (q_block - self.first_row) * self.blocks + k_block
        if not len(self.listed):
            return place != place
        found = torch.searchsorted(self.listed, place).clamp(max=len(self.listed) - 1)
        return (self.listed[found] == place) & (k_block < self.blocks)

    def spans(self, q_block: Tensor, kv_len: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        begin = (q_block - self.first_row) * self.blocks
        first, last = (torch.searchsorted(self.listed, x) for x in (begin, begin + self.blocks))
        index, number = expand_counts(last - first)
        block = self.listed[first[index] + number] - begin[index]
        return index, block, block


def selections_of(pattern: Pattern) -> list[SelectedBlocks]:
    """Returns all `SelectedBlocks` in a pattern, also inside `&`, `|` and `+`."""
    return [mask for mask in joined_masks(pattern) if isinstance(mask, SelectedBlocks)]


def has_lists(pattern: Pattern) -> bool:
    """Whether a selection in a pattern has blocks below 16 tokens, which kernels read key by key.

    Selections inside documents and trees count too.
    """
    if not pattern.tensors:
        return False
    found: bool | None = vars(pattern).get("_has_lists")
    if found is None:
        found = any(isinstance(x, SelectedBlocks) and x.block_size < 16 for x in parts_of(pattern))
        if not torch.compiler.is_compiling():
            object.__setattr__(pattern, "_has_lists", found)
    return found
