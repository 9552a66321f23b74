"""Builds the output of `sparsering plan`: the costs of a pattern on one screen.

Times on named machines are bounds by published peaks, and say so. Nothing is measured here.
"""

from typing import Any

import torch

from ..patterns import Causal
from ..patterns.arguments import shortened
from .estimate import Estimate, Figure
from .fit import Asked, about_largest, usable
from .sizes import show_bytes, show_seconds, show_tokens

WIDTH = 100
SHARDINGS = ("contiguous", "zigzag", "balanced")
MOST_SEARCHED = 1 << 22
"""Tokens of the longest call that is estimated; longer ones are extrapolated."""


def screen(asked: Asked, text: str = "") -> str:
    """Returns the plan as text of at most 24 lines and 100 columns.

    `text` is the pattern as the user wrote it, for the first line.

    Raises: ValueError as `estimate`, for a machine, size or pattern that is not possible.

    Cost: a few seconds for 2^20 tokens; the layout and the plans of one length.
    """
    found = asked.estimate()
    limit = _limit(asked)
    lines = [
        shortened(text or str(asked.pattern), WIDTH - 10),
        _call_line(asked, found),
        "",
        _row("runs", f"{found.backend}, blocks of {found.block_size}"),
        *_pair_rows(asked, found),
        *_time_rows(asked, found),
        *_memory_rows(found, limit),
        _row("fits", _what_fits(asked, limit)),
        *_rank_rows(asked, found),
        "",
        _row("advice", _advice(asked, found, limit)),
        _row(
            "quality",
            "arithmetic cannot tell what leaving out pairs costs: compare on your model and data",
        ),
        _row("", "(docs/selection.md; sparsering.selection.selection_report for chosen blocks)"),
    ]
    return "\n".join(line[:WIDTH].rstrip() for line in lines)


def _row(name: str, text: str) -> str:
    return f"{name:<9} {text}"


def _call_line(asked: Asked, found: Estimate) -> str:
    heads = f"{found.num_heads} heads"
    if found.num_kv_heads not in (None, found.num_heads):
        heads += f" ({found.num_kv_heads} of keys)"
    device = "this machine" if found.machine is None else found.machine.name
    return (
        f"{asked.tokens:,} tokens, {heads} of {found.head_dim}, {_name(found.dtype)}, batch "
        f"{found.batch_size}, {'forward and backward' if found.backward else 'forward'}, on "
        f"{f'{asked.ranks} x ' if asked.ranks > 1 else ''}{device}"
    )


def _pair_rows(asked: Asked, found: Estimate) -> list[str]:
    each = _pairs_of_a_head(found)
    return [
        _row("pairs", f"{each:.3g} a head and entry; blocks visited {100 * found.density:.3g}%"),
        _row(
            "dense",
            f"{_dense_name(asked)} has {_dense_pairs(asked):.3g} pairs, "
            f"{_times(_dense_pairs(asked) / max(1.0, each))} as many",
        ),
    ]


def _pairs_of_a_head(found: Estimate) -> float:
    return found.pairs / found.num_heads / found.batch_size


def _dense_name(asked: Asked) -> str:
    return "causal attention" if _is_causal(asked) else "full attention"


def _dense_pairs(asked: Asked) -> float:
    """Counts the pairs of one head of dense attention, causal if the pattern is."""
    n = asked.tokens
    return n * (n + 1) / 2 if _is_causal(asked) else float(n) * n


def _is_causal(asked: Asked) -> bool:
    """Whether no query sees a later key, tested on at most 2,048 tokens."""
    length = min(asked.tokens, 2048)
    pattern: Any = asked.pattern  # masks and mixtures define `&` differently
    try:
        return bool(
            pattern.layout(length, num_heads=asked.num_heads).num_pairs
            == (pattern & Causal()).layout(length, num_heads=asked.num_heads).num_pairs
        )
    except (ValueError, TypeError):  # the pattern fits one length only, or takes no `&`
        return False


def _times(factor: float) -> str:
    return f"{factor:,.0f} times" if factor >= 10 else f"{factor:.1f} times"


def _time_rows(asked: Asked, found: Estimate) -> list[str]:
    where = " a rank" if asked.ranks > 1 else ""
    return [_row("time", _told(found.seconds, where, found.flops))]


def _told(seconds: Figure, where: str, flops: Figure) -> str:
    shown = f"{show_seconds(seconds.value)}{where}"
    if seconds.known.startswith("published"):
        return f"at least {shown}: a bound by published peaks, unmeasured ({flops.value:.3g} FLOP)"
    if seconds.known.startswith("measured here"):
        return f"{shown}, by this machine's calibration ({flops.value:.3g} FLOP)"
    return f"roughly {shown}: not calibrated; `sparsering calibrate` measures this machine once"


def _memory_rows(found: Estimate, limit: int | None) -> list[str]:
    peak = found.peak_bytes.value
    of = "" if limit is None else f" of {show_bytes(limit)} ({100 * peak / limit:.3g}%)"
    parts = ", ".join(f"{name} {show_bytes(size)}" for name, size in found.memory._asdict().items())
    ranks = " a rank" if found.ranks > 1 else ""
    return [
        _row("memory", f"{show_bytes(peak)}{of}{ranks} at its peak, for this call alone"),
        _row("", parts),
    ]


def _limit(asked: Asked) -> int | None:
    device = asked.device
    unknown = asked.memory is None and device is not None and device.memory_bytes is None
    return None if unknown else asked.limit


def _what_fits(asked: Asked, limit: int | None) -> str:
    if limit is None:
        return "with --memory: the largest batch and the longest sequence"
    try:
        batch = asked.largest("batch_size", 1)
    except ValueError:  # a batch of 1 does not suit the pattern, which has a batch of its own
        batch = 0
    told = f"a batch of {batch:,}" if batch else "not even a batch of 1"
    told += " at this length"
    try:
        tokens = about_largest(
            lambda n: asked.estimate(tokens=n).peak_bytes.value,
            usable(limit),
            4096,
            MOST_SEARCHED,
        )
    except ValueError:  # the pattern fits one length only
        return told
    if tokens < 1:
        return told
    return f"{told}; about {show_tokens(_rounded(tokens))} tokens at this batch"


def _rounded(tokens: float) -> int:
    """Rounds to two digits, because the estimate is not more exact."""
    return int(float(f"{tokens:.1e}"))


def _rank_rows(asked: Asked, found: Estimate) -> list[str]:
    if asked.ranks == 1:
        return []
    alone = asked.estimate(ranks=1)
    rows = [_row("alone", f"one device: {_least(alone)}, {_peak(alone)}")]
    if not any(found.received_bytes) and found.balance.value == 1:
        told = f"{found.sharding}: nothing moves, loads are even; no other sharding is better"
        return [*rows, _row("sharding", told)]
    names = [*SHARDINGS, *([] if asked.sharding in ("auto", *SHARDINGS) else [asked.sharding])]
    titles = ("most received", "link time", "busiest / mean", "time")
    rows.append(f"{'  sharding':<14}" + "".join(f"{title:>18}" for title in titles))
    for name in names:
        one = asked.estimate(sharding=name)
        cells = (
            show_bytes(max(one.received_bytes)),
            "unknown" if one.link_seconds is None else show_seconds(one.link_seconds.value),
            f"{one.balance.value:.3f}",
            _least(one),
        )
        mark = "*" if one.sharding == found.sharding else " "
        rows.append(f"{mark} {name[:11]:<12}" + "".join(f"{cell:>18}" for cell in cells))
    return rows


def _least(found: Estimate) -> str:
    """Formats a time, with "at least" if it is a bound."""
    bound = "at least " if found.seconds.known.startswith("published") else ""
    return bound + show_seconds(found.seconds.value)


def _peak(found: Estimate) -> str:
    return show_bytes(found.peak_bytes.value)


def _advice(asked: Asked, found: Estimate, limit: int | None) -> str:
    """Returns the most important advice."""
    if limit is not None and found.peak_bytes.value > usable(limit):
        ranks = asked.ranks * -(-found.peak_bytes.value // usable(limit))
        return (
            f"it does not fit: {_peak(found)} in {show_bytes(limit)}; take "
            f"about {ranks:.0f} ranks, or shorter sequences"
        )
    saved = _dense_pairs(asked) / max(1.0, _pairs_of_a_head(found))
    if saved < 1.5:
        return "it leaves out almost nothing: dense attention costs as much, and loses nothing"
    if found.link_seconds is not None and found.link_seconds.value > found.seconds.value:
        return "links bound it: fewer ranks, fewer kv heads, or segments that lie inside the shards"
    if found.balance.value > 1.1:
        return f"the busiest rank has {found.balance.value:.2f} of the mean: compare the shardings"
    if found.seconds.known.startswith("uncalibrated"):
        return "run `sparsering calibrate` once: times of this machine then hold"
    if asked.ranks > 1 and limit is not None and found.peak_bytes.value * asked.ranks < limit / 4:
        return "one device has room for it all: ranks save time alone; whole sequences move nothing"
    fits = "" if limit is None else ", and it fits"
    return f"good: {_times(saved)} fewer pairs than {_dense_name(asked)}{fits}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
