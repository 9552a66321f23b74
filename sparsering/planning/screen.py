"""Builds the output of `sparsering plan`: the costs of a pattern on one screen.

Times on named machines are lower bounds by published peaks, and the output says so. This module
measures nothing.
"""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from textwrap import wrap
from typing import Any

from ..ground.arguments import shortened
from ..ground.commands import sparsering
from ..kernels.backends import BACKENDS
from ..kernels.cpu.build import build_failure
from ..patterns.algebra import Frame
from ..patterns.expression import parse
from .comparison import hides_later_keys
from .counts import counts_of
from .estimate import Estimate, Scenario, estimate_of, memory_of_call
from .fit import about_largest, memory_of, most_that_fit, usable
from .proposals import Proposal
from .sizes import show_bytes, show_seconds, show_tokens

WIDTH = 100
SHARDINGS = ("contiguous", "zigzag", "balanced")
_WRAPPED: dict[str, Any] = {
    "subsequent_indent": " " * 10, "replace_whitespace": False, "drop_whitespace": True,
    "break_long_words": False, "break_on_hyphens": False,
}  # fmt: skip
_QUALITY = "arithmetic cannot tell what leaving out pairs costs: compare on your model and data"
_PADDED = 16  # tokens to which kernels round up each side of a tile
MOST_SEARCHED = 1 << 22
"""Largest number of tokens that is estimated; longer sequences are extrapolated."""
_MOST_LISTED = 1 << 18  # pairs of blocks; a plan over ranks lists a million in some seconds


def screen(scenario: Scenario, memory: int | str | None, text: str) -> str:
    """Returns the output of `sparsering plan` for one pattern: about 24 lines of 100 columns.

    Args:
        memory: memory of one device, as in `choose_batch_size`.
        text: the pattern as the user wrote it, for the second line.

    Raises: as `estimate`. Cost: a few seconds for 2^20 tokens.
    """
    machine, estimate = scenario.machine, estimate_of(scenario)
    has_limit = memory is not None or machine is None or machine.memory_bytes is not None
    limit = memory_of(machine, memory, scenario.backend) if has_limit else None
    causal = hides_later_keys(scenario.pattern, scenario.tokens, scenario.num_heads)
    dense_name = "causal attention" if causal else "full attention"
    dense_pairs = scenario.tokens * (scenario.tokens + 1) / 2 if causal else scenario.tokens**2
    pairs = estimate.pairs / estimate.num_heads / estimate.batch_size
    saving, density = dense_pairs / max(1.0, pairs), 100 * estimate.density

    of_rank = " a rank" if scenario.ranks > 1 else ""
    peak = estimate.peak_bytes.value
    of_limit = "" if limit is None else f" of {show_bytes(limit)} ({100 * peak / limit:.3g}%)"
    parts = (f"{name} {show_bytes(size)}" for name, size in estimate.memory._asdict().items())
    lines = [
        title_of(scenario),
        shortened(text, WIDTH - 10),
        "",
        _row("runs", f"{estimate.backend}, blocks of {estimate.block_size}"),
        _row("pairs", f"{pairs:.3g} a head and entry; blocks visited {density:.3g}%"),
        *_short_tiles(scenario, estimate),
        _row("dense", f"{dense_name} has {dense_pairs:.3g} pairs, {_times(saving)} as many"),
        _row("time", _time(estimate, of_rank)),
        _row(
            "memory",
            f"{show_bytes(peak)}{of_limit}{of_rank} at its peak, for this call alone",
        ),
        _row("", ", ".join(parts)),
        _row("fits", _capacity(scenario, limit, _searched(scenario, estimate))),
        *_rank_rows(scenario, estimate),
        "",
        _row("advice", _advice(estimate, limit, saving, dense_name)),
        _row("quality", _QUALITY),
        _row("", "(docs/selection.md; sparsering.selection.selection_report for chosen blocks)"),
    ]
    wrapped = [line for text in lines for line in wrap(text, WIDTH, **_WRAPPED) or [""]]
    # `sparsering train` takes causal patterns only; the line is not wrapped, so it can be copied
    if causal:
        options = f"--pattern {shlex.quote(text)} --context {scenario.tokens} --out runs/planned"
        wrapped.append(_row("next", sparsering(f"train {options}")))
    return "\n".join(wrapped)


def title_of(scenario: Scenario) -> str:
    """Returns a line that describes the planned call: lengths, heads, dtype, batch and machine."""
    heads = f"{scenario.num_heads} heads"
    if scenario.num_kv_heads != scenario.num_heads:
        heads += f" ({scenario.num_kv_heads} of keys)"
    devices = "this machine" if scenario.machine is None else scenario.machine.name
    if scenario.ranks > 1:
        devices = f"{scenario.ranks} x {devices}"
    return (
        f"one attention call of {scenario.tokens:,} tokens, {heads} of {scenario.head_dim}, "
        f"{str(scenario.dtype).removeprefix('torch.')}, batch {scenario.batch_size}, "
        f"{'forward and backward' if scenario.backward else 'forward'}, on {devices}"
    )


def proposal_screen(
    proposals: list[Proposal], title: str, texts: Sequence[str], command: str
) -> str:
    """Returns the output of `sparsering plan` without a pattern: a table of proposed patterns.

    Args:
        proposals: result of `propose`, the recommended one first.
        title: the call and its machine.
        texts: each pattern as it can be typed, whole; rows have their order and numbers.
        command: the user's own command, to which the last line adds `--take`.
    """
    by_pattern = {each.pattern: each for each in proposals}
    best = proposals[0]
    rows = [(number, text, by_pattern[parse(text)]) for number, text in enumerate(texts, 1)]
    taken, text = next((number, text) for number, text, each in rows if each is best)
    lines = [title, "", _row("use", text), _row("because", best.reason)]
    lines += [_row("quality", best.quality), ""]
    lines.append(" row      time    memory   pairs       sees  layers  fits  pattern")
    whole = {_row("use", text)}  # lines to be copied, which are not wrapped
    for number, text, each in rows:
        line = (
            f"{'*' if each is best else ' '} {number:>2}  {show_seconds(each.seconds):>8}  "
            f"{show_bytes(each.bytes):>8}  {100 * each.density:>5.3g}%  {each.reach:>9,}  "
            f"{each.layers or 'never':>6}  {'yes' if each.fits else 'no':<4}  "
        )
        parts = [line + text] if len(line + text) <= WIDTH else [line.rstrip(), " " * 6 + text]
        whole |= set(parts)
        lines += parts
    lines += [
        "",
        "time: on a named machine at least so long, by its peaks; pairs: of dense attention's",
        "sees: keys of the last query; layers: until it depends on all, with residual paths",
        "random blocks: no choice, but what blocks chosen by content cost (nn.SelectedAttention)",
        "next: the plan of a row, by its number:",
        following := f"      {command} --take {taken}",
    ]
    whole.add(following)
    return "\n".join(
        line
        for text in lines
        for line in ([text] if text in whole else wrap(text, WIDTH, **_WRAPPED) or [""])
    )


def _row(name: str, text: str) -> str:
    return f"{name:<9} {text}"


def _times(factor: float) -> str:
    return f"{factor:,.0f} times" if factor >= 10 else f"{factor:.1f} times"


def _time(estimate: Estimate, of_rank: str) -> str:
    """Returns the predicted time as text, which says whether it was measured or is a bound."""
    seconds = f"{show_seconds(estimate.seconds.value)}{of_rank}"
    products, known = f"({estimate.flops.value:.3g} FLOP)", estimate.seconds.known
    if known.startswith("published"):
        return f"at least {seconds}: a bound by published peaks, unmeasured {products}"
    return f"{seconds}, from short calls that were measured here now {products}"


def _short_tiles(scenario: Scenario, estimate: Estimate) -> list[str]:
    """Returns a row of the output that warns if tiles of a dilated branch are mostly padding."""
    counts = counts_of(
        scenario.pattern,
        scenario._frame,
        estimate.block_size,
        cut=estimate.backend == "cpu" and not build_failure(),  # as `estimate` has counted
        lists=BACKENDS[estimate.backend].runs_lists,
    )
    dilated = [x for x in counts.passes if x.step > 1 and x.cells > _PADDED**2]
    shortest = min(dilated, key=lambda x: max(x.longest), default=None)
    if shortest is None or (tokens := max(shortest.longest)) >= _PADDED:
        return []
    text = (
        f"{'one token' if tokens == 1 else f'{tokens} tokens'} a tile where keys are "
        f"{shortest.step:,} apart: kernels compute tiles of {_PADDED} x {_PADDED}, "
        f"{shortest.cells:.3g} pairs a head for these; a smaller rate or longer segments fill them"
    )
    return [_row("tiles", text)]


def _searched(scenario: Scenario, estimate: Estimate) -> int:
    """Returns the longest sequence whose plan lists at most `_MOST_LISTED` pairs of blocks."""
    frame = Frame.build(scenario.tokens, None, scenario.num_heads, scenario.num_kv_heads, None)
    tables = scenario.pattern.num_tables(frame)
    pairs = estimate.density * (scenario.tokens / estimate.block_size) ** 2 * tables
    share = (_MOST_LISTED / max(1.0, pairs)) ** 0.5  # pairs grow with the square at most
    return int(min(MOST_SEARCHED, max(4096, scenario.tokens * share)))


def _capacity(scenario: Scenario, limit: int | None, most: int) -> str:
    """Returns the largest batch and the longest sequence that fit in `limit` bytes, as text.

    No sequence of more than `most` tokens is planned; a longer one is extrapolated.
    """
    if limit is None:
        return "with --memory: the largest batch and the longest sequence"
    try:
        batch = most_that_fit(lambda n: replace(scenario, batch_size=n), usable(limit), 1)
    except ValueError:  # the pattern is for a batch of another size
        batch = 0
    text = (f"a batch of {batch:,}" if batch else "not even a batch of 1") + " at this length"

    def peak(tokens: int) -> float:
        return memory_of_call(replace(scenario, tokens=tokens)).peak

    try:
        tokens = about_largest(peak, usable(limit), min(4096, most), most)
    except ValueError:  # the pattern is for one length only
        tokens = 0
    if tokens < 1:
        return text
    two_digits = int(float(f"{tokens:.1e}"))  # the search is exact to a few percent
    return f"{text}; about {show_tokens(two_digits)} tokens at this batch"


def _rank_rows(scenario: Scenario, estimate: Estimate) -> list[str]:
    """Returns the rows that compare one device with several under each sharding.

    [] for one rank.
    """
    if scenario.ranks == 1:
        return []
    alone = estimate_of(replace(scenario, ranks=1))
    peak = show_bytes(alone.peak_bytes.value)
    rows = [_row("alone", f"one device: {_short_time(alone)}, {peak}")]
    if not any(estimate.received_bytes) and estimate.balance.value == 1:
        text = f"{estimate.sharding}: nothing moves, loads are even; no other sharding is better"
        return [*rows, _row("sharding", text)]
    titles = ("most received", "link time", "busiest / mean", "time")
    rows.append(f"{'  sharding':<14}" + "".join(f"{title:>18}" for title in titles))
    for name in dict.fromkeys(x for x in (*SHARDINGS, scenario.sharding) if x != "auto"):
        one = estimate_of(replace(scenario, sharding=name))
        cells = (
            show_bytes(max(one.received_bytes)),
            "unknown" if one.link_seconds is None else show_seconds(one.link_seconds.value),
            f"{one.balance.value:.3f}",
            _short_time(one),
        )
        mark = "*" if one.sharding == estimate.sharding else " "
        rows.append(f"{mark} {name[:11]:<12}" + "".join(f"{cell:>18}" for cell in cells))
    return rows


def _short_time(estimate: Estimate) -> str:
    bound = "at least " if estimate.seconds.known.startswith("published") else ""
    return bound + show_seconds(estimate.seconds.value)


def _advice(estimate: Estimate, limit: int | None, saving: float, dense_name: str) -> str:
    """Returns the one sentence of advice that matters most for this plan."""
    peak, seconds, balance = estimate.peak_bytes.value, estimate.seconds, estimate.balance.value
    if limit is not None and peak > usable(limit):
        return (
            f"it does not fit: {show_bytes(peak)} in the {show_bytes(usable(limit))} that a call "
            f"can use of {show_bytes(limit)}; take "
            f"about {estimate.ranks * -(-peak // usable(limit)):.0f} ranks, or shorter sequences"
        )
    if saving < 1.5:
        return "it leaves out almost nothing: dense attention costs as much, and loses nothing"
    if estimate.link_seconds is not None and estimate.link_seconds.value > seconds.value:
        return "links bound it: fewer ranks, fewer kv heads, or segments that lie inside the shards"
    if balance > 1.1:
        return f"the busiest rank has {balance:.2f} of the mean: compare the shardings"
    if estimate.ranks > 1 and limit is not None and peak * estimate.ranks < limit / 4:
        return "one device has room for it all: ranks save time alone; whole sequences move nothing"
    fits = "" if limit is None else ", and it fits"
    return f"good: {_times(saving)} fewer pairs than {dense_name}{fits}"
