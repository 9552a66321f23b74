"""Tests of the fuzzer itself, and some seconds of each kind of attack; `make fuzz` runs longer."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import hypothesis.strategies as st
import pytest

from . import calls
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

    def script(self) -> str:
        return f"number = {self.number}"


class Numbers:
    CELLS = tuple(Cell(option, "-", "-", "-") for option in "abc")
    largest = 10**6

    @classmethod
    def cases(cls, cell: Cell) -> st.SearchStrategy[Any]:
        return st.integers(0, cls.largest).map(lambda number: Number(cell, number))


def test_a_fault_is_shrunk_and_shown():
    with pytest.raises(
        Fault, match=r"(?s)/ - / - / -\n\nnumber = 1000\n.*assert self.number < 1000"
    ):
        attack(Numbers, 20.0)


def test_cells_are_counted_until_none_is_empty(monkeypatch):
    monkeypatch.setattr(Numbers, "largest", 50)
    coverage = attack(Numbers, 0.5)
    assert not coverage.empty()
    assert coverage.cases == coverage.right.total() + coverage.refused.total()
    assert set(coverage.reasons.values()) == {"too small"}
    assert coverage.table().split()[:3] == ["a", "b", "c"]


def test_the_same_seed_draws_the_same_cases():
    scripts = []
    for seed in (3, 3, 4):
        drawn = DrawnCalls([])
        attack(drawn, 600.0, seed=seed, rounds=1)
        scripts.append(drawn.scripts)
    assert len(scripts[0]) > 30 and scripts[0] == scripts[1] != scripts[2]


@dataclass(frozen=True)
class DrawnCalls:
    """Calls that are written down and not made."""

    scripts: list[str]
    CELLS = calls.CELLS

    def cases(self, cell: Cell) -> st.SearchStrategy[Any]:
        return calls.cases(cell).map(lambda call: DrawnCall(call, self.scripts))


@dataclass(frozen=True)
class DrawnCall:
    call: calls.Call
    scripts: list[str]

    def cells(self) -> list[Cell]:
        return self.call.cells()

    def check(self) -> None:
        self.scripts.append(self.call.script())

    def script(self) -> str:
        return self.call.script()


CASES = {"calls": 100, "caches": 50, "selections": 60, "rings": 20, "hostile": 100}  # seconds
ROUNDS = {"calls": 6, "caches": 2, "selections": 5, "rings": 2, "hostile": 5}  # a minute in all


@pytest.mark.filterwarnings("ignore")  # torch's own kernels warn, once in a process
@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_an_attack_of_some_seconds_finds_nothing(name, is_long):
    kind = import_module(f"fuzz.{name}")
    size = {"rounds": ROUNDS[name]} if is_long else {"rounds": 1, "cases": CASES[name]}
    coverage = attack(kind, 600.0, seed="make test", **size)
    assert coverage.right.total()
