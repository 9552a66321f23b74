"""Memory over many steps of training whose lengths, patterns and batch sizes change: it stays."""

import multiprocessing

import pytest

from benchmarks import steps_memory

STEPS, EVERY, FIRST = 240, 10, 80
LIMIT = 512 << 10  # of layouts, full before the first step that counts
MOST = 4.0  # megabytes in 1,000 steps


@pytest.fixture(autouse=True)
def few_primitives(monkeypatch):
    """Primitives: oneDNN keeps one for each shape: that is growth, and not ours."""
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")


def growth(limit: int) -> tuple[float, float]:
    """(megabytes in 1,000 steps of what malloc has handed out, bytes of the cache at its end)."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        rows = pool.apply(steps_memory.trained, (True, STEPS, EVERY, limit))
    slope, bound = steps_memory.trend(rows, "handed_out_mb", FIRST)
    return slope - bound, rows[-1]["layout_cache_mb"]


@pytest.mark.slow
def test_what_is_handed_out_does_not_grow_from_step_to_step():
    slope, held = growth(LIMIT)
    assert slope < MOST
    assert held <= LIMIT / 1e6


@pytest.mark.slow
def test_the_criterion_sees_layouts_that_are_never_dropped():
    slope, held = growth(1 << 40)
    assert slope > 2 * MOST
    assert held > 4 * LIMIT / 1e6


def test_a_trend_is_the_slope_of_a_line_within_its_bound():
    rows = [{"step": n, "x": 3.0 + 0.002 * n + 0.1 * (-1) ** n} for n in range(50, 1001, 50)]
    slope, bound = steps_memory.trend(rows, "x", 200)
    assert abs(slope - 2.0) < bound < 0.5
