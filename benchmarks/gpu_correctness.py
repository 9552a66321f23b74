"""Whether the Triton kernels are right on the GPU at hand.

The correctness parts of `benchmarks.gpu`, and what its timings share with them.
"""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparsering as sr
from sparsering.bench.measure import Row
from sparsering.kernels import triton

GPU = torch.cuda.is_available() and not triton.interpreting()
DEVICE = "cuda" if GPU else "cpu"
HALF = torch.bfloat16 if GPU else torch.float32


def inputs(
    heads: int, length: int, width: int, dtype: torch.dtype = HALF, kv_heads: int | None = None
) -> list[Tensor]:
    """Query, key and value of one batch entry, the same at every call."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    own = (heads, kv_heads or heads, kv_heads or heads)
    return [
        torch.randn(1, h, length, width, generator=generator, device=DEVICE, dtype=dtype)
        for h in own
    ]


def largest(errors: list[float], bound: float, what: str) -> float:
    """The largest error. Raises where it is above the bound, or no number."""
    worst = float(torch.tensor(errors).max())
    if not worst <= bound:
        raise RuntimeError(f"{what} is wrong: errors {errors}")
    return worst


def correctness(dtype: torch.dtype) -> list[Row]:
    """Every pattern of the tests, forward and backward, against float64."""
    oracle = tests()
    width, names = (128, list(oracle.PATTERNS)) if GPU else (16, ["causal", "nothing"])
    case = oracle.Case(2, 4, 2, 450, 450, width, width, 128)
    if not GPU:
        case = oracle.Case(1, 2, 1, 50, 50, 16, 16, 16)
    return [against_eager(oracle.PATTERNS[name](case), case, dtype, name) for name in names]


def shapes() -> list[Row]:
    """Head dims, block sizes, strides, lengths, a block bias and selected blocks."""
    oracle = tests()
    causal, steps = oracle.PATTERNS["causal"], oracle.PATTERNS["union of steps"]
    cases = [
        (causal, oracle.Case(1, 2, 1, 300, 300, own, own, 64))
        for own in ((16, 48, 64, 72, 80, 96, 192, 256) if GPU else (24,))
    ]
    cases += [
        (steps, oracle.Case(1, 2, 1, 300, 300, 64, 64, block))
        for block in ((16, 32, 48, 96, 160, 256) if GPU else (48,))
    ]
    cases += [
        (causal, oracle.Case(2, 4, 2, 130, 300, 64, 64, 64, arrange=arrange))
        for arrange in ("tokens before heads", "one head expanded", "width before tokens")
    ][: None if GPU else 1]
    few = oracle.Case(1, 8, 1, 16, 5000 if GPU else 90, 64, 64, 64)
    cases.append((oracle.PATTERNS["full"], few))
    rows = [against_eager(make(case), case, HALF, repr(make(case))) for make, case in cases]
    return [*rows, biased_selection()]


@cache
def tests() -> Any:
    """The oracle of the tests."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import attention_oracle

    return attention_oracle


def against_eager(pattern: sr.Pattern, case: Any, dtype: torch.dtype, name: str) -> Row:
    """Errors of out, lse and gradients; they may be twice those of dense attention so typed."""
    oracle = tests()
    torch.manual_seed(0)
    args = [x.detach().to(DEVICE).requires_grad_() for x in oracle.inputs(case, dtype, False)]
    exact_args = [x.detach().double().requires_grad_() for x in args]
    counts = oracle.dense_counts(pattern, case).to(DEVICE)
    options = {"block_size": case.block_size, "q_start": case.q_start}
    exact = oracle.eager_attention(*exact_args, counts)
    grads = [torch.randn_like(x).nan_to_num() for x in exact]

    def all_of(results: tuple[Tensor, Tensor], wrt: list[Tensor]) -> list[Tensor]:
        given = [grad.to(x) for grad, x in zip(grads, results, strict=True)]
        given[1] = torch.where(results[1].isfinite(), given[1], 0.0)
        options = {"materialize_grads": True}
        return [x.detach() for x in results] + list(
            torch.autograd.grad(list(results), wrt, given, **options)
        )

    true = all_of(exact, exact_args)
    eager = all_of(oracle.eager_attention(*args, counts), args)
    got = sr.attention(*args, pattern, backend="triton", return_lse=True, **options)
    found = []
    for ours, theirs, c in zip(all_of(got, args), eager, true, strict=True):
        size = float(torch.cat((c[c.isfinite()].abs(), c.new_ones(1))).max())
        grant = 0.01 * torch.finfo(dtype).eps * size
        mine, bound = (oracle.errors(x, c)[0] for x in (ours, theirs))
        found.append(mine / (bound + grant))
    worst = largest(found, 2.0, f"{name} in {dtype}, head dim {case.head_dim}")
    return {"pattern": name, "dtype": str(dtype)[6:], "head_dim": case.head_dim,
            "block_size": case.block_size, "error_over_eager": worst}  # fmt: skip


def biased_selection() -> Row:
    """Selected blocks with a bias for each, and its gradient, against float64."""
    block, length = (64, 512) if GPU else (16, 64)
    indices = torch.randint(0, length // block, (1, 2, length // block, 3))
    pattern = sr.SelectedBlocks(indices, block)
    args = [x.requires_grad_() for x in inputs(2, length, 64 if GPU else 16)]
    number = pattern.layout(length, num_heads=2, block_size=block).num_blocks
    args.append(torch.randn(1, 2, number, device=DEVICE).requires_grad_())
    exact_args = [x.detach().double().requires_grad_() for x in args]
    grad = torch.randn_like(args[0])
    results = []
    for own, backend in ((args, "triton"), (exact_args, "reference")):
        out = sr.attention(*own[:3], pattern, block_bias=own[3], block_size=block, backend=backend)
        results.append([out, *torch.autograd.grad(out, own, grad.to(out))])
    found = [float((a.double() - b).norm() / b.norm()) for a, b in zip(*results, strict=True)]
    worst = largest(found, 0.02 if GPU else 1e-5, "a block bias")
    return {"pattern": "SelectedBlocks with a bias", "dtype": str(HALF)[6:], "error": worst}
