"""Times each kernel with 2, 3 and 4 stages and several streamed tiles, at the main shapes.

    python -m benchmarks.gpu.stages --out DIR     # writes DIR/stages.json; all shapes, in one call
    python -m benchmarks.gpu --only "stages and tiles"     # the same as parts of the whole record

A kernel is launched alone: the forward, dQ, or dK and dV. Each row has the error against float64, a
digest of the bits, whether they are those of the default, and what the compiler made. A config that
does not compile, does not fit or computes wrong numbers is named with the reason, and not timed.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparsering as sr
from sparsering.kernels.problem import Problem
from sparsering.kernels.triton import call, configs
from sparsering.kernels.triton.configs import KERNELS, Config
from sparsering.kernels.triton.launch import Launch

from ..measure import Budget, Row, write_record
from .device import (
    DEVICE,
    HALF,
    STUB,
    inputs,
    is_alive,
    poisoned,
    sized,
    spin_up,
    synchronize,
)
from .timing import exact_gradients, relative, taken, watching

STAGES = (2, 3, 4)
TOKENS, HEADS = sized(32768, 256), sized(16, 2)
SECONDS = sized(45.0, 600.0)  # of a case; configs after that are named and left out
_BOUND = 0.02  # largest relative error of a result
_PRODUCTS = {"forward": 2, "query": 3, "key": 4}  # matrix products that a kernel computes
_RESULTS = {"forward": slice(0, 1), "query": slice(1, 2), "key": slice(2, 4)}
_ROTATION = -7046029254386353131  # odd, its bits are spread; as int64


def patterns(block: int) -> dict[str, sr.Pattern]:
    """Returns the two patterns: 10% of random blocks, and dense attention by the same kernels."""
    return {"random blocks": sr.RandomBlocks(0.1, block), "dense": sr.Full()}


def tried(kernel: str, like: Tensor, width: int, block: int) -> list[Config]:
    """Lists the default, then 2, 3 and 4 stages with each streamed tile that `tune` would try."""
    default = configs.default(kernel, like.dtype, like.device, width, block)
    near = configs.candidates(kernel, like, width, block)
    listed = [default]
    for streamed in sorted({c.streamed for c in near if c.rows == default.rows}, reverse=True):
        masked = min(default.masked, streamed // 2)
        own = default._replace(streamed=streamed, masked=masked if masked >= 16 else 0)
        listed += [own._replace(stages=stages) for stages in STAGES]
        listed += [own._replace(warps=12 - own.warps)] * (streamed == default.streamed)
    return list(dict.fromkeys(listed))


def compile_ahead(width: int, block: int, share: int, shares: int) -> Iterator[Row]:
    """Compiles one share of the configs, so that the timed part reads them from Triton's cache."""
    kernels = _Kernels(sr.RandomBlocks(0.1, block), 2, max(4 * block, sized(2048, 0)), width, block)
    every = [(name, c) for name in KERNELS for c in tried(name, kernels.args[0], width, block)]
    for name, config in every[share::shares][: sized(None, 2)]:
        row = {"kernel": name, "head_dim": width, "block_size": block, "config": str(tuple(config))}
        yield row | kernels.compiled(name, config)[1]


def measured(width: int, block: int) -> Iterator[Row]:
    """Times all configs of the three kernels at one shape, sparse and dense."""
    budget = Budget(SECONDS)
    for pattern_name, pattern in patterns(block).items():
        sr.layout_cache.clear()
        kernels = _Kernels(pattern, HEADS, TOKENS, width, block)
        kernels.exact = exact_gradients(kernels.args, pattern, block, kernels.grad)
        spin_up()
        for name in KERNELS:
            shape = {
                "kernel": name, "pattern": pattern_name, "dtype": str(HALF)[6:], "tokens": TOKENS,
                "heads": HEADS, "head_dim": width, "block_size": block,
                "density": kernels.problem.layout.density,
            }  # fmt: skip
            for config in tried(name, kernels.args[0], width, block)[: sized(None, 2)]:
                row = shape | {"backend": f"ours, {_said(config)}", "config": str(tuple(config))}
                if budget.left < 0:
                    yield row | {"left_out": f"the {SECONDS:.0f} s of this case were spent"}
                    continue
                yield row | kernels.timed(name, config)


def _said(config: Config) -> str:
    tiles = f"{config.rows} x {config.streamed}"
    return f"{config.stages} stages of {tiles}, {config.warps} warps"


class _Kernels:
    """Inputs of one shape and pattern, and its three kernels, to be launched one by one.

    `exact` holds out, dQ, dK and dV of the first head in float64, if results are to be checked.
    """

    def __init__(
        self, pattern: sr.Pattern, heads: int, tokens: int, width: int, block: int
    ) -> None:
        self.args = inputs(heads, tokens, width)
        self.grad = inputs(heads, tokens, width, seed=1)[0]
        layout = pattern.layout(tokens, num_heads=heads, block_size=block, device=DEVICE)
        self.problem = Problem(layout, *self.args, width**-0.5)
        self.pairs = layout.density * tokens**2 * heads
        self.out, self.lse = call.forward(self.problem)
        self.exact: list[Tensor] = []
        self._defaults: dict[str, list[Tensor]] = {}

    def _run(self, name: str) -> list[Tensor]:
        if name == "forward":
            return [call.forward(self.problem)[0]]
        no_grad = torch.zeros_like(self.lse)
        grads = call.backward(self.problem, self.out, self.lse, self.grad, no_grad)
        return list(grads[:3])[slice(0, 1) if name == "query" else slice(1, 3)]

    def compiled(self, name: str, config: Config) -> tuple[list[Tensor], Row, Any]:
        """Runs a kernel with a config; returns its results, a row, and its launches or None."""
        query = self.args[0]
        key = configs.config_key(name, query.dtype, query.shape[3], self.problem.layout.block_size)
        caught: list[tuple[Launch, Any]] = []

        def note(run: Callable[[], None], launch: Launch, of_call: Any) -> None:
            run()
            caught.append((launch, of_call))

        with configs.trial({key: config}, query.device), watching(note), poisoned():
            try:
                results = self._run(name)
                synchronize()
            except Exception as error:  # compiler error, or too much shared memory
                if not is_alive():  # an illegal access: no later config can run in this process
                    raise
                why = f"{type(error).__name__}: {error}".partition("\n")[0][:160]
                return [], {"cannot": why}, None
        mine = [
            (launch, of_call) for launch, of_call in caught
            if launch.config == config and launch.kernel.fn.__name__ == f"{name}_kernel"
        ]  # fmt: skip
        if not mine:
            return [], {"cannot": "the call changed this config"}, None
        made = mine[0][0].compiled
        return results, _resources(made), mine

    def timed(self, name: str, config: Config) -> Row:
        """Returns what was compiled, the error, the digest of the bits and the time of a config."""
        results, row, launches = self.compiled(name, config)
        if launches is None:
            return row
        layout, query = self.problem.layout, self.args[0]
        usual = configs.default(
            name, query.dtype, query.device, query.shape[3], layout.block_size
        )  # fmt: skip
        if config == usual:
            self._defaults[name] = results
        default = self._defaults.get(name)
        exact = self.exact[_RESULTS[name]]
        errors = [relative(x[:, :1], y) for x, y in zip(results, exact, strict=True)]
        error = float(torch.tensor(errors, dtype=torch.float64).max())  # NaN stays NaN
        same = None if default is None else _same(results, default)
        row |= {"error": error, "bits": digest(results), "as_default": same}
        if not (error <= _BOUND or STUB):
            return row | {"left_out": f"its error is {error:.3g}"}

        def launch() -> tuple[Tensor, ...]:
            for own, of_call in launches:
                own.run(of_call)
            return ()

        time = taken({"ours": launch}, rounds=3)["ours"]
        work = 2 * _PRODUCTS[name] * self.pairs * self.args[0].shape[3]
        return row | {
            "default": config == usual, **time, "tflops": work / time["ms"] / 1e9,
            "bits_after": digest(results) == row["bits"],
        }  # fmt: skip


def _resources(made: Any) -> Row:
    """Registers, spilled registers and shared bytes of a compiled kernel; {} if interpreted."""
    metadata = getattr(made, "metadata", None)
    if metadata is None:
        return {}
    return {"registers": made.n_regs, "spilled": made.n_spills, "shared_bytes": metadata.shared}


def _same(results: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(results, others, strict=True))


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().flatten().view(torch.int64)


def digest(results: Sequence[Tensor]) -> str:
    """Returns 16 hexadecimal digits of the bits of tensors; integer sums, so exact on any device.

    Each tensor must have a multiple of 8 bytes.
    """
    total = 0
    for number, x in enumerate(results):
        bits = _bits(x)
        places = torch.arange(len(bits), device=bits.device) + (number << 32)
        mixed = bits * (places * _ROTATION | 1)
        total ^= int((mixed ^ (mixed >> 29)).sum()) & (1 << 64) - 1
    return f"{total:016x}"


def main() -> None:
    """Runs all shapes and writes `stages.json`."""
    from .parts import MAIN

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.stages")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/records"))
    out: Path = parser.parse_args().out
    write_record(out, "stages", [row for shape in MAIN for row in measured(*shape)])


if __name__ == "__main__":
    main()
