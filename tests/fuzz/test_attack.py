"""Tests of the fuzzer itself, and some seconds of each kind of attack; `make fuzz` runs longer."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import hypothesis.strategies as st
import pytest

from . import calls, specs
from .attack import Cell, Fault, Refused, attack


@dataclass(frozen=True)
class Number:
    """A case that fails from 1000 on, and is refused below 3."""

    cell: Cell
    number: int

    def cells(self) -> list[Cell]:
        return [self.cell]

    def check(self) -> None:
        if self.number < 3:
            raise Refused("too small")
        assert self.number < 1000


class Numbers:
    CELLS = tuple(Cell(option, "-", "-", "-") for option in "abc")
    largest = 10**6

    @classmethod
    def cases(cls, cell: Cell) -> st.SearchStrategy[Any]:
        return st.integers(0, cls.largest).map(lambda number: Number(cell, number))


def test_a_fault_is_shrunk_and_shown():
    shown = r"(?s)/ - / - / -\n\n.*, number=1000\)\.check\(\)\n.*assert self.number < 1000"
    with pytest.raises(Fault, match=shown):
        attack(Numbers, 20.0)


def test_cells_are_counted_until_none_is_empty(monkeypatch):
    monkeypatch.setattr(Numbers, "largest", 50)
    coverage = attack(Numbers, 60.0, rounds=3)
    assert not coverage.empty()
    assert coverage.cases == coverage.right.total() + coverage.refused.total()
    assert set(coverage.reasons.values()) == {"too small"}
    assert coverage.table().split()[:3] == ["a", "b", "c"]


def test_the_same_seed_draws_the_same_cases():
    drawn = [DrawnCalls([]) for _ in range(3)]
    for calls_of_seed, seed in zip(drawn, (3, 3, 4), strict=True):
        attack(calls_of_seed, 600.0, seed=seed, rounds=1)
    first, again, others = (x.made for x in drawn)
    assert len(first) > 30 and first == again != others
    assert [eval(repr(call), vars(calls)) for call in first] == first  # what a script runs


@dataclass(frozen=True)
class DrawnCalls:
    """Calls that are written down and not made."""

    made: list[calls.Call]
    CELLS = calls.CELLS

    def cases(self, cell: Cell) -> st.SearchStrategy[Any]:
        return calls.cases(cell).map(lambda call: DrawnCall(call, self.made))


@dataclass(frozen=True)
class DrawnCall:
    call: calls.Call
    made: list[calls.Call]

    def cells(self) -> list[Cell]:
        return self.call.cells()

    def check(self) -> None:
        self.made.append(self.call)


# half a second each; the hour is `make fuzz`
SHORT = [("calls", 1, 60), ("caches", 1, 20), ("selections", 1, 36), ("rings", 1, 12)]
SHORT += [("hostile", 1, 64)]  # refusals that no other test sees
SHORT += [("trees", 1, 24), ("long", 1, 4), ("ways", 1, 5), ("models", 1, 5)]
SHORT += [("derivatives", 1, 24)]
LONG = [("calls", 6, 64), ("caches", 2, 64), ("selections", 5, 64), ("rings", 2, 64)]
LONG += [("trees", 6, 64), ("long", 2, 64), ("ways", 5, 64), ("layouts", 6, 64)]
LONG += [("models", 5, 64), ("ranks", 1, 64), ("steps", 2, 64), ("derivatives", 6, 64)]


@pytest.mark.filterwarnings("ignore")  # torch's own kernels warn, once in a process
@pytest.mark.parametrize(
    ("name", "rounds", "cases"),
    [*SHORT, *(pytest.param(*size, marks=pytest.mark.slow) for size in LONG)],
)
def test_an_attack_of_some_seconds_finds_nothing(name, rounds, cases):
    kind = import_module(f"fuzz.{name}")
    coverage = attack(kind, 600.0, seed="make test", rounds=rounds, cases=cases)
    assert coverage.right.total()


class Lists:
    """Calls over lists of single keys on the kernels of Triton, with every option."""

    CELLS = tuple(
        cell
        for cell in calls.CELLS
        if (cell.pattern, cell.backend) == (specs.LISTED, "triton")
        # the interpreter refuses float64 and bfloat16, and autocast computes in the latter
        and cell.dtype in ("float32", "float16")
        and cell.option not in ("none", "autocast")
    )
    cases = staticmethod(calls.cases)


@pytest.mark.parametrize(("rounds", "cases"), [(1, 4), pytest.param(3, 64, marks=pytest.mark.slow)])
def test_lists_with_every_option_on_triton(rounds, cases):
    coverage = attack(Lists, 1800.0, seed="lists", rounds=rounds, cases=cases)
    assert coverage.right.total()
    if rounds > 1:
        assert not [cell for cell in coverage.right if not coverage.right[cell]], coverage.table()
