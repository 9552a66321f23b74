"""Which way of running a call is the cheaper: torch's dense kernel or tiles, and of what size.

Nothing is measured here: rules over figures of the layout, whose constants are measured on CPUs.
"""

from functools import lru_cache

import torch

from ..kernels import sdpa
from ..layouts.compile import compile_passes, default_block_size, terms
from ..numerics import round_up
from ..patterns.algebra import Frame, Pattern, check_fits
from ..patterns.blocks import blockwise_masks
from ..patterns.keys import without_key_masks

_SAMPLE = 2048  # query positions that stand for all
_LEAST_KEYS = 128  # of fewer, there are too few tiles to choose from
_MOST_KEYS = 2048  # of a query, from which on what lies at a pattern's edges is a small part of it

# Smaller tiles cost more a pair and hold fewer pairs that are not of the pattern: they are taken
# where they hold at most this part of what the next larger ones do.
_LARGEST = 128
_SMALLER = ((64, 0.92), (32, 0.6))

BESIDE_DENSE = frozenset({"gather"})
"""Backends that torch's dense kernel may stand in for; the compiled one is faster than that."""

_DENSE_SHARE = 0.5  # of all pairs, that tiles must hold for a mask over all pairs to be cheaper


def prefers_dense(backend: str, pattern: Pattern, frame: Frame, device: torch.device) -> bool:
    """Whether torch's dense kernel is cheaper for a call than the backend that would run it.

    So it is for a pattern that is full or causal, and for a small one of which tiles hold a good
    part. Cost: as `block_size`.
    """
    if backend not in BESIDE_DENSE or device.type != "cpu":
        return False
    kind = sdpa.form(pattern, frame)
    if kind != "masked":
        return kind is not None
    if pattern.tensors or pattern.restarts is not None or not frame.q_len or not frame.num_heads:
        return False
    return _share_held(pattern, frame) >= _DENSE_SHARE


@lru_cache(1024)
def _share_held(pattern: Pattern, frame: Frame) -> float:
    check_fits(pattern, frame)
    size = default_block_size(pattern, frame.kv_len)
    queries = frame.q_start, frame.q_start + frame.q_len
    return _held(pattern, frame, size, queries) / max(1, frame.kv_len)


def block_size(pattern: Pattern, frame: Frame, device: torch.device) -> int:
    """Tokens to a tile where none are named: on a CPU by how many pairs tiles hold for nothing.

    A pattern's own blocks are kept, as `default_block_size` has them.

    Cost: laying out some thousand queries, once for a pattern and its lengths.
    """
    size = default_block_size(pattern, frame.kv_len)
    if device.type != "cpu" or size != _LARGEST or frame.q_len <= 1 or frame.kv_len < _LEAST_KEYS:
        return size
    rest, _ = without_key_masks(pattern)
    blockwise = any(True for branch in rest.branches for _ in blockwise_masks(branch))
    if blockwise or rest.tensors or rest.restarts is not None or not frame.num_heads:
        return size
    return _by_density(rest, frame)


@lru_cache(1024)
def _by_density(pattern: Pattern, frame: Frame) -> int:
    check_fits(pattern, frame)
    steps = (grid.step for branch in pattern.branches for grid, _ in terms(branch, _LARGEST))
    sample = max(_SAMPLE, 2 * _LARGEST * max(steps, default=1))
    first = max(0, frame.q_len - sample) // 2 // sample * sample + frame.q_start
    queries = first, min(first + sample, frame.q_start + frame.q_len)
    chosen, held = _LARGEST, _held(pattern, frame, _LARGEST, queries)
    for size, least in _SMALLER:
        if held > _MOST_KEYS:
            break
        smaller = _held(pattern, frame, size, queries)
        if smaller > least * held:
            break
        chosen, held = size, smaller
    return chosen


def _held(pattern: Pattern, frame: Frame, size: int, queries: tuple[int, int]) -> float:
    """Pairs in the tiles that some queries visit, to a query; mean over heads.

    Kernels round what is left of a sequence to 16 tokens, not to a whole tile.
    """
    found = 0.0
    for compiled in compile_passes(pattern, frame, size, queries=[queries]):
        axes = zip(compiled.queries, compiled.keys, strict=True)
        rounded = [tuple(round_up(axis.count.clamp(min=0), 16) for axis in pair) for pair in axes]
        tables = [table for row in compiled.tables for table in row]
        for number, table in enumerate(tables):
            rows, columns = rounded[number * len(rounded) // len(tables)]
            of_row = rows.repeat_interleave(table.row_ptr.diff())
            found += float((of_row * columns[table.key_tile]).sum()) / len(tables)
    return found / (queries[1] - queries[0])
