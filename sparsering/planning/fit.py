"""Searches with `estimate` for the largest batch and the longest sequence that fit in memory.

    choose_batch_size(pattern, tokens="64K", memory="24GB", backward=True)     # 11
    longest_sequence(pattern, memory="24GB", num_heads=16, machine="L4")

Memory must hold one attention call: inputs, results, tensors saved for backward, workspace and
layout, but no weights, other layers or interpreter. Memory that is free now is what counts.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from ..ground.arguments import checked_integer, checked_number
from ..ground.keywords import with_hints
from ..patterns.algebra import Pattern
from .estimate import Scenario, memory_of_call
from .machines import OTHER_NAMES, Machine, machine_of
from .memory import Memory
from .sizes import parse_bytes, parse_tokens, show_bytes

SHARE = 0.92
"""Share of memory that a call may use. `estimate` counts memory in use, but a memory limit may also
count reserved memory, such as the untouched part of buffers."""

MOST = 1 << 40
"""Upper bound of a search: larger batches or longer sequences fit on no machine."""

_FIRST_TOKENS = 4096  # tokens with which `longest_sequence` begins its search


@with_hints(OTHER_NAMES)
def choose_batch_size(
    pattern: Pattern,
    *,
    tokens: int | str,
    memory: int | str | None = None,
    share: float = SHARE,
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
    """Returns the largest batch of one attention call that fits in memory, without a model.

    For a model's training step, `sparsering plan --model NAME --memory 24GB` counts weights,
    gradients, optimizer states and the activations of all layers too.

    It fits if the peak that `estimate` predicts is at most `share` of the memory.

    Args:
        tokens: length of a sequence, or a text such as "64K" (2^16).
        memory: memory of one device, in bytes or as "24GB" (10^9) or "24GiB" (2^30). Default: what
            is free on this machine now (of its GPU for the backend "triton"), or all memory of a
            named machine. "total": all memory of this machine too.
        share: the part of it that the call may use, above 0 and at most 1.
        The others: as in `estimate`. `ranks` devices share each sequence.

    Returns: number of batch entries, at least 1.

    Raises: ValueError if not even one sequence fits, or an argument is out of range.

    Cost: building one layout (and a `RingPlan` for several ranks), then about ten estimates.

    Example:
        >>> choose_batch_size(SlidingWindow(256), tokens="4K", memory="1GB", num_heads=2)
        108
    """
    scenario = Scenario(
        pattern=pattern,
        tokens=parse_tokens(tokens),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        batch_size=1,
        backward=backward,
        machine=machine_of(machine),
        ranks=ranks,
        sharding=sharding,
        backend=backend,
        block_size=block_size,
    )
    room = usable(limit := memory_of(machine, memory, backend), share)
    if entries := most_that_fit(lambda n: replace(scenario, batch_size=n), room, 1):
        return entries
    raise ValueError(
        f"memory must hold one sequence of {scenario.tokens:,} tokens, which needs "
        f"{_shortage(scenario, limit, share)}; pass fewer tokens (longest_sequence says how many "
        "fit), a smaller dtype, or more ranks"
    )


@with_hints(OTHER_NAMES)
def longest_sequence(
    pattern: Pattern,
    *,
    memory: int | str | None = None,
    share: float = SHARE,
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
    """Returns the longest sequence for which one attention call fits in memory, without a model.

    For a model's training step, `sparsering plan --model NAME --memory 24GB` counts weights,
    gradients, optimizer states and the activations of all layers too.

    It fits if the peak that `estimate` predicts is at most `share` of the memory.

    Args:
        memory, share: as in `choose_batch_size`.
        batch_size: number of sequences in the call.
        multiple_of: the result is a multiple of this number.
        The others: as in `estimate`. `ranks` devices share each sequence.

    Returns: number of tokens, a multiple of `multiple_of`.

    Raises: ValueError if not even `multiple_of` tokens fit, or an argument is out of range.

    Cost: the layouts of about six lengths, the longest slightly longer than the result: seconds if
    millions of tokens fit.
    """
    multiple_of = checked_integer("multiple_of", multiple_of, 1)
    scenario = Scenario(
        pattern=pattern,
        tokens=multiple_of,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        batch_size=batch_size,
        backward=backward,
        machine=machine_of(machine),
        ranks=ranks,
        sharding=sharding,
        backend=backend,
        block_size=block_size,
    )
    room = usable(limit := memory_of(machine, memory, backend), share)
    first = max(1, _FIRST_TOKENS // multiple_of)
    if units := most_that_fit(lambda n: replace(scenario, tokens=n * multiple_of), room, first):
        return units * multiple_of
    raise ValueError(
        f"memory must hold {multiple_of} tokens, which need {_shortage(scenario, limit, share)}; "
        "pass fewer heads, a smaller batch_size or dtype, or more memory"
    )


def _shortage(scenario: Scenario, limit: int, share: float) -> str:
    """Returns the part of an error message that says how much memory is needed and available."""
    peak = memory_of_call(scenario).peak
    return f"{show_bytes(peak)}, got {show_bytes(limit)}, of which {share:.0%} may be used"


def most_that_fit(scenario_of: Callable[[int], Scenario], room: int, start: int) -> int:
    """Finds the largest n whose scenario fits in `room` bytes; returns 0 if 1 does not.

    `scenario_of(n)` is a call whose tensors grow in proportion to n, such as one of n batch entries
    or n tokens. The search begins at `start`.
    """

    @cache
    def memory(n: int) -> Memory:
        return memory_of_call(scenario_of(n))

    # Tensors grow in proportion to n, so they bound n. Each size may be rounded up by a byte.
    inputs, results, saved, _, _ = memory(start)
    most = start * room // max(1, inputs + results + saved - 3)
    return largest_that_fits(lambda n: memory(n).peak, room, start, min(MOST, most))


def largest_that_fits(
    peak: Callable[[int], float], limit: float, start: int, most: int = MOST
) -> int:
    """Finds n <= most with `peak(n) <= limit < peak(n + 1)`; returns 0 if peak(1) > limit.

    Peaks are almost quadratic in n, so the next guess is where the parabola through three known
    points crosses the limit. If five guesses leave more than 1/16 of the interval in which n lies,
    the next guess halves the interval, which bounds the number of guesses.
    """
    low, high = 0, most + 1  # low fits (or is 0), high does not
    width = high
    peaks: dict[int, float] = {}
    guess = start
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        peaks[guess] = peak(guess)
        if peaks[guess] <= limit:
            low = guess
        else:
            high = guess
        # Constant buffers dominate the first, small peak: it is left out once two others are known.
        guess = _crossing({n: peaks[n] for n in list(peaks)[len(peaks) > 2 :]}, limit)
        if len(peaks) % 5 == 0:
            guess = (low + high) // 2 if high - low > width // 16 else guess
            width = high - low
        if high > most and len(peaks) == 1:  # a single peak gives no slope
            guess = min(max(guess, 2 * low), 64 * low)
    return low


def about_largest(peak: Callable[[int], float], limit: float, start: int, most: int) -> int:
    """Finds about the largest n with `peak(n) <= limit`; the result is below 1 if there is none.

    It is exact to a few percent. No peak beyond `most` is evaluated; a larger result is
    extrapolated.
    """
    peaks: dict[int, float] = {}
    guess, expected = 0, start
    while abs(expected - guess) > 0.03 * guess and len(peaks) < 8:
        guess = max(1, min(expected, 8 * max(peaks) if 0 < len(peaks) < 3 else most, most))
        if guess in peaks:
            break
        peaks[guess] = peak(guess)
        expected = _crossing(peaks, limit)
    return expected


def _crossing(peaks: dict[int, float], limit: float) -> int:
    """Extends memory peaks, given by n, as a parabola; returns the n at which it meets the limit.

    The parabola goes through the three known peaks nearest to the limit; two give a line.
    """
    *others, b = sorted(sorted(peaks, key=lambda n: abs(peaks[n] - limit))[:3])
    room = limit - peaks[b]
    slopes = [(peaks[b] - peaks[a]) / (b - a) for a in others]
    curve = (slopes[1] - slopes[0]) / (others[1] - others[0]) if len(slopes) == 2 else 0.0
    slope = slopes[-1] + curve * (b - others[-1]) if slopes else 0.0  # slope of the parabola at b
    square = slope**2 + 4 * curve * room
    if slope <= 0 or square < 0:
        return int(b * limit / max(1.0, peaks[b]))
    return int(b + 2 * room / (slope + math.sqrt(square)))


def usable(memory: int, share: float = SHARE) -> int:
    """Returns how many bytes a call may use: `share` of `memory`, rounded down."""
    if not (share := checked_number("share", share, 0, 1)):
        raise ValueError("share must be above 0, got 0; 0.8 leaves a fifth of the memory free")
    return int(share * memory)


def memory_of(
    machine: Machine | str | None, memory: int | str | None, backend: str | None = None
) -> int:
    """Returns `memory` in bytes; by default what is free here, or all that a named machine has.

    Raises: ValueError if the memory of a named machine is not known.
    """
    device = machine_of(machine)
    total = isinstance(memory, str) and memory == "total"
    if memory is not None and not total:
        return parse_bytes(memory)
    if device is None:
        on_gpu = backend == "triton" and torch.cuda.is_available()
        return (gpu_memory if on_gpu else memory_here)(free=not total)
    if device.memory_bytes is None:
        raise ValueError(
            f"memory must be given for {device.name}, because its servers vary in memory; for "
            "example, pass memory='256GB'"
        )
    return device.memory_bytes


def gpu_memory(free: bool) -> int:
    """Returns the total or the free bytes of the current GPU.

    Torch's unused cache counts as free.
    """
    left, total = torch.cuda.mem_get_info()
    return left + (torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) if free else total


def memory_here(free: bool, system: Path = Path("/")) -> int:
    """Returns the total or the free bytes of memory of this machine, or of its container.

    Memory that caches files counts as free. `system` is the root of the files that are read.
    """
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, KeyError):  # not Linux
        size = 1024 * numbers_in(system / "proc/meminfo")["MemAvailable:" if free else "MemTotal:"]
    for folder, limit, used, files in _control_groups(system):
        # The container has no memory limit if the file is missing, or says "max".
        with suppress(OSError, ValueError):
            room = int((folder / limit).read_text())
            with suppress(OSError, ValueError):
                cached = numbers_in(folder / "memory.stat").get(files, 0)
                room -= max(0, int((folder / used).read_text()) - cached) if free else 0
            size = min(size, max(0, room))
    return size


def _control_groups(system: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yields the control groups (Linux's memory limits, as of a container) that bound this process.

    Each item is (folder, limit, used, files), for a group of this process or one of its parents.

    The last three name, for version 1 or 2 of control groups, the files with the limit and the
    used bytes, and the field of memory.stat that counts cached files.
    """
    own = ["0::/", "0:memory:/"]  # the root of what a container sees
    with suppress(OSError):
        own += (system / "proc/self/cgroup").read_text().splitlines()
    for line in own:
        _, names, path = (line + "::").split(":")[:3]
        root, files = system / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        if "memory" in names.split(","):
            root /= "memory"
            files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        elif names:
            continue
        folder = root / path.strip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(root):
                yield group, *files


def numbers_in(file: Path) -> dict[str, int]:
    """Reads a file whose lines have a name and a number, such as /proc/meminfo: {name: number}."""
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
