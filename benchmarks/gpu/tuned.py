"""Runs `sparsering tune` for the main shapes and times them again with its choices.

First, several processes compile every candidate; Triton caches the results on disk, so that tuning
does not wait for compilers. The choices are stored in the folder of the record, apart from those of
the machine, so that all other parts use the defaults.
"""

import contextlib
import os
from collections.abc import Iterator

import torch

import sparsering as sr
from sparsering.kernels import tune
from sparsering.kernels.problem import Problem
from sparsering.kernels.triton import call, configs

from ..measure import Row
from .device import DEVICE, HALF, inputs, sized, synchronize
from .peers import flops, ours
from .speed import HEADS, MAIN_TOKENS
from .timing import Call, error_of_rows, largest, prepared, relative, taken, with_gradients

FOLDER = "SPARSERING_TUNED"  # names the folder of the choices in a worker's environment


def pattern_of(block: int) -> sr.Pattern:
    """Pattern of the main shape: 10% of random blocks."""
    return sr.RandomBlocks(0.1, block)


def compile_ahead(width: int, block: int, share: int, shares: int) -> Iterator[Row]:
    """Runs each candidate of one share once, on few tokens; yields its difference or its error."""
    heads, length = sized((4, 2048), (2, 4 * block))
    args = inputs(heads, length, width)
    layout = pattern_of(block).layout(length, num_heads=heads, block_size=block, device=DEVICE)
    problem = Problem(layout, *args, width**-0.5)
    grad = torch.randn_like(args[0])

    def run(kernel: str) -> list[torch.Tensor]:
        out, lse = call.forward(problem)
        if kernel == "forward":
            return [out]
        return list(call.backward(problem, out, lse, grad, torch.zeros_like(lse))[:3])

    expected = {kernel: [x.clone() for x in run(kernel)] for kernel in ("forward", "query")}
    expected["key"] = expected["query"]
    every = [
        (kernel, config)
        for kernel in configs.KERNELS
        for config in configs.candidates(kernel, args[0], width, block, ping_pong=True)
    ]
    for kernel, config in every[share::shares][: sized(None, 1)]:
        key = configs.config_key(kernel, HALF, width, block)
        row: Row = {"kernel": kernel, "head_dim": width, "block_size": block,
                    "config": str(tuple(config))}  # fmt: skip
        with configs.trial({key: config}, args[0].device):
            try:
                errors = [relative(a, b.double()) for a, b in
                         zip(run(kernel), expected[kernel], strict=True)]  # fmt: skip
                synchronize()
            except Exception as error:  # compiler error or too much shared memory: `tune` skips it
                yield row | {"cannot": f"{type(error).__name__}: {error}".split("\n")[0][:120]}
                continue
        yield row | {"differs": max(errors)}


def measured(width: int, block: int) -> Iterator[Row]:
    """Tunes one shape: yields each kernel's chosen config and its default."""
    with _own_folder():
        yield from _measured(width, block)


def _measured(width: int, block: int) -> Iterator[Row]:
    lines: list[str] = []
    tune.tune(
        "triton", pattern_of(block), tokens=sized(MAIN_TOKENS, 2 * block), num_heads=HEADS,
        num_kv_heads=HEADS, head_dim=width, dtype=HALF, block_sizes=(block,), ping_pong=True,
        say=lines.append,
    )  # fmt: skip
    like = inputs(1, 16, width)[0]
    for kernel in configs.KERNELS:
        key = configs.config_key(kernel, HALF, width, block)
        tried = [line.removeprefix(f"{key} ") for line in lines if line.startswith(key)]
        yield {
            "kernel": kernel, "head_dim": width, "block_size": block, "dtype": str(HALF)[6:],
            "default": str(tuple(configs.default(kernel, HALF, like.device, width, block))),
            "tuned": str(tuple(configs.config_for(kernel, like, width, block))),
            "tried": tried,
        }  # fmt: skip


def beside_default(width: int, block: int) -> Iterator[Row]:
    """Times the main shape with the default configs and with the chosen ones, in turns."""
    with _own_folder():
        yield from _beside_default(width, block)


def _beside_default(width: int, block: int) -> Iterator[Row]:
    pattern = pattern_of(block)
    args = inputs(HEADS, MAIN_TOKENS, width)
    grad = torch.randn_like(args[0])
    chosen = {
        key: config
        for kernel in configs.KERNELS
        for key in [configs.config_key(kernel, HALF, width, block)]
        for config in [configs.config_for(kernel, args[0], width, block)]
    }
    plain = {
        key: configs.default(kernel, HALF, args[0].device, width, block)
        for kernel in configs.KERNELS
        for key in [configs.config_key(kernel, HALF, width, block)]
    }
    if all(tuple(chosen[key]) == tuple(plain[key]) for key in plain):
        why = "nothing was faster than the defaults, or nothing was tuned"
        yield {"backend": "ours, tuned", "head_dim": width, "block_size": block, "left_out": why}
        return
    density = pattern.layout(MAIN_TOKENS, num_heads=HEADS, block_size=block).density

    def with_configs(of_kernels: dict[str, configs.Config], run: Call) -> Call:
        def call() -> torch.Tensor | tuple[torch.Tensor, ...]:
            with configs.trial(of_kernels, args[0].device):
                return run()

        return call

    for backward in (False, True):
        run: Call = ours(args, pattern, block)
        if backward:
            run = with_gradients(ours(args, pattern, block), args, grad)
        calls = {"ours": with_configs(plain, run), "ours, tuned": with_configs(chosen, run)}
        calls, _ = prepared(calls, lambda name, call: call)
        first, second = (x if isinstance(x, tuple) else (x,) for x in (c() for c in calls.values()))
        errors = [relative(a, b.double()) for a, b in zip(second, first, strict=True)]
        error = largest(errors, 0.02, "what was tuned")
        if not backward:
            error = error_of_rows(second[0], args, pattern)
        for name, time in taken(calls).items():
            work = flops(HEADS, density * MAIN_TOKENS**2, width, backward)
            yield {
                "backend": name, "case": "forward+backward" if backward else "forward",
                "dtype": str(HALF)[6:], "tokens": MAIN_TOKENS, "heads": HEADS, "head_dim": width,
                "block_size": block, "density": density, **time,
                "tflops": work / time["ms"] / 1e9, "error": error,
            }  # fmt: skip


@contextlib.contextmanager
def _own_folder() -> Iterator[None]:
    """Makes tuning store and read its choices in the record's folder, inside the block."""
    before = os.environ.get("SPARSERING_CACHE")
    os.environ["SPARSERING_CACHE"] = os.environ[FOLDER]
    configs.measured.forget()
    try:
        yield
    finally:
        os.environ.pop("SPARSERING_CACHE")
        if before is not None:
            os.environ["SPARSERING_CACHE"] = before
        configs.measured.forget()
