"""Eager attention in float64 throughout: transformers rounds its softmax to float32.

There, the least float64 is -inf, and a row of padding is NaN, which spreads to the other rows.
"""

import gc
from collections.abc import Iterator

import pytest
import torch
from helpers.ring_workers import workers_of
from torch import Tensor

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
    softmax = torch.nn.functional.softmax

    def in_full(
        x: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, **_: object
    ) -> Tensor:
        return softmax(x, dim=dim, dtype=None if x.dtype == torch.float64 else dtype)

    monkeypatch.setattr(torch.nn.functional, "softmax", in_full)
    yield
