"""Searches with `estimate` for the largest batch and the longest sequence that fit in memory.

    choose_batch_size(pattern, tokens="64K", memory="24GB", backward=True)     # 11
    longest_sequence(pattern, memory="24GB", num_heads=16, machine="L4")

The peak of one attention call must fit: inputs, results, tensors saved for backward, workspace and
layout. It does not include weights, activations of other layers, or the interpreter. A share of the
memory, `SPARE`, stays free.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..patterns.algebra import Pattern
from ..patterns.arguments import checked_integer
from .estimate import Estimate, estimate
from .machines import Machine, named
from .memory import Memory
from .sizes import parse_bytes, parse_tokens, show_bytes

SPARE = 0.08
"""Share of memory that a plan leaves free. `estimate` counts memory in use, but a memory limit may
also count reserved memory, such as the untouched part of buffers.
"""
MOST = 1 << 40
"""Upper bound of a search: larger batches and longer sequences fit nowhere."""
_FIRST = 4096  # tokens of the first estimate of a search for the longest sequence


@dataclass(frozen=True)
class Asked:
    """Arguments of a plan: those of `estimate`, and the memory of one device."""

    pattern: Pattern
    tokens: int = _FIRST
    memory: int | str | None = None
    machine: Machine | str | None = None
    ranks: int = 1
    sharding: str = "auto"
    num_heads: int = 8
    num_kv_heads: int | None = None
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    batch_size: int = 1
    backward: bool = False
    backend: str | None = None
    block_size: int | None = None

    @property
    def device(self) -> Machine | None:
        """The named machine; None for this one."""
        return named(self.machine) if isinstance(self.machine, str) else self.machine

    @property
    def limit(self) -> int:
        """Bytes of the given memory, else of the machine's; ValueError if neither is known."""
        return memory_of(self.machine, self.memory)

    def estimate(self, **changes: Any) -> Estimate:
        """Estimates the call, with some arguments changed."""
        options = vars(self) | changes
        pattern, _ = options.pop("pattern"), options.pop("memory")
        return estimate(pattern, **options)

    def largest(self, name: str, start: int, unit: int = 1) -> int:
        """Finds the largest batch_size or tokens (`name`) of a call that fits, as a count of units.

        The search begins with `start` units. Returns 0 if not even one unit fits.
        """
        room = usable(self.limit)

        @cache
        def memory(count: int) -> Memory:
            return self.estimate(**{name: count * unit}).memory

        # Tensors alone grow in proportion, which bounds the search. Each of the three parts may
        # have been rounded up by a byte.
        inputs, results, saved, _, _ = memory(start)
        most = start * room // max(1, inputs + results + saved - 3)
        return largest_that_fits(lambda n: memory(n).peak, room, start, min(MOST, most))


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
        tokens: Length of a sequence, or a text such as "64K" (2^16).
        memory: Memory of one device, in bytes or as "24GB" (10^9) or "24GiB" (2^30); default all
            that the machine has.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads, default as many.
        head_dim: Channels of a head.
        dtype: Type of query, key and value.
        backward: Whether gradients are computed too.
        machine: A machine or its name ("H200"), default this one.
        ranks: Number of devices that share each sequence; `memory` is that of one.
        sharding: The rule for which rank owns which tokens.
        backend: Default: the one that `attention` would run.
        block_size: Tokens per tile; default: as `attention` would choose.

    Returns:
        Number of batch entries, at least 1.

    Raises:
        ValueError: Not even one entry fits, or an argument is out of range.

    Cost: the layout (and plan) of one length, then about ten estimates.

    Example:
        >>> choose_batch_size(SlidingWindow(256), tokens="4K", memory="1GB", num_heads=2)
        108
    """
    asked = Asked(
        pattern, parse_tokens(tokens), memory, machine, ranks, sharding, num_heads, num_kv_heads,
        head_dim, dtype, backward=backward, backend=backend, block_size=block_size,
    )  # fmt: skip
    if found := asked.largest("batch_size", 1):
        return found
    raise ValueError(
        f"memory must hold one entry of {asked.tokens:,} tokens, which needs "
        f"{show_bytes(asked.estimate().peak_bytes.value)}, got {show_bytes(asked.limit)}, of which "
        f"{SPARE:.0%} stay free; take fewer tokens (longest_sequence says how many fit), a smaller "
        "dtype, or more ranks"
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
    """The longest sequence for which one attention call fits in memory.

    `multiple_of` tokens more do not fit, by the arithmetic of `estimate`, with `SPARE` left free.

    Args:
        pattern: A mask or a mixture.
        memory: Memory of one device, as in `choose_batch_size`.
        batch_size: Number of sequences in the call.
        multiple_of: The result is a multiple of it.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads, default as many.
        head_dim: Channels of a head.
        dtype: Type of query, key and value.
        backward: Whether gradients are computed too.
        machine: A machine or its name ("H200"), default this one.
        ranks: Number of devices that share each sequence; `memory` is that of one.
        sharding: The rule for which rank owns which tokens.
        backend: Default: the one that `attention` would run.
        block_size: Tokens per tile; default: as `attention` would choose.

    Returns:
        Number of tokens, a multiple of `multiple_of`.

    Raises:
        ValueError: Not even `multiple_of` tokens fit, or an argument is out of range.

    Cost: the layouts of about six lengths, the longest slightly longer than the result: seconds if
    millions of tokens fit.
    """
    multiple_of = checked_integer("multiple_of", multiple_of, 1)
    asked = Asked(
        pattern, multiple_of, memory, machine, ranks, sharding, num_heads, num_kv_heads,
        head_dim, dtype, batch_size, backward, backend, block_size,
    )  # fmt: skip
    if found := asked.largest("tokens", max(1, _FIRST // multiple_of), multiple_of):
        return found * multiple_of
    raise ValueError(
        f"memory must hold {multiple_of} tokens, which need "
        f"{show_bytes(asked.estimate().peak_bytes.value)}, got {show_bytes(asked.limit)}, of which "
        f"{SPARE:.0%} stay free; take fewer heads or entries, a smaller dtype, or more memory"
    )


def largest_that_fits(
    peak: Callable[[int], float], limit: float, start: int, most: int = MOST
) -> int:
    """Finds n <= most with `peak(n) <= limit < peak(n + 1)`; returns 0 if 1 is too large.

    Peaks are almost quadratic in n, so the next guess is where the parabola through three known
    points crosses the limit. The first point is left out once there are two others: constant
    buffers dominate the peak of a small size. Where five guesses leave more than a sixteenth of the
    bracket, the next one halves it, which bounds the search.
    """
    low, high = 0, most + 1  # low fits, high does not
    wide = high
    known: dict[int, float] = {}
    guess = start
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        known[guess] = peak(guess)
        if known[guess] <= limit:
            low = guess
        else:
            high = guess
        guess = _crossing({n: known[n] for n in list(known)[len(known) > 2 :]}, limit)
        if len(known) % 5 == 0:
            guess = (low + high) // 2 if high - low > wide // 16 else guess
            wide = high - low
        if high > most:  # two points give a slope; before, a guess may be far too large
            guess = min(max(guess, 2 * low), 64 * low if len(known) < 2 else most)
    return low


def about_largest(peak: Callable[[int], float], limit: float, start: int, most: int) -> int:
    """Finds the largest n with `peak(n) <= limit`, to some percent; below 1 if none fits.

    The search evaluates no peak beyond `most`, and usually one near the answer.
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
    """Returns where the parabola through the three points nearest to the limit crosses it.

    A line replaces the parabola if fewer points are known, or if the parabola never crosses.
    """
    *others, b = sorted(sorted(known, key=lambda n: abs(known[n] - limit))[:3])
    room = limit - known[b]
    slopes = [(known[b] - known[a]) / (b - a) for a in others]
    curve = (slopes[1] - slopes[0]) / (others[1] - others[0]) if len(slopes) == 2 else 0.0
    slope = slopes[-1] + curve * (b - others[-1]) if slopes else 0.0  # slope of the parabola at b
    square = slope**2 + 4 * curve * room
    if slope <= 0 or square < 0:
        return int(b * limit / max(1.0, known[b]))
    return int(b + 2 * room / (slope + math.sqrt(square)))


def usable(memory: int) -> int:
    """Returns the bytes of a memory that a call may use."""
    return int((1 - SPARE) * memory)


def memory_of(machine: Machine | str | None, memory: int | str | None) -> int:
    """Returns the given bytes of memory, else those that the machine has.

    Raises:
        ValueError: Neither is known.
    """
    if memory is not None:
        return parse_bytes(memory)
    if machine is None:
        return memory_here()
    device = machine if isinstance(machine, Machine) else named(machine)
    if device.memory_bytes is None:
        raise ValueError(
            f"memory must be given for {device.name}, which has what its owner put in; such as "
            "memory='256GB'"
        )
    return device.memory_bytes


def memory_here() -> int:
    """Returns the memory of this machine in bytes, or its container's limit if that is lower."""
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            have = min(have, int(Path(limit).read_text()))
        except (OSError, ValueError):  # not Linux, no such group, or "max"
            continue
    return have
