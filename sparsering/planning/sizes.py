"""Parses sizes that people write, such as "24GB" or "1M" tokens, and formats sizes for them."""

import re
from collections.abc import Mapping

from ..patterns.arguments import shortened

BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
MOST_BYTES = 1 << 62
COUNT_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def parse_bytes(size: int | str) -> int:
    """Parses a size in bytes: 24_000_000_000, "24GB" (10^9) or "24GiB" (2^30).

    Raises:
        ValueError: `size` is no positive size.
    """
    return _number(size, BYTE_UNITS, "memory must be bytes, or a text such as '24GB' or '24GiB'")


def parse_tokens(count: int | str) -> int:
    """Parses a count of tokens: 1_048_576, "1M" (2^20) or "64K" (2^16).

    Raises:
        ValueError: `count` is no positive whole number.
    """
    return _number(count, COUNT_UNITS, "tokens must be a whole number, or a text such as '64K'")


def _number(given: object, units: Mapping[str, int], expected: str) -> int:
    if isinstance(given, str):
        parts = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?) ?([a-z]*)", given.strip().lower())
        if parts and len(parts[1]) < 30 and parts[2] in units:
            number = float(re.sub("[_,]", "", parts[1])) * units[parts[2]]
            if 1 <= number <= MOST_BYTES and (number == int(number) or units is BYTE_UNITS):
                return int(number)
    elif isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= MOST_BYTES:
        return given
    raise ValueError(f"{expected}, above 0, got {shortened(repr(given))}")


def show_bytes(size: float) -> str:
    """Formats a number of bytes with three digits and a decimal unit: B, kB, MB, GB, ..."""
    return _read(size, ("B", "kB", "MB", "GB", "TB", "PB"), 1000)


def show_tokens(count: int) -> str:
    """Formats a count of tokens: whole below 2^14, else in K, M, G, T, powers of 1024."""
    if count < 2**14:
        return f"{count:,}"
    return _read(count, ("", "K", "M", "G", "T"), 1024).replace(" ", "")


def show_seconds(seconds: float) -> str:
    """Formats a time with three digits, in units from microseconds to hours."""
    for most, unit, name in ((1e-3, 1e-6, "us"), (1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min")):
        if seconds < most:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 3600:.3g} h"


def _read(number: float, units: tuple[str, ...], step: int) -> str:
    power = 0
    while round(number) >= step and power + 1 < len(units):
        number, power = number / step, power + 1
    digits = f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"
    return f"{digits} {units[power]}".strip()
