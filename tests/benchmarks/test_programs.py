"""The tables of whole programs: operators are in the right part, and ways compute the same."""

import json

import pytest

from benchmarks import programs, unlike_heads


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("sparsering_cpu::forward_laid", "attention"),
        ("sparsering_cpu::table", "layouts"),
        ("sparsering::attention", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::addmm", "products"),
        ("aten::mkldnn_linear", "products"),
        ("aten::mul", "elementwise"),
    ],
)
def test_an_operator_belongs_to_its_part(operator, kind):
    assert programs.kind_of(operator) == kind


@pytest.mark.parametrize(("name", "peer"), [("packed", "SDPA with a mask"), ("qwen3", "sdpa")])
def test_shares_are_of_one_whole_and_ways_agree(name, peer):
    """Two ways differ in their last bits: an error of 0 would say that one of them ran twice."""
    rows = programs.rows(name, quick=True, rounds=1)
    assert [row["way"] for row in rows] == ["sparsering", peer]
    for row in rows:
        assert sum(row[kind] for kind in programs.KINDS) == pytest.approx(1)
        assert row["attention"] > 0
        assert row["products"] > 0
    assert 0 < rows[0]["error"] < 1e-5


def test_times_of_an_earlier_record_stand_beside(tmp_path):
    path, rows = tmp_path / "programs.json", [{"program": "a", "way": way} for way in "xy"]
    old = {"environment": {"commit": "abc"}, "rows": [{"program": "a", "way": "x", "ms": 2.0}]}
    path.write_text(json.dumps(old))
    programs.add_before(rows, path)
    assert [row["before_ms"] for row in rows] == [2.0, None]
    assert {row["before_commit"] for row in rows} == {"abc"}


def test_unlike_heads_agree_with_float64():
    rows = unlike_heads.rows(300, rounds=1)
    assert len(rows) == 6
    by_name = {(row["pattern"], row["store"]): row for row in rows}
    whole, split = by_name["all keys", "float32"], by_name["half of the heads stream", "int8"]
    assert split["bytes"] < whole["bytes"] / 3
    assert whole["error"] < 1e-5 < split["error"]
