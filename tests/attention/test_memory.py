"""Peak memory of a call: the tensors of [B, H, N, D] that it must make, and the workspace.

What torch's CPU allocator hands out and takes back is recorded by torch.profiler and added up in
order, so that the peak is exact, the same in every run, and sees temporaries inside of operators.
The resident set of a process is neither: it keeps what was freed, and counts what only was touched.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.tensor_bytes import measure
from helpers.thinned import slow_except, thinned
from oracles.attention_oracle import workspace
from torch import Tensor

import sparsering as sr

WORKSPACE = 16 << 20
WIDTH = 32
LENGTHS = (8 << 10, 16 << 10, 32 << 10)
FLOAT = 4

PATTERNS = {
    "causal longnet": sr.LongNet((1024, 4096), (1, 4)) & sr.Causal(),
    "longnet": sr.LongNet((1024, 4096), (1, 4)),
    "window": sr.SlidingWindow(255),
    "window and global tokens": (sr.SlidingWindow(127, 127) | sr.GlobalTokens(16)),
    "random blocks": sr.RandomBlocks(0.01, 128) & sr.SlidingWindow(8191, 8192),
}


@pytest.fixture(autouse=True)
def default_workspace() -> Iterator[None]:
    with workspace(WORKSPACE):
        yield


def inputs(length: int, heads: int = 1, kv_heads: int = 1, dtype: torch.dtype = torch.float32):
    shapes = ((1, h, length, WIDTH) for h in (heads, kv_heads, kv_heads))
    return tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)


def forward(args: tuple[Tensor, ...], pattern: sr.Pattern, **options: Any) -> Any:
    with torch.no_grad():
        return sr.attention(*args, pattern, return_lse=True, **{"backend": "gather", **options})


def forward_and_backward(args: tuple[Tensor, ...], pattern: sr.Pattern, **options: Any) -> Any:
    out, lse = sr.attention(*args, pattern, return_lse=True, **{"backend": "gather", **options})
    return out, lse, torch.autograd.grad((out, lse), args, (out.detach(), lse.detach()))


def tensors_forward(length: int) -> int:
    """Bytes of out and lse."""
    return length * (WIDTH + 1) * FLOAT


def tensors_backward(length: int) -> int:
    """Out, dq, dk, dv; lse, one without its infinities, dlse, delta; a product on the way."""
    return length * (4 * WIDTH + 4) * FLOAT + length * WIDTH * FLOAT


def test_the_meter_sees_the_scores_of_dense_attention():
    length = 1024
    args = inputs(length)
    scores = length * length * FLOAT
    with torch.no_grad():
        got = measure(lambda: (args[0] @ args[1].mT).softmax(-1) @ args[2])
    assert 2 * scores <= got.peak <= 2.1 * scores
    assert got.kept == length * WIDTH * FLOAT


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_peak_is_the_tensors_it_makes_and_the_workspace(name):
    pattern = PATTERNS[name]
    for length in LENGTHS[:2]:
        args = inputs(length)
        forward(args, pattern)  # builds the layout, which stays
        got = measure(lambda args=args: forward(args, pattern))
        assert got.peak <= tensors_forward(length) + WORKSPACE
        assert got.kept == tensors_forward(length)
        got = measure(lambda args=args: forward_and_backward(args, pattern))
        assert got.peak <= tensors_backward(length) + WORKSPACE
        assert got.kept == length * (4 * WIDTH + 1) * FLOAT  # out, lse and three gradients


@pytest.mark.parametrize(
    ("call", "name"),
    slow_except(
        [(forward_and_backward, "causal longnet"), (forward, "window")],
        [forward, forward_and_backward],
        ["causal longnet", "window"],
    ),
    ids=lambda x: getattr(x, "__name__", x),
)
def test_peak_grows_linearly_and_stays_far_below_the_pairs(name, call):
    pattern = PATTERNS[name]
    tensors = tensors_forward if call is forward else tensors_backward
    limit = 4 << 20  # full at every one of the lengths
    peaks = []
    with workspace(limit):
        for length in LENGTHS:
            args = inputs(length)
            forward(args, pattern)
            peaks.append(measure(lambda args=args: call(args, pattern)).peak)
    assert peaks[-1] <= tensors(LENGTHS[-1]) + limit
    scores = pattern.layout(LENGTHS[-1]).num_pairs * FLOAT
    assert peaks[-1] < scores / (5 if call is forward else 1.3)
    for (a, b), (first, second) in zip(pairwise(LENGTHS), pairwise(peaks), strict=True):
        assert second - first <= 1.1 * (tensors(b) - tensors(a))


@pytest.mark.slow
def test_what_is_on_top_of_the_tensors_is_the_same_at_every_length():
    pattern = PATTERNS["longnet"]
    for limit in (1, 8 << 20):
        extra = []
        for length in LENGTHS:
            args = inputs(length)
            with workspace(limit):
                forward(args, pattern)
                got = measure(lambda args=args: forward(args, pattern))
            extra.append(got.peak - tensors_forward(length))
        assert max(extra) <= 1.05 * min(extra)


def test_a_smaller_workspace_takes_less_memory():
    args = inputs(LENGTHS[0])
    pattern = PATTERNS["window"]
    peaks = []
    forward(args, pattern)  # builds the layout, which stays
    for limit in (64 << 20, 8 << 20, 1 << 20):
        with workspace(limit):
            peaks.append(measure(lambda: forward_and_backward(args, pattern)).peak)
            assert peaks[-1] <= tensors_backward(LENGTHS[0]) + limit
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > 2 * peaks[-1]


def test_the_first_call_takes_little_more_for_the_layout():
    for pattern in PATTERNS.values():
        args = inputs(LENGTHS[1])
        sr.layout_cache.clear()
        got = measure(lambda args=args, pattern=pattern: forward(args, pattern))
        layout = pattern.layout(LENGTHS[1])
        allowance = 4 * (8 << 20) + 20 * layout.nbytes  # cells that are evaluated at a time
        assert got.peak <= tensors_forward(LENGTHS[1]) + WORKSPACE + allowance


def test_grouped_heads_copy_no_keys():
    length = LENGTHS[0]
    pattern = PATTERNS["window"]
    args = inputs(length, 8, 1)
    forward(args, pattern)
    got = measure(lambda: forward(args, pattern))
    assert got.peak <= 8 * tensors_forward(length) + WORKSPACE


def test_a_transposed_input_costs_one_copy_of_each_at_most():
    length = LENGTHS[0]
    pattern = PATTERNS["window"]
    args = tuple(torch.randn(1, length, 4, WIDTH).transpose(1, 2) for _ in range(3))
    forward(args, pattern)
    got = measure(lambda: forward(args, pattern))
    assert got.peak <= 4 * (tensors_forward(length) + 3 * length * WIDTH * FLOAT) + WORKSPACE


def test_half_precision_adds_one_rounded_result():
    length = LENGTHS[0]
    pattern = PATTERNS["causal longnet"]
    args = inputs(length, dtype=torch.bfloat16)
    forward(args, pattern)
    got = measure(lambda: forward(args, pattern))
    assert got.peak <= tensors_forward(length) + length * WIDTH * 2 + WORKSPACE


def test_merging_a_branch_costs_no_copy_of_the_output():
    """A mixture of many branches is accumulated: none of their outputs is kept."""
    length = LENGTHS[0]
    window = PATTERNS["window"]
    mixture = window + window + window + window
    args = inputs(length)
    forward(args, mixture)
    got = measure(lambda: forward(args, mixture))
    assert got.peak <= tensors_forward(length) + WORKSPACE


@pytest.mark.slow
def test_a_million_tokens():
    length = 1 << 20
    pattern = sr.LongNet((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12)) & sr.Causal()
    query, key, value = (torch.randn(1, 1, length, 64) for _ in range(3))
    results = []
    got = measure(lambda: results.append(forward((query, key, value), pattern)) or results)
    tensors = length * 65 * FLOAT
    assert got.peak <= tensors + WORKSPACE + (512 << 20)  # the layout of a first call
    out, lse = results[0]
    assert out.isfinite().all() and lse[..., ::2].isfinite().all()
    for position in (0, 1, 12345, length - 1):  # one row at a time, as if it were decoded
        end = slice(0, position + 1)
        row = sr.attention(query[:, :, position : position + 1], key[:, :, end], value[:, :, end],
                           pattern, backend="reference")  # fmt: skip
        assert (out[:, :, position] - row[:, :, 0]).abs().max() < 1e-5


def test_key_mass_takes_a_few_tensors_at_any_length():
    """It allocates two unused gradients, packed inputs, lse and channels of ones."""
    heads, kv_heads = 4, 2
    for length in LENGTHS[:2]:
        query, key, _ = inputs(length, heads, kv_heads)
        pattern = PATTERNS["longnet"]
        sr.key_mass(query, key, pattern)
        got = measure(lambda args=(query, key, pattern): sr.key_mass(*args))
        tensor, lse = query.numel() * FLOAT, heads * length * FLOAT
        fixed = scratch() + 2 * pattern.layout(length, num_heads=heads, num_kv_heads=2).nbytes
        assert got.peak <= 4 * tensor + 12 * lse + fixed
        assert got.kept == lse


# The CPU kernel: packed keys and values of some heads, and a scratch for each thread


def scratch() -> int:
    """Bytes that do not grow with N: of each thread, tiles of scores and of operands."""
    return torch.get_num_threads() * 8 * 128 * 256 * FLOAT


def test_sums_of_long_key_tiles_do_not_grow_with_the_pairs():
    """Clean blocks are seen by far more queries than noisy ones, so their sums are in pieces.

    All pieces of this call would be 120 MB.
    """
    length, most_of_pieces = 32 << 10, 32 << 20
    args, pattern = inputs(length), sr.BlockDiffusion(length // 2, 32)
    forward(args, pattern, backend="cpu")
    got = measure(lambda: forward_and_backward(args, pattern, backend="cpu"))
    tensor, fixed = args[0].numel() * FLOAT, 2 * pattern.layout(length, num_heads=1).nbytes
    assert got.peak <= 8 * tensor + most_of_pieces + scratch() + fixed


@pytest.mark.parametrize("dtype", thinned(2, [torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("name", slow_except(["causal longnet"], PATTERNS))
def test_the_cpu_kernel_takes_a_few_tensors_at_any_length(name, dtype):
    """Forward and backward, one [B, H, N, D] counting as one tensor.

    Out, packed keys and values of some heads, where several passes meet in half precision their
    float32 sums; with backward the gradients, too. A backward over dilated passes has ten float32
    copies of one head for each thread: K as it is and transposed, V, dK and dV of the latest
    segment of queries and of those before, so that they are added in one order, and the sums of
    dQ, dK and dV over the passes. With products of bfloat16, K and V take half of that.
    """
    pattern, heads = PATTERNS[name], 8
    forward_and_backward(inputs(64, heads, heads, dtype), pattern, backend="cpu")  # keeps 8 bytes
    for length in LENGTHS[: 1 if dtype == torch.bfloat16 else 2]:
        args = inputs(length, heads, heads, dtype)
        forward(args, pattern, backend="cpu")  # builds the layout, which stays
        tensor, lse = args[0].numel() * dtype.itemsize, heads * length * FLOAT
        fixed = scratch() + 2 * pattern.layout(length, num_heads=heads).nbytes
        got = measure(lambda args=args: forward(args, pattern, backend="cpu"))
        assert got.peak <= 2.5 * tensor + lse + fixed
        assert got.kept == tensor + lse
        got = measure(lambda args=args: forward_and_backward(args, pattern, backend="cpu"))
        of_heads = torch.get_num_threads() * 10 * FLOAT * args[0].numel() // heads
        assert got.peak <= max(6 * tensor, 4 * tensor + of_heads) + 2 * lse + fixed
        assert got.kept == 4 * tensor + lse
