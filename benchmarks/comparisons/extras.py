"""Cost of a call's extras: each is timed against the same call without it, with errors."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsering.functional import attention
from sparsering.layouts.cache import layout_cache
from sparsering.patterns.algebra import Pattern
from sparsering.patterns.blocks import RandomBlocks
from sparsering.patterns.keys import KeyMask, KeyPadding
from sparsering.patterns.positions import Causal, Full, SlidingWindow
from sparsering.patterns.varlen_mask import Varlen
from sparsering.route.options import alibi

from ..measure import (
    Row,
    distance_of,
    error_of_rows,
    gradient_of,
    inputs_of,
    interleaved_times,
    milliseconds,
)
from .cases import BLOCK, ragged

HEADS, WIDTH, RADIUS = 8, 64, 4096
WITHOUT = "without"


def extras(quick: bool) -> list[Row]:
    """Softcap, distance bias, sink, dropout, key masks on 10% random blocks and a window."""
    length = 2048 if quick else 16384
    rows: list[Row] = []
    for dtype in (torch.float32, torch.bfloat16):
        for pattern in (RandomBlocks(0.1, BLOCK), SlidingWindow(1023)):
            rows += _forward(pattern, length, dtype, quick)
        rows += _with_backward(RandomBlocks(0.1, BLOCK), length // 2, dtype, quick)
        rows += _key_masks(length, dtype, quick)
    return [*rows, *_varlen_layouts(quick), _cap_error()]


def _options() -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)
    single: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 50.0},
        "distance_bias": {"distance_bias": alibi(slopes, RADIUS)},
        "sink": {"sink": torch.randn(HEADS, generator=generator)},
        "dropout": {"dropout_p": 0.1, "dropout_seed": 7},
    }
    together = {name: x for options in single.values() for name, x in options.items()}
    return {WITHOUT: {}, **single, "all": together}


def _forward(pattern: Pattern, length: int, dtype: torch.dtype, quick: bool) -> list[Row]:
    inputs, options = inputs_of(HEADS, length, WIDTH, dtype), _options()
    calls = {name: _call(inputs, pattern, extra) for name, extra in options.items()}
    with torch.no_grad():
        ms, ratio = _ratios(calls, 3 if quick else 15)
        return [
            _row("forward", pattern, inputs, name, ms[name], ratio[name])
            | {"error": _error(calls[name](), inputs, pattern, options[name])}
            for name in calls
        ]


def _call(
    inputs: Sequence[Tensor], pattern: Pattern, options: Mapping[str, Any]
) -> Callable[[], Tensor]:
    query, key, value = inputs
    return lambda: attention(query, key, value, pattern, **options)


def _with_backward(pattern: Pattern, length: int, dtype: torch.dtype, quick: bool) -> list[Row]:
    inputs = inputs_of(HEADS, length, WIDTH, dtype)
    grad = gradient_of(inputs[0])
    calls, leaves = {}, {}
    for name, extra in _options().items():
        own = [x.clone().requires_grad_() for x in inputs]
        tables = {
            k: x.clone().requires_grad_() if isinstance(x, Tensor) else x for k, x in extra.items()
        }
        leaves[name] = [*own, *(x for x in tables.values() if isinstance(x, Tensor))]
        calls[name] = _differentiated(own, pattern, tables, leaves[name], grad)
    ms, ratio = _ratios(calls, 3 if quick else 9)
    rows: list[Row] = []
    for name, call in calls.items():
        exact = [x.detach().double().requires_grad_() for x in leaves[name]]
        tables = dict(_options()[name])
        in_float64 = iter(exact[3:])
        tables = {k: next(in_float64) if isinstance(x, Tensor) else x for k, x in tables.items()}
        expected = _differentiated(exact[:3], pattern, tables, exact, grad.double())()
        row = _row("forward and backward", pattern, inputs, name, ms[name], ratio[name])
        rows.append(row | {"error": distance_of(call(), expected)})
    return rows


def _differentiated(
    inputs: Sequence[Tensor],
    pattern: Pattern,
    options: Mapping[str, Any],
    leaves: Sequence[Tensor],
    grad: Tensor,
) -> Callable[[], tuple[Tensor, ...]]:
    call = _call(inputs, pattern, options)
    return lambda: torch.autograd.grad(call(), leaves, grad)


def _key_masks(length: int, dtype: torch.dtype, quick: bool) -> list[Row]:
    """Measures a new key mask in every call, on a pattern whose layout is cached."""
    inputs, pattern = inputs_of(HEADS, length, WIDTH, dtype), RandomBlocks(0.1, BLOCK)
    generator = torch.Generator().manual_seed(4)

    def holes() -> Pattern:
        return pattern & KeyMask(torch.rand(1, length, generator=generator) < 0.99)

    def padding() -> Pattern:
        lost = int(torch.randint(1, BLOCK, (), generator=generator))
        return pattern & KeyPadding((length - lost,))

    calls = {
        WITHOUT: lambda: _call(inputs, pattern, {})(),
        "another KeyMask": lambda: _call(inputs, holes(), {})(),
        "another KeyPadding": lambda: _call(inputs, padding(), {})(),
    }
    with torch.no_grad():
        ms, ratio = _ratios(calls, 3 if quick else 15)
        rows = [
            _row("forward", pattern, inputs, name, ms[name], ratio[name])
            for name in calls
            if name != WITHOUT
        ]
        for row, make in zip(rows, (holes, padding), strict=True):
            masked = make()
            row["error"] = _error(_call(inputs, masked, {})(), inputs, masked, {})
    return rows


def _varlen_layouts(quick: bool) -> list[Row]:
    """Times layouts of `attention_varlen`: 256 documents of different lengths, 65,536 tokens."""
    tokens = 4096 if quick else 65536
    lengths, rows = ragged(256, tokens), []
    for inner in (Full(), Causal()):
        pattern, times = Varlen(lengths, lengths, inner), []
        for _ in range(3 if quick else 15):
            layout_cache.clear()
            times.append(milliseconds(partial(pattern.layout, tokens, q_start=0)))
        layout = pattern.layout(tokens, q_start=0)
        rows.append({
            "case": "layout of attention_varlen", "pattern": f"256 documents, {inner}",
            "tokens": tokens, "ms": statistics.median(times), "blocks": layout.num_blocks,
        })  # fmt: skip
    return rows


def _cap_error() -> Row:
    """Relative error of softcap for scores from 1e-6 to 1e3: with one key, lse is the score."""
    scores = torch.logspace(-6, 3, 1 << 16)
    one = torch.ones(1, 1, 1, 1)
    query = scores[None, None, :, None]
    _, lse = attention(query, one, one, Full(), scale=1.0, softcap=50.0, return_lse=True)
    exact = 50 * (scores.double() / 50).tanh()
    worst = float(((lse[0, 0] - exact).abs() / exact).max())
    return {"case": "error of softcap(50) alone", "error": worst}


def _ratios(
    calls: Mapping[str, Callable[[], object]], rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Median milliseconds of each call, and its median ratio to the call without extras."""
    times = interleaved_times(calls, rounds)
    ms = {name: statistics.median(values) for name, values in times.items()}
    pairs = {name: zip(values, times[WITHOUT], strict=True) for name, values in times.items()}
    return ms, {name: statistics.median(a / b for a, b in both) for name, both in pairs.items()}


def _row(
    case: str, pattern: Pattern, inputs: Sequence[Tensor], name: str, ms: float, ratio: float
) -> Row:
    query = inputs[0]
    layout = pattern.layout(query.shape[2], num_heads=HEADS, block_size=BLOCK)
    return {
        "case": case, "pattern": pattern.normal_text, "extra": name, "dtype": str(query.dtype)[6:],
        "tokens": query.shape[2], "heads": HEADS, "head_dim": WIDTH, "block_size": BLOCK,
        "density": layout.density, "ms": ms, "times_without": ratio,
    }  # fmt: skip


def _error(
    out: Tensor, inputs: Sequence[Tensor], pattern: Pattern, options: Mapping[str, Any]
) -> float:
    """Largest relative error of sampled rows against the float64 reference; raises if wrong."""
    query, key, value = (x.double() for x in inputs)

    def exact_row(row: int) -> Tensor:
        one = query[:, :, row : row + 1]
        return attention(one, key, value, pattern, q_start=row, backend="reference", **options)

    return error_of_rows(out, exact_row, 16)
