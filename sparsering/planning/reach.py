"""Counts what the last query of a pattern sees, and after how many layers it depends on all."""

import math
from functools import lru_cache, partial

import torch
from torch import Tensor

from ..ground.once import one_thread
from ..layouts.bitmaps import unpack
from ..layouts.cache import layout_cache
from ..layouts.layout import BlockLayout, slots_of
from ..patterns.algebra import Frame, Pattern

_MOST_BLOCKS = 1 << 21  # of one layout; a pattern with more is laid out for some rows at a time
_MOST_PARTS = 4  # number of such layouts, of some 30 MB each, that are kept for the next layer


@one_thread()
def keys_seen(pattern: Pattern, frame: Frame) -> Tensor:
    """Returns which keys the last query sees in at least one head: bool [kv_len]."""
    layout = _rows_of(pattern, frame, 128, frame.q_len - 1, 1)
    return _keys_of(layout, torch.ones(1, dtype=torch.bool))


@one_thread()
def layers_to_see_all(
    pattern: Pattern, frame: Frame, fresh: Tensor, blocks: float, block_size: int
) -> int | None:
    """Returns the layers after which the last query depends on every token; None if never.

    A layer's output at a token depends on the keys that its query sees, and on the token itself
    (the residual path). Heads count together.

    Args:
        frame: of equally many queries and keys; q_start is 0.
        fresh: bool [tokens], the keys that the last query sees, from `keys_seen`.
        blocks: about how many blocks of `block_size` tokens the pattern visits.
    """
    tokens = frame.q_len
    seen = fresh.clone()
    seen[-1] = True
    parts = max(1, math.ceil(blocks / _MOST_BLOCKS))
    rows = max(1, tokens // parts // block_size) * block_size
    lay_out = lru_cache(_MOST_PARTS)(partial(_rows_of, pattern, frame, block_size))
    layers = 1
    while not seen.all():
        before = seen.clone()
        for start in reversed(range(0, tokens, rows)):  # the last queries see most
            part = fresh[start : start + rows]
            if part.any() and not seen.all():
                seen |= _keys_of(lay_out(start, len(part)), part, seen)
        fresh = seen & ~before
        if not fresh.any():
            return None
        layers += 1
    return layers


def _rows_of(pattern: Pattern, frame: Frame, size: int, start: int, rows: int) -> BlockLayout:
    """Builds the layout of `rows` queries alone, the first of which is at position `start`."""
    frame = frame._replace(q_len=rows, q_start=start)
    return layout_cache.layout(pattern, frame, size, torch.device("cpu"))


def _keys_of(layout: BlockLayout, queries: Tensor, known: Tensor | None = None) -> Tensor:
    """Returns the keys that the marked queries see, bool [kv_len]; `queries` is bool [q_len].

    Key tiles whose keys are all in `known`, bool [kv_len], are not looked at.
    """
    marked = torch.nn.functional.pad(queries, (0, 1))
    seen = torch.zeros(layout.frame.kv_len + 1, dtype=torch.bool)
    if known is not None:
        known = torch.nn.functional.pad(known, (0, 1), value=True)
    heads, size = layout.frame.num_heads, layout.block_size
    for p in layout.passes:
        sets = max(p.row_ptr.shape[1], p.query_start.shape[0])
        for head in range(0, heads, max(1, heads // sets)):  # heads that share tables: once
            row, key, bitmap, axis = layout.table(p, 0, head)
            tokens, real = slots_of(p.query_start[axis], p.query_stop[axis], p.step, size)
            rows = marked[torch.where(real, tokens, layout.frame.q_len)]  # [query tiles, size]
            busy = rows.any(1)[row]
            tokens, real = slots_of(p.key_start[axis], p.key_stop[axis], p.step, size)
            tokens = torch.where(real, tokens, layout.frame.kv_len)
            if known is not None:
                busy &= ~known[tokens].all(1)[key]
            row, key, bitmap = row[busy], key[busy], bitmap[busy]
            hits = torch.zeros(tokens.shape, dtype=torch.int32)
            hits[key[bitmap < 0]] = 1
            varies = (bitmap >= 0) & (hits[key, 0] == 0)  # the rest are tiles that are seen whole
            row, key, bitmap = row[varies], key[varies], bitmap[varies]
            numbers, counts = bitmap.unique(return_counts=True)
            in_order = bitmap.argsort(stable=True).split(counts.tolist())
            for number, entries in zip(numbers.tolist(), in_order, strict=True):
                bits = unpack(p.bitmaps[number, None], size)[0]
                masked = rows[row[entries]].float() @ bits.float()
                hits.index_add_(0, key[entries], (masked > 0).int())
            seen[tokens[hits > 0]] = True
    return seen[:-1]
