"""Tracks memory over 1,000 training steps whose lengths, patterns and batch sizes change.

    python -m benchmarks.steps_memory --out benchmarks/records

`steps-memory.json`: every 50 steps the resident memory, the bytes allocated through malloc, and the
bytes of the layout cache, whose limit is so low that it fills early. Also the trend after the first
quarter of the steps: megabytes in 1,000 steps with its 95% interval. The same steps with torch's
dense attention show the share of the model and the allocator. Both run with the default settings
and again with oneDNN's cache of primitives limited to 16: by default it keeps up to 1,024, one for
each shape of a matrix product, and they keep the heap around them from shrinking.
"""

import argparse
import ctypes
import math
import multiprocessing
import os
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsering as sr
from sparsering.selection import block_scores, select_blocks

from .measure import Row, memory, write_record

STEPS, EVERY = 1000, 50
LIMIT = 2 << 20  # bytes of the layout cache
WIDTH, HEADS = 64, 2
LENGTHS, BATCHES = (64, 768), (1, 4)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Attention and a perceptron, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.of_all, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        query, key, value = (
            part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.of_all(x).chunk(3, 2)
        )
        x = x + self.out(attend(query, key, value).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(x)))


def documents(length: int, draw: random.Random) -> tuple[int, ...]:
    """Draws lengths of documents that fill a sequence."""
    cuts = sorted(draw.sample(range(1, length), 3))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True))


def drawn(step: int, length: int, batch: int, draw: random.Random) -> Attend:
    """Draws the attention of a step: one of ten kinds, with new arguments."""
    causal, segment = sr.Causal(), draw.choice((64, 96, 128, 256))
    patterns: list[sr.Pattern] = [
        causal,
        causal & sr.SlidingWindow(draw.randrange(16, 256)),
        sr.LongNet((segment, 4 * segment), (1, 4)) & causal,
        sr.LongNet((segment, 2 * segment), (1, 2)),
        sr.RandomBlocks(0.1 + 0.2 * draw.random(), draw.choice((16, 64)), seed=step) & causal,
        sr.Packed(documents(length, draw), sr.SlidingWindow(draw.randrange(16, 128))) & causal,
        sr.KeyPadding(tuple(draw.randrange(1, length + 1) for _ in range(batch))),
        sr.SlidingWindow(draw.randrange(8, 64), 8) | sr.GlobalTokens(draw.randrange(1, 9)),
    ]
    kind = step % (len(patterns) + 2)
    if kind < len(patterns):
        return partial(sr.attention, pattern=patterns[kind])
    if kind == len(patterns):
        return partial(sr.attention, pattern=patterns[4], backend="gather")

    def chosen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.no_grad():
            blocks = select_blocks(block_scores(query, key, 32), 4, block_size=32)
        return sr.attention(query, key, value, sr.SelectedBlocks(blocks, 32, 1) & causal)

    return chosen


def handed_out() -> int:
    """Bytes allocated through malloc and not freed, in all arenas and maps; 0 without glibc."""

    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )]  # fmt: skip

    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = Info
    usage = mallinfo()
    return int(usage.uordblks + usage.hblkhd)


def trained(ours: bool, steps: int, every: int, limit: int = LIMIT) -> list[Row]:
    """Trains in this process and records its memory every `every` steps."""
    torch.manual_seed(0)
    draw = random.Random(0)
    sr.layout_cache.set_limit(limit)
    layers = nn.ModuleList(Layer() for _ in range(2))
    optimiser = torch.optim.AdamW(layers.parameters(), 1e-3)
    rows: list[Row] = []
    for step in range(1, steps + 1):
        length, batch = draw.randrange(*LENGTHS), draw.randint(*BATCHES)
        attend = drawn(step, length, batch, draw)
        if not ours:
            attend = F.scaled_dot_product_attention
        x = torch.randn(batch, length, WIDTH)
        y = x
        for layer in layers:
            y = layer(y, attend)
        loss = (y - x.roll(1, 1)).square().mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        if step % every == 0:
            assert math.isfinite(loss.item())
            info = sr.layout_cache.info()
            rows.append(
                {
                    "attention": "sparsering" if ours else "dense",
                    "step": step,
                    "resident_mb": memory("VmRSS") / 1e6,
                    "handed_out_mb": handed_out() / 1e6,
                    "layout_cache_mb": info.bytes / 1e6,
                    "layouts_built": info.misses,
                }
            )
    return rows


def trend(rows: list[Row], figure: str, first: int) -> tuple[float, float]:
    """Fits a trend to a figure after step `first`: (slope, half width of its 95% interval).

    Both are per 1,000 steps, by least squares with independent residuals.
    """
    points = [(float(r["step"]), r[figure]) for r in rows if r["step"] > first]
    x, y = torch.tensor(points, dtype=torch.float64).T / torch.tensor([[1000.0], [1.0]])
    off = x - x.mean()
    slope = (off * y).sum() / off.square().sum()
    rest = y - y.mean() - slope * off
    spread = (rest.square().sum() / (len(x) - 2) / off.square().sum()).sqrt()
    return slope.item(), 2.1 * spread.item()  # Student's t for some 15 points


def main() -> int:
    """Writes the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps_memory", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for primitives in (None, "16"):
        if primitives is not None:
            os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = primitives
        with multiprocessing.get_context("spawn").Pool(2) as pool:  # one process for each attention
            runs = [(ours, arguments.steps, EVERY) for ours in (True, False)]
            of_both = pool.starmap(trained, runs, chunksize=1)
        for steps in of_both:
            rows += [{"onednn_primitives": primitives, **row} for row in steps]
            for figure in ("resident_mb", "handed_out_mb"):
                slope, bound = trend(steps, figure, arguments.steps // 4)
                rows.append(
                    {
                        "onednn_primitives": primitives, "attention": steps[0]["attention"],
                        "trend_of": figure, "after_step": arguments.steps // 4,
                        "mb_in_1000_steps": slope, "bound_95": bound,
                    }
                )  # fmt: skip
    write_record(arguments.out, "steps-memory", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
