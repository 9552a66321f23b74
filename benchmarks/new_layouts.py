"""Measures what a pattern that is new in each step costs.

    python -m benchmarks.new_layouts --out benchmarks/records
    python -m benchmarks.new_layouts --out benchmarks/records --base FOLDER   # of another checkout

`new-layouts.json`: CPU milliseconds of a layout by kind of pattern and length, one thread, the
block size given (128) and chosen, and operators in it, nested ones counted too; each layout is of
another value, such as other documents. With `--base`, that checkout measures the same up to 65,536
tokens.
Then FlexAttention's `create_block_mask` of such documents, plain and compiled (of 64K tokens one
int64 tensor of all pairs would take 34 GB), and 1,000 training steps of a small model over
documents that are others in each step: the share of time that layouts take, and memory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import sparsering as sr
from sparsering.kernels.cpu.build import library

TOKENS = (64, 512, 4096, 65536, 1 << 20)
STEPS, TRAINED = 1000, 8192


def lengths_of(tokens: int, documents: int, seed: int) -> tuple[int, ...]:
    """Draws lengths of documents, from a sixth of the mean to twice the mean."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(documents, generator=generator) + 0.1
    ends = (weights.cumsum(0) / weights.sum() * tokens).round().long().tolist()
    ends[-1] = tokens
    return tuple(b - a for a, b in zip([0, *ends], ends, strict=False))


def tree_of(tokens: int, nodes: int, seed: int) -> sr.Pattern:
    """Draws a tree of prompts and answers."""
    generator = torch.Generator().manual_seed(seed)
    parents = [-1] + [
        int(torch.randint(max(1, i), (1,), generator=generator)) for i in range(nodes - 1)
    ]
    return sr.Tree(lengths_of(tokens, nodes, seed), tuple(parents))


def kinds(tokens: int) -> dict[str, Callable[[int], Any]]:
    """Makes a pattern of each kind from a number; patterns of two numbers differ."""
    few, many = min(10, tokens // 8), min(1000, tokens // 4)
    window = min(4096, tokens // 4)
    causal = sr.Causal()
    return {
        "Causal (lengths differ)": lambda i: causal,
        "window and 4 sinks": lambda i: causal
        & (sr.SlidingWindow(window + i) | sr.GlobalTokens(4, rows=False)),
        "chunks of 2,048 tokens": lambda i: causal & sr.Dilated(min(2048, tokens) + i, 1),
        f"{few} documents": lambda i: causal & sr.Documents(lengths_of(tokens, few, i)),
        f"{many} documents": lambda i: causal & sr.Documents(lengths_of(tokens, many, i)),
        f"{few} documents, a window in each": lambda i: sr.Packed(
            lengths_of(tokens, few, i), sr.SlidingWindow(window)
        ),
        f"tree of {few} nodes": lambda i: tree_of(tokens, few, i),
        "LongNet of 3 branches": lambda i: causal
        & sr.LongNet((min(2048, tokens) + 4 * i, 4 * window, 8 * window), (1, 2, 4)),
        "padding, 2 sequences": lambda i: sr.KeyPadding((tokens - 1 - i, tokens))
        & sr.SlidingWindow(window),
        "mask of keys": lambda i: sr.SlidingWindow(window)
        & sr.KeyMask(torch.arange(tokens) % (7 + i) > 0),
        "RandomBlocks(0.1)": lambda i: sr.RandomBlocks(0.1, 64, seed=i),
        "Hierarchical": lambda i: sr.Hierarchical(((64, 256 + 64 * i), (256, 4096)), 64),
        "RandomBlocks & window + LongNet": lambda i: (
            (sr.RandomBlocks(0.1, 64, seed=i) & sr.SlidingWindow(window))
            + sr.Dilated(min(2048, tokens), 2)
        ),
    }  # fmt: skip


def measured(tokens: int, name: str, make: Callable[[int], Any]) -> dict[str, Any]:
    """Median CPU milliseconds of new layouts, and operators of torch in the last one."""
    row: dict[str, Any] = {"pattern": name, "tokens": tokens}
    count = 9 if tokens < 100_000 else 5
    for label, size in (("given", 128), ("chosen", None)):
        times = []
        for i in range(count + 2):
            pattern, length = make(i), tokens + (i if name.startswith("Causal") else 0)
            begin = time.process_time_ns()
            layout = pattern.layout(length, block_size=size)
            times.append((time.process_time_ns() - begin) / 1e6)
        row[f"ms_{label}"] = statistics.median(times[2:])
        sr.layout_cache.clear()
        pattern = make(count + 2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            layout = pattern.layout(tokens, block_size=size)
        events = profile.key_averages()
        row[f"operators_{label}"] = sum(x.count for x in events if "::" in x.key)
    return row | {"blocks": layout.num_blocks, "block_size": layout.block_size}


def table(most: int) -> list[dict[str, Any]]:
    """The rows of all kinds and of lengths up to `most`."""
    torch.set_num_threads(1)
    library()
    return [
        measured(tokens, name, make)
        for tokens in TOKENS
        if tokens <= most
        for name, make in kinds(tokens).items()
        if not (tokens > 100_000 and "Random" in name)
    ]  # fmt: skip


def mask_times(
    make: Callable[..., Any], tokens: int, documents: int, clock: Callable[[], int]
) -> list[float]:
    """Milliseconds of FlexAttention's `create_block_mask`, for other documents each time."""
    times = []
    for seed in range(6):
        lengths = torch.tensor(lengths_of(tokens, documents, seed))
        document = torch.repeat_interleave(torch.arange(documents), lengths)

        def visible(b, h, q, k, document=document):  # type: ignore[no-untyped-def]
            return (q >= k) & (document[q] == document[k])

        begin = clock()
        make(visible, None, None, tokens, tokens, device="cpu")
        times.append((clock() - begin) / 1e6)
    return times[1:]


def flex_rows() -> list[dict[str, Any]]:
    """CPU milliseconds of `create_block_mask` for the documents of a row, plain and compiled."""
    from torch.nn.attention.flex_attention import create_block_mask

    makers = {"plain": create_block_mask, "compiled": torch.compile(create_block_mask)}
    rows = []
    for tokens in (4096, 16384):
        for name, make in makers.items():
            row: dict[str, Any] = {"pattern": f"create_block_mask, {name}", "tokens": tokens}
            try:
                row["ms"] = statistics.median(mask_times(make, tokens, 10, time.process_time_ns))
            except Exception as error:
                row["failed"] = str(error).splitlines()[0][:120]
            rows.append(row)
    return rows


class Small(torch.nn.Module):
    """Two layers of attention over packed documents, 128 channels in 2 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, 128)
        self.mix = torch.nn.ModuleList(torch.nn.Linear(128, 384) for _ in range(2))
        self.wide = torch.nn.ModuleList(torch.nn.Linear(128, 512) for _ in range(2))
        self.narrow = torch.nn.ModuleList(torch.nn.Linear(512, 128) for _ in range(2))

    def forward(self, tokens: torch.Tensor, pattern: sr.Pattern) -> torch.Tensor:
        x = self.embed(tokens)
        for mix, wide, narrow in zip(self.mix, self.wide, self.narrow, strict=True):
            query, key, value = mix(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
            x = x + sr.attention(query, key, value, pattern).transpose(1, 2).flatten(2)
            x = x + narrow(torch.relu(wide(x)))
        return x @ self.embed.weight.T


def resident() -> int:
    """Bytes of memory that the process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def trained() -> dict[str, Any]:
    """Steps of the small model over other documents each: time of layouts, of all, and memory."""
    torch.manual_seed(0)
    model, spent, memory = Small(), [0.0], []
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 256, (1, TRAINED))
    begin = time.process_time()
    for step in range(STEPS):
        pattern = sr.Causal() & sr.Documents(lengths_of(TRAINED, 10 + step % 20, step))
        start = time.process_time()
        pattern.layout(TRAINED, num_heads=2)  # what the call would build
        spent[0] += time.process_time() - start
        logits = model(tokens, pattern)
        torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            memory.append(resident())
    whole = time.process_time() - begin
    return {
        "pattern": "10 to 29 documents, others in each step", "tokens": TRAINED, "steps": STEPS,
        "ms_step": whole / STEPS * 1e3, "ms_layout": spent[0] / STEPS * 1e3,
        "share": spent[0] / whole, "memory_mb": [round(x / 1e6) for x in memory],
        "cache_mb": sr.layout_cache.info().bytes / 1e6,
    }  # fmt: skip


def main() -> None:
    """Writes the record; with `--table`, prints the rows of this checkout's layouts alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--base", type=Path, help="folder of another checkout, measured too")
    parser.add_argument("--table", type=int, metavar="TOKENS", help="print the rows up to here")
    arguments = parser.parse_args()
    if arguments.table:
        print(json.dumps(table(arguments.table)))
        return
    from .measure import write_record

    before = []
    if arguments.base:
        environment = os.environ | {"PYTHONPATH": str(arguments.base)}
        command = [sys.executable, str(Path(__file__).resolve()), "--table", "65536"]
        done = subprocess.run(
            command, env=environment, cwd=arguments.base, capture_output=True, text=True, check=True
        )
        revision = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=arguments.base,
            capture_output=True,
            text=True,
            check=True,
        )
        before = [row | {"revision": revision.stdout.strip()} for row in json.loads(done.stdout)]
    rows = [*table(TOKENS[-1]), *before, *flex_rows()]
    torch.set_num_threads(2)
    write_record(arguments.out, "new-layouts", [*rows, trained()])


if __name__ == "__main__":
    main()
