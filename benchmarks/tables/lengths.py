"""Tables over lengths: 4K to 1M tokens by pattern, and the longest sequence in a memory."""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from sparsering.patterns.algebra import Pattern
from sparsering.patterns.blocks import Hierarchical, RandomBlocks
from sparsering.patterns.positions import Causal, Full, LongNet, SlidingWindow

from ..measure import (
    Budget,
    Row,
    available_bytes,
    give_back_freed,
    interleaved_times,
    sampled_error,
    spread_of,
    within_memory,
)
from .comparison import FOUNDING
from .measured import (
    CALLS,
    DENSE,
    Case,
    call_of,
    in_new_process,
    left_out,
    own_backend,
    rows_of,
    warm_up,
)
from .planned import planned_longest

EIGHT_HEADS = 65536  # the prior documents' longest sequence; longer calls have one head
STEP = 4096
DISTURBED = 5  # a pair that takes so many times as long as at the length before is measured again


def patterns() -> dict[str, tuple[Pattern, str | None, int]]:
    """Pattern, backend and block size by name."""
    return {
        "dense SDPA": (Full(), DENSE, 64),
        "window in blocks": (FOUNDING, None, 64),
        "window of 512": (Causal() & SlidingWindow(511), None, 128),
        "LongNet": (LongNet((2048, 4096, 8192), (1, 2, 4)), None, 128),
        "90% sparse": (RandomBlocks(0.1, 128), None, 128),
        "95% sparse": (RandomBlocks(0.05, 128), None, 128),
        "99% sparse": (RandomBlocks(0.01, 128), None, 128),
        "hierarchical": (Hierarchical(((64, 512), (512, None)), 64), None, 64),
    }


def case_of(name: str, tokens: int, heads: int) -> Case:
    """Builds the case of a pattern by its name."""
    pattern, backend, block = patterns()[name]
    return Case(name, pattern, tokens, backend or own_backend(), heads, block_size=block)


def lengths(quick: bool, budget: Budget) -> list[Row]:
    """Measures each pattern at 4,096 tokens and at each doubling, up to 1M.

    Calls that would take too long or too much memory are left out; their rows say why. The
    prediction extrapolates the pairs of the two lengths before, and the time of one pair. It builds
    no layout: that of a tenth of 2^40 pairs would exceed the memory. A call whose rate falls to a
    fifth of its rate at the length before is measured again, and the faster measurement counts.
    """
    exponents = range(8, 10) if quick else range(12, 21)
    rates: dict[str, float] = {}  # milliseconds of a pair, by pattern
    pairs: dict[str, list[float]] = {name: [] for name in patterns()}  # pairs of a head, by length
    rows: list[Row] = []
    for place, exponent in enumerate(exponents):
        tokens = 1 << exponent
        heads = (8 if tokens <= EIGHT_HEADS else 1) if not quick else 2
        # More than an even share of the time left, since short lengths use only a part of theirs.
        share = max(budget.left, 0) / (len(exponents) - place) * 1.6
        cases: list[Case] = []
        predicted = 0.0
        needed = tokens * heads * 64 * 4 * 10  # inputs, results, and the error check in float64
        for name in patterns():
            case = case_of(name, tokens, heads)
            if len(pairs[name]) <= place:
                pairs[name].append(_next(pairs[name]))
            seconds = rates.get(name, 0) * heads * pairs[name][place] / 1e3
            if needed > available_bytes() / 2:
                rows.append(left_out(case, f"no room: {needed / 1e9:,.0f} GB with the check of it"))
            elif CALLS * seconds > share / 2 or predicted + CALLS * seconds > share:
                rows.append(left_out(case, f"no time: a call would take about {seconds:,.1f} s"))
                rows[-1]["predicted_seconds"] = seconds
            else:
                cases.append(case)
                predicted += CALLS * seconds
        results = rows_of(cases, min(share / 3, 2), rows=8)
        for number, row in enumerate(results):
            usual = rates.get(row["call"], math.inf)
            if row["ms"] / heads / row["pairs"] > DISTURBED * usual:  # by other work of the machine
                (again,) = rows_of([cases[number]], min(share / 3, 2), rows=8)
                results[number] = min(row, again, key=lambda each: each["ms"])
        for row in results:
            rates[row["call"]] = row["ms"] / heads / row["pairs"]
            pairs[row["call"]][place] = row["pairs"]
        rows += results
    return rows


def _next(pairs: list[float]) -> float:
    """Predicts the pairs at twice the length from the last two lengths; four times from one."""
    if len(pairs) < 2:
        return 4.0 * pairs[-1] if pairs else 0.0
    return pairs[-1] ** 2 / pairs[-2]


def longest(quick: bool, budget: Budget) -> list[Row]:
    """Searches the longest sequence that runs within a memory limit; 4,096 tokens more do not fit.

    Inputs, layout and result count. The operating system enforces the limit (RLIMIT_DATA).
    """
    limit = (1 << 26) if quick else (1 << 30)
    step = 1024 if quick else STEP
    rows: list[Row] = []
    for name in ("window in blocks", "window of 512", "LongNet", "99% sparse", "dense SDPA"):
        guess = limit // (8 * 64 * 4 * 4) // step * step
        case = case_of(name, guess, 8)
        if name == "dense SDPA":
            rows.append(left_out(case, "by memory as long as the others; not run, as a call of "
                                       "all pairs at that length takes minutes"))  # fmt: skip
            continue
        if budget.left < 15 and not quick:
            rows.append(left_out(case, "no time left"))
            continue
        fits, fails = None, None
        tokens = guess
        while tokens >= guess // 2 and budget.left > 0:
            if _fits(case_of(name, tokens, 8), limit):
                fits = tokens
            else:
                fails = tokens
            if fits and fails:
                if fails - fits <= step:
                    break
                tokens = (fits + fails) // 2 // step * step
            else:
                stride = max(step, tokens // 32 // step * step)
                tokens += stride if fits else -stride
        if fits is None and tokens < guess // 2:
            raise RuntimeError(f"{name}: half of what arithmetic says did not fit in {limit} bytes")
        if fits is None or fails is None:
            rows.append(left_out(case, "no time left to find it"))
            continue
        case = case_of(name, fits, 8)
        peak, row = in_new_process(_within, case, limit, True, torch.get_num_threads())
        rows.append({**row, "peak_bytes": peak, "limit_bytes": limit, "did_not_fit": fails})
    return rows + planned_longest(quick)


def _fits(case: Case, limit: int) -> bool:
    """Whether a call runs within a limit; a process that crashes ran out of memory."""
    try:
        return bool(in_new_process(_within, case, limit, False, torch.get_num_threads())[1])
    except RuntimeError:
        return False


def _within(case: Case, limit: int, measured: bool, threads: int) -> Iterator[object]:
    """Runs a call under a limit; last yields whether it succeeded, or its row if `measured`."""
    torch.set_num_threads(threads)
    warm_up(case)
    give_back_freed()
    yield None
    tensors = within_memory(limit, partial(_attended, case))
    yield None
    if tensors is None:
        yield False
        return
    inputs, out = tensors
    if not measured:
        yield bool(out.any()) and bool(out[:, :, ::STEP].isfinite().all())
        return
    query, key, value = inputs
    layout = case.pattern.layout(
        case.tokens, num_heads=case.heads, block_size=case.block_size or 64
    )
    yield {
        "call": case.call, "backend": case.backend, "pattern": case.pattern.normal_text,
        "dtype": case.dtype, "tokens": case.tokens, "heads": case.heads, "head_dim": case.head_dim,
        "density": layout.num_pairs / case.tokens**2,
        "error": sampled_error(out, query, key, value, case.pattern, 4),
        **spread_of(interleaved_times({"call": call_of(case, inputs)}, 3)["call"]),
    }  # fmt: skip


def _attended(case: Case) -> tuple[list[Tensor], Tensor]:
    """Draws the inputs and runs the call: (inputs, output)."""
    inputs = case.inputs()
    return inputs, call_of(case, inputs)()
