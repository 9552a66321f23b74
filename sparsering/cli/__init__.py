"""The command line: `sparsering try | demo | train | generate | plot | plan | info | build | ...`.

Wrong arguments, missing files or packages, and too little memory print one line to stderr; the
exit code is then 2.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .. import __version__
from ..mistakes import OneLineParser, run_command
from . import demo, machine, patterns, planning, training, trying

# Commands import inside their functions, so that `--help` and wrong options answer at once.


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to the help of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        plain = action.default in (None, False, argparse.SUPPRESS) or "default" in str(action.help)
        return action.help if plain else super()._get_help_string(action)


class _Parser(OneLineParser):
    """Prints an error in one line, and adds some arguments only when a command is parsed.

    These are added by `add_later(parser)`, for arguments whose imports are slow.
    """

    def __init__(self, *, add_later: Callable[[Any], None] = lambda _: None, **options: Any):
        super().__init__(formatter_class=_Help, **options)
        self.add_later = add_later

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        self.add_later(self)
        return super().parse_known_args(*arguments, **options)


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
    return run_command("sparsering", arguments)
