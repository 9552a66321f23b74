"""Draws cases where coverage is least, checks them, and shrinks the first that fails.

A kind of case is a module with `CELLS`, all combinations to test, and `cases(cell)`, a hypothesis
strategy of cases that cover the cell. A case has `cells()` and `check()`; its repr is its source.
"""

import hashlib
import os
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import hypothesis
import hypothesis.strategies as st
import torch

SLOW = ("triton",)  # interpreted
SLOW_ROUNDS = 6  # one round in so many is theirs, and every round once only their cells are empty


class Cell(NamedTuple):
    """A combination to test: an option or a step, a class of patterns, a backend and a dtype."""

    option: str
    pattern: str
    backend: str
    dtype: str


class Case(Protocol):
    """One drawn case."""

    def cells(self) -> Sequence[Cell]:
        """Returns all combinations that the case covers."""

    def check(self) -> None:
        """Raises `Refused` if the library refuses the case, AssertionError if it is wrong."""


class Kind(Protocol):
    """A module of cases."""

    CELLS: Sequence[Cell]

    def cases(self, cell: Cell) -> st.SearchStrategy[Case]:
        """Strategy of cases that cover the cell."""


class Refused(Exception):  # noqa: N818, a refusal is not an error
    """The library refused a case with an error that its contract allows."""


class Fault(Exception):  # noqa: N818, the error is in the library
    """A failing case, shrunk; the text has its script and its traceback."""

    coverage: "Coverage"


class Coverage:
    """Counts of correct and of refused cases, by cell."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.right: Counter[Cell] = Counter(dict.fromkeys(cells, 0))
        self.refused: Counter[Cell] = Counter()
        self.reasons: dict[Cell, str] = {}
        self.cases = 0
        self.begin, self.seconds = 0.0, 0.0  # processor time: at first, and until the first fault

    def emptiest(self, count: int, seed: str, slow: bool) -> list[Cell]:
        """The least covered cells of slow or of other backends; the seed shuffles ties."""
        cells = [cell for cell in self.right if _is_slow(cell) == slow]
        cells = cells or list(self.right)
        return sorted(cells, key=lambda cell: (self.seen(cell), _digest(seed, *cell)))[:count]

    def seen(self, cell: Cell) -> int:
        return self.right[cell] + self.refused[cell]

    def add(self, case: Case, cell: Cell, refused: str = "") -> None:
        """Counts a case: for all its cells if it was correct, only for `cell` if it was refused."""
        if refused:
            self.refused[cell] += 1
            self.reasons[cell] = refused
            return
        for covered in case.cells():
            if covered in self.right:
                self.right[covered] += 1

    def empty(self) -> list[Cell]:
        """Returns the cells without any case so far."""
        return [cell for cell in self.right if not self.seen(cell)]

    def table(self) -> str:
        """Formats a table: the least count over pattern classes, by (backend, dtype) and option.

        `3`: each class has at least three correct cases; `3-`: some classes were always refused;
        `no`: all classes were refused.
        """
        rows = sorted({(cell.backend, cell.dtype) for cell in self.right})
        options = list(dict.fromkeys(cell.option for cell in self.right))
        lines = [("", *options)]
        for row in rows:
            line = [" ".join(row)]
            for option in options:
                cells = [c for c in self.right if (c.backend, c.dtype) == row]
                cells = [c for c in cells if c.option == option]
                asked = [c for c in cells if self.right[c] or not self.refused[c]]
                least = str(min((self.right[c] for c in asked), default="no"))
                line.append(least + "-" * (0 < len(asked) < len(cells)) if cells else "")
            lines.append(tuple(line))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
            for line in lines
        )


def attack(
    kind: Kind,
    seconds: float,
    seed: int | str = 0,
    under_way: Path | None = None,
    backends: Sequence[str] | None = None,
    rounds: int | None = None,
    cases: int = 64,
) -> Coverage:
    """Checks cases of a kind for some seconds.

    Args:
        kind: the module of cases.
        seconds: time for drawing cases.
        seed: the same seed draws the same cases, as far as the time allows.
        under_way: a file with the case that is running, in case the process dies.
        backends: the backends to test, default all.
        rounds: how many rounds, default as many as there is time for.
        cases: most cases of a round.

    Raises: Fault for the first case that fails, after shrinking it.
    """
    cells = [c for c in kind.CELLS if backends is None or c.backend.split()[-1] in backends]
    coverage, end, number = Coverage(cells), time.monotonic() + seconds, 0
    coverage.begin = time.process_time()
    try:
        while cells and time.monotonic() < end and number != rounds:
            empty = {_is_slow(cell) for cell in coverage.empty()}
            slow = number % SLOW_ROUNDS == SLOW_ROUNDS - 1 or empty == {True}
            _round(kind, coverage, end, f"{seed} {number}", under_way, slow, cases)
            number += 1
    finally:
        coverage.seconds = coverage.seconds or time.process_time() - coverage.begin
    return coverage


def attack_by_name(
    name: str,
    seconds: float,
    seed: str,
    under_way: Path | None = None,
    backends: Sequence[str] | None = None,
) -> tuple[Coverage, str]:
    """Runs `attack` in a worker process; returns its coverage, and the text of a fault or ""."""
    prepare()
    kind: Any = import_module(f"fuzz.{name}")
    try:
        return attack(kind, seconds, seed, under_way, backends), ""
    except Fault as fault:
        return fault.coverage, str(fault)


def prepare() -> None:
    """Sets one thread, NaN in torch's uninitialized memory, and Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.simplefilter("ignore")


def _round(
    kind: Kind,
    coverage: Coverage,
    end: float,
    seed: str,
    under_way: Path | None,
    slow: bool,
    cases: int,
) -> None:
    cells = coverage.emptiest(32, seed, slow)
    failed: list[Any] = []

    @hypothesis.settings(
        max_examples=cases,
        database=None,
        deadline=None,
        derandomize=False,
        report_multiple_bugs=False,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.seed(int(_digest(seed), 16))
    @hypothesis.given(
        st.sampled_from(cells).flatmap(lambda c: st.tuples(st.just(c), kind.cases(c)))
    )
    def examine(drawn: tuple[Cell, Case]) -> None:
        cell, case = drawn
        if not failed and time.monotonic() >= end:
            return
        if under_way is not None:
            under_way.write_text(repr(case))
        coverage.cases += 1
        torch.manual_seed(0)
        try:
            case.check()
        except Refused as refusal:
            coverage.add(case, cell, str(refusal))
        except Exception:
            coverage.seconds = coverage.seconds or time.process_time() - coverage.begin
            failed[:] = [cell, case, traceback.format_exc()]
            raise
        else:
            if not failed:
                coverage.add(case, cell)

    try:
        examine()
    except Exception as error:
        if not failed:  # the error is in the fuzzer itself, not in a case
            raise
        cell, case, trace = failed
        text = f"{' / '.join(cell)}\n\n{script(case)}\n\n{trace}"
        fault = Fault(text)
        fault.coverage = coverage
        raise fault from error


def script(case: Case) -> str:
    """Python that runs a case again, with `tests` on the path."""
    return f"from fuzz.calls import *\nfrom {type(case).__module__} import *\n{case!r}.check()"


def _is_slow(cell: Cell) -> bool:
    return cell.backend.split()[-1] in SLOW


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
