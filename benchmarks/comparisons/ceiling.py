"""Measures what the matrix products of a machine attain, and each call's share of that.

    python -m benchmarks ceiling --out benchmarks/records

`ceiling.json`: for each set of vector instructions that the machine has (a tier) and each dtype,
the rate of products with a tile's shapes. `kernel`: the CPU kernel's own product in a loop;
`torch`: `torch.bmm` of many tiles, and one large `torch.mm`. The highest of them is the ceiling.
Then the rate of calls, as a share of the ceiling and of our own rate on `Full()`. Each tier runs in
a process of its own, whose environment limits the kernel, torch, oneDNN and MKL to it.
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparsering as sr
from sparsering.kernels.cpu.build import build

from ..measure import (
    Row,
    distance_of,
    gradient_of,
    inputs_of,
    interleaved,
    sampled_error,
    write_record,
)

TIERS = {"avx2": "AVX2", "avx512": "AVX512_CORE"}
"""Names of the tiers: for SPARSERING_CPU, and for oneDNN's limit."""
HEADS, WIDTHS, BLOCKS, DTYPES = 8, (64, 128), (128, 64, 32), (torch.float32, torch.bfloat16)
DENSE = "Full(), block_size=128"


def ceiling(out: Path, tier: str | None = None, quick: bool = False) -> Path:
    """Measures one tier in this process, or each in a new one, and writes the record."""
    if tier is not None:
        return write_record(out, "ceiling", [{"tier": tier, **row} for row in tier_rows(quick)])
    rows: list[Row] = []
    for name in tiers():
        with tempfile.TemporaryDirectory() as folder:
            options = ["--out", folder, "--tier", name, *(["--quick"] if quick else [])]
            command = [sys.executable, "-m", "benchmarks", "ceiling", *options]
            subprocess.run(command, env={**os.environ, **limits(name)}, check=True)
            rows += json.loads((Path(folder) / "ceiling.json").read_bytes())["rows"]
    return write_record(out, "ceiling", rows)


def tiers() -> list[str]:
    """Returns the tiers that this machine runs, the lowest first."""
    most = torch.backends.cpu.get_cpu_capability().lower()
    names = list(TIERS)
    return names[: names.index(most) + 1] if most in names else []


def limits(tier: str) -> dict[str, str]:
    """Returns the environment of a process that uses no instructions above a tier."""
    if tier == tiers()[-1]:
        return {"SPARSERING_CPU": tier}
    return {
        "SPARSERING_CPU": tier, "ATEN_CPU_CAPABILITY": tier, "ONEDNN_MAX_CPU_ISA": TIERS[tier],
        "MKL_ENABLE_INSTRUCTIONS": TIERS[tier],
    }  # fmt: skip


def tier_rows(quick: bool) -> list[Row]:
    """Rates of products and calls in this process."""
    rows: list[Row] = []
    # torch multiplies tiles of bfloat16 with AVX-512 alone, and ends the process without it.
    pairs = torch.backends.cpu.get_cpu_capability() == "AVX512"
    for dtype in DTYPES if pairs else DTYPES[:1]:
        for width in WIDTHS:
            products = product_rows(width, dtype, quick)
            most = max(row["gflops"] for row in products)
            rows += products
            rows += call_rows(width, dtype, most, False, quick)
            rows += call_rows(width, dtype, most, True, quick)
    return rows


def product_rows(width: int, dtype: torch.dtype, quick: bool) -> list[Row]:
    """Rates of products [rows, inner] x [inner, columns] on all threads."""
    tile, many, large = 128, 64, 512 if quick else 2048
    repeats = many if quick else 8192  # in shorter loops the threads share a core
    scores, sums = (tile, width, tile), (width, tile, tile)
    calls: dict[tuple[str, tuple[int, int, int], int], Callable[[], object]] = {}
    for shape in (scores, sums):
        rows, inner, columns = shape
        if (call := kernel_product(shape, dtype, repeats)) is not None:
            calls["kernel", shape, repeats * torch.get_num_threads()] = call
        tiles = torch.randn(many, rows, inner).to(dtype), torch.randn(many, inner, columns)
        calls["torch", shape, many] = partial(torch.bmm, tiles[0], tiles[1].to(dtype))
    a = torch.randn(large, large).to(dtype)
    calls["torch", (large, large, large), 1] = partial(torch.mm, a, a)
    named = {str(key): call for key, call in calls.items()}
    ms = interleaved(named, 5 if quick else 21)
    return [
        {
            "product": name, "dtype": str(dtype)[6:], "head_dim": width, "shape": list(shape),
            "gflops": 2 * count * shape[0] * shape[1] * shape[2] / ms[str(key)] / 1e6,
        }
        for key in calls for name, shape, count in [key]
    ]  # fmt: skip


def kernel_product(
    shape: tuple[int, int, int], dtype: torch.dtype, times: int
) -> Callable[[], object] | None:
    """Returns a call that repeats the kernel's product in each thread; None if it has none."""
    rows, inner, columns = shape
    library = ctypes.CDLL(str(build()))
    name = "bfloat16_" if dtype == torch.bfloat16 else ""
    repeat: Any = getattr(library, f"sparsering_repeat_{name}product")
    repeat.restype = ctypes.c_bool
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)
    operands = [
        (
            torch.randn(rows, inner).to(dtype),
            torch.randn(inner, columns).to(dtype),
            torch.empty(rows, columns),
        )
        for _ in range(threads)
    ]
    sizes = [ctypes.c_int64(n) for n in (rows, columns, inner)]

    def one(tensors: tuple[Tensor, ...]) -> bool:
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in tensors]
        return bool(repeat(ctypes.c_int64(times), *sizes, *pointers))

    if dtype == torch.bfloat16 and not one(operands[0]):
        return None
    return lambda: list(pool.map(one, operands))


def call_rows(
    width: int, dtype: torch.dtype, most: float, backward: bool, quick: bool
) -> list[Row]:
    """Rates of calls, forward or with backward, as shares of the ceiling and of `Full()`."""
    patterns: dict[str, tuple[sr.Pattern, int]] = {DENSE: (sr.Full(), 128)}
    for block in BLOCKS:
        patterns[f"RandomBlocks(0.1, {block})"] = sr.RandomBlocks(0.1, block), block
    patterns["Causal() & SlidingWindow(512)"] = sr.Causal() & sr.SlidingWindow(512), 128
    patterns["LongNet((512, 1024, 2048), (1, 2, 4))"] = (
        sr.LongNet((512, 1024, 2048), (1, 2, 4)), 128,
    )  # fmt: skip
    length = 1024 if quick else 8192 if backward else 16384
    calls: dict[str, Callable[[], Any]] = {}
    gradients: dict[int, Tensor] = {}  # by length; drawn once, outside of the timed calls
    inputs = [x.requires_grad_(backward) for x in inputs_of(HEADS, length, width, dtype)]
    short = 1024 if quick else 4096  # the rate of Full() is the same at this length
    first = [x[:, :, :short].detach().requires_grad_(backward) for x in inputs]
    for name, (pattern, block) in patterns.items():
        given = first if name == DENSE else inputs
        if backward and given[0].shape[2] not in gradients:
            gradients[given[0].shape[2]] = gradient_of(given[0])
        calls[name] = partial(run, given, pattern, block, gradients.get(given[0].shape[2]))
    ms = interleaved(calls, 2 if quick else 7)
    rates: dict[str, float] = {}
    rows: list[Row] = []
    for name, (pattern, block) in patterns.items():
        given = first if name == DENSE else inputs
        tokens = given[0].shape[2]
        layout = pattern.layout(tokens, num_heads=HEADS, block_size=block)
        density = layout.density
        work = (14 if backward else 4) * HEADS * density * tokens**2 * width
        rates[name] = work / ms[name] / 1e6
        rows.append({
            "call": name, "case": "forward+backward" if backward else "forward",
            "dtype": str(dtype)[6:], "tokens": tokens, "heads": HEADS, "head_dim": width,
            "block_size": block, "density": density, "ms": ms[name], "gflops": rates[name],
            "of_ceiling": rates[name] / most, "of_full": rates[name] / rates[DENSE],
            "error": error_of(given, pattern, block, backward),
        })  # fmt: skip
    return rows


def run(inputs: list[Tensor], pattern: sr.Pattern, block: int, gradient: Tensor | None) -> Any:
    """Runs our attention; with a gradient of its output, returns those of the inputs."""
    out = sr.attention(inputs[0], inputs[1], inputs[2], pattern, block_size=block, backend="cpu")
    return out if gradient is None else torch.autograd.grad(out, inputs, gradient)


def error_of(inputs: list[Tensor], pattern: sr.Pattern, block: int, backward: bool) -> float:
    """Error of a forward on sampled rows, or of all gradients of a head on 2,048 tokens."""
    query, key, value = inputs
    if not backward:
        return sampled_error(run(inputs, pattern, block, None), query, key, value, pattern)
    own = [x[:, :1, :2048].detach().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in own]
    out: Any = sr.attention(exact[0], exact[1], exact[2], pattern, block_size=block)
    gradient = gradient_of(own[0])
    gradients = torch.autograd.grad(out, exact, gradient.double())
    return distance_of(run(own, pattern, block, gradient), gradients)
