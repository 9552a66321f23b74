"""Counts what the last query of a pattern sees, and after how many layers it depends on all."""

import math
from collections.abc import Iterator
from functools import lru_cache, partial

import torch
from torch import Tensor

from ..layouts.bitmaps import unpack
from ..layouts.layout import BlockLayout, slots_of
from ..patterns.algebra import Frame, Pattern

_MOST_BLOCKS = 1 << 21  # in one layout; a larger one is laid out in parts, each when it is needed


def keys_seen(pattern: Pattern, frame: Frame) -> Tensor:
    """Returns whether the last query sees each key, in any head: bool [kv_len]."""
    layout = _layout(pattern, frame, 128, frame.q_len - 1, 1)
    return _keys_of(layout, torch.ones(1, dtype=torch.bool))


def layers_to_see_all(
    pattern: Pattern, frame: Frame, fresh: Tensor, blocks: float, block_size: int
) -> int | None:
    """Returns the layers after which the last query depends on every token; None if never.

    A layer's output at a token depends on the keys that its query sees, and on the token itself
    (the residual path). Heads count together.

    Args:
        frame: of equally many queries and keys; q_start is 0.
        fresh: result of `keys_seen`.
        blocks: about how many blocks of `block_size` tokens the pattern visits.
    """
    tokens = frame.q_len
    seen = fresh.clone()
    seen[-1] = True
    parts = max(1, math.ceil(blocks / _MOST_BLOCKS))
    rows = max(1, tokens // parts // block_size) * block_size
    lay_out = lru_cache(1)(partial(_layout, pattern, frame, block_size))
    layers = 1
    while not seen.all():
        before = seen.clone()
        for start in reversed(range(0, tokens, rows)):  # the last queries see most
            part = fresh[start : start + rows]
            if part.any() and not seen.all():
                seen |= _keys_of(lay_out(start, len(part)), part)
        fresh = seen & ~before
        if not fresh.any():
            return None
        layers += 1
    return layers


def _layout(pattern: Pattern, frame: Frame, block_size: int, start: int, rows: int) -> BlockLayout:
    return pattern.layout(
        rows,
        frame.kv_len,
        num_heads=frame.num_heads,
        num_kv_heads=frame.num_kv_heads,
        q_start=start,
        block_size=block_size,
    )


def _keys_of(layout: BlockLayout, queries: Tensor) -> Tensor:
    """Returns the keys that the marked queries see, bool [kv_len]; `queries` is bool [q_len]."""
    marked = torch.nn.functional.pad(queries, (0, 1))
    seen = torch.zeros(layout.frame.kv_len + 1, dtype=torch.bool)
    for tile_queries, tile_keys, (row, key, bitmap), bits in _tables(layout):
        rows = marked[tile_queries]  # [query tiles, block_size]
        busy = rows.any(1)[row]
        row, key, bitmap = row[busy], key[busy], bitmap[busy]
        hits = torch.zeros(tile_keys.shape, dtype=torch.int32)
        hits[key[bitmap < 0]] = 1
        for number in bitmap[bitmap >= 0].unique().tolist():
            entries = bitmap == number
            masked = (
                rows[row[entries]].float()
                @ unpack(bits[number, None], layout.block_size)[0].float()
            )
            hits.index_add_(0, key[entries], (masked > 0).int())
        seen[tile_keys[hits > 0]] = True
    return seen[:-1]


def _tables(
    layout: BlockLayout,
) -> Iterator[tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor], Tensor]]:
    """Yields for each pass and head: tokens of tiles, past their end the length; entries, bitmaps.

    Heads that share tables and tiles are yielded once.
    """
    heads = layout.frame.num_heads
    for p in layout.passes:
        sets = max(p.row_ptr.shape[1], p.query_start.shape[0])
        for head in range(0, heads, max(1, heads // sets)):
            row, key, bitmap, axis = layout.table(p, 0, head)
            tiles = (p.query_start, p.query_stop), (p.key_start, p.key_stop)
            (queries, real_q), (keys, real_k) = (
                slots_of(start[axis], stop[axis], p.step, layout.block_size)
                for start, stop in tiles
            )
            queries = torch.where(real_q, queries, layout.frame.q_len)
            keys = torch.where(real_k, keys, layout.frame.kv_len)
            yield queries, keys, (row, key, bitmap), p.bitmaps
