"""The benchmark of windows over grids agrees with itself, and its record is within its bars."""

import pytest
import torch

import sparsering as sr
from benchmarks import neighbourhoods
from benchmarks.measure import distance_of

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
