"""Functions that Triton kernels share: which work unit a program computes, how it reads tiles.

A `tl.constexpr` is fixed when a kernel is compiled. Lengths, counts, strides and scales are not, so
that new ones need no compilation.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

_INTS = (tl.int32, tl.int64)
_TABLES = ("tile_start", "tile_stop", "tile_origin")  # programs load a single number of each


def kernel(function: Callable[..., None]) -> Any:
    """Decorates a Triton kernel that is compiled once for all values of its integer arguments.

    Another alignment of layout tables, as after each decoded token, needs no compilation either.
    """
    kinds = inspect.get_annotations(function)
    tables = [name for name in _TABLES if name in inspect.signature(function).parameters]
    return triton.jit(
        function,
        do_not_specialize=[name for name, kind in kinds.items() if kind in _INTS],
        do_not_specialize_on_alignment=tables,
    )


@triton.jit
def load_rows(
    tiles, source, offset, row, column, token, real, step, stride, COUNT: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ALL: tl.constexpr, TMA: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Loads [COUNT, PADDED_DIM]: every `step`-th row from `token` on, of [.., tokens, HEAD_DIM].

    With TMA it uses the descriptor `tiles` of a matrix where the head begins at (row, column); then
    all rows must exist, and step must be 1. Otherwise it reads from `source + offset`; rows where
    `real` is False become 0. ALL is True if all rows exist, so that `real` is not needed.
    """
    if TMA:
        return tiles.load([row + token.to(tl.int32), column])
    else:
        index: tl.constexpr = tl.int64 if WIDE else tl.int32
        dim = tl.arange(0, PADDED_DIM)
        rows = tl.arange(0, COUNT).to(index) * (step * stride).to(index)
        pointers = source + (offset + token * stride) + rows[:, None] + dim[None, :]
        if HEAD_DIM == PADDED_DIM:
            if ALL:
                return tl.load(pointers)
            else:
                return tl.load(pointers, mask=real[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=real[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def head_of(batch, head, batch_stride, head_stride, side, token_stride, ALIGN: tl.constexpr,
            TMA: tl.constexpr):
    """Returns where a head of [B, H, N, D] begins: its offset, and its row and column for TMA.

    With TMA, a matrix has the tokens as rows; strides count rows, heads are `side` columns apart.
    """
    if TMA:
        row, column = batch * batch_stride + head * head_stride, head * elements(side, ALIGN)
        return row * token_stride + column, row.to(tl.int32), column.to(tl.int32)
    else:
        offset = batch * elements(batch_stride, ALIGN) + head * elements(head_stride, ALIGN)
        return offset, 0, 0


@triton.jit
def step_of(step, TMA: tl.constexpr):
    """Returns the distance between a tile's neighbouring tokens; with TMA, the constant 1."""
    return tl.full([], 1, tl.int64) if TMA else step


@triton.jit
def visible(words, bitmap, rows, first, TILE: tl.constexpr, WORD: tl.constexpr,
            COUNT: tl.constexpr):
    """Returns int32 [rows, COUNT], not 0 where a bitmap has the pair; bitmap -1 has all pairs.

    `rows` are indices of tokens in a tile: a bitmap has a line of TILE bits for each token. Columns
    are COUNT tokens of the other tile, from index `first` on. Each word of a line is loaded once;
    the compiler knows which columns it has.
    """
    LINE: tl.constexpr = TILE // WORD
    line = words + bitmap.to(tl.int64) * (TILE * LINE) + rows[:, None] * LINE
    along = tl.arange(0, COUNT)[None, :]
    bits = tl.zeros_like(rows[:, None] + along)
    for w in tl.static_range((COUNT + WORD - 1) // WORD):
        lines = tl.where((bitmap >= 0) & (first // WORD + w < LINE), TILE, 0)  # that have the word
        word = tl.load(line + first // WORD + w, mask=rows[:, None] < lines, other=-1).to(tl.int32)
        bit = word & (1 << (along & (WORD - 1)))
        bits = tl.where((along & ~(WORD - 1)) == w * WORD, bit, bits)
    return bits


@triton.jit
def program_of(parts, PACK: tl.constexpr, num_units, num_heads, group):
    """Returns (part of a tile, work unit, first head, batch entry); parts vary the fastest."""
    program = tl.program_id(0).to(tl.int64)
    part = (program % parts).to(tl.int32)
    unit = program // parts % num_units
    rest = (program // parts // num_units).to(tl.int32)
    if PACK == 1:
        all_packs, head = num_heads, rest % num_heads
    else:
        packs = (group + PACK - 1) // PACK  # per kv head
        all_packs = num_heads // group * packs
        pack = rest % all_packs
        head = pack // packs * group + pack % packs * PACK
    return part, unit, head, (rest // all_packs).to(tl.uint32).to(tl.int64)


@triton.jit
def table_of(batch, head, num_heads, tables, table_batches, axes):
    """Returns the index of a query head's table of visited tiles, and of its tile bounds (axis)."""
    of_batch = tl.where(table_batches > 1, batch, 0)
    axis = (head * axes // num_heads).to(tl.uint32)  # unsigned: widening takes no register
    return of_batch * tables + head * tables // num_heads, axis.to(tl.int64)


@triton.jit
def rows_of(
    begin, stop, step, part, head, group, TILE: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, PACK: tl.constexpr,
):
    """Returns (index in the tile, token, query head, whether it exists) of each program row."""
    row = tl.arange(0, ROWS)
    slot = part * TOKENS + row % TOKENS
    of_pack = row // TOKENS
    position = begin + (row % TOKENS) * step
    real = (position < stop) & (slot < TILE) & (of_pack < PACK) & (head % group + of_pack < group)
    return slot, position, (head + of_pack).to(tl.int64), real


@triton.jit
def elements(stride, ALIGN: tl.constexpr):
    """Converts a stride in units of ALIGN to elements; the known factor permits wide loads."""
    return tl.cast(stride, tl.int64) * ALIGN  # the interpreter may pass an int32


@triton.jit
def unit_at(unit):
    """Returns a unit: (tile or -1 if unused, first entry, first entry that needs a mask, end)."""
    return tl.load(unit), tl.load(unit + 1), tl.load(unit + 2), tl.load(unit + 3)


@triton.jit
def span_of(tile_start, tile_stop, axis, num_tiles, tile, first_slot, step, WIDE: tl.constexpr):
    """Returns (index of the tile's token number `first_slot`, counted from 0; end of the tile).

    Both are indices of tokens in the sequence: int64 if WIDE, int32 otherwise.
    """
    index: tl.constexpr = tl.int64 if WIDE else tl.int32
    at = axis * num_tiles + tile
    begin = tl.load(tile_start + at) + first_slot * step
    return begin.to(index), tl.load(tile_stop + at).to(index)


@triton.jit
def from_table(start, tokens, bitmap, entry, table, num_entries):
    """Returns four pointers to the items of one table, from pointers to lists of all tables."""
    offset = table * num_entries
    return start + offset, tokens + offset, bitmap + offset, entry + offset
