"""The condition of `Rearranged`: where the pairs of a mask stand after its tokens moved."""

from functools import lru_cache

import torch
from torch import Tensor

from ..ground.rows import expand_counts
from ..patterns.rearranged import Rearranged
from .joints import Declared
from .tiles import Axis, Origin, Spans, spans_of_positions

_BLOCK = 16  # tokens; the least size of a tile
_MOST_CELLS = 1 << 24  # (query, key) pairs moved at a time, to bound memory


class Moved(Declared):
    """Condition of a `Rearranged`. Its pairs are listed in blocks of 16 x 16 tokens, once."""

    def candidates(self, queries: Axis, keys: Axis, origin: Origin) -> Spans:
        assert isinstance(self.mask, Rearranged)
        row_ptr, block = _moved_blocks(self.mask)
        rows = len(row_ptr) - 1
        first, last = (x - origin.start for x in (queries.start, queries.last))
        low, high = (row_ptr[x.clamp(0, rows)] for x in (first // _BLOCK, last // _BLOCK + 1))
        tile, number = expand_counts((high - low).clamp(min=0))
        begin = origin.start[tile] + block[low[tile] + number] * _BLOCK
        return spans_of_positions(queries, keys, tile, begin, begin + _BLOCK - 1)


@lru_cache(16)
def _moved_blocks(moved: Rearranged) -> tuple[Tensor, Tensor]:
    """Lists the blocks of 16 keys that each block of 16 queries sees in the new order.

    Returns: row pointers int64 [blocks + 1], key blocks int64 [pairs of blocks].
    """
    length = len(moved.order)
    place = torch.empty_like(moved.order).scatter_(0, moved.order, torch.arange(length))
    block, blocks = place // _BLOCK, -(-length // _BLOCK)
    layout = moved.mask.layout(length)
    found = [torch.zeros(0, dtype=torch.int64)]
    size, slots = layout.block_size, torch.arange(layout.block_size)
    at_once = max(1, _MOST_CELLS // size**2)
    for p in layout.passes:
        entries = len(layout.table(p, 0, 0)[0])
        for begin in range(0, entries, at_once):
            q, k, cells = layout.cells(p, 0, 0, slots, slice(begin, begin + at_once))
            entry, row, column = torch.nonzero(cells, as_tuple=True)
            code = block[q[entry, row]] * blocks + block[k[entry, column]]
            found.append(code.unique())
    code = torch.cat(found).unique()
    row_ptr = torch.searchsorted(code, torch.arange(blocks + 1) * blocks)
    return row_ptr, code % max(1, blocks)
