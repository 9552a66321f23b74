"""Checks the kernels on this GPU: patterns, dtypes, shapes, backends.

Everything is compared with dense float64. An error may be twice that of dense attention in the
inputs' dtype. Each case of the Triton kernels runs twice, with equal bits, and once with pipelines
of one stage, which may not be less exact. `calls` checks graphs, compilation, modules and other
kinds of calls.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparsering as sr
from sparsering.selection import select_blocks

from ..measure import Row
from .device import DEVICE, GPU, HALF, STUB, inputs, poisoned, sized
from .timing import largest, relative

# Allowance beyond twice the error of dense attention, relative to the largest number: kernels
# compute powers of two, which round differently from exp.
_GRANT = {torch.float32: 2e-6, torch.bfloat16: 8e-5, torch.float16: 1e-5}

_TERMS = 8  # terms that an instruction of a tensor core adds to a sum of float32, for tf32

TF32 = "float32, tf32"
DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
    TF32: torch.float32,
}  # fmt: skip

REPEATED = GPU
"""Whether cases run three times; the interpreter has one way to compute."""


def grant(dtype: torch.dtype, terms: int, tensor_cores: bool = GPU) -> float:
    """Returns the allowance beyond twice dense attention's error, for sums of `terms` products.

    It is relative to the largest number of a tensor. In float32, kernels compute three products of
    tf32 for one (`tf32x3`). They omit a product of two small parts, 2^-22 of the product at most.
    A tensor core also truncates each sum, where float32 arithmetic rounds it. An addition loses
    2^-24 on average, always toward zero, so that the losses add up: 3 * terms / 8 additions.
    """
    if dtype != torch.float32 or not tensor_cores:
        return _GRANT[dtype]
    return max(_GRANT[dtype], 2.0**-22 + 3 * -(-terms // _TERMS) * 2.0**-24)


@cache
def oracle() -> Any:
    """Imports the oracle of the tests."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    from oracles import attention_oracle

    return attention_oracle


def checked(run: Callable[[], Sequence[Tensor]], check: Callable[[Sequence[Tensor]], None]) -> None:
    """Checks what a call of the Triton kernels returns, as the tests do on a GPU."""
    oracle()
    from helpers.device_runs import checked

    checked(run, check, repeated=REPEATED)


@contextlib.contextmanager
def products_of(name: str) -> Iterator[None]:
    """Enables tf32 products inside the block if `name` is `TF32`; otherwise torch's default."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if name == TF32 else "none"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def smoke() -> Iterator[Row]:
    """Checks one forward and one backward: whether kernels compile, launch and are right at all."""
    case = oracle().Case(1, 4, 2, *sized((1000, 1000, 128, 128, 128), (40, 40, 16, 16, 16)))
    yield against_eager(sr.Causal() & sr.SlidingWindow(sized(300, 20)), case, HALF, "window")


LAUNCHES = {
    # name: pattern, lengths and heads of a case, dtype
    "4 heads on one, blocks of 64": ("window", (1, 8, 2, 600, 600, 64, 64, 64), "bfloat16"),
    "dK and dV over several heads": ("causal", (1, 32, 4, 2048, 2048, 128, 128, 128), "bfloat16"),
    "long rows, cut": ("causal", (1, 2, 2, 4096, 4096, 64, 64, 64), "bfloat16"),
    "several passes": ("longnet", (1, 4, 2, 600, 600, 128, 128, 64), "bfloat16"),
    "one query": ("full", (2, 8, 2, 1, 3000, 128, 128, 128), "bfloat16"),
    "float32": ("window", (1, 4, 2, 300, 300, 64, 64, 64), "float32"),
    "not aligned": ("window", (1, 4, 2, 301, 301, 72, 72, 64), "bfloat16"),
}


def launches(name: str) -> Iterator[Row]:
    """Checks a kind of launch that `smoke` has not: packed heads, cut tiles, passes, few rows."""
    pattern, shape, dtype = LAUNCHES[name]
    if not GPU or STUB:
        shape = (*shape[:3], min(50, shape[3]), min(70, shape[4]), 16, 16, 16)
        dtype = dtype if GPU else "float32"
    masks = {
        "window": sr.Causal() & sr.SlidingWindow(sized(250, 20)), "causal": sr.Causal(),
        "full": sr.Full(), "longnet": sr.LongNet(sized((64, 256), (16, 32)), (1, 4)) & sr.Causal(),
    }  # fmt: skip
    case = oracle().Case(*shape)
    yield against_eager(masks[pattern], case, DTYPES[dtype], pattern, dtype)


def choice() -> Iterator[Row]:
    """Compares the choice of blocks with the CPU's, index by index, among ties and NaN too."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([-2.0, -0.0, 0.0, 1e-40, 1.5, torch.inf, -torch.inf, torch.nan])
    blocks = sized(600, 40)
    ties = values[torch.randint(len(values), (2, 9, blocks), generator=generator)]
    drawn = torch.randn(2, 9, blocks, generator=generator)
    for k in sized((1, 7, 64, 256), (1, 7)):
        differ = []
        for scores in (ties, drawn):
            for options in ({"causal": False}, {"q_start": 31 * 64}):
                own = {"block_size": 64, "query_block": 64, "sink": 0, "local": 0, **options}
                expected = select_blocks(scores[None], k, **own)
                found = select_blocks(scores[None].to(DEVICE), k, **own)
                differ.append(float(not torch.equal(found.cpu(), expected)))
        yield {"pattern": "choice of blocks", "case": f"{k} of {blocks}",
               "error": largest(differ, 0, "the choice of blocks")}  # fmt: skip


def main_shapes(width: int, block: int) -> Iterator[Row]:
    """Checks the measured shapes on few tokens: out, lse, and gradients through both."""
    length = sized(2048, 4 * block)
    case = oracle().Case(1, sized(4, 2), sized(4, 2), length, length, width, width, block)
    patterns = {
        "random blocks": sr.RandomBlocks(0.1, block),
        "window": sr.Causal() & sr.SlidingWindow(sized(400, 40)),
        "longnet": sr.LongNet(sized((256, 512), (16, 32)), (1, 2)),
    }
    for name, pattern in patterns.items():
        yield against_eager(pattern, case, HALF, name)


def every_pattern(dtype: str, share: int, shares: int) -> Iterator[Row]:
    """Checks one of `shares` parts of the tests' patterns, forward and backward."""
    names = list(oracle().PATTERNS)[share::shares]
    yield from _patterns(names[: sized(None, 1)], dtype)


def _patterns(names: Sequence[str], dtype: str) -> Iterator[Row]:
    """Checks patterns of the tests, forward and backward."""
    case = oracle().Case(2, 4, 2, 450, 450, 128, 128, 128)
    if not GPU:
        case = oracle().Case(1, 2, 1, 50, 50, 16, 16, 16)
    with products_of(dtype):
        for name in names:
            kind = DTYPES[dtype] if GPU else torch.float32
            yield against_eager(oracle().PATTERNS[name](case), case, kind, name, dtype)


TEN = (
    "causal", "window", "global tokens", "longnet", "random blocks", "packed", "block diffusion",
    "neighbourhood in tiles", "blocks of each head", "a mixture of each head",
)  # fmt: skip


def ten_patterns(dtype: str, share: int) -> Iterator[Row]:
    """Checks every second of ten patterns, beginning with the first or the second."""
    yield from _patterns(TEN[share::2], dtype)


def head_dim(width: int) -> Iterator[Row]:
    """Checks causal attention of one head dim, also with a different value dim."""
    for value_dim in dict.fromkeys((width, max(32, width // 2))):
        case = oracle().Case(1, 2, 1, 300, 300, width, value_dim, 64)
        if not GPU:
            case = oracle().Case(1, 2, 1, 40, 40, width, value_dim, 16)
        yield against_eager(oracle().PATTERNS["causal"](case), case, HALF, "causal")


def block_size(block: int) -> Iterator[Row]:
    """Checks plain and strided tiles of one block size, at a ragged length."""
    case = oracle().Case(1, 2, 1, *sized((300, 300, 64, 64), (60, 60, 16, 16)), block)
    make = oracle().PATTERNS["union of steps"]
    yield against_eager(make(case), case, HALF, "union of steps")


def strides() -> Iterator[Row]:
    """Checks memory layouts of the inputs, and few queries on many keys."""
    patterns, case_of = oracle().PATTERNS, oracle().Case
    ways = ("tokens before heads", "one head expanded", "width before tokens",
            "every other of a larger tensor")  # fmt: skip
    for arrange in ways[: sized(None, 1)]:
        lengths = sized((130, 300), (30, 50))
        case = case_of(2, 4, 2, *lengths, *sized((64, 64), (16, 16)), 64, arrange=arrange)
        yield against_eager(patterns["causal"](case), case, HALF, f"causal, {arrange}")
    few = case_of(1, 8, 1, *sized((16, 5000), (3, 90)), 64, 64, 64)
    yield against_eager(patterns["full"](few), few, HALF, "full, few queries")


def backend(name: str, dtype: str) -> Iterator[Row]:
    """Checks one backend on this device, forward and backward; a row names what it refuses."""
    case = oracle().Case(1, 4, 2, *sized((384, 384, 64, 64, 64), (40, 40, 16, 16, 16)))
    some = {
        "causal": sr.Causal(), "longnet": sr.LongNet((16, 64), (1, 2)),
        "blocks": sr.RandomBlocks(0.3, case.block_size),
    }  # fmt: skip
    with products_of(dtype):
        for label, pattern in some.items():
            try:
                yield against_eager(pattern, case, DTYPES[dtype], label, dtype, name)
            except (NotImplementedError, ImportError) as refusal:
                reason = f"{refusal}".partition("\n")[0][:160]
                yield {"backend": name, "pattern": label, "dtype": dtype, "refused": reason}


def against_eager(
    pattern: sr.Pattern,
    case: Any,
    dtype: torch.dtype,
    name: str,
    dtype_name: str = "",
    backend: str = "triton",
) -> Row:
    """Errors of out, lse and gradients; at most twice those of dense attention in this dtype."""
    torch.manual_seed(0)
    args = [x.detach().to(DEVICE).requires_grad_() for x in oracle().inputs(case, dtype, False)]
    exact_args = [x.detach().double().requires_grad_() for x in args]
    counts = oracle().dense_counts(pattern, case).to(DEVICE)
    options: dict[str, Any] = {"block_size": case.block_size, "q_start": case.q_start}
    exact = oracle().dense_attention(*exact_args, counts)
    grads = [torch.randn_like(x).nan_to_num() for x in exact]

    def all_of(results: Sequence[Tensor], wrt: list[Tensor]) -> list[Tensor]:
        cotangents = [grad.to(x) for grad, x in zip(grads, results, strict=True)]
        cotangents[1] = torch.where(results[1].isfinite(), cotangents[1], 0.0)
        options = {"materialize_grads": True}
        return [x.detach() for x in results] + list(
            torch.autograd.grad(list(results), wrt, cotangents, **options)
        )

    true = all_of(exact, exact_args)
    eager = all_of(oracle().dense_attention(*args, counts), args)
    ratios, worst = [], 0.0
    terms = max(case.kv_len, case.q_len * case.num_heads // case.num_kv_heads, case.head_dim)
    allowed = grant(dtype, terms)

    def run() -> list[Tensor]:
        with poisoned() if backend == "triton" else contextlib.nullcontext():
            return all_of(
                sr.attention(*args, pattern, backend=backend, return_lse=True, **options), args
            )

    def check(got: Sequence[Tensor]) -> None:
        nonlocal worst
        for ours, theirs, c in zip(got, eager, true, strict=True):
            size = float(torch.cat((c[c.isfinite()].abs(), c.new_ones(1))).max())
            bound = oracle().errors(theirs, c)[0]
            # the stub's kernels write nothing, which is not finite where it must be
            mine, most = (math.nan, math.nan) if STUB else oracle().errors(ours, c)
            ratios.append(mine / (bound + allowed * size))
            worst = max(worst, most / size)

    if backend == "triton":
        checked(run, check)
    else:
        check(run())
    label = dtype_name or str(dtype)[6:]
    ratio = largest(ratios, 2.0, f"{name} of {backend} in {label}, head dim {case.head_dim}")
    return {"backend": backend, "pattern": name, "dtype": label, "head_dim": case.head_dim,
            "value_dim": case.value_dim, "block_size": case.block_size, "error": worst,
            "error_over_dense": ratio}  # fmt: skip


def biased_selection() -> Iterator[Row]:
    """Checks selected blocks with a bias for each, and its gradient together with that of lse."""
    block, length = sized((64, 512), (16, 64))
    indices = torch.randint(0, length // block, (1, 2, length // block, 3))
    pattern = sr.SelectedBlocks(indices.to(DEVICE), block)
    on_host = sr.SelectedBlocks(indices, block)
    args = [x.requires_grad_() for x in inputs(2, length, sized(64, 16))]
    number = on_host.layout(length, num_heads=2, block_size=block).num_blocks
    args.append(torch.randn(1, 2, number, device=DEVICE).requires_grad_())
    exact_args = [x.detach().double().requires_grad_() for x in args]
    grads = torch.randn_like(args[0]), torch.randn(1, 2, length, device=DEVICE)

    def results(own: Sequence[Tensor], backend: str) -> list[Tensor]:
        both = sr.attention(
            *own[:3], pattern, block_bias=own[3], block_size=block, backend=backend,
            return_lse=True,
        )  # fmt: skip
        cotangents = [grad.to(x) for grad, x in zip(grads, both, strict=True)]
        return [*both, *torch.autograd.grad(list(both), own, cotangents)]

    exact, errors = results(exact_args, "reference"), []
    checked(
        lambda: results(args, "triton"),
        lambda got: errors.extend(relative(a, b) for a, b in zip(got, exact, strict=True)),
    )
    worst = largest(errors, 0.02 if GPU else 1e-5, "a block bias")
    yield {"pattern": "SelectedBlocks with a bias", "dtype": str(HALF)[6:], "error": worst}


def beyond_int32() -> Iterator[Row]:
    """Checks B * H * N * D just above 2^31: last tokens of the last head, forward and backward."""
    heads, width = sized((16, 128), (2, 16))
    length = sized((1 << 31) // (heads * width) + 128, 320)
    args = [x.requires_grad_() for x in inputs(heads, length, width)]
    window, reach = sized((500, 1000), (100, 200))
    pattern = sr.Causal() & sr.SlidingWindow(window)
    out = sr.attention(*args, pattern, backend="triton")
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, args, grad)
    tail = [x[:, -1:, -reach:].detach().double().requires_grad_() for x in args]
    exact = sr.attention(*tail, pattern, backend="reference")
    last = reach - window - 1  # these queries see no key before the tail
    tail_rows = [x[:, -1:, -last:] for x in (out, *grads)]
    expected = [exact, *torch.autograd.grad(exact, tail, grad[:, -1:, -reach:].double())]
    errors = [relative(a, b[:, :, -last:]) for a, b in zip(tail_rows, expected, strict=True)]
    worst = largest(errors, 0.02, "what lies beyond 2^31 elements")
    yield {"elements": args[0].numel(), "tokens": length, "heads": heads, "error": worst}
