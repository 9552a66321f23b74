"""Masks that are defined block by block, or by a tensor.

In most of them, whole blocks of queries see whole blocks of keys. The block size is part of the
pattern; its layout may have tiles of another size. Below, b = p // block_size is the block of query
position p, and b' = k // block_size that of key position k. A negative position is in no block.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ground.arguments import (
    checked_flag,
    checked_integer,
    freeze_integer,
    freeze_integers,
    per_entry,
    shortened,
)
from ..ground.keywords import class_with_hints
from ..ground.rows import expand_counts, mix, permute
from .algebra import Frame, Mask
from .positions import Lengths, _InDocuments


@class_with_hints
class BlockwiseMask(Mask):
    """A mask that says which key blocks each query block sees."""

    block_size: int
    by_distance: ClassVar[bool] = False  # True if the mask depends on b - b' alone

    def _validate(self) -> None:
        freeze_integer(self, "block_size", 1)

    @property
    def row_size(self) -> int:
        """Number of queries in a query block, which may differ from `block_size`."""
        return self.block_size

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return self.blocks_hold(p // self.row_size, k // self.block_size, frame.kv_len) & (p >= 0)

    def blocks_hold(self, q_block: Tensor, k_block: Tensor, kv_len: int | Tensor) -> Tensor:
        """Whether query blocks see key blocks: bool of their indices' broadcast shape.

        Indices are at least 0.
        """
        raise NotImplementedError

    def spans(self, q_block: Tensor, kv_len: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Lists the key blocks that query blocks [n] see, as ranges for the layout of tiles.

        Returns: int64 [m] each: index into `q_block`, first key block, last key block (inclusive).
        A query block may have several ranges, and they may overlap or reach outside the keys.
        """
        raise NotImplementedError


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class BlockDilated(BlockwiseMask):
    """A block of queries sees its own block of keys, and blocks at a distance in `rates`.

    In blocks of `block_size` tokens: b' = b, or abs(b - b') is one of `rates`.

    Example: `BlockDilated((1, 2, 4, 8), 64)`.
    """

    rates: tuple[int, ...]
    block_size: int
    asks_frame = False
    by_distance = True

    def _validate(self) -> None:
        freeze_integers(self, "rates", 1)
        super()._validate()

    def blocks_hold(self, q_block: Tensor, k_block: Tensor, kv_len: int | Tensor) -> Tensor:
        distances = torch.tensor([0, *self.rates], device=q_block.device)
        return torch.isin((q_block - k_block).abs(), distances)

    def spans(self, q_block: Tensor, kv_len: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        distances = torch.tensor(sorted({0, *self.rates, *(-rate for rate in self.rates)}))
        blocks = (q_block[:, None] + distances).flatten()
        return torch.arange(len(q_block)).repeat_interleave(len(distances)), blocks, blocks


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class BlockWindow(BlockwiseMask):
    """A block of queries sees the blocks of keys up to `radius` away: abs(b - b') <= radius.

    Blocks have `block_size` tokens. Example: `BlockWindow(2, 64)`.
    """

    radius: int
    block_size: int
    asks_frame = False
    by_distance = True

    def _validate(self) -> None:
        freeze_integer(self, "radius", 0)
        super()._validate()

    def blocks_hold(self, q_block: Tensor, k_block: Tensor, kv_len: int | Tensor) -> Tensor:
        return (q_block - k_block).abs() <= self.radius

    def spans(self, q_block: Tensor, kv_len: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.arange(len(q_block)), q_block - self.radius, q_block + self.radius


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class BlockCausal(BlockwiseMask):
    """A block of queries sees its own block of keys whole, and all blocks before it: b' <= b.

    Blocks have `block_size` tokens; or, where it is a sequence, its sizes in order, which sum to
    Nk. As the lengths of `Documents`, sizes may be 0, nested by batch entry, or an int64 tensor,
    which is data of compiled functions.

    Example: `BlockCausal(32)`, or `BlockCausal((4, 9, 1))` for a prefix, a state and an action.
    """

    block_size: int
    asks_frame = False
    by_distance = True

    def __new__(cls, block_size: Any) -> Any:  # `BlockCausal` or `CausalBlocks`
        if cls is BlockCausal and _are_sizes(block_size):
            return CausalBlocks(block_size)
        return super().__new__(cls)

    def blocks_hold(self, q_block: Tensor, k_block: Tensor, kv_len: int | Tensor) -> Tensor:
        return k_block <= q_block

    def spans(self, q_block: Tensor, kv_len: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.arange(len(q_block)), torch.zeros_like(q_block), q_block


def _are_sizes(block_size: Any) -> bool:
    """Whether the argument of `BlockCausal` is one size per block instead of a single size."""
    if isinstance(block_size, Tensor):
        return block_size.dim() > 0
    if isinstance(block_size, str | bytes | type):
        return False
    return isinstance(block_size, Sequence) or getattr(block_size, "ndim", 0) > 0


@dataclass(frozen=True, repr=False, eq=False)
class CausalBlocks(_InDocuments):
    """`BlockCausal` of blocks of unlike sizes: a query sees its own block and all earlier keys."""

    lengths: Lengths
    _name = "BlockCausal"
    _unit = "block"
    _counts = "sizes"

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        return CausalBlocks(self.entries[batch]) if per_entry(self.lengths) else self

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        # a key before the query is always visible; a later key only if it is in the query's block
        ends = self.ends()
        same = torch.searchsorted(ends, p, right=True) == torch.searchsorted(ends, k, right=True)
        return ((k <= p) | (same & (p >= 0))) & (k < frame.kv_len)

    def _from_tokens(self) -> str:
        return "BlockCausal(ids.unique_consecutive(return_counts=True)[1]) takes ids of blocks"


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class BlockDiffusion(BlockwiseMask):
    """Trains block diffusion over `n` noisy tokens, followed by the same `n` tokens clean.

    A noisy block sees itself whole, and the clean blocks before it; a clean block sees the clean
    blocks up to its own. `block_size` divides `n`; a call has 2 n tokens.

    Source: Block Diffusion (arXiv 2503.09573), section 3.
    """

    n: int
    block_size: int

    def _validate(self) -> None:
        super()._validate()
        freeze_integer(self, "n", 1)
        if self.n % self.block_size:
            raise ValueError(
                f"BlockDiffusion n must be a multiple of block_size {self.block_size}, got "
                f"{self.n}; pad both halves"
            )

    def check(self, frame: Frame) -> None:
        if (most := max(frame.kv_len, frame.q_start + frame.q_len)) > 2 * self.n:
            raise ValueError(
                f"BlockDiffusion with n {self.n} is for {2 * self.n} tokens, noisy and clean ones, "
                f"got {most}; pass half the number of tokens as n"
            )

    @property
    def own_length(self) -> int:
        return 2 * self.n

    def blocks_hold(self, q_block: Tensor, k_block: Tensor, kv_len: int | Tensor) -> Tensor:
        half = self.n // self.block_size
        seen = torch.where(q_block < half, q_block + half - 1, q_block)  # last clean block
        return (k_block == q_block) | ((k_block >= half) & (k_block <= seen))

    def spans(self, q_block: Tensor, kv_len: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        half = self.n // self.block_size
        noisy, clean = (torch.nonzero(x)[:, 0] for x in (q_block < half, q_block != 0))
        last = torch.where(q_block < half, q_block + half - 1, q_block)[clean]
        own, first = q_block[noisy], torch.full_like(last, half)
        return torch.cat((noisy, clean)), torch.cat((own, first)), torch.cat((own, last))


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class Hierarchical(BlockwiseMask):
    """The union of levels (stride, window), in tokens: at every stride, a block sees a window.

    At a level, query blocks with b % max(1, stride // block_size) == 0 see the key blocks with
    abs(b - b') <= (window // block_size) // 2, or all key blocks if the window is None.
    """

    levels: tuple[tuple[int, int | None], ...]
    block_size: int
    asks_frame = False

    def _validate(self) -> None:
        super()._validate()
        if not isinstance(self.levels, tuple | list):
            raise TypeError(
                "Hierarchical levels must be (stride, window) pairs, got "
                f"{shortened(repr(self.levels))}"
            )
        if not self.levels:
            raise ValueError(
                "Hierarchical levels must hold at least one (stride, window) pair, got none; "
                "((block_size, None),) sees everything"
            )
        for level in self.levels:
            if not isinstance(level, Sequence) or len(level) != 2:
                raise ValueError(
                    "each of Hierarchical levels must be a (stride, window) pair, got "
                    f"{shortened(repr(level))}; write (stride, None) to see everything"
                )
        levels = tuple(
            (
                checked_integer("Hierarchical stride", stride, 1),
                None if window is None else checked_integer("Hierarchical window", window, 0),
            )
            for stride, window in self.levels
        )
        object.__setattr__(self, "levels", levels)

    def in_blocks(self) -> list[tuple[int, int | None]]:
        """Returns (stride between query blocks, window radius or None) per level, in blocks."""
        size = self.block_size
        return [(max(1, s // size), None if w is None else w // size // 2) for s, w in self.levels]

    def blocks_hold(self, q_block: Tensor, k_block: Tensor, kv_len: int | Tensor) -> Tensor:
        pairs = (q_block != q_block) | (k_block != k_block)
        for period, radius in self.in_blocks():
            level = q_block % period == 0
            if radius is not None:
                level = level & ((q_block - k_block).abs() <= radius)
            pairs = pairs | level
        return pairs

    def spans(self, q_block: Tensor, kv_len: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        far = torch.iinfo(torch.int64).max // (4 * self.block_size)
        parts = []
        for period, radius in self.in_blocks():
            index = torch.nonzero(q_block % period == 0)[:, 0]
            reach = far if radius is None else radius
            parts.append(torch.stack((index, q_block[index] - reach, q_block[index] + reach)))
        index, first, last = torch.cat(parts, 1)
        return index, first, last


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class RandomBlocks(BlockwiseMask):
    """A block of queries sees its own block of keys and a seeded random choice of others.

    With blocks = ceil(Nk / block_size), it sees max(1, floor(density * blocks + 0.5)) key blocks,
    where 0 < density <= 1. The choice is a function of (seed, kv head, query block, blocks) alone;
    all heads share it unless `per_head`.
    """

    density: float
    block_size: int
    seed: int = 0
    per_head: bool = True

    def _validate(self) -> None:
        super()._validate()
        freeze_integer(self, "seed", -(1 << 63), (1 << 63) - 1)
        number: Any = self.density
        if isinstance(number, bool) or not isinstance(number, Real):
            raise TypeError(f"RandomBlocks density must be a number, got {shortened(repr(number))}")
        if type(self.density) is not int:  # the repr of a numpy number is no literal
            object.__setattr__(self, "density", float(number))
        checked_flag("RandomBlocks per_head", self.per_head)
        if not 0 < self.density <= 1:
            raise ValueError(
                "RandomBlocks density must be above 0 and at most 1, got "
                f"{shortened(repr(self.density))}"
            )

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        key = int(mix(self.seed, frame.kv_head(head) if self.per_head else 0))
        return _RandomBlocksOfHead(float(self.density), self.block_size, key)

    def num_tables(self, frame: Frame) -> int:
        return frame.num_kv_heads if self.per_head else 1


@dataclass(frozen=True, repr=False, eq=False)
class _RandomBlocksOfHead(BlockwiseMask):
    """The mask of one kv head of a `RandomBlocks`, whose random choice `key` determines.

    A query block takes the first `count` key blocks of a random permutation. If there is a key
    block of equal index (the diagonal), it takes this block, and `count - 1` of the others.
    """

    density: float
    block_size: int
    key: int

    def counts(self, kv_len: int | Tensor) -> tuple[Tensor, Tensor]:
        """Returns the number of key blocks, and how many of them each query block sees."""
        blocks = -(-torch.as_tensor(kv_len) // self.block_size)
        count = (self.density * blocks.double() + 0.5).floor().long().clamp(min=1).minimum(blocks)
        return blocks, count

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        # Tokens of one pair of blocks ask the same, and a draw is slow: draw once for each pair.
        blocks = (p // self.row_size << 32) + k // self.block_size
        pairs, place = blocks.unique(return_inverse=True)
        drawn = self.blocks_hold(pairs >> 32, pairs & 0xFFFFFFFF, frame.kv_len)
        return drawn[place] & (p >= 0)

    def _row(self, q_block: Tensor, kv_len: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns four numbers for each query block, from which its random key blocks follow.

        These are: whether it has a diagonal block, how many other blocks it draws, from how many it
        draws them, and the hash that keys the permutation.
        """
        blocks, count = self.counts(kv_len)
        diagonal = q_block < blocks
        own = diagonal.long()
        return diagonal, count - own, blocks - own, mix(self.key, q_block, blocks)

    def blocks_hold(self, q_block: Tensor, k_block: Tensor, kv_len: int | Tensor) -> Tensor:
        diagonal, drawn, others, key = self._row(q_block, kv_len)
        skip = diagonal & (k_block > q_block)
        image = (k_block - skip.long()).clamp(min=0).minimum(others - 1).clamp(min=0)
        chosen = permute(image, others.clamp(min=1), key, inverse=True) < drawn
        return torch.where(diagonal & (q_block == k_block), True, chosen & (others > 0))

    def spans(self, q_block: Tensor, kv_len: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        diagonal, drawn, others, key = torch.broadcast_tensors(*self._row(q_block, kv_len))
        index, turn = expand_counts(drawn)
        image = permute(turn, others[index], key[index]) if len(index) else turn
        image = image + (diagonal[index] & (image >= q_block[index])).long()
        added = torch.nonzero(diagonal)[:, 0]
        blocks = torch.cat((image, q_block[added]))
        return torch.cat((index, added)), blocks, blocks


class Owned(NamedTuple):
    """Wraps a tensor on a GPU that nobody will write to, so that a mask need not copy it."""

    tensor: Tensor


@class_with_hints
class TensorMask(Mask):
    """A mask whose first field is a tensor, copied at construction and compared by content."""

    dtype: ClassVar[torch.dtype] = torch.bool
    table_dims: ClassVar[tuple[int, ...]] = (2, 3)

    @property
    def table(self) -> Tensor:
        return next(self._values())

    def _validate(self) -> None:
        name, table = type(self).__name__, next(self._values())
        owned = isinstance(table, Owned) and table.tensor.device.type != "cpu"
        if isinstance(table, Owned):
            table = table.tensor
        if not isinstance(table, Tensor) or table.dtype != self.dtype:
            kind = table.dtype if isinstance(table, Tensor) else type(table).__name__
            way_out = f"convert with .to({self.dtype})"
            if not isinstance(table, Tensor):
                way_out = f"torch.as_tensor(..., dtype={self.dtype}) makes one"
            elif table.is_floating_point() and self.dtype == torch.int64:
                way_out = "these look like scores: pass scores.topk(k).indices"
            raise TypeError(f"{name} needs a {self.dtype} tensor, got {kind}; {way_out}")
        if table.layout is not torch.strided or table.is_meta or table.is_nested:
            got = "one on the meta device" if table.is_meta else str(table.layout)
            raise ValueError(
                f"{name} needs a dense tensor with numbers, got "
                f"{'a nested one' if table.is_nested else got}; convert with .to_dense(), or make "
                "it on the CPU"
            )
        if table.dim() not in self.table_dims:
            raise ValueError(
                f"{name} needs a tensor of {' or '.join(map(str, self.table_dims))} dims, "
                f"got shape {tuple(table.shape)}; remove dims with squeeze() or an index"
            )
        name = fields(self)[0].name  # type: ignore[arg-type]
        object.__setattr__(self, name, table if owned else table.detach().clone())
        super()._validate()

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        _, *others = self._values()
        return type(self)(self._table_of(batch, head, frame), *others)

    def num_tables(self, frame: Frame) -> int:
        return 1 if self.table.dim() == 2 else self.table.shape[-3]

    def num_batches(self) -> int | None:
        return self.table.shape[0] if self.table.dim() == 4 else None

    def _table_of(self, batch: int, head: int, frame: Frame) -> Tensor:
        table = (self.table[batch] if self.table.dim() == 4 else self.table).cpu()
        return table[head * len(table) // frame.num_heads] if table.dim() == 3 else table

    def check(self, frame: Frame) -> None:
        if (tables := self.num_tables(frame)) not in (1, frame.num_kv_heads, frame.num_heads):
            raise ValueError(
                f"{type(self).__name__} must have 1, {frame.num_kv_heads} (kv) or "
                f"{frame.num_heads} (query) heads, got {tables} in shape {tuple(self.table.shape)}"
                + "; if the first dim is the batch, table[:, None] adds one head for all"
                * (self.table.dim() == 3)
            )


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class Dense(TensorMask):
    """Any bool mask [Nq, Nk], [H, Nq, Nk] or [B, H, Nq, Nk], for small inputs.

    Row i is for the i-th query of the call, whatever its position.
    """

    mask: Tensor
    table_dims: ClassVar[tuple[int, ...]] = (2, 3, 4)

    def check(self, frame: Frame) -> None:
        super().check(frame)
        if tuple(self.mask.shape[-2:]) != (frame.q_len, frame.kv_len):
            raise ValueError(
                f"Dense mask must be [..., {frame.q_len}, {frame.kv_len}] for these lengths, "
                f"got shape {tuple(self.mask.shape)}"
            )

    @property
    def own_length(self) -> int:
        return self.mask.shape[-1]

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return lookup(self.mask, p - frame.q_start, k)


def lookup(table: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Reads a bool table [R, C] at indices that broadcast; an index outside of it gives False."""
    rows, columns = table.shape
    if not table.numel():
        return (row != row) | (column != column)
    inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    return inside & table[row.clamp(0, rows - 1), column.clamp(0, columns - 1)]


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class Blocks(TensorMask, BlockwiseMask):
    """A query p sees the keys k where `active[..., p // block_size, k // block_size]`.

    Positions p count from the first key, so cross attention usually needs `q_start=0`.

    Args:
        active: bool [Qb, Kb], [H, Qb, Kb] or [B, H, Qb, Kb] with H = 1, Hkv or Hq; copied. It must
            cover all positions.
        block_size: tokens in a block.
    """

    active: Tensor
    block_size: int
    table_dims: ClassVar[tuple[int, ...]] = (2, 3, 4)

    def check(self, frame: Frame) -> None:
        super().check(frame)
        ends = frame.q_start + frame.q_len, frame.kv_len
        needed = [math.ceil(max(0, end) / self.block_size) for end in ends]
        if any(size < need for size, need in zip(self.active.shape[-2:], needed, strict=True)):
            raise ValueError(
                f"Blocks must cover {needed[0]} query and {needed[1]} key blocks of "
                f"{self.block_size} by absolute position, got shape {tuple(self.active.shape)}; "
                "for cross attention pass q_start=0"
            )

    @property
    def own_length(self) -> int:
        return min(self.active.shape[-2:]) * self.block_size

    def blocks_hold(self, q_block: Tensor, k_block: Tensor, kv_len: int | Tensor) -> Tensor:
        return lookup(self.active, q_block, k_block)

    def spans(self, q_block: Tensor, kv_len: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.active[q_block.clamp(max=len(self.active) - 1)]
        index, block = torch.nonzero(rows, as_tuple=True)
        return index, block, block
