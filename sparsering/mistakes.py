"""Ends a program with one line on stderr for a mistake of its user, without a traceback.

    with one_line_errors("train_packed", install=install("cli")):  # names the missing package
        from tqdm import tqdm

    if __name__ == "__main__":
        with one_line_errors("train_packed"):
            main()

Wrong arguments, missing files or packages, and too little memory exit with code 2, as wrong options
do. A RuntimeError other than too little memory is a fault of the program and keeps its traceback.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from .ground.arguments import shortened
from .ground.progress import showing

USER_ERRORS = (ValueError, OSError, ImportError, NotImplementedError, FloatingPointError)
TOO_LARGE = (MemoryError, OverflowError, RecursionError)  # torch has a RuntimeError for memory
LONGEST_LINE = 2000
# Other ranks wait so long before they exit: torchrun ends all ranks soon after the first exit, and
# rank 0 must have printed the error by then.
SPEAKS_WITHIN_S = 3.0


class OneLineParser(argparse.ArgumentParser):
    """A parser that prints an error in one line; the usage is in `--help`."""

    def error(self, message: str) -> NoReturn:
        """Prints the message, and exits with code 2."""
        self.exit(2, in_one_line(f"{self.prog}: {message}; see {self.prog} --help") + "\n")


@contextmanager
def one_line_errors(program: str, *, install: str = "", shown: bool = True) -> Iterator[None]:
    """Runs a program's imports or its main function; a user's mistake ends it in one line.

    Args:
        program: name of the program, which begins the line.
        install: command that is added where a package is missing.
        shown: False prints nothing, for all ranks but one.
    """
    try:
        yield
        return
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code(program, error, install=install, shown=shown)
        if code is None:
            raise
    if not shown:
        time.sleep(SPEAKS_WITHIN_S)
    sys.exit(code)  # outside of the handler, so that no traceback has the error as its context


def run_command(program: str, arguments: argparse.Namespace) -> int:
    """Runs the command that a parser has set as `run`; its option `--quiet` hides progress.

    An error that all ranks raise has an attribute `speaker`: the rank that prints it.

    Returns: the command's exit code; 2 after a mistake of the user, 128 + n after signal n.
    """
    quiet = getattr(arguments, "quiet", False)
    try:
        with showing("nothing" if quiet else "bars and lines"):
            return int(arguments.run(arguments))
    except (Exception, KeyboardInterrupt) as error:
        own_rank = int(os.environ.get("RANK", "0"))
        shown = getattr(error, "speaker", own_rank) == own_rank
        code = exit_code(program, error, shown=shown)
        if code is None:
            raise
    if not shown:
        time.sleep(SPEAKS_WITHIN_S)
    return code


def exit_code(
    program: str, error: BaseException, *, install: str = "", shown: bool = True
) -> int | None:
    """Prints an error in one line, and returns the exit code; None for a fault of the program."""
    # A reader such as `head` has closed the pipe. Python flushes stdout again on exit, into null.
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    code, said = 2, str(error) or type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        code, said = 130, "interrupted"
    elif isinstance(error, ModuleNotFoundError) and install:
        said = f"{said}; {install}"
    elif isinstance(error, USER_ERRORS):
        pass
    elif isinstance(error, TOO_LARGE) or (isinstance(error, RuntimeError) and "allocate" in said):
        said = f"a number is too large for this machine: {type(error).__name__} {error}"
    else:
        return None
    if shown:
        print(in_one_line(f"{program}: {said}"), file=sys.stderr)
    return code


def in_one_line(text: str) -> str:
    """Joins the lines of a message, and escapes control characters (names may be foreign)."""
    return shortened(" ".join(text.split()), LONGEST_LINE)
