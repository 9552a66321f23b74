"""Parses sizes as people write them, such as "24GB" or "1M" tokens, and formats sizes."""

import re
from collections.abc import Mapping

from ..ground.arguments import index_of, shortened

BYTE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    BYTE_UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
MOST_BYTES = 1 << 62
COUNT_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def parse_bytes(size: int | str) -> int:
    """Parses bytes: 24_000_000_000, "24GB" (10^9) or "24GiB" (2^30); ValueError if not positive."""
    return _number(size, BYTE_UNITS, "memory must be bytes, or a text such as '24GB' or '24GiB'")


def parse_tokens(count: int | str, name: str = "tokens") -> int:
    """Parses tokens: 1_048_576, "1M" (2^20) or "64K" (2^16); ValueError if not a positive int."""
    return _number(count, COUNT_UNITS, f"{name} must be a whole number, or a text such as '64K'")


def _number(size: object, units: Mapping[str, int], expected: str) -> int:
    """Parses a positive number, with a unit or without; `expected` begins the error message."""
    if isinstance(size, str):
        form = r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[+]?[0-9]{1,2})?) ?([a-z]*)"
        parts = re.fullmatch(form, size.strip().lower())
        if parts and len(parts[1]) < 30 and parts[2] in units:
            amount = float(re.sub("[_,]", "", parts[1])) * units[parts[2]]
            if 1 <= amount <= MOST_BYTES and (amount == int(amount) or units is BYTE_UNITS):
                return int(amount)
    elif isinstance(size, float) and size.is_integer() and 1 <= size <= MOST_BYTES:
        return int(size)
    elif (number := index_of(size)) is not None and 1 <= number <= MOST_BYTES:
        return number
    raise ValueError(f"{expected}, above 0, got {shortened(repr(size))}")


def show_bytes(size: float) -> str:
    """Formats a number of bytes with three digits and a decimal unit: B, kB, MB, GB, ..."""
    return _scaled(size, ("B", "kB", "MB", "GB", "TB", "PB"), 1000)


def show_tokens(count: int) -> str:
    """Formats a number of tokens, from 2^14 on in units of K, M, G, T, powers of 1024."""
    if count < 2**14:
        return f"{count:,}"
    return _scaled(count, ("", "K", "M", "G", "T"), 1024).replace(" ", "")


def show_seconds(seconds: float) -> str:
    """Formats a time with three digits, in units from microseconds to hours."""
    for most, unit, name in ((1e-3, 1e-6, "us"), (1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min")):
        if seconds < most:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 3600:.3g} h"


def _scaled(number: float, units: tuple[str, ...], step: int) -> str:
    """Formats a number in the first unit in which it is below `step`, such as "1.5 GB"."""
    for unit in units:
        if round(number) < step or unit == units[-1]:
            break
        number /= step
    digits = f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"
    return f"{digits} {unit}".strip()
