"""Chooses the default tokens per tile, so that most (query, key) pairs in visited tiles attend.

The rule counts pairs in a sample of the layout; its constants were measured on CPUs.
"""

from functools import lru_cache

import torch

from ..patterns.algebra import Frame, Pattern, check_fits, joined_masks
from ..patterns.blocks import BlockwiseMask
from ..patterns.keys import without_key_masks
from .compile import compile_passes, default_block_size
from .terms import terms

_SAMPLE = 2048  # number of query positions in the sample
_LEAST_KEYS = 128  # a shorter sequence has too few tiles for a choice to matter
_MOST_KEYS = 2048  # with more keys per query, smaller tiles save little

# Smaller tiles cost more per pair, but contain fewer pairs outside the pattern. `_SMALLER` lists
# (size, share): the size is chosen if its tiles contain at most that share of the pairs in the
# tiles of the next larger size.
_LARGEST = 128
_SMALLER = ((64, 0.92), (32, 0.6))


def block_size(pattern: Pattern, frame: Frame, device: torch.device) -> int:
    """Returns the default tokens per tile; on a CPU, a sparse pattern may get less than 128.

    Cost: compiling the layout of a few thousand queries, once per pattern and lengths.
    """
    size = default_block_size(pattern, frame.kv_len)
    if device.type != "cpu" or size != _LARGEST or frame.q_len <= 1 or frame.kv_len < _LEAST_KEYS:
        return size
    rest, _ = without_key_masks(pattern)
    blockwise = any(isinstance(mask, BlockwiseMask) for mask in joined_masks(rest))
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
    chosen, pairs = _LARGEST, _pairs_in_tiles(pattern, frame, _LARGEST, queries)
    for size, share in _SMALLER:
        if pairs > _MOST_KEYS:
            break
        smaller = _pairs_in_tiles(pattern, frame, size, queries)
        if smaller > share * pairs:
            break
        chosen, pairs = size, smaller
    return chosen


def _pairs_in_tiles(pattern: Pattern, frame: Frame, size: int, queries: tuple[int, int]) -> float:
    """Counts all (query, key) pairs in visited tiles: a mean per query and head."""
    total = 0.0
    for compiled in compile_passes(pattern, frame, size, queries=[queries]):
        # Kernels round a partial tile up to a multiple of 16 tokens, not to a whole tile.
        axes = zip(compiled.queries, compiled.keys, strict=True)
        rounded = [[-(-axis.count.clamp(min=0) // 16) * 16 for axis in pair] for pair in axes]
        tables = [table for row in compiled.tables for table in row]
        for number, table in enumerate(tables):
            rows, columns = rounded[number * len(rounded) // len(tables)]
            of_row = rows.repeat_interleave(table.row_ptr.diff())
            total += float((of_row * columns[table.key_tile]).sum()) / len(tables)
    return total / (queries[1] - queries[0])
