"""The oracle itself: it must say what was drawn by hand, and be no function of a larger scene."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from oracles.drawings import DRAWINGS, Drawing
from oracles.patterns_oracle import Spec, counts, is_batched, is_mixture, matrix
from oracles.strategies import Scene, cases


@pytest.mark.parametrize("drawn", DRAWINGS, ids=lambda drawn: drawn.behaviour)
def test_oracle_gives_the_drawn_matrix(drawn: Drawing) -> None:
    expected = matrix(drawn.picture)
    batch = expected.shape[0] if is_batched(drawn.spec) else 1
    assert counts(drawn.spec, batch=batch, **drawn.arguments).tolist() == expected.tolist()


def test_drawings_are_read_as_batch_head_query_key() -> None:
    drawn = """
        1 . | 2 .
        . . | 1 1
        . . | . 3
        ---
        . . | . .
        . 1 | . .
        . . | . .
    """
    assert matrix(drawn).tolist() == [
        [[[1, 0], [0, 0], [0, 0]], [[2, 0], [1, 1], [0, 3]]],
        [[[0, 0], [0, 1], [0, 0]], [[0, 0], [0, 0], [0, 0]]],
    ]


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(cases(max_length=40))
def test_masks_count_to_one_and_drawn_scenes_are_legal(case: tuple[Spec, Scene]) -> None:
    spec, scene = case
    dense = counts(spec, batch=scene.batch, **scene.arguments)
    if not is_mixture(spec):
        assert dense.le(1).all()
    if not is_batched(spec):
        assert torch.equal(dense, dense[:1].expand_as(dense))
