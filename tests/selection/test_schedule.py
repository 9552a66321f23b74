"""Schedules by their definition; the gate against the schedule that does not look."""

import math

import pytest

from sparsering.selection import GatedSchedule, Schedule


def test_linear_between_points_constant_outside_end_inclusive():
    schedule = Schedule(((10, 1.0), (20, 0.5), (40, 0.1)))
    assert [schedule(s) for s in (-5, 0, 10)] == [1.0, 1.0, 1.0]
    assert schedule(15) == 0.75 and schedule(20) == 0.5 and math.isclose(schedule(30), 0.3)
    assert [schedule(s) for s in (40, 41, 10**9)] == [0.1, 0.1, 0.1]


def test_cosine_is_flat_at_both_ends_and_half_way_in_the_middle():
    schedule = Schedule(((0, 1.0), (100, 0.0)), kind="cosine")
    assert schedule(0) == 1.0 and schedule(100) == 0.0 and math.isclose(schedule(50), 0.5)
    assert all(
        math.isclose(schedule(s), 0.5 + 0.5 * math.cos(math.pi * s / 100)) for s in range(100)
    )
    assert 1 - schedule(1) < 3e-4 and schedule(99) < 3e-4


def test_steps_change_at_their_point_not_before():
    schedule = Schedule(((0, 8), (10, 4), (20, 2)), kind="step")
    assert [schedule(s) for s in (-1, 0, 9, 9.999, 10, 19, 20, 21)] == [8, 8, 8, 8, 4, 4, 2, 2]


@pytest.mark.parametrize("kind", ["linear", "cosine", "step"])
def test_of_two_points_at_a_step_the_later_counts_from_there(kind):
    schedule = Schedule(((0, 1.0), (10, 1.0), (10, 0.2), (20, 0.2)), kind)
    assert schedule(9.999) == 1.0 and schedule(10) == 0.2 and schedule(15) == 0.2
    assert Schedule(((5, 1.0), (5, 0.0)), kind)(4) == 1.0
    assert Schedule(((5, 1.0), (5, 0.0)), kind)(5) == 0.0


def test_a_schedule_is_a_value():
    schedule = Schedule(((0, 1), (5, 0)))
    assert (
        schedule == Schedule([[0, 1], [5, 0]]) and len({schedule, Schedule([(0, 1), (5, 0)])}) == 1
    )
    assert Schedule(((3, 0.5),))(0) == Schedule(((3, 0.5),))(9) == 0.5


@pytest.mark.parametrize(
    ("points", "kind", "said"),
    [
        ((), "linear", "at least one"),
        (0.5, "linear", "at least one"),
        ((0, 1.0), "linear", r"written \(\(step, value\),\)"),
        (((0, 1.0, 2.0),), "linear", "finite numbers"),
        (((0, math.nan),), "linear", "finite numbers"),
        (((math.inf, 1.0),), "linear", "finite numbers"),
        ((("0", 1.0),), "linear", "finite numbers"),
        (((5, 1.0), (4, 0.0)), "linear", "step 4 after 5"),
        (((0, 1.0),), "exponential", "linear, cosine, step"),
    ],
)
def test_what_is_no_schedule_is_refused(points, kind, said):
    with pytest.raises(ValueError, match=said):
        Schedule(points, kind)


def test_no_step_is_refused():
    with pytest.raises(ValueError, match="nan"):
        Schedule(((0, 1.0),))(math.nan)


def test_the_gate_moves_where_the_bar_is_reached_then_tells():
    gated = GatedSchedule(Schedule(((0, 1.0), (4, 0.0))), bar=0.9)
    got = [gated.step(metric) for metric in (0.5, 0.9, math.nan, 0.95, 0.2, 1.0, math.inf, 1.0)]
    assert got == [1.0, 0.75, 0.75, 0.5, 0.5, 0.25, 0.0, 0.0] and gated.clock == 5


def test_the_gate_resumes():
    schedule = Schedule(((0, 1.0), (4, 0.0)))
    a, b = GatedSchedule(schedule, 0.9), GatedSchedule(schedule, 0.9)
    a.step(1.0)
    a.step(1.0)
    b.load_state_dict(a.state_dict())
    assert b.step(0.0) == 0.5 and b.step(1.0) == a.step(1.0) == 0.25
    with pytest.raises(ValueError, match="'clock'"):
        b.load_state_dict({"step": 1})
    with pytest.raises(ValueError, match="at least 0"):
        b.load_state_dict({"clock": -1})
    with pytest.raises(ValueError, match="finite"):
        GatedSchedule(schedule, math.nan)


def waits_for_learning(make) -> bool:
    """Whether density stays at 1 through a run of 10,000 steps whose model learns nothing."""
    density = make(Schedule(((0, 1.0), (1000, 0.1))))
    return all(density(metric=0.03) == 1.0 for _ in range(10_000))


def test_a_schedule_by_steps_alone_ends_sparse_whether_or_not_the_model_had_learned():
    class ByStepsAlone:
        """The prior library's schedule, which advances with each call."""

        def __init__(self, schedule):
            self.schedule, self.steps = schedule, 0

        def __call__(self, metric):
            self.steps += 1
            return self.schedule(self.steps)

    def gated(schedule):
        return GatedSchedule(schedule, bar=0.95).step

    assert not waits_for_learning(ByStepsAlone)
    assert waits_for_learning(gated)
    learned = gated(Schedule(((0, 1.0), (1000, 0.1))))
    assert [learned(0.99) for _ in range(1000)][-1] == 0.1
