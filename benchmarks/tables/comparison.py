"""Tables at one length: backends against dense attention, densities, gallery, roofline."""

from collections.abc import Callable
from functools import partial

import torch

from sparsering.kernels.backends import BACKENDS, is_default
from sparsering.patterns.algebra import Pattern
from sparsering.patterns.blocks import BlockDilated, BlockWindow, Hierarchical, RandomBlocks
from sparsering.patterns.expression import parse
from sparsering.patterns.positions import Causal, Full, LongNet, SlidingWindow

from ..flex import flex_call
from ..measure import (
    Budget,
    Row,
    distance_of,
    interleaved_times,
    sampled_error,
    spread_of,
)
from .measured import (
    DENSE,
    Case,
    left_out,
    own_backend,
    rows_of,
)

FOUNDING = BlockWindow(2, 64)
"""Pattern of the prior documents' founding table: 5 blocks of 64, 7.7% of the pairs at 4,096."""


ORACLE = "not timed: dense mathematics that forms every pair, for tests to compare with"


def comparison(quick: bool, budget: Budget) -> list[Row]:
    """Measures every backend that runs here: 4,096 tokens, B1 H8 D64, window and 10% of blocks."""
    tokens = 256 if quick else 4096
    geometries: dict[str, Pattern] = {
        "window of 256": FOUNDING if not quick else BlockWindow(1, 32),
        "random blocks": RandomBlocks(0.1, 64),
    }
    meant = LongNet((tokens // 4, tokens // 2, tokens), (1, 2, 4))
    rows: list[Row] = []
    own = own_backend()
    for geometry, pattern in geometries.items():
        cases = [Case(f"{geometry}, ours ({own})", pattern, tokens)]
        refused: list[Row] = []
        for name, backend in BACKENDS.items():
            case = Case(f"{geometry}, {name}", pattern, tokens, name)
            interpreted = name == "triton" and not is_default(name)
            reasons = ["its kernels need a GPU"] if interpreted else backend.reasons()
            if name == "reference":
                refused.append(left_out(case, ORACLE))
            elif reasons:
                refused.append(left_out(case, "cannot run here: " + "; ".join(reasons)))
            elif name != own:
                cases.append(case)
        if geometry == "window of 256":
            cases[1:1] = [
                Case("all pairs, dense SDPA", Full(), tokens, DENSE),
                Case("LongNet, ours", meant, tokens),
            ]
        rows += rows_of(cases, min(budget.left / 8, 6))
        rows += refused
        if geometry == "random blocks":
            flex = Case(f"{geometry}, FlexAttention compiled", pattern, tokens)
            rows += _compiled_flex(flex, quick, budget)
    half = [
        Case("all pairs, dense SDPA, bfloat16", Full(), tokens, DENSE, dtype="bfloat16"),
        *(
            Case(f"{name}, ours ({own}), bfloat16", pattern, tokens, dtype="bfloat16")
            for name, pattern in geometries.items()
        ),
    ]
    rows += rows_of(half, 2)
    both = [
        Case("all pairs, dense SDPA, with gradients", Full(), tokens, DENSE, backward=True),
        Case(f"window of 256, ours ({own}), with gradients", FOUNDING, tokens, backward=True),
    ]
    return rows + rows_of(both, 3)


def _compiled_flex(case: Case, quick: bool, budget: Budget) -> list[Row]:
    """Measures compiled FlexAttention on the same blocks; it compiles for half a minute."""
    if quick or budget.left < 45:
        return [left_out(case, "no time left to compile it")]
    inputs = case.inputs()
    assert isinstance(case.pattern, RandomBlocks)
    try:
        call = flex_call(inputs, case.pattern, 64)
        out = call()
    except Exception as error:  # a failing peer is reported, not hidden
        return [left_out(case, f"failed: {type(error).__name__}: {error}"[:200])]
    layout = case.pattern.layout(case.tokens, num_heads=case.heads, block_size=64)
    pairs = layout.num_pairs
    error_of = sampled_error(out, inputs[0], inputs[1], inputs[2], case.pattern, 16)
    spread = _spread(call, 15)
    return [{
        "call": case.call, "backend": "FlexAttention", "case": "forward",
        "pattern": case.pattern.normal_text, "dtype": case.dtype, "tokens": case.tokens, "batch": 1,
        "heads": case.heads, "head_dim": case.head_dim, "block_size": 64, "pairs": pairs,
        "density": pairs / case.tokens**2, "error": error_of, **spread,
        "gflops": 4 * case.heads * case.head_dim * pairs / spread["ms"] / 1e6, "peak_bytes": None,
    }]  # fmt: skip


def _spread(call: Callable[[], object], rounds: int) -> Row:
    """Times a single call for about two seconds."""
    return spread_of(interleaved_times({"": call}, rounds, seconds=2, least=3)[""])


def sparsity(quick: bool, budget: Budget) -> list[Row]:
    """2,048 tokens in blocks of 32: random 10, 25, 50%, the prior's real densities, and dense."""
    tokens = 256 if quick else 2048
    cases = [Case("all pairs, dense SDPA", Full(), tokens, DENSE)]
    for share in (10, 25, 50):
        cases.append(
            Case(f"{share}% of random blocks", RandomBlocks(share / 100, 32), tokens, block_size=32)
        )
    for percent, radius in (("19.3%", 6), ("44.9%", 16), ("75.8%", 32)):
        pattern = BlockWindow(radius, 32)
        cases.append(Case(f"window of {percent}", pattern, tokens, block_size=32))
    return rows_of(cases, min(budget.left / 3, 6))


def gallery(quick: bool, budget: Budget) -> list[Row]:
    """Measures a call of each pattern in the gallery, with one head."""
    tokens = 256 if quick else 4096
    scale = tokens // 256
    patterns: tuple[tuple[str, Pattern], ...] = (
        ("Causal", Causal()),
        ("Window", SlidingWindow(16 * scale, 16 * scale)),
        ("Causal window", Causal() & SlidingWindow(32 * scale)),
        ("Window and global tokens",
         parse(f"Causal() & (SlidingWindow({16 * scale}) | GlobalTokens({4 * scale}))")),
        ("LongNet", LongNet((64 * scale, 256 * scale), (1, 4)) & Causal()),
        ("Blocks, window", BlockWindow(2, 4 * scale)),
        ("Blocks, dilated", BlockDilated((1, 2, 4, 8, 16), 4 * scale)),
        ("Random blocks, 10%", RandomBlocks(0.1, 4 * scale)),
        ("Hierarchical", Hierarchical(((4 * scale, 32 * scale), (32 * scale, None)), 4 * scale)),
        ("Documents", parse(f"Documents(({64 * scale}, {32 * scale}, {160 * scale})) & Causal()")),
    )  # fmt: skip
    block = 64 if not quick else 16
    dense = Case("dense SDPA, all pairs", Full(), tokens, DENSE, heads=1)
    cases = [Case(name, pattern, tokens, heads=1, block_size=block) for name, pattern in patterns]
    return rows_of([dense, *cases], min(budget.left / 3, 6))


def roofline(quick: bool, budget: Budget) -> list[Row]:
    """Measures the machine's peaks (a matrix product and a large copy), and calls below them."""
    size = 256 if quick else 2048
    rows: list[Row] = []
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(size, size, generator=generator).to(dtype) for _ in range(2))
        out, exact = a @ b, a[:16].double() @ b.double()
        error = distance_of([out[:16]], [exact])
        if not error < 0.02:
            raise RuntimeError(f"the matrix product is wrong: error {error:.3g}")
        spread = _spread(partial(torch.mm, a, b, out=out), 30)
        name = str(dtype)[6:]
        rows.append({
            "call": f"matrix product of {size:,}, {name}", "dtype": name, "density": 1.0,
            "error": error, **spread, "gflops": 2 * size**3 / spread["least_ms"] / 1e6,
            "peak_bytes": out.nbytes,
        })  # fmt: skip
    source = torch.randn(1 << (20 if quick else 27))
    target = torch.empty_like(source)
    spread = _spread(partial(target.copy_, source), 30)
    rows.append({
        "call": f"copy of {source.nbytes >> 20} MiB", "dtype": "float32", "density": 1.0,
        "error": float((target - source).abs().max()), **spread,
        "gb_per_s": 2 * source.nbytes / spread["least_ms"] / 1e6, "peak_bytes": target.nbytes,
    })  # fmt: skip
    rows += _points(quick, budget)
    return rows


def _points(quick: bool, budget: Budget) -> list[Row]:
    """Measures calls of low and of high arithmetic intensity."""
    tokens = 256 if quick else 4096
    patterns: tuple[tuple[str, Pattern], ...] = (
        ("window of 16", SlidingWindow(8, 8)),
        ("window of 128", SlidingWindow(64, 64)),
        ("10% of random blocks", RandomBlocks(0.1, 128)),
        ("all pairs", Full()),
    )
    rows: list[Row] = []
    for dtype in ("float32", "bfloat16"):
        cases = [
            Case(f"{name}, {dtype}", pattern, tokens, dtype=dtype, block_size=128)
            for name, pattern in patterns
        ]
        cases.append(Case(f"dense SDPA, {dtype}", Full(), tokens, DENSE, dtype=dtype))
        results = rows_of(cases, min(budget.left / 4, 3))
        for row in results:  # FLOP per byte: 4 D FLOP a pair; query, key, value, out of D a token
            row["intensity"] = row["pairs"] / tokens / getattr(torch, dtype).itemsize
        rows += results
        if budget.left < 0:
            break
    return rows
