"""Proposes patterns for a length: the densest one to train that a budget allows.

    propose(1 << 20, machine="H200")[0].pattern     # which pattern to begin with
    propose("200K", memory="16GB", backward=True)   # on this machine

Costs are those of `estimate`; docs/planning.md has the rules and what they rest on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..ground.arguments import checked_flag, checked_number
from ..ground.commands import sparsering
from ..ground.keywords import class_with_hints, with_hints
from ..ground.progress import Progress, progress
from ..patterns import Causal, Full, Pattern
from ..patterns.expression import parse
from .estimate import Estimate, Scenario, estimate_of
from .fit import memory_of
from .machines import OTHER_NAMES, Machine, machine_of
from .reach import keys_seen, layers_to_see_all
from .sizes import parse_tokens, show_bytes, show_seconds

_SINKS = 4  # first tokens, which every query of a window sees too
_WINDOWS = (1024, 4096, 16384)
_BLOCK = 128
LONGEST = 1 << 24
"""Largest number of tokens for which patterns are proposed, which then takes minutes."""
_NEVER = "its last token never depends on the whole text"
_COST_ALONE = "the cost of blocks chosen by content; random ones are not a pattern to train with"

_RECORD = "(benchmarks/records/selection-language.json)"
_QUALITY = {
    "dense": f"1.672 bits a byte on code of 2,048 tokens, which the others are held to {_RECORD}",
    "window": f"2.004 bits a byte where dense attention has 1.672, at 22% of its pairs {_RECORD}",
    "blocks": "2.067 bits a byte where dense attention has 1.672, at 22% of its pairs; blocks "
    f"chosen by content cost the same and have 1.666 to 1.915 {_RECORD}",
}


class _Candidate(NamedTuple):
    """A pattern that may be proposed, its costs, and `reach` and `layers` as in `Proposal`."""

    kind: str
    estimate: Estimate
    reach: int
    layers: int | None


@class_with_hints
@dataclass(frozen=True)
class Proposal:
    """A pattern for a length, with its predicted costs.

    Attributes:
        pattern: the pattern, which runs at that length as it is.
        seconds: time of a call with its layout cached, as `estimate` predicts it.
        bytes: most memory in use at once, of one rank.
        density: pairs over those of dense attention; above 1 if a mixture counts more.
        reach: keys that the last query sees, in any head.
        layers: after how many the last query depends on every token, or None (residual paths).
        ranks: devices that share the sequence.
        fits: whether `seconds` and `bytes` are within the limits.
        reason: why it is where it is in the list, in a sentence.
        quality: what this project's records know of its results, or "unknown".
    """

    pattern: Pattern
    seconds: float
    bytes: float
    density: float
    reach: int
    layers: int | None
    ranks: int
    fits: bool
    reason: str
    quality: str


@with_hints({**OTHER_NAMES, "tokens": "the length is its first argument; write seq_len="})
def propose(
    seq_len: int | str,
    *,
    num_heads: int = 8,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    machine: Machine | str | None = None,
    ranks: int = 1,
    seconds: float | None = None,
    memory: int | str | None = None,
    causal: bool = True,
    backward: bool = False,
) -> list[Proposal]:
    """Proposes patterns for a sequence length; the first is recommended, to train a model with.

    Recommended is the densest candidate that meets both limits and whose last query depends on
    every token after some number of layers (`layers` is not None), or if there is none, the densest
    that meets both limits. If none does, it is the one that needs the least memory (the least time
    if only time is short), and its `fits` is False. Random blocks are never recommended: their rows
    show what blocks chosen by content cost, and a model learns more from those.

    Args:
        seq_len: number of queries and of keys, or a text such as "200K".
        num_heads, num_kv_heads, head_dim, batch_size, machine, ranks, backward: as in `estimate`.
        dtype: default bfloat16 on a named GPU, else float32.
        seconds: limit of one call. Default: the time of a layer's other products, 24 (num_heads *
            head_dim)^2 FLOPs a token (three times that with backward), at the rate that dense
            attention has on the machine; attention then is at most half of a layer.
        memory: limit of one rank in bytes, or a text such as "80GB"; default what the machine has,
            or what is free on this machine.
        causal: candidates hide later keys.

    Returns: candidates, the recommended one first, then the others from dense to sparse: dense
        attention, windows with sinks, LongNet, random blocks of 90, 95 and 99% sparsity beside the
        neighbouring blocks (the cost of blocks chosen by content), and `Hierarchical`.

    Raises: ValueError for sizes or limits that are not positive, an unknown machine, or a machine
        without a known memory if `memory` is not given.

    Cost: estimates and layouts of ten patterns; some ten seconds for 2^20 tokens, over ranks too.

    Example:
        >>> propose(4096)[0].pattern
        Causal()
    """
    machine = machine_of(machine)
    dtype = default_dtype(machine) if dtype is None else dtype
    checked_flag("causal", causal)
    if seconds is not None and not checked_number("seconds", seconds, 0):
        raise ValueError("seconds must be above 0, got 0; leave it out for a default limit")
    limit = memory_of(machine, memory)
    dense = Scenario(
        pattern=Causal() if causal else Full(),
        tokens=parse_tokens(seq_len, "seq_len"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        batch_size=batch_size,
        backward=backward,
        machine=machine,
        ranks=ranks,
        sharding="auto",
        backend=None,
        block_size=None,
    )
    if dense.tokens > LONGEST:
        raise ValueError(
            f"seq_len must be at most {LONGEST:,}, since layers are counted on whole layouts, got "
            f"{dense.tokens:,}; pass fewer tokens, or name a pattern: `estimate` and "
            f"{sparsering('plan PATTERN')} sample its rows"
        )
    texts = list(candidates(dense.tokens, causal))
    with progress("plan", 2 * len(texts), "estimate") as work:
        return _proposals(dense, texts, seconds, limit, causal, work)


def _proposals(
    dense: Scenario,
    texts: list[tuple[str, str]],
    seconds: float | None,
    limit: float,
    causal: bool,
    work: Progress,
) -> list[Proposal]:
    """Estimates each candidate (kind, text of a pattern), and puts the recommended one first.

    `texts` begins with dense attention, whose rate gives the default limit of `seconds`.
    """
    found: list[_Candidate] = []
    for kind, text in texts:
        estimate = estimate_of(replace(dense, pattern=parse(text)))
        work.advance(note=kind)
        # counted here, because the estimate's layout is still in the cache
        seen = keys_seen(estimate.pattern, estimate._frame)
        layers = _layers(kind, estimate, seen, causal)
        found.append(_Candidate(kind, estimate, reach=int(seen.sum()), layers=layers))
        work.advance(note=kind)
    most = found[0].estimate
    if seconds is None:
        products = 24 * (dense.num_heads * dense.head_dim) ** 2 * dense.tokens * dense.batch_size
        seconds = products * (3 if dense.backward else 1) * most.seconds.value / most.flops.value
    found.sort(key=lambda each: (-each.estimate.pairs, each.estimate.seconds.value))
    # random blocks show a cost, and are not a pattern to train with
    best, reason = _recommended([x for x in found if x.kind != "blocks"], seconds, limit)
    proposals: list[Proposal] = []
    for each in found:
        estimate = each.estimate
        late, large = estimate.seconds.value > seconds, estimate.peak_bytes.value > limit
        unseen = each.layers is None and estimate.pairs > best.estimate.pairs
        passed_over = _COST_ALONE if each.kind == "blocks" else _NEVER if unseen else None
        proposal = Proposal(
            pattern=estimate.pattern,
            seconds=estimate.seconds.value,
            bytes=float(estimate.peak_bytes.value),
            density=estimate.pairs / most.pairs,
            reach=each.reach,
            layers=each.layers,
            ranks=dense.ranks,
            fits=not (late or large),
            reason=reason if each is best else _place(late, large, passed_over),
            quality=_QUALITY.get(each.kind, "unknown"),
        )
        proposals.insert(0 if each is best else len(proposals), proposal)
    return proposals


def default_dtype(machine: Machine | None) -> torch.dtype:
    """Returns the dtype to plan for: bfloat16 on a named GPU, float32 on a CPU or this machine."""
    return torch.bfloat16 if machine is not None and machine.kind == "gpu" else torch.float32


def candidates(tokens: int, causal: bool) -> Iterator[tuple[str, str]]:
    """Yields the patterns to choose among as (kind, text); dense attention comes first."""
    within = " & Causal()" if causal else ""
    yield "dense", "Causal()" if causal else "Full()"
    for window in (_WINDOWS[0], *(w for w in _WINDOWS[1:] if w < tokens)):
        near = f"SlidingWindow({window - 1}, {0 if causal else window - 1})"
        yield "window", f"({near} | GlobalTokens({_SINKS}, rows={not causal})){within}"
    segments = [2048]
    while segments[-1] < tokens:
        segments.append(4 * segments[-1])
    rates = tuple(4**i for i in range(len(segments)))
    yield "longnet", f"LongNet({tuple(segments)}, {rates}){within}"
    for density in (0.1, 0.05, 0.01):
        blocks = f"RandomBlocks({density}, {_BLOCK}, per_head=False)"
        yield "blocks", f"({blocks} | BlockWindow(1, {_BLOCK})){within}"
    levels = ((_BLOCK, 16 * _BLOCK), (8 * _BLOCK, 128 * _BLOCK), (64 * _BLOCK, None))
    yield "hierarchical", f"Hierarchical({levels}, {_BLOCK}){within}"


def _recommended(found: list[_Candidate], seconds: float, limit: float) -> tuple[_Candidate, str]:
    """Returns the pattern to recommend, and a sentence with the reason.

    `found` has the candidates to train a model with (no random blocks), from dense to sparse.
    """
    times = f"within {show_seconds(seconds)} and {show_bytes(limit)}"
    small = [one for one in found if one.estimate.peak_bytes.value <= limit]
    fitting = [one for one in small if one.estimate.seconds.value <= seconds]
    if fitting:
        one = next((each for each in fitting if each.layers is not None), fitting[0])
        reason = f"the densest candidate to train with {times}"
        if one.layers is None:
            reason += f"; {_NEVER}, nor does that of another candidate that fits"
        elif one is not fitting[0]:
            reason += (
                f" whose last token depends on the whole text (after {one.layers:,} layers); in "
                f"the denser {fitting[0].kind} it never does"
            )
        return one, reason
    if small:
        one = min(small, key=lambda each: each.estimate.seconds.value)
        needs = show_seconds(one.estimate.seconds.value)
        return one, f"no candidate to train with is {times}; this one takes the least time, {needs}"
    one = min(found, key=lambda each: each.estimate.peak_bytes.value)
    peak = one.estimate.peak_bytes.value
    ranks = -(-peak * one.estimate.ranks // limit)
    return one, (
        f"no candidate to train with is {times}; this one needs the least memory, "
        f"{show_bytes(peak)} a rank, or at least {ranks:.0f} ranks"
    )


def _place(late: bool, large: bool, passed_over: str | None) -> str:
    """Returns the reason why a pattern is not the recommended one.

    `passed_over` is the reason for a pattern that is within the limits, or None.
    """
    over = " and ".join(name for name, short in (("time", late), ("memory", large)) if short)
    if over:
        return f"over the limit of {over}"
    if passed_over:
        return f"within the limits, but {passed_over}"
    return "sparser than the limits ask for"


def _layers(kind: str, estimate: Estimate, seen: Tensor, causal: bool) -> int | None:
    """Returns after how many layers the last query depends on all tokens; None if it never does.

    For a causal window they are computed by arithmetic, because counting goes layer by layer.
    """
    if seen.all():
        return 1
    if kind == "window" and causal:
        return -(-(estimate.tokens - 1 - _SINKS) // (int(seen.sum()) - 1 - _SINKS))
    blocks = estimate.density * (estimate.tokens / estimate.block_size) ** 2
    return layers_to_see_all(estimate.pattern, estimate._frame, seen, blocks, estimate.block_size)
