"""Functions that Triton kernels share: they find a program's work unit, and read tiles.

A `tl.constexpr` is fixed when a kernel is compiled. Lengths, counts, strides and scales are plain
arguments, so that new values need no compilation.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

_INTS = (tl.int32, tl.int64)
_TABLES = ("tile_start", "tile_stop", "tile_origin")  # each program loads a single number of them


def kernel(function: Callable[..., None], jit: Callable[..., Any] = triton.jit) -> Any:
    """Decorates a Triton kernel that is compiled once for all values of its integer arguments.

    A new alignment of layout tables, as after each decoded token, needs no compilation either.
    `jit` is Gluon's for a kernel that is written in Gluon.
    """
    kinds = inspect.get_annotations(function)
    tables = [name for name in _TABLES if name in inspect.signature(function).parameters]
    return jit(
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
    """Loads rows of [.., tokens, HEAD_DIM]: every `step`-th row from `token` on.

    Returns [COUNT, PADDED_DIM]. With TMA it reads from the descriptor `tiles` of a matrix in which
    the head begins at (row, column); all rows must then exist, and step must be 1. Without TMA it
    reads from `source + offset`, and rows where `real` is False become 0. ALL says that all rows
    exist, so that `real` is not needed.
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

    With TMA, the tensor is a matrix whose rows are tokens: strides count rows, and heads that lie
    side by side are `side` columns apart.
    """
    if TMA:
        row, column = batch * batch_stride + head * head_stride, head * elements(side, ALIGN)
        return row * token_stride + column, row.to(tl.int32), column.to(tl.int32)
    else:
        offset = batch * elements(batch_stride, ALIGN) + head * elements(head_stride, ALIGN)
        return offset, 0, 0


@triton.jit
def step_of(step, TMA: tl.constexpr):
    """Returns the distance between neighboring tokens of a tile; with TMA, the constant 1."""
    return tl.full([], 1, tl.int64) if TMA else step


@triton.jit
def visible(words, bitmap, rows, first, TILE: tl.constexpr, WORD: tl.constexpr,
            COUNT: tl.constexpr):
    """Returns int32 [rows, COUNT] that is not 0 where a bitmap has the pair.

    Bitmap -1 has all pairs. `rows` are indices of tokens in a tile: a bitmap has a line of TILE
    bits for each of them. Columns are COUNT tokens of the other tile, from index `first` on. Each
    word of a line is loaded once, because the compiler knows which columns it has.
    """
    along = tl.arange(0, COUNT)[None, :]
    return visible_among(words, bitmap, rows, along, first, TILE, WORD, COUNT)


@triton.jit
def visible_among(words, bitmap, rows, along, first, TILE: tl.constexpr, WORD: tl.constexpr,
                  COUNT: tl.constexpr):
    """Returns `visible`; `along` [1, COUNT] numbers its columns, in the layout of the caller."""
    LINE: tl.constexpr = TILE // WORD
    line = words + bitmap.to(tl.int64) * (TILE * LINE) + rows[:, None] * LINE
    bits = 0
    for w in tl.static_range((COUNT + WORD - 1) // WORD):
        lines = tl.where((bitmap >= 0) & (first // WORD + w < LINE), TILE, 0)  # 0: no such word
        word = tl.load(line + first // WORD + w, mask=rows[:, None] < lines, other=-1).to(tl.int32)
        bit = word & (1 << (along & (WORD - 1)))
        bits = tl.where((along & ~(WORD - 1)) == w * WORD, bit, bits)
    return bits


@triton.jit
def program_of(parts, PACK: tl.constexpr, num_units, num_heads, group):
    """Returns what a program computes: (part of a tile, work unit, first head, batch entry).

    Parts vary the fastest between programs.
    """
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
    """Returns the indices of a query head's table of tiles and of its tile bounds (axis)."""
    of_batch = tl.where(table_batches > 1, batch, 0)
    axis = (head * axes // num_heads).to(tl.uint32)  # unsigned: widening takes no register
    return of_batch * tables + head * tables // num_heads, axis.to(tl.int64)


@triton.jit
def rows_of(
    begin, stop, step, part, head, group, TILE: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, PACK: tl.constexpr,
):
    """Returns, for each row of a program: index in the tile, token, query head, and existence."""
    row = tl.arange(0, ROWS)
    slot = part * TOKENS + row % TOKENS
    of_pack = row // TOKENS
    position = begin + (row % TOKENS) * step
    real = (position < stop) & (slot < TILE) & (of_pack < PACK) & (head % group + of_pack < group)
    return slot, position, (head + of_pack).to(tl.int64), real


@triton.jit
def elements(stride, ALIGN: tl.constexpr):
    """Converts a stride from units of ALIGN to elements; the known factor permits wide loads."""
    return tl.cast(stride, tl.int64) * ALIGN  # the interpreter may pass an int32


@triton.jit
def unit_at(unit):
    """Loads a unit: (tile, or -1 if unused; first entry; first entry that needs a mask; end)."""
    return tl.load(unit), tl.load(unit + 1), tl.load(unit + 2), tl.load(unit + 3)


@triton.jit
def span_of(tile_start, tile_stop, axis, num_tiles, tile, first_slot, step, WIDE: tl.constexpr):
    """Returns the index of the tile's token number `first_slot`, and the end of the tile.

    Both are indices of tokens in the sequence: int64 if WIDE, else int32.
    """
    index: tl.constexpr = tl.int64 if WIDE else tl.int32
    at = axis * num_tiles + tile
    begin = tl.load(tile_start + at) + first_slot * step
    return begin.to(index), tl.load(tile_stop + at).to(index)


@triton.jit
def from_table(start, tokens, bitmap, entry, table, num_entries):
    """Moves four pointers from the lists of all tables to the items of one table."""
    offset = table * num_entries
    return start + offset, tokens + offset, bitmap + offset, entry + offset
