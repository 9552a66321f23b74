"""The largest batch and the longest sequence that fit: `estimate`, searched.

    choose_batch_size(pattern, tokens="64K", memory="24GB", backward=True)     # 11
    longest_sequence(pattern, memory="24GB", num_heads=16, machine="L4")

What must fit is the peak of one attention call: its inputs, results, what backward keeps, workspace
and layout. Weights, activations of other layers and the interpreter itself are beside it. A part of
the memory, `SPARE`, stays free.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

from ..cost.machines import Machine, named
from ..patterns.algebra import Pattern
from ..patterns.arguments import checked_integer
from .estimate import estimate
from .sizes import parse_bytes, parse_tokens, show_bytes

SPARE = 0.08
"""Part of a memory that a plan leaves free: `estimate` tells memory in use, and where memory is
limited what is reserved may count, buffers' room that is never touched with it.
"""
MOST = 1 << 40
"""Where a search ends: batches and tokens beyond fit nowhere."""


def choose_batch_size(
    pattern: Pattern,
    *,
    tokens: int | str,
    memory: int | str | None = None,
    num_heads: int = 8,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    backward: bool = False,
    machine: Machine | str | None = None,
    ranks: int = 1,
    sharding: str = "auto",
    backend: str | None = None,
    block_size: int | None = None,
) -> int:
    """The largest batch of one attention call that fits in memory.

    One entry more does not fit, by the arithmetic of `estimate` and with `SPARE` left free.

    Args:
        pattern: A mask or a mixture.
        tokens: Of a sequence, or a text such as "64K" (2^16).
        memory: Of one device, in bytes or as "24GB" (10^9) or "24GiB" (2^30); default what the
            machine has.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, default as many.
        head_dim: Channels of a head.
        dtype: Of query, key and value.
        backward: Whether gradients are computed too.
        machine: A machine or its name ("H200"), default this one.
        ranks: Devices that share each sequence; memory is that of one.
        sharding: Which rank has which tokens.
        backend: Default the one that would run.
        block_size: Default the one that would be chosen.

    Returns:
        Entries of the batch, at least 1.

    Raises:
        ValueError: Not even one entry fits, or an argument is out of range.

    Cost: the layout (and plan) of one length, then some ten estimates.

    Example:
        >>> choose_batch_size(SlidingWindow(256), tokens="4K", memory="1GB", num_heads=2)
        108
    """
    length, limit = parse_tokens(tokens), memory_of(machine, memory)

    def peak(batch_size: int) -> float:
        return estimate(
            pattern,
            tokens=length,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            batch_size=batch_size,
            backward=backward,
            machine=machine,
            ranks=ranks,
            sharding=sharding,
            backend=backend,
            block_size=block_size,
        ).peak_bytes.value

    if found := largest_that_fits(peak, usable(limit), 1):
        return found
    raise ValueError(
        f"memory must hold one entry of {length:,} tokens, which needs {show_bytes(peak(1))}, got "
        f"{show_bytes(limit)}, of which {SPARE:.0%} stay free; take fewer tokens (longest_sequence "
        "says how many fit), a smaller dtype, or more ranks"
    )


def longest_sequence(
    pattern: Pattern,
    *,
    memory: int | str | None = None,
    batch_size: int = 1,
    multiple_of: int = 128,
    num_heads: int = 8,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    backward: bool = False,
    machine: Machine | str | None = None,
    ranks: int = 1,
    sharding: str = "auto",
    backend: str | None = None,
    block_size: int | None = None,
) -> int:
    """The most tokens of a sequence with which one attention call fits in memory.

    `multiple_of` more do not fit, by the arithmetic of `estimate` and with `SPARE` left free.

    Args:
        pattern: A mask or a mixture.
        memory: Of one device, as in `choose_batch_size`.
        batch_size: Sequences of one call.
        multiple_of: The number is a multiple of it.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, default as many.
        head_dim: Channels of a head.
        dtype: Of query, key and value.
        backward: Whether gradients are computed too.
        machine: A machine or its name ("H200"), default this one.
        ranks: Devices that share each sequence; memory is that of one.
        sharding: Which rank has which tokens.
        backend: Default the one that would run.
        block_size: Default the one that would be chosen.

    Returns:
        Tokens, a multiple of `multiple_of`.

    Raises:
        ValueError: Not even `multiple_of` tokens fit, or an argument is out of range.

    Cost: the layouts of some six lengths, the longest a little longer than what fits: seconds where
    millions of tokens fit.
    """
    limit = memory_of(machine, memory)

    def peak(units: int) -> float:
        return estimate(
            pattern,
            tokens=units * multiple_of,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            batch_size=batch_size,
            backward=backward,
            machine=machine,
            ranks=ranks,
            sharding=sharding,
            backend=backend,
            block_size=block_size,
        ).peak_bytes.value

    multiple_of = checked_integer("multiple_of", multiple_of, 1)
    start = max(1, 4096 // multiple_of)
    if found := largest_that_fits(peak, usable(limit), start):
        return found * multiple_of
    raise ValueError(
        f"memory must hold {multiple_of} tokens, which need {show_bytes(peak(1))}, got "
        f"{show_bytes(limit)}, of which {SPARE:.0%} stay free; take fewer heads or entries, a "
        "smaller dtype, or more memory"
    )


def largest_that_fits(peak: Callable[[int], float], limit: float, start: int) -> int:
    """The largest n with `peak(n) <= limit` of which n + 1 is too large; 0 where 1 is too large.

    Peaks of calls are almost parabolas, so the next guess lies where the one through three known
    points crosses the limit; halving the bracket ends what a crooked one would draw out.
    """
    low, high = 0, MOST + 1  # low fits, high does not
    known: dict[int, float] = {}
    guess = start
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        known[guess] = peak(guess)
        if known[guess] <= limit:
            low = guess
        else:
            high = guess
        if len(known) % 3 == 0 and high <= MOST:
            guess = (low + high) // 2
        else:
            guess = _crossing(known, limit)
        if high > MOST:
            guess = min(max(guess, 2 * low), 64 * low)
    return low


def about_largest(peak: Callable[[int], float], limit: float, start: int, most: int) -> int:
    """About the largest n with `peak(n) <= limit`, to some percent; below 1 where none fits.

    No peak beyond `most` is asked for, and as a rule one that is near the answer.
    """
    known: dict[int, float] = {}
    guess, expected = 0, start
    while abs(expected - guess) > 0.03 * guess and len(known) < 8:
        reach = 8 * max(known) if 0 < len(known) < 3 else most
        guess = max(1, min(expected, reach, most))
        if guess in known:
            break
        known[guess] = peak(guess)
        expected = _crossing(known, limit)
    return expected


def _crossing(known: dict[int, float], limit: float) -> int:
    """Where the parabola through the three known points nearest to the limit crosses it.

    A line takes its place where fewer points are known, or where the parabola never crosses.
    """
    *others, b = sorted(sorted(known, key=lambda n: abs(known[n] - limit))[:3])
    room = limit - known[b]
    slopes = [(known[b] - known[a]) / (b - a) for a in others]
    curve = (slopes[1] - slopes[0]) / (others[1] - others[0]) if len(slopes) == 2 else 0.0
    slope = slopes[-1] + curve * (b - others[-1]) if slopes else 0.0  # of the parabola at b
    square = slope**2 + 4 * curve * room
    if slope <= 0 or square < 0:
        return int(b * limit / max(1.0, known[b]))
    return int(b + 2 * room / (slope + math.sqrt(square)))


def usable(memory: int) -> int:
    """Bytes of a memory that a call may take."""
    return int((1 - SPARE) * memory)


def memory_of(machine: Machine | str | None, memory: int | str | None) -> int:
    """Bytes that may be used: those that are given, else what the machine has.

    Raises:
        ValueError: Neither is known.
    """
    if memory is not None:
        return parse_bytes(memory)
    if machine is None:
        return memory_here()
    found = machine if isinstance(machine, Machine) else named(machine)
    if found.memory_bytes is None:
        raise ValueError(
            f"memory must be given for {found.name}, which has what its owner put in; such as "
            "memory='256GB'"
        )
    return found.memory_bytes


def memory_here() -> int:
    """Bytes of memory of this machine, or of the container where that has less."""
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            have = min(have, int(Path(limit).read_text()))
        except (OSError, ValueError):  # not Linux, no such group, or "max"
            continue
    return have
