"""What a layout of a million tokens will cost on a GPU: `python -m benchmarks.device_layouts`.

Nothing here is measured on a GPU. The layout and its walks are made on the meta device, where each
operation says which bytes it would read and write; what the host does is timed on this machine. A
prediction adds both: see `PREDICTION`. Writes `device-layouts.json` into `--out`.
"""

import argparse
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sparsering as sr
from sparsering.bench.measure import Row, interleaved, write_record
from sparsering.kernels.triton.walk import walk
from sparsering.layouts.compile import build_layout
from sparsering.layouts.device.build import arithmetic_layout
from sparsering.layouts.device.plan import plan
from sparsering.layouts.layout import BlockLayout
from sparsering.patterns.algebra import Frame

CPU, META = torch.device("cpu"), torch.device("meta")
TOKENS, BLOCK = 1 << 20, 128
PROCESSORS = 132  # of an H100
PATTERNS = {
    "Causal() & SlidingWindow(4096)": (sr.Causal() & sr.SlidingWindow(4096), 1),
    "LongNet((2048, 32768), (1, 12))": (sr.LongNet((2048, 32768), (1, 12)), 1),
    "Causal() & (SlidingWindow(512) | GlobalTokens(64))": (
        sr.Causal() & (sr.SlidingWindow(512) | sr.GlobalTokens(64)),
        1,
    ),
    "LongNet((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))": (
        sr.LongNet((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12)),
        1,
    ),
    "LongNet((2048, 32768), (1, 12)) & Causal(), 16 heads": (
        sr.LongNet((2048, 32768), (1, 12)) & sr.Causal(),
        16,
    ),
}

PREDICTION = (
    "host_ms (the row arithmetic, timed here) + the larger of launches x microseconds and "
    "bytes / 3 TB/s"
)
MICROSECONDS = (
    5,
    8,
)  # of the host for each launch, through torch and Python: assumed, not measured
BYTES_PER_MS = 3e9

# Kernels of an operation, where they are more than one (assumed: torch's CUDA sources).
KERNELS = {"sort": 6, "cumsum": 2, "cummax": 2, "repeat_interleave": 3}
NO_KERNEL = frozenset(
    (
        "view", "expand", "unsqueeze", "squeeze", "transpose", "t", "permute", "slice", "select",
        "split", "unbind", "as_strided", "alias", "detach", "unflatten", "split_with_sizes",
        "_unsafe_view", "view_as", "_reshape_alias", "empty", "new_empty", "empty_like",
    )
)  # fmt: skip


class Counted(TorchDispatchMode):
    """Counts kernels and the bytes that they read and write, of operations on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        name = function.overloadpacket.__name__
        if any(x.is_meta for x in tensors) and name not in NO_KERNEL:
            if not all(x.is_meta for x in tensors):
                raise RuntimeError(f"{name} copies from the host")
            self.kernels[name] += KERNELS.get(name, 1)
            self.bytes += KERNELS.get(name, 1) * sum(x.numel() * x.itemsize for x in tensors)
        return out

    def row(self, part: str, host_ms: float) -> Row:
        launches = self.kernels.total()
        predicted = {
            f"predicted_ms_at_{us}_us": host_ms
            + max(launches * us / 1e3, self.bytes / BYTES_PER_MS)
            for us in MICROSECONDS
        }
        return {
            "part": part,
            "launches": launches,
            "megabytes": self.bytes / 1e6,
            "host_ms": host_ms,
            **predicted,
        }


def rows() -> list[Row]:
    """Of each pattern the layout and its two walks: counts, times of the host, predictions."""
    found: list[Row] = []
    for name, (pattern, heads) in PATTERNS.items():
        frame = Frame.build(TOKENS, TOKENS, heads, heads, None)

        def rows_of_tiles(pattern: sr.Pattern = pattern, frame: Frame = frame) -> object:
            return plan(pattern, frame, BLOCK)

        def compiled(pattern: sr.Pattern = pattern, frame: Frame = frame) -> object:
            return build_layout(pattern, frame, BLOCK, CPU)

        ms = interleaved({"rows": rows_of_tiles, "compiled": compiled}, 15)
        with Counted() as counted:
            layout = arithmetic_layout(pattern, frame, BLOCK, META)
            assert layout is not None
            layout = layout.kept(META)
        parts = [counted.row("layout", ms["rows"]) | {"compiled_on_host_ms": ms["compiled"]}]
        for part, by_key in (("walk of queries", False), ("transpose, walk of keys", True)):
            with Counted() as counted:
                walk_all(layout, by_key)
            parts.append(counted.row(part, 0.0))
        for row in parts:
            found.append({"pattern": name, "tokens": TOKENS, "block_size": BLOCK, **row})
        check(pattern, heads)
    return found


def walk_all(layout: BlockLayout, by_key: bool) -> None:
    """What a forward asks of a layout, or a backward beyond that."""
    for number in range(len(layout.passes)):
        walk(layout, number, by_key=by_key, programs=4, processors=PROCESSORS)


def check(pattern: sr.Pattern, heads: int) -> None:
    """Raises where what is counted is not the pattern: the same at 16K tokens, on the host."""
    frame = Frame.build(1 << 14, 1 << 14, heads, heads, None)
    made, compiled = (
        arithmetic_layout(pattern, frame, BLOCK, CPU),
        pattern.layout(1 << 14, num_heads=heads, block_size=BLOCK),
    )
    if made is None or made.num_blocks != compiled.num_blocks:
        raise RuntimeError(f"the layout of {pattern} is wrong")
    if not math.isclose(made.num_pairs, compiled.num_pairs):
        raise RuntimeError(f"{made.num_pairs} pairs of {pattern}, not {compiled.num_pairs}")


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/records"))
    made = rows()
    told: Row = {"prediction": PREDICTION, "kernels_of_an_operation": KERNELS}
    write_record(parser.parse_args().out, "device-layouts", [told, *made])


if __name__ == "__main__":
    main()
