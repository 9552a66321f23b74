"""The benchmark of spheres agrees with itself, and its record is within the bars of the docs."""

import math

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
