"""Calls made in other ways: a batch of gradients, four threads, forked, compiled, recomputed.

A compiled call has its lengths as tensors; its graph first runs with the lengths turned around.
"""

import os
import signal
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import product

import hypothesis.strategies as st
import torch
from oracles.patterns_oracle import build
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import sparsering as sr

from . import calls, specs
from .attack import Cell, Refused

WAYS = ("batch of gradients", "four threads", "forked process", "one compiled graph")
WAYS += ("checkpoint in a graph",)
BACKENDS = ("default", "cpu", "gather", "reference", "torch_sparse")
CELLS = [Cell(*cell) for cell in product(WAYS, specs.CLASSES, BACKENDS, calls.DTYPES)]
CELLS += [Cell(*cell) for cell in product(WAYS, calls.LIBRARIES["sdpa"], ("sdpa",), calls.DTYPES)]
SECONDS = 20  # in which a forked process ends


@dataclass(frozen=True)
class Way(calls.Call):
    """One call, made in a way of `WAYS`."""

    way: str = WAYS[0]

    def cells(self) -> list[Cell]:
        return [Cell(self.way, c, self.backend, self.dtype) for c in specs.classes_of(self.spec)]

    def check(self) -> None:
        tensors = self.tensors()
        try:
            results = self.run(tensors)
        except (NotImplementedError, ImportError) as refusal:
            raise Refused(str(refusal)) from None
        if self.way == "batch of gradients":
            self.check_batch(tensors)
            return
        if self.way in ("one compiled graph", "checkpoint in a graph"):
            self.check_compiled(tensors, results)
            return
        sr.layout_cache.clear()  # the layout is built by four threads, or in the forked process
        if self.way == "four threads":
            with ThreadPoolExecutor(4) as pool:
                start = threading.Barrier(4)
                others = [pool.submit(self.run, tensors, start) for _ in range(4)]
                found = [other.result() for other in others]
            for other in found:
                assert all(map(same_bits, results, other)), "a thread has other bits"
            return
        with others_attend():
            if not (child := os.fork()):
                status = 1
                try:
                    signal.alarm(SECONDS)
                    status = 2 * (not all(map(same_bits, results, self.run_forked(tensors))))
                except BaseException:
                    os.write(2, traceback.format_exc().encode())
                finally:
                    os._exit(status)
            status = os.waitpid(child, 0)[1]
        assert status == 0, f"the forked process ends with {status}: 14 is too late, 512 other bits"

    def grads(self, tensors: list[Tensor], seed: int = 0) -> list[Tensor]:
        torch_generator = torch.Generator().manual_seed(self.seed + seed)
        return [torch.randn(x.shape, generator=torch_generator).to(x.dtype) for x in tensors]

    def run(self, tensors: dict[str, Tensor], start: threading.Barrier | None = None) -> list:
        """Returns out, lse and the gradients."""
        if start is not None:
            start.wait()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            results = self.attend(tensors)
        leaves, grads = list(tensors.values()), self.grads(list(results))
        found = torch.autograd.grad(results, leaves, grads, materialize_grads=True)
        return [*results, *found]

    def run_forked(self, tensors: dict[str, Tensor]) -> list:
        """Returns out, lse and the gradients; no gradients where torch refuses a backward pass.

        It does once autograd has started threads for GPUs, as builds for GPUs do also without one.
        """
        try:
            return self.run(tensors)
        except RuntimeError as error:
            if "Autograd-and-Fork" not in str(error):
                raise
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return list(self.attend(tensors))

    def check_compiled(self, tensors: dict[str, Tensor], expected: list) -> None:
        torch._dynamo.reset()
        counters.clear()

        def plain(pattern: sr.Pattern) -> list:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                return list(self.attend(tensors, pattern))

        def recomputed(pattern: sr.Pattern) -> list:
            return list(checkpoint(lambda: tuple(plain(pattern)), use_reentrant=False))

        call = plain
        if self.way == "checkpoint in a graph":
            call = recomputed
            os.environ["TRITON_INTERPRET"] = "0"  # the choice of a backend then asks triton too

        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        of_blocks = self.block_bias is not None  # their number is that of these lengths alone
        try:
            for turned in (False,) if of_blocks else (True, False):
                results = compiled(build(specs.with_tensors(self.spec, turned)))
        finally:
            os.environ["TRITON_INTERPRET"] = "1"
        leaves, grads = list(tensors.values()), self.grads(list(results))
        found = torch.autograd.grad(results, leaves, grads, materialize_grads=True)
        assert all(map(same_bits, [*results, *found], expected)), "the graph has other bits"
        assert counters["stats"]["unique_graphs"] == 1, "lengths made a second graph"

    def check_batch(self, tensors: dict[str, Tensor]) -> None:
        """Compares each gradient of a batch of three with the oracle's."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            results = self.attend(tensors)
        of_each = [self.grads(list(results), number) for number in range(3)]
        many = [torch.stack(grads) for grads in zip(*of_each, strict=True)]
        found = torch.autograd.grad(
            results, list(tensors.values()), many, is_grads_batched=True, materialize_grads=True
        )
        for number, grads in enumerate(of_each):
            got = {name: x[number] for name, x in zip(tensors, found, strict=True)}
            calls.compare(got, self.expected(tensors, *grads), self.precision())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


@contextmanager
def others_attend() -> Iterator[None]:
    """Runs calls with ever new layouts in two threads."""
    is_done = threading.Event()

    def work(seed: int) -> None:
        x = torch.randn(1, 1, 256, 8)
        for number in range(10**9):
            if is_done.is_set():
                return
            pattern = sr.Documents((number % 200, 256 - number % 200)) & sr.SlidingWindow(seed + 9)
            sr.attention(x, x, x, pattern & sr.Dense(torch.rand(256, 256) < 0.5), block_size=16)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_done.set()
        for thread in threads:
            thread.join()


@st.composite
def cases(draw: st.DrawFn, cell: Cell) -> Way:
    """Draws calls with any options, in a cell's way."""
    options = calls.OF_LIBRARIES if cell.backend in calls.LIBRARIES else calls.OPTIONS
    option = draw(st.sampled_from(("none", *options)))
    if option in calls.HALF_ALONE and cell.dtype == "float64":
        option = "none"
    call = draw(calls.cases(cell._replace(option=option)))
    return Way(**{field.name: getattr(call, field.name) for field in fields(call)}, way=cell.option)
