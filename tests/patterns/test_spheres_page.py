"""The functions of docs/spheres.md against their definitions, which are loops here."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from helpers.pages import ROOT, blocks
from torch import Tensor

import sparsering as sr

PAGE = blocks((ROOT / "docs" / "spheres.md").read_text(encoding="utf-8"))
OPENINGS = ("def ", "class ", "@sr.register_pattern")


def recipes() -> dict[str, Any]:
    """The functions and classes of the page, without the calls behind them."""
    names: dict[str, Any] = {"sr": sr, "torch": torch, "math": math}
    for block in PAGE:
        for part in block.code.split("\n\n\n"):
            if part.startswith(OPENINGS):
                exec(part, names)
    return names


RECIPES = recipes()


@pytest.mark.parametrize(("rows", "columns", "radius"), [(5, 7, 1), (5, 6, 2), (9, 8, 3)])
def test_windows_go_around_the_globe(rows, columns, radius):
    n = rows * columns
    pairs = torch.zeros(rows, columns, rows, columns, dtype=torch.bool)
    for row, column in product(range(rows), range(columns)):
        first = min(max(row - radius, 0), rows - 1 - 2 * radius)
        for down, right in product(range(2 * radius + 1), range(-radius, radius + 1)):
            pairs[row, column, first + down, (column + right) % columns] = True
    pattern = RECIPES["AroundTheGlobe"](rows, columns, radius)
    assert pattern.to_dense(n)[0].bool().equal(pairs.view(n, n))
    x = torch.randn(3, 1, 1, n, 16, dtype=torch.float64)  # by its layout, which asks candidates
    mask = pairs.view(n, n)
    exact = torch.nn.functional.scaled_dot_product_attention(*x, attn_mask=mask)
    torch.testing.assert_close(sr.attention(*x, pattern), exact)


def test_circles_have_the_points_within_an_angle():
    points = torch.nn.functional.normalize(torch.randn(1500, 3, dtype=torch.float64), dim=1)
    edges = RECIPES["in_circle"](points, points[:40], 0.7)
    expected = [
        [q, k]
        for q, k in product(range(1500), range(40))
        if float(points[q] @ points[k]) >= math.cos(0.7)
    ]
    assert sorted(edges.T.tolist()) == expected


def angles(points: Tensor) -> tuple[Tensor, Tensor]:
    return points[:, 2], torch.atan2(points[:, 1], points[:, 0]) % (2 * math.pi)


def test_healpix_of_twelve_pixels():
    height, turn = angles(RECIPES["healpix"](1))
    expected = torch.tensor([2 / 3, 0, -2 / 3]).repeat_interleave(4)
    torch.testing.assert_close(height, expected, rtol=0, atol=1e-6)
    eighths = torch.tensor([1, 3, 5, 7, 0, 2, 4, 6, 1, 3, 5, 7]) * math.pi / 4
    apart = (turn - eighths + 1).remainder(2 * math.pi) - 1
    torch.testing.assert_close(apart, torch.zeros(12), rtol=0, atol=1e-6)


@pytest.mark.parametrize("side", [2, 4, 8])
def test_healpix_has_rings_and_nested_squares(side):
    points = RECIPES["healpix"](side)
    height, turn = angles(points.double())
    rings: dict[float, list[float]] = {}
    for z, longitude in zip(height.tolist(), turn.tolist(), strict=True):
        rings.setdefault(round(z, 5), []).append(longitude)
    counts = [len(rings[z]) for z in sorted(rings, reverse=True)]
    cap = [4 * i for i in range(1, side)]
    assert counts == [*cap, *[4 * side] * (2 * side + 1), *cap[::-1]]
    for own in rings.values():
        gaps = torch.tensor(sorted(own)).diff()
        torch.testing.assert_close(gaps, torch.full_like(gaps, 2 * math.pi / len(own)))
    parents = RECIPES["healpix"](side // 2)
    own = points.unflatten(0, (-1, 4)).mean(1) @ parents.T
    assert own.argmax(1).equal(torch.arange(len(parents)))  # four in a row are a pixel's parts


def halved(points: Tensor, own: list[int], size: int) -> list[list[int]]:
    """The balls below a set of points, as lists."""
    if len(own) == size:
        return [own]
    places = points[own]
    axis = int((places.amax(0) - places.amin(0)).argmax())
    by = sorted(own, key=lambda i: float(points[i, axis]))
    middle = len(own) // 2
    return halved(points, by[:middle], size) + halved(points, by[middle:], size)


@pytest.mark.parametrize(("points", "size"), [(64, 4), (48, 6), (16, 16)])
def test_balls_are_halves_of_halves(points, size):
    cloud = torch.randn(points, 3)
    order = RECIPES["ball_order"](cloud, size)
    balls = [set(x) for x in order.view(-1, size).tolist()]
    assert balls == [set(x) for x in halved(cloud, list(range(points)), size)]
