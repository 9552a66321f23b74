"""The benchmark of windows over grids agrees with itself, and its record is within its bars."""

import json
from pathlib import Path

import pytest
import torch

import sparsering as sr
from benchmarks import neighbourhoods
from benchmarks.measure import distance_of

ROOT = Path(__file__).resolve().parents[2]
SMALL = [((9, 12), (2, 3)), ((5, 6, 7), (1, 0, 2))]


@pytest.mark.parametrize("grid", SMALL)
def test_a_small_run_agrees_with_itself(grid):
    inputs = neighbourhoods.inputs_on(grid)
    right = neighbourhoods.exact(grid, inputs, True)
    for make in (neighbourhoods.ours, neighbourhoods.masked):
        found = neighbourhoods.step(make(grid), inputs, True)
        assert distance_of([x[0, 0] for x in found], right) < 1e-5


@pytest.mark.parametrize("grid", SMALL)
def test_masks_are_those_of_the_pattern(grid):
    mask = neighbourhoods.dense_mask(grid)
    assert torch.equal(mask, sr.Neighbourhood(*grid).to_dense(len(mask)).bool().squeeze())


def test_the_record_is_within_its_bars():
    path = ROOT / "benchmarks" / "records" / "neighbourhoods.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["environment"]["uncommitted_changes"] is False
    rows = {(len(r["grid"]), r["way"], r["backward"]): r for r in record["rows"]}
    for dims in (2, 3):
        for backward in (False, True):
            ours = rows[dims, "sparsering", backward]
            dense = rows[dims, "sdpa with a bool mask", backward]
            assert ours["ms"] < dense["ms"] and ours["peak_mb"] < dense["peak_mb"]
            assert ours["error"] < 2e-6 and dense["error"] < 2e-5
        natten = next(r for k, r in rows.items() if k[0] == dims and k[1].startswith("natten"))
        assert natten["error"] < 2e-6 and natten["from_ours"] < 2e-6
