"""The harness of the benchmarks: turns, errors that are caught, limits, processes that fail."""

import math
import resource

import pytest
import torch

import sparsering as sr
from benchmarks.measure import (
    distance_of,
    inputs_of,
    interleaved_times,
    of_ranks,
    peak_and_figures,
    sampled_error,
    spread_of,
    within_memory,
)


def test_as_many_rounds_as_the_seconds_allow():
    calls = {"a": lambda: None, "b": lambda: None}
    for seconds, rounds in ((0, 2), (60, 7), (math.inf, 7)):
        times = interleaved_times(calls, 7, seconds=seconds, least=2)
        assert [len(x) for x in times.values()] == [rounds, rounds]


def test_calls_take_turns_after_an_untimed_round_by_a_clock_of_their_own():
    ran = []

    def clock(call):
        ran.append(call())
        return float(len(ran))

    calls = {"a": lambda: "a", "b": lambda: "b"}
    assert interleaved_times(calls, 2, clock=clock) == {"a": [3, 5], "b": [4, 6]}
    assert interleaved_times(calls, 1, clock=clock, warm=True) == {"a": [7], "b": [8]}
    assert ran == ["a", "b"] * 4
    assert spread_of([3.0, 1.0, 8.0]) == {"ms": 3, "least_ms": 1, "most_ms": 8, "rounds": 3}


@pytest.mark.parametrize(
    ("heads", "pattern"),
    [
        (1, sr.RandomBlocks(0.3, 16) & sr.Causal()),
        *((heads, sr.Dilated(32, 2)) for heads in (None, 2, 9)),
    ],
)
def test_errors_of_some_heads_are_those_of_the_definition(heads, pattern):
    query, key, value = inputs_of(6, 64, 16, torch.float64, batch=2, kv_heads=3)
    out = sr.attention(query, key, value, pattern, backend="reference")
    assert sampled_error(out, query, key, value, pattern, heads=heads) < 1e-14
    off = out + 1e-3 * out.abs().max()
    error = sampled_error(off, query, key, value, pattern, rows=64)
    assert error == pytest.approx(1e-3)
    for wrong, said in ((0 * out, "zeros"), (out.roll(1, 2), "is wrong"), (out / 0, "no number")):
        with pytest.raises(RuntimeError, match=said):
            sampled_error(wrong, query, key, value, pattern, heads=heads)


def test_distances_are_relative_and_what_is_no_number_shows():
    one, two = torch.tensor([1.0, 4.0]), torch.tensor([1.0, 2.0])
    assert distance_of([one, two], [two, two]) == 1.0
    assert math.isnan(distance_of([one, one * torch.nan], [two, two]))


def test_what_memory_does_not_hold_is_none_and_the_limit_is_lifted():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert within_memory(64 << 20, lambda: len(bytearray(1 << 20))) == 1 << 20
    assert within_memory(64 << 20, lambda: bytearray(1 << 30)) is None
    assert within_memory(64 << 20, lambda: torch.zeros(1 << 28)) is None
    with pytest.raises(RuntimeError, match="another"):
        within_memory(64 << 20, lambda: (_ for _ in ()).throw(RuntimeError("another")))
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def yields_and_fails():
    yield None
    raise ValueError("no")


def rank_fails(rank, world):
    raise ValueError("no")


@pytest.mark.slow
def test_work_that_fails_is_told():
    with pytest.raises(RuntimeError, match="yields_and_fails"):
        peak_and_figures(yields_and_fails)
    with pytest.raises(Exception, match="rank_fails"):
        of_ranks(rank_fails, 2)
