"""Rows that select their own blocks, on the CPU: the walk by key tile against 64-query tiles.

A tile of 64 queries visits the union of its rows' blocks.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence

from sparsering.kernels.cpu import backward, forward
from sparsering.kernels.problem import Problem
from sparsering.layouts.bitmaps import pack
from sparsering.layouts.layout import BlockLayout
from sparsering.patterns.algebra import Pattern
from sparsering.patterns.positions import Causal
from sparsering.patterns.selected import SelectedBlocks

from ..measure import Row, gradient_of, inputs_of, interleaved_times, sampled_error
from .cases import dense

HEADS, KV_HEADS, WIDTH, BLOCK, CHOSEN = 8, 2, 64, 64, 16
_LONGEST_UNION = 16384  # tokens; beyond, one bitmap for each pair of tiles takes too much memory


def rows(quick: bool) -> list[Row]:
    """16 random blocks of 64 for rows of 64, 16 and 1 queries; times attention alone.

    `share`: part of a row's blocks that its neighbour also lists: 0 (only by chance) or 90%.
    """
    results: list[Row] = []
    for length in (512,) if quick else (4096, 16384, 65536):
        for share in (0.0, 0.9):
            for dtype in (torch.float32, torch.bfloat16):
                results += _rows(length, share, dtype, quick)
    return results


def drawn(length: int, tokens: int, share: float) -> SelectedBlocks:
    """Draws each row's blocks: first, own, and others that repeat the row before with P `share`."""
    generator = torch.Generator().manual_seed(0)
    shape = KV_HEADS, length // tokens, CHOSEN
    current = torch.arange(shape[1])[:, None] * tokens // BLOCK
    redrawn = torch.rand(shape, generator=generator) >= share
    redrawn[:, 0] = True
    row = torch.where(redrawn, torch.arange(shape[1])[:, None], 0).cummax(1).values
    blocks = (torch.rand(shape, generator=generator) * (current + 1)).long().gather(1, row)
    blocks[..., 0], blocks[..., 1] = 0, current[:, 0]
    return SelectedBlocks(blocks, BLOCK, tokens)


def in_tiles(layout: BlockLayout) -> BlockLayout:
    """Rebuilds a layout with tiles of 64 queries, which visit the union of their rows' blocks.

    The pairs stay the same; each pair of tiles has its own bitmap.
    """
    (p,) = layout.passes
    tiles, columns = -(-p.query_start.shape[1] // BLOCK), p.key_start.shape[1]
    tables, bitmaps, first = [], [], 0
    causal = torch.ones(BLOCK, BLOCK, dtype=torch.bool).tril()
    for head in range(KV_HEADS):
        row, key, _, _ = layout.table(p, 0, head * HEADS // KV_HEADS)
        pair, entry = (row // BLOCK * columns + key).unique(return_inverse=True)
        cells = torch.zeros(len(pair), BLOCK, BLOCK, dtype=torch.bool)
        cells[entry, row % BLOCK] = True
        cells[pair // columns == pair % columns] &= causal
        bitmaps.append(pack(cells))
        row_ptr = torch.searchsorted(pair // columns, torch.arange(tiles + 1))
        tables.append((row_ptr, pair % columns, torch.arange(first, first + len(pair))))
        first += len(pair)
    row_ptr, key_tile, bitmap = (
        pad_sequence(list(x), batch_first=True).int()[None] for x in zip(*tables, strict=True)
    )
    start, stop = p.query_start[:, ::BLOCK], p.query_stop[:, BLOCK - 1 :: BLOCK]
    united = replace(
        p, query_start=start, query_stop=stop, row_ptr=row_ptr, key_tile=key_tile, bitmap=bitmap,
        bitmaps=torch.cat(bitmaps), slot=None, longest=None,
    )  # fmt: skip
    return replace(layout, passes=(united,))


def _rows(length: int, share: float, dtype: torch.dtype, quick: bool) -> list[Row]:
    query, key, value = inputs_of(HEADS, length, WIDTH, dtype, kv_heads=KV_HEADS)
    patterns: dict[str, Pattern] = {}
    problems: dict[str, Problem] = {}
    for tokens in (64, 16, 1):
        name = f"rows of {tokens}"
        patterns[name] = drawn(length, tokens, share) & Causal()
        layout = patterns[name].layout(
            length, num_heads=HEADS, num_kv_heads=KV_HEADS, block_size=BLOCK
        )
        problems[name] = Problem(layout, query, key, value, WIDTH**-0.5)
    if length <= _LONGEST_UNION:
        name = "rows of 1, tiles of their union"
        patterns[name] = patterns["rows of 1"]
        problems[name] = problems["rows of 1"]._replace(layout=in_tiles(layout))
    results = {name: forward(x) for name, x in problems.items()}
    grad = gradient_of(query)
    calls: dict[str, Callable[[], object]] = {}
    for name, x in problems.items():
        zeros = torch.zeros_like(results[name][1])
        calls[f"{name}: forward"] = partial(forward, x)
        calls[f"{name}: backward"] = partial(backward, x, *results[name], grad, zeros)
    if length <= _LONGEST_UNION:
        calls["dense SDPA: forward"] = peer = dense((query, key, value), causal=True)
    times = interleaved_times(calls, 2 if quick or length > 30000 else 4)
    rows: list[Row] = []
    for name, x in problems.items():
        (p,) = x.layout.passes
        row: Row = {
            "call": name, "tokens": length, "dtype": str(dtype)[6:], "shared": share,
            "pairs": x.layout.num_pairs, "entries": int(p.num_entries.sum()),
        }  # fmt: skip
        for part in ("forward", "backward"):
            of_call = times[f"{name}: {part}"]
            row |= {f"{part}_ms": statistics.median(of_call), f"{part}_least": min(of_call)}
        row["error"] = sampled_error(results[name][0], query, key, value, patterns[name])
        rows.append(row)
    if length <= _LONGEST_UNION:
        of_call = times["dense SDPA: forward"]
        rows.append(
            {
                "call": "dense SDPA", "tokens": length, "dtype": str(dtype)[6:], "shared": share,
                "forward_ms": statistics.median(of_call), "forward_least": min(of_call),
                "error": sampled_error(peer(), query, key, value, Causal()),
            }
        )  # fmt: skip
    return rows
