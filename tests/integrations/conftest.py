"""Eager attention in float64 throughout: transformers rounds its softmax to float32.

There, the least float64 is -inf, and a row of padding is NaN, which spreads to the other rows.
"""

import gc
from collections.abc import Iterator

import pytest
import torch
from helpers.full_softmax import in_full
from helpers.ring_workers import workers_of

four = workers_of(4, "session")  # ranks of all tests here that leave them as they were


@pytest.fixture(autouse=True, scope="module")
def older_objects_are_not_looked_through() -> None:
    """Spares a model that gets a config of its own a search of all that modules have imported.

    Looking for the whole model among those 400,000 objects takes longer than most tests' models do.
    A model that a test makes is found as ever.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def softmax_in_full(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.nn.functional, "softmax", in_full)
    yield
