"""The comparisons: what is timed, beside which peer, and how its output is checked.

Rates count visited blocks: 4 * H * blocks * block^2 * D for a forward pass, 3.5 times that with
backward. `error` is the largest error of sampled rows against float64, relative to the largest
value.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..algebra import Pattern
from ..block_patterns import RandomBlocks
from ..cache import layout_cache
from ..functional import attention
from ..layout import BlockLayout
from ..merge import merge_attention
from ..patterns import Causal, Full, GlobalTokens, LongNet, SlidingWindow
from .measure import Row, interleaved, peak_extra_bytes, sampled_error

BLOCK = 128
LONGNET = ((2048, 4096, 8192), (1, 2, 4))


def layouts(quick: bool) -> list[Row]:
    """Time and memory of compiling patterns at 2^20 tokens, and of FlexAttention's mask at 16K."""
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
    }
    rows: list[Row] = []
    for name, (pattern, tokens) in cases.items():
        ms = interleaved({"layout": partial(_fresh_layout, pattern, tokens)}, 7)["layout"]
        layout = _fresh_layout(pattern, tokens)
        rows.append({
            "pattern": name, "tokens": tokens, "ms": ms, "bytes": layout.nbytes,
            "blocks": layout.num_blocks, "density": layout.density,
        })  # fmt: skip
    from torch.nn.attention.flex_attention import create_block_mask

    tokens = min(length, 16384)
    start = time.perf_counter()
    create_block_mask(_flex_window, None, None, tokens, tokens, device="cpu", BLOCK_SIZE=BLOCK)
    ms = (time.perf_counter() - start) * 1e3
    rows.append({"pattern": "FlexAttention create_block_mask", "tokens": tokens, "ms": ms})
    return rows


def random_blocks(quick: bool) -> list[Row]:
    """10% random blocks of 128 (and the diagonal), B1 H8 D64: FlexAttention and dense SDPA."""
    length = 2048 if quick else 16384
    pattern = RandomBlocks(0.1, BLOCK)
    layout = pattern.layout(length, num_heads=8, block_size=BLOCK)
    rows: list[Row] = []
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value = _inputs(8, length, 64, dtype)
        calls: dict[str, Callable[[], Tensor]] = {
            "gather": partial(
                attention, query, key, value, pattern, block_size=BLOCK, backend="gather"
            ),
            "flex": _flex_call(query, key, value, pattern),
            "dense": partial(F.scaled_dot_product_attention, query, key, value),
        }
        ms = interleaved(calls, 3 if quick else 7)
        for name, call in calls.items():
            density = 1.0 if name == "dense" else layout.density
            checked: Pattern = Full() if name == "dense" else pattern
            rows.append({
                "case": "forward", "backend": name, "dtype": str(dtype)[6:], "tokens": length,
                "density": density, "ms": ms[name],
                "gflops": 4 * 8 * density * length**2 * 64 / ms[name] / 1e6,
                "error": sampled_error(call(), query, key, value, checked),
            })  # fmt: skip
    query, key, value = (x.requires_grad_() for x in _inputs(8, length // 2, 64, torch.float32))
    density = pattern.layout(length // 2, num_heads=8, block_size=BLOCK).density

    def backward(call: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call().sum(), (query, key, value))

    both = {
        "gather": backward(lambda: attention(query, key, value, pattern, block_size=BLOCK)),
        "dense": backward(lambda: F.scaled_dot_product_attention(query, key, value)),
    }
    for name, taken in interleaved(both, 2 if quick else 5).items():
        share = 1.0 if name == "dense" else density
        rows.append({
            "case": "forward+backward", "backend": name, "dtype": "float32", "tokens": length // 2,
            "density": share, "ms": taken,
            "gflops": 14 * 8 * share * (length // 2) ** 2 * 64 / taken / 1e6,
        })  # fmt: skip
    return rows


def longnet_branches(quick: bool) -> list[Row]:
    """LongNet (2048, 4096, 8192) / (1, 2, 4), B1 H8 N16384 D64: SDPA per branch and residue."""
    length = 8192 if quick else 16384
    pattern = LongNet(*LONGNET)
    query, key, value = _inputs(8, length, 64, torch.float32)
    calls: dict[str, Callable[[], Tensor]] = {
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
    """The peer: torch's own CPU flash kernel on strided views, merged by lse.

    Segment lengths divide the sequence and are multiples of their rates, so views suffice.
    """
    outs, lses = [], []
    batch, _, length, width = query.shape
    for segment, rate in zip(*LONGNET, strict=True):
        out, lse = torch.zeros_like(query), query.new_full(query.shape[:3], -torch.inf)
        for residue in range(rate):
            own = slice(residue, None, rate)
            parts = [
                x[:, own, residue::rate].reshape(-1, 1, segment // rate, width)
                for x in (query, key, value)
            ]
            part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts)
            out[:, own, residue::rate] = part[0].view(batch, -1, length // rate, width)
            lse[:, own, residue::rate] = part[1].reshape(batch, -1, length // rate)
        outs.append(out)
        lses.append(lse)
    return merge_attention(outs, lses)[0]


def memory(quick: bool) -> list[Row]:
    """Peak extra memory of one call against length, forward and with backward, H1 D64 float32."""
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
    query, key, value = _inputs(1, length, 64, torch.float32)
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
    query, key, value = (x.requires_grad_(backward) for x in _inputs(1, length, 64, torch.float32))
    small = query[:, :, :4096], key[:, :, :4096], value[:, :, :4096]
    out = attention(*small, pattern)
    if backward:
        torch.autograd.grad(out.sum(), small)
    del out
    yield
    out = attention(query, key, value, pattern)
    if backward:
        torch.autograd.grad(out.sum(), (query, key, value))


def _fresh_layout(pattern: Pattern, length: int) -> BlockLayout:
    layout_cache.clear()
    return pattern.layout(length, block_size=BLOCK)


def _inputs(heads: int, length: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, length, width, generator=generator).to(dtype) for _ in range(3)]


def _flex_call(
    query: Tensor, key: Tensor, value: Tensor, pattern: RandomBlocks
) -> Callable[[], Tensor]:
    """Compiled FlexAttention on the very blocks of the pattern, all of them full."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    length = query.shape[2]
    p = pattern.layout(length, num_heads=query.shape[1], block_size=BLOCK).passes[0]
    count = torch.diff(p.row_ptr)  # [1, H, rows]
    blocks = torch.zeros(*count.shape, length // BLOCK, dtype=torch.int32)
    blocks[..., : int(count.max())] = p.key_tile.view(*count.shape, -1)
    nothing = torch.zeros_like(count)
    mask = BlockMask.from_kv_blocks(
        nothing,
        torch.zeros_like(blocks),
        count,
        blocks,
        BLOCK_SIZE=BLOCK,
        seq_lengths=(length, length),
    )
    compiled = torch.compile(flex_attention)
    return lambda: compiled(query, key, value, block_mask=mask)


def _flex_window(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k >= 0) & (q - k <= 4096)
