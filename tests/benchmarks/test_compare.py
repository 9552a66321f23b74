"""`make compare`: the verdict over rounds, and the turns of both revisions."""

import random
from pathlib import Path

import pytest

from benchmarks import compare as module
from benchmarks.compare import MOST_ROUNDS, ROUNDS, SLOWER, compare, is_open, verdict

BASE, HEAD = Path("base"), Path("head")


def test_the_verdict_is_a_median_and_two_standard_errors():
    ratio, noise = verdict([1.0, 1.1, 1.2, 1.3, 9.0])
    assert ratio == 1.2
    assert noise == pytest.approx(2 * 1.2533 * 1.4826 * 0.1 / 5**0.5)


@pytest.mark.parametrize(("ratios", "more"), [([1.0] * 6, False), ([1.2] * 6, False),
                                              ([1.04, 1.2, 1.12, 1.09], True)])  # fmt: skip
def test_more_rounds_are_for_doubt(ratios, more):
    assert is_open(ratios) is more


def machine(monkeypatch, slower: float, seed: int, spread: float = 0.03) -> list[Path]:
    """Makes `measure` draw the times of two cases; the head's second case is slower."""
    draw, asked = random.Random(seed), []

    def measure(folder: Path) -> dict[str, float]:
        asked.append(folder)
        factor = slower if folder == HEAD else 1.0
        return {"one": 5 * draw.gauss(1, spread), "two": 2 * factor * draw.gauss(1, spread)}

    monkeypatch.setattr(module, "measure", measure)
    return asked


def test_a_slow_down_of_15_percent_is_found_and_an_equal_build_is_none(monkeypatch):
    alarms = {1.0: 0, 1.15: 0, 1.25: 0}
    for slower in alarms:
        for seed in range(100):
            machine(monkeypatch, slower, seed)
            one, two = compare(BASE, HEAD)
            assert not one["slower"] and ROUNDS <= two["rounds"] <= MOST_ROUNDS
            assert two["slower"] == (two["ratio"] - two["noise"] > SLOWER)
            alarms[slower] += two["slower"]
    assert alarms[1.0] == 0
    assert alarms[1.15] >= 60  # single rounds differ by 4%
    assert alarms[1.25] == 100


def test_revisions_take_turns(monkeypatch):
    asked = machine(monkeypatch, 1.0, 0, 0.0)
    compare(BASE, HEAD)
    assert asked == [BASE, HEAD, HEAD, BASE] * (ROUNDS // 2)


def test_a_case_that_only_the_head_has_is_left_out_and_one_that_it_lost_is_an_error(monkeypatch):
    times = {BASE: {"one": 1.0}, HEAD: {"one": 1.3, "new": 1.0}}
    monkeypatch.setattr(module, "measure", times.get)
    (row,) = compare(BASE, HEAD)
    assert (row["case"], row["ratio"], row["noise"], row["slower"]) == ("one", 1.3, 0.01, True)
    with pytest.raises(RuntimeError, match="in the other revision alone: new"):
        compare(HEAD, BASE)
