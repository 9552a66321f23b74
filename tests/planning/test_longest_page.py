"""docs/longest.md shows what the planner predicts now, and says that nothing was measured."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tabulate_longest() -> Any:
    spec = importlib.util.spec_from_file_location("longest", ROOT / "tools/tabulate_longest.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


TOOL = tabulate_longest()
ROWS = json.loads(TOOL.RECORD.read_text(encoding="utf-8"))["rows"]
# The others take half a minute. GPUs of equal memory differ in their rates alone.
QUICK = [("causal", "H200"), ("window", "L4"), ("LongNet", "B200"), ("random blocks", "A100 80GB")]


def differing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that are not in the record; times may differ in their last digits."""
    places = ("gpu", "name", "backward")
    kept = {tuple(row[x] for x in places): row for row in ROWS}
    return [
        row
        for row in rows
        if row
        != (found := kept[tuple(row[x] for x in places)])
        | {"at_least_seconds": pytest.approx(found["at_least_seconds"], rel=1e-4)}
    ]


def test_the_tables_are_those_of_the_record():
    text = TOOL.PAGE.read_text(encoding="utf-8")
    assert TOOL.page(text, ROWS) == text, "tools/tabulate_longest.py writes the page"
    for change in ({"tokens": 1}, {"at_least_seconds": 1e9}, {"bytes": dict.fromkeys("ab", 1)}):
        assert TOOL.page(text, [{**row, **change} for row in ROWS]) != text
    assert "predictions, not measurements" in text


@pytest.mark.parametrize("backward", [False, True])
def test_the_record_is_what_the_planner_predicts(backward):
    rows = [TOOL.row(name, backward, gpu) for name, gpu in QUICK]
    assert not differing(rows), "tools/tabulate_longest.py predicts again"
    assert differing([row | {"tokens": row["tokens"] + 128} for row in rows]) != []


@pytest.mark.slow
def test_the_whole_record_is_what_the_planner_predicts():
    rows = TOOL.predicted()
    assert len(rows) == len(ROWS)
    assert not differing(rows)
