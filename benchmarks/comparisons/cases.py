"""Basic comparisons: timed calls, their peers, and the checks of their outputs.

Rates count visited blocks: 4 * H * blocks * block^2 * D for a forward pass, 3.5 times that with
backward. `error` is the largest error of sampled rows against float64, relative to the largest
value.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsering.functional import attention
from sparsering.ground.numerics import merge_attention
from sparsering.kernels.cpu.build import library
from sparsering.layouts.cache import layout_cache
from sparsering.layouts.layout import BlockLayout
from sparsering.patterns.algebra import Pattern
from sparsering.patterns.blocks import RandomBlocks
from sparsering.patterns.mask_mod import from_mask_mod
from sparsering.patterns.positions import Causal, Full, GlobalTokens, LongNet, Packed, SlidingWindow

from ..flex import causal_window, flex_call, window_mask
from ..measure import (
    Row,
    distance_of,
    gradient_of,
    inputs_of,
    interleaved,
    milliseconds,
    peak_extra_bytes,
    sampled_error,
)

BLOCK = 128
LONGNET = ((2048, 4096, 8192), (1, 2, 4))


def layouts(quick: bool) -> list[Row]:
    """Times compiling patterns at 2^20 tokens (with memory), and FlexAttention's mask at 16K.

    The kernel is loaded before, as it is after the first call of a process.
    """
    library()
    length = 1 << (14 if quick else 20)
    cases: dict[str, tuple[Pattern, int]] = {
        "SlidingWindow(4096)": (SlidingWindow(4096), length),
        "Causal() & (SlidingWindow(4096) | GlobalTokens(64))": (
            Causal() & (SlidingWindow(4096) | GlobalTokens(64)),
            length,
        ),
        "LongNet(2048..32768)": (
            LongNet((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12)),
            length,
        ),
        "Causal()": (Causal(), min(length, 65536)),
        "256 documents of many lengths, Packed(..., Causal())": (
            Packed(ragged(256, min(length, 65536)), Causal()),
            min(length, 65536),
        ),
        "from_mask_mod(causal window of 4096)": (
            from_mask_mod(causal_window(4096)),
            min(length, 16384),
        ),
    }
    rows: list[Row] = []
    for name, (pattern, tokens) in cases.items():
        ms = interleaved({"layout": partial(_fresh_layout, pattern, tokens)}, 7)["layout"]
        layout = _fresh_layout(pattern, tokens)
        rows.append({
            "pattern": name, "tokens": tokens, "ms": ms, "bytes": layout.nbytes,
            "blocks": layout.num_blocks, "density": layout.density,
        })  # fmt: skip
    tokens = min(length, 16384)
    ms = milliseconds(partial(window_mask, 4096, tokens))
    rows.append({"pattern": "FlexAttention create_block_mask", "tokens": tokens, "ms": ms})
    return rows


def random_blocks(quick: bool) -> list[Row]:
    """10% random blocks (and the diagonal), B1 H8, against FlexAttention and dense SDPA."""
    length = 2048 if quick else 16384
    rows: list[Row] = []
    for dtype, width, block in (
        (torch.float32, 64, 128),
        (torch.float32, 64, 64),
        (torch.float32, 128, 128),
        (torch.bfloat16, 64, 128),
        (torch.bfloat16, 64, 64),
        (torch.bfloat16, 128, 128),
    ):
        inputs = inputs_of(8, length, width, dtype)
        pattern = RandomBlocks(0.1, block)
        calls = {
            **_trainable_calls(inputs, pattern, block),
            "flex": flex_call(inputs, pattern, block),
        }
        rows += compare(calls, inputs, pattern, block, quick)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [x.requires_grad_() for x in inputs_of(8, length // 2, 64, dtype)]
        rows += _with_backward(inputs, RandomBlocks(0.1, BLOCK), quick)
    return rows


def compare(
    calls: Mapping[str, Callable[[], Tensor]],
    inputs: Sequence[Tensor],
    pattern: Pattern,
    block: int,
    quick: bool,
    rounds: int = 7,
) -> list[Row]:
    """Measures a row for each call; "dense" attends to all pairs, the others to the pattern."""
    query = inputs[0]
    batch, heads, length, width = query.shape
    ms = interleaved(calls, 3 if quick else rounds)
    rows: list[Row] = []
    for name, call in calls.items():
        attended: Pattern = Full() if name == "dense" else pattern
        density = attended.layout(length, num_heads=heads, block_size=block).density
        rows.append({
            "case": "forward", "backend": name, "dtype": str(query.dtype)[6:], "tokens": length,
            "batch": batch, "heads": heads, "head_dim": width, "block_size": block,
            "density": density, "ms": ms[name],
            "gflops": 4 * batch * heads * density * length**2 * width / ms[name] / 1e6,
            "error": sampled_error(call(), inputs[0], inputs[1], inputs[2], attended),
        })  # fmt: skip
    return rows


def _trainable_calls(
    inputs: Sequence[Tensor], pattern: RandomBlocks, block: int
) -> dict[str, Callable[[], Tensor]]:
    """Calls with a backward pass on a CPU: all but FlexAttention."""
    return {
        "cpu": ours(inputs, pattern, block),
        "gather": ours(inputs, pattern, block, "gather"),
        "dense": dense(inputs),
    }


def _with_backward(inputs: Sequence[Tensor], pattern: RandomBlocks, quick: bool) -> list[Row]:
    query = inputs[0]
    heads, length, width = query.shape[1:]
    grad = gradient_of(query)

    def gradients(call: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(call(), inputs, grad)

    forward = _trainable_calls(inputs, pattern, BLOCK)
    calls = {name: gradients(call) for name, call in forward.items()}
    exact = {p: exact_gradients(inputs, p, grad) for p in (pattern, Full())}
    rows: list[Row] = []
    for name, taken in interleaved(calls, 2 if quick else 5).items():
        attended = Full() if name == "dense" else pattern
        share = attended.layout(length, num_heads=heads, block_size=BLOCK).density
        rows.append({
            "case": "forward+backward", "backend": name, "dtype": str(query.dtype)[6:],
            "tokens": length, "heads": heads, "head_dim": width, "block_size": BLOCK,
            "density": share, "ms": taken,
            "gflops": 14 * heads * share * length**2 * width / taken / 1e6,
            "error": distance_of(calls[name](), exact[attended]),
        })  # fmt: skip
    return rows


def exact_gradients(inputs: Sequence[Tensor], pattern: Pattern, grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key and value in float64."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    return torch.autograd.grad(ours(exact, pattern, BLOCK, "gather")(), exact, grad.double())


def longnet_branches(quick: bool) -> list[Row]:
    """LongNet (2048, 4096, 8192) / (1, 2, 4), B1 H8 N16384 D64, against SDPA per branch."""
    length = 8192 if quick else 16384
    pattern = LongNet(*LONGNET)
    query, key, value = inputs_of(8, length, 64, torch.float32)
    calls: dict[str, Callable[[], Tensor]] = {
        "cpu": lambda: attention(query, key, value, pattern, backend="cpu"),
        "gather": lambda: attention(query, key, value, pattern, backend="gather"),
        "SDPA per branch and residue": lambda: per_branch_sdpa(query, key, value),
    }
    ms = interleaved(calls, 3 if quick else 7)
    layout = pattern.layout(length, num_heads=8)
    return [
        {
            "backend": name, "tokens": length, "density": layout.density, "ms": ms[name],
            "gflops": 4 * 8 * layout.num_pairs * 64 / ms[name] / 1e6,
            "error": sampled_error(call(), query, key, value, pattern),
        }
        for name, call in calls.items()
    ]  # fmt: skip


def per_branch_sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """LongNet with torch's own CPU flash kernel, per branch and residue class, merged by lse.

    Segment lengths divide the sequence and are multiples of their rates, so views suffice.
    """
    outs, lses = [], []
    batch, _, length, width = query.shape
    for segment, rate in zip(*LONGNET, strict=True):
        out, lse = torch.zeros_like(query), query.new_full(query.shape[:3], -torch.inf)
        for residue in range(rate):
            heads = slice(residue, None, rate)
            parts = [
                x[:, heads, residue::rate].reshape(-1, 1, segment // rate, width)
                for x in (query, key, value)
            ]
            part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts)
            out[:, heads, residue::rate] = part[0].view(batch, -1, length // rate, width)
            lse[:, heads, residue::rate] = part[1].reshape(batch, -1, length // rate)
        outs.append(out)
        lses.append(lse)
    return merge_attention(outs, lses)[0]


def window(quick: bool) -> list[Row]:
    """A causal window of 512 at 262144 tokens, H4 D64; dense SDPA at 8192 for its rate."""
    rows: list[Row] = []
    pattern = Causal() & SlidingWindow(512)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = inputs_of(4, 1 << (13 if quick else 18), 64, dtype)
        calls = {"cpu": ours(inputs, pattern)}
        rows += compare(calls, inputs, pattern, BLOCK, quick)
        inputs = inputs_of(4, 8192, 64, dtype)
        calls = {"dense": dense(inputs)}
        rows += compare(calls, inputs, Full(), BLOCK, quick)
    return rows


def small(quick: bool) -> list[Row]:
    """Short sequences against dense SDPA, where the overhead of a call shows.

    Shapes are (batch, heads, head dim) of common models; (8, 12, 32) is MiniLM.
    """
    rows: list[Row] = []
    shapes = ((1, 8, 64), (1, 8, 128), (1, 12, 32), (8, 12, 32), (32, 12, 32), (8, 12, 64))
    lengths = (64, 128, 256, 512)
    for dtype, (batch, heads, width) in itertools.product((torch.float32, torch.bfloat16), shapes):
        for length in lengths[: 2 if quick else None]:
            inputs = inputs_of(heads, length, width, dtype, batch)
            block = min(BLOCK, length)
            calls = {"cpu": ours(inputs, Full(), block), "dense": dense(inputs)}
            rounds = max(15, 1_000_000 // (batch * heads * length))
            rows += compare(calls, inputs, Full(), block, quick, rounds)
    return rows


def decode(quick: bool) -> list[Row]:
    """One query against cached keys, and the time to read the keys once.

    The query sees a window and global tokens, or all keys. Several caches take turns, like the
    layers of a model, so that none stays in the processor's cache.
    """
    length = 1 << (12 if quick else 17)
    rows: list[Row] = []
    patterns: dict[str, Pattern] = {
        "window 4096 and 64 global": Causal()
        & (SlidingWindow(4096) | GlobalTokens(64, rows=False)),
        "all": Causal(),
    }
    shapes = (8, 8), (8, 1), (16, 1)
    for dtype, (heads, kv_heads) in itertools.product((torch.float32, torch.bfloat16), shapes):
        query = inputs_of(heads, 1, 64, dtype)[0]
        num_caches = 4 if kv_heads == 8 else 32
        caches = [
            torch.randn(2, 1, kv_heads, length, 64).to(dtype).unbind() for _ in range(num_caches)
        ]
        for name, pattern in patterns.items():
            layout = pattern.layout(1, length, num_heads=heads, num_kv_heads=kv_heads)
            first = max(0, length - 4097) if name != "all" else 0
            visited = [x[..., first:, :].view(torch.int32) for cache in caches for x in cache]
            calls = [ours([query, *cache], pattern) for cache in caches]
            ms = interleaved(
                {"cpu": partial(_each, calls), "read": partial(_each, [x.amax for x in visited])},
                3 if quick else 15,
            )
            key, value = caches[0]
            rows.append({
                "pattern": name, "dtype": str(dtype)[6:], "tokens": length, "heads": heads,
                "kv_heads": kv_heads, "keys": int(layout.num_pairs),
                "ms": ms["cpu"] / num_caches, "read_ms": ms["read"] / num_caches,
                "error": sampled_error(calls[0](), query, key, value, pattern, rows=1),
            })  # fmt: skip
    return rows


def memory(quick: bool) -> list[Row]:
    """Peak extra memory of one call at growing lengths, forward and with backward, H1 D64."""
    rows: list[Row] = []
    for length in (8192, 16384) if quick else (65536, 131072, 262144):
        for backward in (False, True):
            extra = peak_extra_bytes(_one_call, length, backward)
            rows.append({
                "pattern": "LongNet(2048, 4096, 8192 / 1, 2, 4) & Causal()", "tokens": length,
                "case": "forward+backward" if backward else "forward", "extra_bytes": extra,
                "tensors_of_input_size": extra / (length * 64 * 4),
            })  # fmt: skip
    return rows


def million_tokens(quick: bool) -> list[Row]:
    """One forward call at 2^20 tokens, H1 D64 float32, LongNet & Causal: time, memory, error."""
    length = 1 << (15 if quick else 20)
    pattern = LongNet(*LONGNET) & Causal()
    query, key, value = inputs_of(1, length, 64, torch.float32)
    start = time.perf_counter()
    out = attention(query, key, value, pattern)
    first = time.perf_counter() - start
    assert isinstance(out, Tensor)
    second = interleaved({"call": lambda: attention(query, key, value, pattern)}, 1)["call"] / 1e3
    layout = pattern.layout(length)
    return [{
        "pattern": "LongNet(2048, 4096, 8192 / 1, 2, 4) & Causal()", "tokens": length,
        "seconds_with_layout": first, "seconds": second, "density": layout.density,
        "gflops": 4 * layout.num_pairs * 64 / second / 1e9,
        "error": sampled_error(out, query, key, value, pattern, rows=8),
        "extra_bytes": peak_extra_bytes(_one_call, length, False),
    }]  # fmt: skip


def _one_call(length: int, backward: bool) -> Iterator[None]:
    pattern = LongNet(*LONGNET) & Causal()
    inputs = [x.requires_grad_(backward) for x in inputs_of(1, length, 64, torch.float32)]
    small = [x[:, :, :4096] for x in inputs]
    out = ours(small, pattern)()
    if backward:
        torch.autograd.grad(out.sum(), small)
    del out
    yield
    out = ours(inputs, pattern)()
    if backward:
        torch.autograd.grad(out.sum(), inputs)


def ragged(count: int, total: int) -> tuple[int, ...]:
    """Draws `count` lengths whose sum is `total`, up to twice the mean, the same at every call."""
    weights = torch.rand(count, generator=torch.Generator().manual_seed(0)) + 1e-3
    ends = (weights.cumsum(0) / weights.sum() * total).round().long()
    ends[-1] = total
    return tuple(torch.diff(ends, prepend=ends.new_zeros(1)).tolist())


def _fresh_layout(pattern: Pattern, length: int) -> BlockLayout:
    layout_cache.clear()
    return pattern.layout(length, block_size=BLOCK)


def _each(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def ours(
    inputs: Sequence[Tensor], pattern: Pattern, block: int = BLOCK, backend: str = "cpu"
) -> Callable[[], Tensor]:
    """Call of our attention on one backend."""
    query, key, value = inputs
    return partial(attention, query, key, value, pattern, block_size=block, backend=backend)


def dense(inputs: Sequence[Tensor], causal: bool = False) -> Callable[[], Tensor]:
    """Call of torch's own attention to all pairs, or to the causal ones."""
    query, key, value = inputs
    grouped = query.shape[1] != key.shape[1]
    return partial(
        F.scaled_dot_product_attention, query, key, value, is_causal=causal, enable_gqa=grouped
    )
