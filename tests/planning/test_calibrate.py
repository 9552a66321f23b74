"""Rates of a machine: fitted, kept in a file, ignored where they cannot be read."""

import json

import pytest
import torch

import sparsering as sr
from sparsering.kernels import tuning_file
from sparsering.patterns.algebra import Frame
from sparsering.planning import calibrate as module
from sparsering.planning.calibrate import _fitted, calibrated, why_not
from sparsering.planning.memory import Call, takes_heads
from sparsering.planning.seconds import KINDS, amounts, parts_of, seconds_of
from sparsering.planning.work import work_of


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning_file, "cache_folder", lambda: tmp_path)
    module._read.cache_clear()
    yield tmp_path
    module._read.cache_clear()


def write(text: str) -> None:
    module._path().write_text(text)
    module._read.cache_clear()


def content(**changes: object) -> str:
    rates = {part: dict.fromkeys(KINDS, 1e-9) for part in ("cpu float32 forward",)}
    told = {"version": 1, "threads": torch.get_num_threads(), "error": 0.1, "rates": rates}
    return json.dumps(told | changes)


def work(tokens: int = 2048, kv_heads: int = 4):
    return work_of(sr.Causal(), Frame.build(tokens, tokens, 4, kv_heads, 0), 128)


def test_without_a_file_there_is_no_calibration_and_one_is_offered():
    assert calibrated() is None
    assert "sparsering calibrate" in why_not()


def test_a_file_is_read_and_used_by_estimate():
    told = sr.estimate(sr.Causal(), tokens=1024, backend="cpu")
    assert told.seconds.known == "uncalibrated" and "calibrate" in told.hint
    write(content())
    told = sr.estimate(sr.Causal(), tokens=1024, backend="cpu")
    found = calibrated()
    assert found is not None and told.seconds.known == "measured here" and not told.hint
    call = Call(1, 64, torch.float32)
    of_work = work_of(sr.Causal(), Frame.build(1024, 1024, 8, 8, 0), told.block_size)
    expected = 1e-9 * sum(amounts("cpu float32 forward", of_work, call))
    assert told.seconds.value == pytest.approx(expected)


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]",
        content(version=0),
        content(threads=4096),
        content(rates={}),
        content(rates={"cpu float32 forward": {"call": 1.0}}),
        content(rates={"cpu float32 forward": dict.fromkeys(KINDS, -1.0)}),
        content(rates={"cpu float32 forward": dict.fromkeys(KINDS, "1")}),
        content(error=float("nan")),
    ],
)
def test_what_is_no_calibration_is_ignored_and_named(text):
    write(text)
    assert calibrated() is None
    assert "cannot be read" in why_not()
    assert sr.estimate(sr.Causal(), tokens=256, backend="cpu").seconds.known == "uncalibrated"


def test_rates_that_made_the_seconds_are_found():
    torch.manual_seed(0)
    rows = torch.rand(40, len(KINDS), dtype=torch.float64) + 0.1
    rates = torch.linspace(0, 2, len(KINDS), dtype=torch.float64)
    found = _fitted(tuple(rows.tolist()), tuple((rows @ rates).tolist()))
    told = rows @ torch.tensor([found[kind] for kind in KINDS], dtype=torch.float64)
    assert ((told / (rows @ rates)) - 1).abs().max() < 0.02
    assert min(found.values()) >= 0


def test_more_work_takes_more_seconds():
    call = Call(1, 64, torch.float32)
    rates = {
        f"cpu float32 {part}": dict.fromkeys(KINDS, 1e-9)
        for part in ("forward", "backward by heads", "backward by tiles")
    }
    short, long = work(1024), work(2048)
    assert seconds_of("cpu", short, call, False, rates) < seconds_of(
        "cpu", long, call, False, rates
    )
    assert seconds_of("cpu", long, call, False, rates) < seconds_of("cpu", long, call, True, rates)


def test_parts_follow_how_the_kernel_shares_its_work(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    call = Call(1, 64, torch.float32)
    assert takes_heads(work(kv_heads=4), call) and not takes_heads(work(kv_heads=1), call)
    assert parts_of("cpu", work(kv_heads=1), call, True)[1] == "cpu float32 backward by tiles"
    assert parts_of("cpu", work(kv_heads=4), call, True)[1] == "cpu float32 backward by heads"


@pytest.mark.slow
def test_calibrate_measures_and_keeps_what_calibrated_reads(cache):
    found, path = module.calibrate()
    assert path.parent == cache and calibrated() == found
    assert found.error < 1 and all(min(rates.values()) >= 0 for rates in found.rates.values())
