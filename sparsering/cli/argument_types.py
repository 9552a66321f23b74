"""Defines types, choices and help texts of arguments that several commands share."""

import argparse
from typing import Any, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

DTYPES = ("float32", "bfloat16", "float16")
DTYPE: dict[str, Any] = {
    "choices": DTYPES,
    "help": "dtype of inputs (default: bfloat16 on a GPU, else float32)",
}
PATTERN = "such as 'LongNet((1024, 4096), (1, 4)) & Causal()'"


def add_quiet(command: argparse.ArgumentParser) -> None:
    """Adds `--quiet`, which `main` reads, to a command that can take long."""
    command.add_argument("--quiet", action="store_true", help="no bar and no lines of progress")


def positive(text: str) -> int:
    """Parses a whole number above 0, for argparse's `type`."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return number


def token_count(text: str) -> int:
    """Parses a number of tokens such as 65536, 64K, 1M or 1e6, for argparse's `type`."""
    from ..planning.sizes import parse_tokens

    try:
        return parse_tokens(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def memory_size(text: str) -> int | str:
    """Parses bytes such as 24GB or 24GiB, or "total", for argparse's `type`."""
    from ..planning.sizes import parse_bytes

    if text.isascii() and text.isdigit() and 0 < int(text) < 1_000_000:
        raise argparse.ArgumentTypeError(
            f"expected memory such as 24GB, got {text} bytes; name a unit"
        )
    try:
        return text if text == "total" else parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
