"""The benchmark of graphs agrees with itself, and its record is within the bars of the docs."""

import json
from pathlib import Path

from benchmarks import graphs

ROOT = Path(__file__).resolve().parents[2]


def test_a_small_run_agrees_with_itself():
    index, graph, inputs = graphs.graph_of(300, 8)
    assert index.shape == (2, 2400) and graph.slot_shape == (1, graphs.HEADS, 300, 8)
    for way in graphs.WAYS:
        found = graphs.errors(graphs.step(way, True, graph, inputs), index, inputs)
        assert found.keys() == {"error_out", "error_query", "error_bias"}


def test_the_record_is_within_the_bars():
    record = json.loads((ROOT / "benchmarks/records/graphs.json").read_text(encoding="utf-8"))
    assert record["environment"]["uncommitted_changes"] is False
    ours, peer = ({r["backward"]: r for r in record["rows"] if r["way"] == w} for w in graphs.WAYS)
    assert ours[True]["points"] == 41_162 and ours[True]["edges"] == 32 * 41_162
    assert ours[True]["process_mb"] < 4000 and ours[True]["ms"] < 5000
    assert ours[True]["peak_mb"] < peer[True]["peak_mb"] / 4
    for row in ours.values():
        assert all(x < 1e-6 for name, x in row.items() if name.startswith("error"))
