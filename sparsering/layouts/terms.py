"""Splits a mask into terms, which each fit one grid of tiles; groups heads with equal masks."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TypeGuard

import torch

from ..patterns import positions
from ..patterns.algebra import And, Frame, Mask, Mixture, Not, Or, Pattern, joined_masks
from ..patterns.blocks import (
    BlockCausal,
    BlockDilated,
    BlockWindow,
    CausalBlocks,
    Hierarchical,
    RandomBlocks,
)
from ..patterns.grid import GridTiles
from ..patterns.neighbourhood import Neighbourhood
from ..patterns.per_head import NO_PAIRS, PerHead
from ..patterns.positions import Dilated, Documents, GlobalTokens, Packed, SlidingWindow
from ..patterns.selected import selections_of
from ..patterns.tree import Nodes, Tree
from .tiles import Grid

Heads = dict[tuple[Mask, ...], list[tuple[int, int]]]
"""For each tuple of masks, the (batch entry, head) pairs that have these masks."""

_SHORT_NODE = 32  # tokens; if nodes have fewer on average, dilated tiles cost more than whole tiles
_SIMPLE: tuple[type, ...] = (
    *(positions.Full, positions.Causal, positions.PooledCausal),
    *(BlockCausal, BlockDilated, BlockWindow, Hierarchical),
)
"""Masks whose sizes stay as they are in `typical`."""

_MOST_SPLIT = 256  # most masks after a split; `&` of unions multiplies their numbers


def terms(mask: Mask, block_size: int) -> list[tuple[Grid, Mask]]:
    """Splits a mask into masks that together have its pairs, and that each fit one grid of tiles.

    Returns: (grid, mask) for each. A pair in several masks belongs to the first of them. If the
    mask has one selection whose block size is a multiple of `block_size`, the first mask has all
    selected pairs, in a grid of step 1, so that no tile spans several rows or blocks of the
    selection.
    """
    found, plain = _split(mask, block_size), Grid(1, block_size)
    selections = selections_of(mask)
    if len(selections) != 1 or selections[0].block_size % block_size:
        return found
    if not (others := [(grid, part) for grid, part in found if grid != plain]):
        return found
    listed = [part if grid == plain else And((*selections, part)) for grid, part in found]
    rest = [(grid, part) for grid, part in others if not _is_within(part, selections[0])]
    return [(plain, listed[0] if len(listed) == 1 else Or(tuple(listed))), *rest]


def disjoint_terms(mask: Mask, block_size: int) -> Iterator[tuple[Grid, Mask]]:
    """Yields `terms`, each without the pairs of earlier terms, so that no two share a pair."""
    earlier: list[Mask] = []
    for grid, term in terms(mask, block_size):
        yield grid, And((term, Not(Or(tuple(earlier))))) if earlier else term
        earlier.append(term)


def _is_within(mask: Mask, selection: Mask) -> bool:
    """Whether a mask is visibly a subset of the selection, because it intersects with it."""
    if isinstance(mask, And | Or):
        return (any if isinstance(mask, And) else all)(_is_within(x, selection) for x in mask.masks)
    return mask is selection


def _split(mask: Mask, block_size: int) -> list[tuple[Grid, Mask]]:
    """Splits a mask into (grid, mask) terms: one for each grid of tiles that its parts need."""
    if not any(map(_has_grid, joined_masks(mask))):
        return [(Grid(1, block_size), mask)]
    match mask:
        case Dilated():
            return [(_dilated_grid(mask, block_size), mask)]
        case SlidingWindow(_, _, dilation) if dilation > 1:
            return [(Grid(dilation, dilation * block_size, residues=dilation), mask)]
        case Neighbourhood() if is_in_tiles(mask):
            return [(_in_tiles_of_grid(mask, block_size), mask)]
        case Packed(_, inner) if (documents := mask.common_lengths) is not None:
            of_inner = _split(inner, block_size)
            return [
                (_in_documents(grid, documents), replace(mask, pattern=part))
                for grid, part in of_inner
            ]
        case Tree(_, _, inner, _) if mask._own_batches() is None:
            of_inner = _split(inner, block_size)
            along = [(_in_nodes(grid, mask.nodes, block_size), part) for grid, part in of_inner]
            return [(grid, replace(mask, pattern=part)) for grid, part in _unite(along)]
        case PerHead(patterns):
            of_pattern = {part: dict(_split(part, block_size)) for part in patterns}
            grids = dict.fromkeys(grid for of_grid in of_pattern.values() for grid in of_grid)
            rows = [[of_pattern[part].get(grid, NO_PAIRS) for part in patterns] for grid in grids]
            return [(grid, PerHead(tuple(row))) for grid, row in zip(grids, rows, strict=True)]
        case And(masks):
            found = _split(masks[0], block_size)
            for part in masks[1:]:
                joined: list[tuple[Grid, Mask]] = [
                    (max(grid, other, key=Grid.selectivity), And((left, right)))
                    for grid, left in found
                    for other, right in _split(part, block_size)
                ]
                found = _unite(joined)
                split = sum(len(list(joined_masks(mask))) for _, mask in found)
                if len(found) > 1 and split > _MOST_SPLIT:
                    raise ValueError(
                        f"expected a pattern that splits into at most {_MOST_SPLIT} masks, got "
                        f"{split} or more; join fewer unions of dilated masks by &"
                    )
            return found
        case Or(masks):
            return _unite([term for part in masks for term in _split(part, block_size)])
    return [(Grid(1, block_size), mask)]


def is_in_tiles(mask: Mask) -> TypeGuard[Neighbourhood]:
    """Whether a mask is a `Neighbourhood` over tokens in the order of tiles."""
    return isinstance(mask, Neighbourhood) and mask.tile is not None


def _has_grid(mask: Mask) -> bool:
    """Whether a mask may need other tiles than consecutive tokens, for example dilated ones."""
    if isinstance(mask, PerHead):
        return any(_has_grid(part) for x in mask.patterns for part in joined_masks(x))
    dilated = isinstance(mask, SlidingWindow) and mask.dilation > 1
    return dilated or is_in_tiles(mask) or isinstance(mask, Dilated | Packed | Tree)


def _unite(found: list[tuple[Grid, Mask]]) -> list[tuple[Grid, Mask]]:
    """Joins terms that have the same grid into one, by `|` of their masks."""
    by_grid: dict[Grid, list[Mask]] = {}
    for grid, mask in found:
        by_grid.setdefault(grid, []).append(mask)
    return [(grid, x[0] if len(x) == 1 else Or(tuple(x))) for grid, x in by_grid.items()]


def _dilated_grid(mask: Dilated, block_size: int) -> Grid:
    """Returns the grid of a `Dilated`: tiles that hold only positions with its residue."""
    length, rate = mask.segment_length, mask.dilation_rate
    reach = rate * block_size
    if length < reach and length % rate == 0:
        length *= reach // length  # a tile then covers several whole segments
    if rate == 1 and length % block_size == 0:
        return Grid(1, block_size)
    return Grid(rate, length, anchor=mask if rate > 1 else None)


def _in_tiles_of_grid(mask: Neighbourhood, block_size: int) -> Grid:
    """Returns the grid of a `Neighbourhood` in the order of tiles.

    No tile of the layout spans two tiles of the grid, unless these are so small that several whole
    ones fit into it: it would see the windows of both.
    """
    plain, order = Grid(1, block_size), mask.grid
    volume = math.prod(order.sizes)
    cut = any(n % size for n, size in zip(order.shape, order.sizes, strict=True))
    if not cut and volume % block_size * (block_size % volume) == 0:
        return plain
    return replace(plain, documents=_volumes(order, block_size))


@lru_cache(64)
def _volumes(order: GridTiles, most: int) -> tuple[int, ...]:
    """Returns the tokens of each tile of a grid; small neighbours are joined, up to `most`."""
    volumes = torch.ones((), dtype=torch.int64)
    for n, size, count in zip(order.shape, order.sizes, order.counts, strict=True):
        heights = torch.full((count,), size)
        heights[-1] = n - (count - 1) * size
        volumes = (volumes[..., None] * heights).flatten()
    joined: list[int] = []
    for volume in volumes.tolist():
        if joined and joined[-1] + volume <= most:
            joined[-1] += volume
        else:
            joined.append(volume)
    return tuple(joined)


def _in_documents(grid: Grid, lengths: tuple[int, ...]) -> Grid:
    """Returns a grid with the same steps, whose segments begin anew in each document."""
    if grid.documents is not None:  # Packed in Packed: inner lengths repeat in each document
        times = sum(length > 0 for length in lengths)
        depths = None if grid.depths is None else grid.depths * times
        return replace(grid, documents=grid.documents * times, depths=depths)
    return replace(grid, documents=lengths)


def _in_nodes(grid: Grid, nodes: Nodes, block_size: int) -> Grid:
    """Returns the grid for a tree, along whose paths a mask has `grid`.

    A long node has tiles of its own, which start at depths that are multiples of the block size, so
    that they share bitmaps. A tile of short nodes holds several of them, because tables would
    otherwise list each node and its ancestors one by one.
    """
    sizes, depths = nodes.start.diff().tolist(), nodes.depth.tolist()
    plain = Grid(1, block_size)
    if grid != plain:
        if not sizes or sum(sizes) >= _SHORT_NODE * len(sizes):
            return replace(grid, documents=tuple(sizes), depths=tuple(depths))
        grid = plain  # tiles of a node would hold a few tokens each
    groups: list[tuple[int, int, bool]] = []  # (tokens, depth of the first one, are nodes short)
    for size, depth in zip(sizes, depths, strict=True):
        short = size < block_size
        if groups and short and groups[-1][2]:
            groups[-1] = groups[-1][0] + size, 0, True  # several nodes have no common depth
        else:
            groups.append((size, depth, short))
    if len(groups) == 1 and groups[0][1] == 0:
        return grid
    tokens, first, _ = zip(*groups, strict=True) if groups else ((), (), ())
    return replace(grid, documents=tokens, depths=first)


def typical(pattern: Pattern, frame: Frame) -> tuple[Pattern, Frame]:
    """Returns a pattern and frame with rounded sizes, so that similar calls share a block size.

    Returns both unchanged if a mask in the pattern has no typical form.
    """
    length = _rounded(frame.kv_len)
    branches = tuple(_typical(branch, length) for branch in pattern.branches)
    if frame.q_start != frame.kv_len - frame.q_len or None in branches:
        return pattern, frame
    q_len = length if frame.q_len == frame.kv_len else min(length, _rounded(frame.q_len))
    alike = Mixture(branches) if len(branches) > 1 else branches[0]  # type: ignore[arg-type]
    return alike, frame._replace(q_len=q_len, kv_len=length, q_start=length - q_len)  # type: ignore[return-value]


def _typical(mask: Mask, length: int) -> Mask | None:
    """Returns a mask of the same kind with rounded sizes, or None if there is no such mask.

    `length` is the rounded number of keys. Returns None if the mask has no typical form.
    """
    match mask:
        case And(masks) | Or(masks):
            parts = tuple(_typical(part, length) for part in masks)
            return None if None in parts else type(mask)(parts)  # type: ignore[arg-type]
        case SlidingWindow(left, right, dilation):
            left, right = (side and _rounded(side) for side in (left, right))
            return SlidingWindow(left, right, dilation)
        case GlobalTokens(count, rows, columns):
            return GlobalTokens(_rounded(count), rows, columns)
        case Dilated(segment_length, rate, offset):
            return Dilated(_rounded(segment_length), rate, offset)
        case Documents(_) | CausalBlocks(_):
            return type(mask)(_lengths(_most_documents(mask), length))
        case Packed(_, pattern):
            if pattern.own_length is not None:
                return None  # a typical document would have another length than the pattern needs
            inner = _typical(pattern, length)
            if inner is None:
                return None
            return Packed(_lengths(_most_documents(mask), length), inner)
        case Tree(lengths, parents, pattern, own_length) if mask._own_batches() is None:
            edges = [0] * (len(lengths) + 1)  # nodes on each node's path; item -1 is above roots
            for node, parent in enumerate(parents):
                edges[node] = edges[parent] + 1
            number = _rounded(len(lengths))
            children = _rounded(round(number ** (1 / max(1, max(edges) - 1))))
            tree = _tree(number, length, children)
            if own_length is not None:
                length = own_length = max(_rounded(own_length), tree.nodes.longest)
            inner = _typical(pattern, length)
            return None if inner is None else replace(tree, pattern=inner, length=own_length)
        case PerHead(patterns):
            alike = {part: _typical(part, length) for part in dict.fromkeys(patterns)}
            parts = tuple(alike[part] for part in patterns)
            return None if None in parts else PerHead(parts)  # type: ignore[arg-type]
        case RandomBlocks():
            return replace(mask, seed=0, per_head=False)
    return mask if type(mask) in _SIMPLE else None


def _rounded(size: int) -> int:
    """Rounds to a number of two leading binary digits: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    step = 1 << max(0, size.bit_length() - 2)
    return (size + step // 2) // step * step


def _most_documents(mask: Documents | Packed | CausalBlocks) -> int:
    """Returns how many non-empty documents the batch entry with the most of them has, rounded."""
    return _rounded(max(sum(n > 0 for n in lengths) for lengths in mask.entries))


@lru_cache(256)
def _lengths(number: int, length: int) -> tuple[int, ...]:
    """Returns `number` lengths, from short to twice the mean, whose sum is `length`."""
    ends = [length * i * i // number**2 for i in range(number + 1)] if number else [0, length]
    return tuple(map(int.__sub__, ends[1:], ends))


@lru_cache(256)
def _tree(number: int, length: int, children: int) -> Tree:
    """Returns a tree of `number` nodes with `length` tokens and `children` children per node."""
    lengths = _lengths(number, length)
    parents = ((node - 1) // children if node else -1 for node in range(len(lengths)))
    return Tree(lengths, tuple(parents))


def distinct_heads(pattern: Pattern, frame: Frame) -> Heads:
    """Groups query heads with equal masks, one mask per part of a mixture `a + b`."""
    seen: Heads = {}
    num_batches = pattern.num_batches()
    for batch in range(1 if num_batches is None else num_batches):
        for head in range(frame.num_heads):
            branches = tuple(branch.at(batch, head, frame) for branch in pattern.branches)
            seen.setdefault(branches, []).append((batch, head))
    return seen


def distinct_kv_heads(pattern: Pattern, frame: Frame) -> Heads:
    """Groups kv heads whose query heads have the same masks."""
    of_place: dict[tuple[int, int], dict[Mask, None]] = {}
    for branches, places in distinct_heads(pattern, frame).items():
        for batch, head in places:
            of_place.setdefault((batch, frame.kv_head(head)), {}).update(dict.fromkeys(branches))
    seen: Heads = {}
    for place, masks in of_place.items():
        seen.setdefault(tuple(masks), []).append(place)
    return seen
