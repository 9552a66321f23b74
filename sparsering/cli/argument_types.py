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
