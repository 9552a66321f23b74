"""Converts masks to conditions (`leaves`), which build layouts and compute lifetimes of keys.

Conditions of most kinds also become programs of the compiled kernel (`kernels/cpu/lower/`), which
makes equal tables in a fraction of the time. Without it, `compile` evaluates them with torch.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from ..ground.kernel_library import kernel_operators
from ..ground.once import spared_threads
from ..patterns import blocks, positions
from ..patterns.algebra import And, Frame, Mask, Not, Or
from ..patterns.blocks import BlockwiseMask
from ..patterns.keys import KeyMask
from ..patterns.neighbourhood import Neighbourhood
from ..patterns.rearranged import Rearranged
from ..patterns.tree import Tree
from .joints import AllOf, AnyOf, Declared, InBlocks, Negated, PerDocument
from .leaves import Condition, Congruent, InKeys, Linear, OnGrid, SameDocument, SameSegment
from .neighbourhoods import InNeighbourhood
from .paths import OnPath
from .rearranged import Moved
from .tiles import Axis

_MOST_GRID_DIMS = 6  # of grids that the compiled kernel knows: `kMostGridDims` of lower/grid.h


def condition(mask: Mask, frame: Frame, in_document: bool = False) -> Condition:
    """Returns the condition of a mask that `Mask.at` has resolved to one head.

    With `in_document`, positions restart in each document.
    """
    match mask:
        case positions.Documents():
            return SameDocument(pad(mask.ends(), (1, 0)))
        case blocks.CausalBlocks():  # the key is in the query's block, or earlier
            return AnyOf((SameDocument(pad(mask.ends(), (1, 0))), Linear(1, -1, 0)))
        case positions.Packed(_, inner):
            same = SameDocument(pad(mask.ends(), (1, 0)))
            return PerDocument(same, condition(inner, frame, True), inner.asks_frame)
        case Tree(_, _, inner, _):
            return OnPath(mask.nodes, condition(inner, frame, True))
        case And(masks):
            return AllOf(condition(part, frame, in_document) for part in masks)
        case Or(masks):
            return AnyOf(condition(part, frame, in_document) for part in masks)
        case Not(part):
            return Negated(condition(part, frame, in_document))
        case BlockwiseMask():
            return _in_blocks(mask, None if in_document else frame.kv_len)
        case KeyMask(valid):
            return InKeys(valid)
        case Neighbourhood():
            return InNeighbourhood(mask)
        case Rearranged():
            return Moved(mask, frame, in_document)
    return _of_positions(mask) or Declared(mask, frame, in_document)


def _of_positions(mask: Mask) -> Condition | None:
    """Returns the condition of a mask that comparisons of two positions define, else None."""
    match mask:
        case positions.Full():
            return Linear(0, 0, 0)
        case positions.Causal():
            return Linear(1, -1, 0)
        case positions.PooledCausal(size, stride):
            return Linear(1, -stride, size - 1)
        case positions.SlidingWindow(left, right, dilation):
            parts = [*([Congruent(dilation)] if dilation > 1 else []), *_near(left, right)]
            return AllOf(parts) if parts else Linear(0, 0, 0)
        case positions.GlobalTokens(count, rows, columns):
            queries = AllOf((Linear(1, 0, 0), Linear(-1, 0, 1 - count)))
            keys = Linear(0, -1, 1 - count if columns else 1)
            return AnyOf((queries, keys)) if rows else keys
        case positions.Dilated(length, rate, _):
            segment, residue = SameSegment(length), mask.offset_of(0, 1)
            grids = (OnGrid(of_query, length, rate, residue) for of_query in (True, False))
            return AllOf((segment, *grids)) if rate > 1 else segment
    return None


def _near(left: int | None, right: int | None) -> list[Condition]:
    """Returns conditions for p - left <= k <= p + right (query p, key k); None means no bound."""
    parts: list[Condition] = [] if left is None else [Linear(-1, 1, -left)]
    return parts if right is None else [*parts, Linear(1, -1, -right)]


def _in_blocks(mask: BlockwiseMask, length: int | None) -> Condition:
    """Returns the condition of a blockwise mask.

    Each item of `levels` is a list of conditions on block indices; a pair must meet all of one
    item.
    """
    levels: list[Sequence[Condition]]
    match mask:
        case blocks.BlockDilated(rates, _):
            levels = [_near(n, -n) for n in {0, *rates, *(-rate for rate in rates)}]
        case blocks.BlockWindow(radius, _):
            levels = [_near(radius, radius)]
        case blocks.BlockCausal():
            levels = [_near(None, 0)]
        case blocks.BlockDiffusion(n, size):
            noisy, clean = Linear(-1, 0, 1 - n // size), Linear(0, 1, n // size)
            levels = [_near(0, 0), [noisy, clean, *_near(None, n // size - 1)]]
            levels += [[clean, *_near(None, 0)]]
        case blocks.Hierarchical():
            levels = [(OnGrid(True, n, n, 0), *_near(r, r)) for n, r in mask.in_blocks()]
        case _:
            return InBlocks(mask, None, length)
    return InBlocks(mask, AllOf((Linear(1, 0, 0), AnyOf(map(AllOf, levels)))))


def native_table(
    rule: Condition, queries: Axis, keys: Axis, block_size: int, count: bool = False
) -> list[Tensor] | None:
    """Compiles a condition to a table in the C++ kernel; returns None if it cannot.

    Threads that `one_thread` spares share the work of long sequences.

    Returns: row pointers, key tiles, bitmap indices, bitmaps, and int64 (pairs, most tile pairs
    with one query tile, and with one key tile). With `count`, only the number of pairs in visited
    tiles.
    """
    tiles = ([x.residue, x.start, x.last] for x in (queries, keys))
    return _native("table", [rule], *tiles, keys.step, block_size, count, spared_threads())


def native_page(
    masks: Sequence[Mask], frame: Frame, first: Tensor, keys: Tensor, queries: int, block_size: int
) -> list[Tensor] | None:
    """Finds the tiles of keys that a tile of queries sees, in the C++ kernel; None if it cannot.

    `page_over` calls it. Row i of `first` [rows] and `keys` [rows, keys] has mask i modulo the
    number of masks.

    Returns: int32 [rows, 2] row pointers; [rows, most visited tiles] key tiles and bitmap indices
    (-1 if all pairs attend), padded with 0; the bitmaps.
    """
    rules = (condition(mask, frame) for mask in masks)
    return _native("page", rules, first, keys, queries, block_size)


def _native(name: str, rules: Iterable[Condition], *rest: Any) -> list[Tensor] | None:
    """Runs a C++ operator on encoded conditions; None if no kernel is there or one has no code."""
    kernel = kernel_operators()
    program: tuple[list[int], list[Tensor]] = [], []
    if kernel is None or not all(_encode(rule, *program) for rule in rules):
        return None
    return getattr(kernel, name)(*program, *rest) or None


def _encode(rule: Condition, numbers: list[int], tensors: list[Tensor]) -> bool:
    """Appends a condition to a program for the C++ kernel; returns False if that cannot express it.

    Returns False if the kernel does not know its kind.
    """
    parts: tuple[Condition, ...] = ()
    match rule:
        case Linear(a, b, c):
            numbers += (0, a, b, c)
        case InKeys(values) | SameDocument(values):
            numbers.append(1 if isinstance(rule, InKeys) else 5)
            tensors.append(values)
        case Congruent(size) | SameSegment(size):
            numbers += (2 if isinstance(rule, Congruent) else 4, size)
        case OnGrid(of_query, segment, rate, residue):
            numbers += (3, of_query, segment, rate, residue)
        case AllOf() | AnyOf():
            parts = rule.parts
            numbers += (6 if isinstance(rule, AllOf) else 7, len(parts))
        case Negated(part):
            parts = (part,)
            numbers.append(8)
        case PerDocument(same, inner, _):
            parts = (inner,)
            numbers.append(9)
            tensors.append(same.starts)
        case OnPath(nodes, inner) if len(nodes.depth):
            parts = (inner,)
            numbers.append(10)
            tensors += (nodes.start, nodes.depth, nodes.enter, nodes.leave)
        case InBlocks(mask, Condition() as inner, _):
            parts = (inner,)
            numbers += (11, mask.row_size, mask.block_size)
        case InBlocks(blocks._RandomBlocksOfHead() as mask, None, int() as length):
            numbers += (12, mask.block_size, mask.block_size, mask.key)
            numbers += map(int, mask.counts(length))
        case InBlocks(blocks.Blocks(active, n), _, _) if len(listed := active.flatten().nonzero()):
            numbers += (13, n, n, active.shape[1])
            tensors.append(listed[:, 0])
        case InNeighbourhood(mask) if len(mask.shape) <= _MOST_GRID_DIMS:
            tile = mask.shape if mask.tile is None else mask.grid.sizes
            numbers += (14, len(tile))
            for dim, size in zip(mask.dims, tile, strict=True):
                numbers += (*map(int, dim), size)
        case _:
            return False
    return all(_encode(part, numbers, tensors) for part in parts)
