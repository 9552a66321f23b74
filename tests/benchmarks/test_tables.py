"""The report's tables: every row has its density, error, spread and peak; what is wrong is none."""

import json
import sys

import pytest
import torch

import sparsering as sr
from benchmarks import tables
from benchmarks.__main__ import main
from benchmarks.measure import Budget
from benchmarks.report.page import TITLES
from benchmarks.tables import TABLES, measure_tables
from benchmarks.tables.measured import DENSE, Case, peak_bytes, rows_of

FIGURES = ("density", "error", "ms", "least_ms", "most_ms", "peak_bytes")


def check_row(row):
    if "left_out" in row:
        assert row["left_out"]
    elif row.get("known") == "planned":
        assert "ms" not in row and row["density"] > 0
        assert row["received_bytes"] > 0 if "ranks" in row else row["tokens"] > 0
    else:
        assert all(row[name] is not None for name in FIGURES), row
        assert 0 < row["least_ms"] <= row["ms"] <= row["most_ms"]
        assert row["error"] < 0.02 and row["peak_bytes"] > 0
        assert 0 < row["density"] <= 3  # a mixture of three counts a pair up to three times


@pytest.mark.slow
def test_rows_of_calls_side_by_side():
    window = sr.BlockWindow(1, 32)
    own, dense, both = rows_of(
        [
            Case("own", window, 256, heads=2, block_size=32),
            Case("all", sr.Full(), 256, DENSE, heads=2),
            Case("gradients", window, 256, heads=2, block_size=32, backward=True),
        ],
        0.01,
        least=2,
        most=2,
    )
    for row in (own, dense, both):
        check_row(row)
        assert row["rounds"] == 2
    assert own["density"] == pytest.approx((3 * 8 - 2) / 64) and dense["density"] == 1
    assert own["pairs"] == (3 * 8 - 2) * 32**2
    result = 2 * 256 * 64 * 4
    assert own["peak_bytes"] >= result and both["peak_bytes"] >= 4 * result  # with three gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_peak_holds_the_result_also_where_its_inputs_left_room_behind(dtype):
    case = Case("own", sr.SlidingWindow(63), 4096, dtype=dtype)
    result = 8 * 4096 * 64 * getattr(torch, dtype).itemsize
    assert result <= peak_bytes(case) < 4 * result


@pytest.mark.parametrize("fault", ["zeros", "another head's keys", "no number"])
def test_what_is_wrong_is_no_row(monkeypatch, fault):
    attention = sr.attention

    def faulty(query, key, value, pattern, **options):
        if fault == "another head's keys":
            return attention(query, key.roll(1, 1), value, pattern, **options)
        return attention(query, key, value, pattern, **options) * (
            0 if fault == "zeros" else torch.nan
        )

    monkeypatch.setattr(tables.measured, "attention", faulty)
    with pytest.raises(RuntimeError, match="the timed function"):
        rows_of([Case("own", sr.Causal(), 256, heads=2)], 0.01)


def test_gradients_that_are_wrong_are_no_row(monkeypatch):
    right = tables.measured.call_of

    def halved(case, inputs):
        call = right(case, inputs)
        if not inputs[0].requires_grad:
            return call
        return lambda: call().detach() + 0 * sum(x.sum() for x in inputs)

    monkeypatch.setattr(tables.measured, "call_of", halved)
    with pytest.raises(RuntimeError, match="the timed gradients are wrong"):
        rows_of([Case("own", sr.Causal(), 64, heads=1, backward=True)], 0.01)


def test_a_failed_table_is_recorded_and_tried_again_and_a_whole_one_is_kept(monkeypatch, tmp_path):
    runs = []

    def measured(quick: bool, budget: Budget):
        runs.append(quick)
        if len(runs) == 2:
            raise RuntimeError("the timed function returned zeros")
        return [{"call": "a", "run": len(runs)}]

    monkeypatch.setattr(tables, "TABLES", {"one": (measured, 0.5), "two": (measured, 0.5)})
    said = []
    found = measure_tables(tmp_path, quick=True, say=said.append)
    assert found["two"]["failed"] == "RuntimeError: the timed function returned zeros"
    assert "rows" not in json.loads((tmp_path / "two.json").read_text())
    again = measure_tables(tmp_path, quick=True, say=said.append)
    assert again["one"] == found["one"] and again["two"]["rows"] == [{"call": "a", "run": 3}]
    assert again["one"]["environment"]["commit"] and said[2] == "one: on record"
    (tmp_path / "one.json").write_text("{")
    measure_tables(tmp_path, quick=True, say=said.append)
    measure_tables(tmp_path, say=said.append)  # a trial run is no record of a true one
    assert runs == [True] * 4 + [False] * 2


def test_shares_of_the_time_are_those_of_one_whole():
    assert sum(share for _, share in TABLES.values()) == pytest.approx(1)
    assert set(TITLES) == {*TABLES, "memory"}  # which is drawn of the rows of lengths


@pytest.mark.slow
def test_a_trial_run_of_the_whole_report(tmp_path):
    assert main(["report", "--quick", "--out", str(tmp_path)]) == 0
    for name in TABLES:
        record = json.loads((tmp_path / f"{name}.json").read_text())
        assert record["quick"] and record["environment"]["torch"] == torch.__version__
        assert record["rows"], name
        for row in record["rows"]:
            check_row(row)
    page = (tmp_path / "index.html").read_text()
    assert "its figures mean nothing" in page and page.count("<img ") > 12
    before = {name: (tmp_path / f"{name}.json").stat().st_mtime_ns for name in TABLES}
    assert main(["report", "--quick", "--out", str(tmp_path)]) == 2  # it is finished
    (tmp_path / "index.html").unlink()
    assert main(["report", "--quick", "--out", str(tmp_path)]) == 0
    assert before == {name: (tmp_path / f"{name}.json").stat().st_mtime_ns for name in TABLES}


def test_a_disturbed_row_is_measured_again(monkeypatch):
    measured: list[list[str]] = []

    def rows_of(cases, seconds, rows):
        measured.append([case.call for case in cases])
        disturbed = len(measured) == 2
        return [
            {"call": x.call, "pairs": x.tokens, "ms": x.tokens * (9.0 if disturbed else 1.0)}
            for x in cases
        ]

    module = sys.modules["benchmarks.tables.lengths"]  # the folder exports a function of its name
    monkeypatch.setattr(module, "rows_of", rows_of)
    rows = module.lengths(True, Budget(1e9))
    assert all(row["ms"] == row["pairs"] for row in rows)
    names = list(module.patterns())
    assert measured == [names, names, *([name] for name in names)]
