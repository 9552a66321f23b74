"""Patterns against matrices drawn by hand, and against an oracle in plain Python."""

from typing import Any

import pytest
import torch
from oracles.drawings import DRAWINGS, Drawing
from oracles.every_pattern import expanded
from oracles.patterns_oracle import Spec, build, counts, is_batched, is_mixture, matrix
from oracles.strategies import Scene, cases, examples
from torch import Tensor

import sparsering as sr


def assert_is_matrix(pattern: Any, spec: Spec, arguments: dict[str, Any], expected: Tensor) -> None:
    dense = pattern.to_dense(**arguments)
    assert (dense.dim() == 4) == is_batched(spec)
    if is_mixture(spec):
        assert dense.dtype is not torch.bool
        assert not dense.is_floating_point()
    else:
        assert dense.dtype is torch.bool
    actual = expanded(dense, *expected.shape).to(torch.int64)
    assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("drawn", DRAWINGS, ids=lambda drawn: drawn.behaviour)
def test_pattern_is_the_drawn_matrix(drawn: Drawing) -> None:
    assert_is_matrix(build(drawn.spec), drawn.spec, drawn.arguments, matrix(drawn.picture))


def test_tables_of_an_empty_scene_are_accepted() -> None:
    for shape in ((0, 5), (5, 0), (0, 0)):
        nothing = torch.zeros(shape, dtype=torch.bool)
        assert sr.Dense(nothing).to_dense(*shape).shape == (1, *shape)
        assert (sr.Dense(nothing) + sr.Causal()).to_dense(*shape).sum() == 0
        assert sr.Dense(nothing).layout(*shape, block_size=16).num_pairs == 0


def test_constructors_take_the_keywords_of_the_contract() -> None:
    active = torch.ones(1, 1, dtype=torch.bool)
    assert sr.SlidingWindow(left=3) == sr.SlidingWindow(left=3, right=0, dilation=1)
    assert sr.GlobalTokens(count=2) == sr.GlobalTokens(count=2, rows=True, columns=True)
    assert sr.Dilated(segment_length=4, dilation_rate=2) == sr.Dilated(4, 2, offset="head")
    assert sr.LongNet(segment_lengths=(4, 8), dilation_rates=(1, 2), offset=1) == sr.LongNet(
        (4, 8), (1, 2), 1
    )
    assert sr.BlockDilated(rates=(1,), block_size=16) == sr.BlockDilated((1,), 16)
    assert sr.BlockWindow(radius=1, block_size=16) == sr.BlockWindow(1, 16)
    assert sr.RandomBlocks(density=0.5, block_size=16) == sr.RandomBlocks(
        0.5, 16, seed=0, per_head=True
    )
    assert sr.Hierarchical(levels=((16, 32),), block_size=16) == sr.Hierarchical(((16, 32),), 16)
    assert sr.Documents(lengths=(1, 2)) == sr.Documents((1, 2))
    assert sr.Packed(lengths=(1, 2), pattern=sr.Causal()) == sr.Packed((1, 2), sr.Causal())
    assert sr.KeyPadding(lengths=(1, 2)) == sr.KeyPadding((1, 2))
    assert sr.KeyMask(valid=active) == sr.KeyMask(active)
    assert sr.Blocks(active=active, block_size=16) == sr.Blocks(active, 16)
    assert sr.Dense(mask=active) == sr.Dense(active)


def oracle_of(spec: Spec, scene: Scene) -> Tensor:
    return counts(spec, batch=scene.batch if is_batched(spec) else 1, **scene.arguments)


@examples(50, 250, cases())
def test_pattern_equals_the_oracle(case: tuple[Spec, Scene]) -> None:
    spec, scene = case
    assert_is_matrix(build(spec), spec, scene.arguments, oracle_of(spec, scene))


@examples(8, 40, cases(max_length=260, min_length=71, max_heads=2))
def test_long_pattern_equals_the_oracle(case: tuple[Spec, Scene]) -> None:
    spec, scene = case
    assert_is_matrix(build(spec), spec, scene.arguments, oracle_of(spec, scene))
