"""The benchmark of spheres agrees with itself, and its record is within the bars of the docs."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import spheres
from benchmarks.measure import distance_of, inputs_of


def test_the_octahedral_grid_covers_the_sphere():
    points, area = spheres.octahedral(24)
    assert len(points) == len(area) == 3168
    torch.testing.assert_close(points.square().sum(1), torch.ones_like(area))
    assert float(area.sum()) == pytest.approx(4 * math.pi, rel=1e-12)
    square = (points.square() * area[:, None]).sum(0)  # Gauss and Legendre are exact here
    torch.testing.assert_close(square, torch.full_like(square, 4 * math.pi / 3))


@pytest.mark.parametrize("backward", [False, True])
def test_a_small_run_agrees_with_itself(backward):
    points, area = spheres.octahedral(8)
    keys = spheres.neighbours(points, 8)
    assert (keys == torch.arange(544)[:, None]).any(1).all()  # each node sees itself
    inputs = list(inputs_of(2, 544, 16))
    exact = spheres.exact(keys, area, inputs, backward)
    for make in spheres.WAYS.values():
        results = spheres.step(make(keys, area), inputs, backward)
        assert len(results) == (4 if backward else 1)
        assert distance_of([x[0, 0] for x in results], exact) < 2e-6


def test_the_record_is_within_the_bars():
    path = Path(__file__).resolve().parents[2] / "benchmarks/records/spheres.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["environment"]["uncommitted_changes"] is False
    rows = {(x["way"], x["heads"], x["backward"]): x for x in record["rows"]}
    assert all(x["nodes"] == 40_320 and x["edges"] == 32 * 40_320 for x in rows.values())
    assert all(x["error"] < 1e-6 for x in rows.values())
    ours, peer = spheres.WAYS
    for backward in (False, True):
        own, dense = (rows[way, spheres.HEADS, backward] for way in (ours, peer))
        assert 5 * own["ms"] < dense["ms"]
        most = rows[ours, spheres.MOST_HEADS, backward]
        assert most["process_mb"] < 1600 < dense["process_mb"]  # no bool of all pairs either
