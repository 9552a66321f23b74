"""The command line: `sparsering try | demo | train | generate | plot | plan | info | build | ...`.

Wrong arguments, missing files or packages, and too little memory print one line to stderr; the
exit code is then 2.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .. import __version__
from ..progress import showing
from . import demo, machine, patterns, planning, training, trying

# Commands import inside their functions, so that `--help` and wrong options answer at once.

USER_ERRORS = (ValueError, OSError, ImportError, NotImplementedError, FloatingPointError)
TOO_LARGE = (MemoryError, OverflowError, RecursionError)  # and torch's RuntimeError of memory
LONGEST_LINE = 2000


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to the help of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        plain = action.default in (None, False, argparse.SUPPRESS) or "default" in str(action.help)
        return action.help if plain else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    """Prints an error in one line; `add_later` adds arguments whose imports are slow, when used."""

    def __init__(self, *, add_later: Callable[[Any], None] = lambda _: None, **options: Any):
        super().__init__(formatter_class=_Help, **options)
        self.add_later = add_later

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        self.add_later(self)
        return super().parse_known_args(*arguments, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, _in_one_line(f"{self.prog}: {message}; see {self.prog} --help") + "\n")


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser; each command sets `run`, a function that gets the parsed arguments."""
    parser = _Parser(
        prog="sparsering", description="Exact sparse attention over declared patterns."
    )
    parser.add_argument("--version", action="version", version=f"sparsering {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for part in (trying, demo, training, patterns, planning, machine):
        part.add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0, 2 for an error, 128 + n after signal n."""
    arguments = build_parser().parse_args(argv)
    arguments.typed = list(sys.argv[1:] if argv is None else argv)  # for messages that add to it
    quiet = getattr(arguments, "quiet", False)
    try:
        with showing("nothing" if quiet else "bars and lines"):
            return int(arguments.run(arguments))
    except BrokenPipeError:  # a reader such as `head` ended; Python would flush again on exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except KeyboardInterrupt:
        print("sparsering: interrupted", file=sys.stderr)
        return 130
    except USER_ERRORS as error:
        print(f"sparsering: {_in_one_line(str(error) or type(error).__name__)}", file=sys.stderr)
        return 2
    except (*TOO_LARGE, RuntimeError) as error:
        if not isinstance(error, TOO_LARGE) and "allocate" not in str(error):
            raise
        text = _in_one_line(f"{type(error).__name__} {error}")
        print(f"sparsering: a number is too large for this machine: {text}", file=sys.stderr)
        return 2


def _in_one_line(text: str) -> str:
    """Joins lines, and escapes control characters: names in a message can come from strangers."""
    from ..patterns.arguments import shortened

    return shortened(" ".join(text.split()), LONGEST_LINE)
