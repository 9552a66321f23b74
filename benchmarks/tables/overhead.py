"""Costs of a call beyond its arithmetic: dispatch, layouts and their cache, block selection."""

import statistics
from dataclasses import replace
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from sparsering.kernels.backends import BACKENDS
from sparsering.layouts.cache import layout_cache
from sparsering.patterns.algebra import Pattern
from sparsering.patterns.blocks import Hierarchical, RandomBlocks
from sparsering.patterns.positions import Causal, Full, LongNet, SlidingWindow
from sparsering.patterns.selected import SelectedBlocks
from sparsering.selection import BlockScorer, block_mass, select_blocks, selection_loss

from ..measure import Budget, Row, milliseconds
from .comparison import FOUNDING
from .measured import DENSE, Case, call_of, own_backend, rows_of


def launches(quick: bool, budget: Budget) -> list[Row]:
    """Counts the torch operators that a warm call of 2,048 tokens dispatches.

    `outermost` counts operators called from Python; `operators` also those that they call in turn.
    The prior documents profile this length.
    """
    tokens = 256 if quick else 2048
    names = ["gather"]
    if not BACKENDS["cpu"].reasons():
        names.insert(0, "cpu")
    cases = [Case("all pairs, dense SDPA", Full(), tokens, DENSE)]
    cases += [Case(f"window of 256, {name}", FOUNDING, tokens, name) for name in names]
    longnet = LongNet((tokens // 4, tokens // 2, tokens), (1, 2, 4))
    cases.append(Case(f"LongNet, {own_backend()}", longnet, tokens))
    cases.append(Case(f"window of 256, {own_backend()}, with gradients", FOUNDING, tokens,
                      backward=True))  # fmt: skip
    rows = rows_of(cases, min(budget.left / 4, 4))
    for case, row in zip(cases, rows, strict=True):
        row |= _dispatched(case)
    return rows


def _dispatched(case: Case) -> Row:
    """Counts operators, outermost operators, and GPU kernels of one warm call."""
    inputs = [x.requires_grad_(case.backward) for x in case.inputs()]
    call = call_of(case, inputs)
    grad = torch.ones_like(inputs[0])

    def work() -> None:
        out = call()
        if case.backward:
            torch.autograd.grad(out, inputs, grad)

    work()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        work()
    events = [event for event in profiled.events() if not event.name.startswith("[")]
    return {
        "operators": len(events),
        "outermost": sum(event.cpu_parent is None for event in events),
        "kernels": None,  # a CPU launches none
    }


def layouts(quick: bool, budget: Budget) -> list[Row]:
    """Measures the cost of a pattern's first call, and the savings by the layout cache.

    `layout_ms`: compiling the layout, uncached. `first_ms`: the first call, including the layout.
    200 further calls alternate between three patterns, so that each looks into the cache.
    """
    sizes = ((256, 2),) if quick else ((4096, 8), (65536, 1))
    rows: list[Row] = []
    for tokens, heads in sizes:
        patterns: dict[str, Pattern] = {
            "window in blocks": FOUNDING,
            "causal window": Causal() & SlidingWindow(511),
            "LongNet": LongNet((2048, 4096, 8192), (1, 2, 4)),
            "random blocks, 1%": RandomBlocks(0.01, 64),
        }
        cases = [
            Case(f"{name}, {tokens:,} tokens", pattern, tokens, heads=heads)
            for name, pattern in patterns.items()
        ]
        results = rows_of(cases, min(budget.left / 6, 4), rows=8)
        for case, row in zip(cases, results, strict=True):
            inputs = case.inputs()
            call = call_of(case, inputs)
            cold, first = [], []
            for _ in range(3):
                layout_cache.clear()
                cold.append(milliseconds(partial(
                    case.pattern.layout, tokens, num_heads=heads, block_size=case.block_size or 64
                )))  # fmt: skip
                layout_cache.clear()
                first.append(milliseconds(call))
            row["layout_ms"], row["first_ms"] = statistics.median(cold), statistics.median(first)
            row["layout_bytes"] = layout_cache.info().bytes
        rows += results
    return rows + _hits(quick, budget)


def _hits(quick: bool, budget: Budget) -> list[Row]:
    """Counts the layouts built by calls that alternate between three patterns."""
    tokens, calls = 256 if quick else 1024, 20 if quick else 200
    cases = [
        Case(f"pattern {number}", pattern, tokens, heads=2)
        for number, pattern in enumerate(
            (FOUNDING, Causal() & SlidingWindow(127), RandomBlocks(0.1, 64)), 1
        )
    ]
    row, *_ = rows_of(cases, min(budget.left / 8, 1))
    each = [call_of(case, case.inputs()) for case in cases]
    layout_cache.clear()
    for number in range(calls):
        each[number % len(each)]()
    info = layout_cache.info()
    name = f"{calls} calls in turn over 3 patterns"
    return [{**row, "call": name, "calls": calls, "built": info.misses,
             "hit_rate": 1 - info.misses / calls}]  # fmt: skip


def chosen(quick: bool, budget: Budget) -> list[Row]:
    """Measures hierarchical blocks, and blocks selected by content with scoring included.

    16 blocks of 64 keys for each 64 queries. Both dtypes, since the prior library failed on one.
    `learns`: how many of the scorer's parameters get a gradient from its loss.
    """
    rows: list[Row] = []
    for tokens in (256,) if quick else (4096, 16384):
        for dtype in ("float32", "bfloat16"):
            levels = ((64, 512), (512, None)) if not quick else ((32, 64), (64, None))
            block = 64 if not quick else 32
            what = f"{tokens:,} tokens, {dtype}"
            causal = Case("", Causal(), tokens, heads=8 if not quick else 2, dtype=dtype)
            cases = [
                replace(causal, call=f"dense SDPA, {what}", backend=DENSE),
                replace(causal, call=f"hierarchical, {what}", pattern=Hierarchical(levels, block),
                        block_size=block),
                replace(causal, call=f"chosen by means, {what}", chooses="sub"),
                replace(causal, call=f"chosen by a scorer, {what}", chooses="scorer"),
            ]  # fmt: skip
            results = rows_of(cases, min(budget.left / 6, 5), rows=8)
            if tokens == 256 or tokens == 4096:
                results[-1]["learns"] = _learning(Case("", Causal(), 256, heads=2, dtype=dtype))
            rows += results
    return rows


def _learning(case: Case) -> str:
    """Counts the scorer's parameters that get a nonzero gradient, as in "6 of 6"."""
    query, key, _ = case.inputs()
    scorer = BlockScorer(case.head_dim, case.heads, 16, query_block=16).to(query.dtype)
    scores = scorer(query, key)
    indices = select_blocks(scores, 4, block_size=16, query_block=16)
    mass = block_mass(query, key, SelectedBlocks(indices, 16, 16) & Causal())
    selection_loss(scores, mass, indices).backward()
    parameters = list(scorer.parameters())
    learning = sum(p.grad is not None and bool(p.grad.any()) for p in parameters)
    return f"{learning} of {len(parameters)}"
