"""Parameters of which `make test` runs some and `make test-all` runs all."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def thinned(step: int, *values: Iterable[Any]) -> list[Any]:
    """Lists all combinations of values; one in `step` is a fast test, the others are slow.

    Those are fast whose indices add up to a multiple of `step`. Each value of a list is in one of
    them if the other lists together have `step` sums of indices.
    """
    return [
        pytest.param(
            *(value for _, value in chosen),
            marks=() if sum(index for index, _ in chosen) % step == 0 else pytest.mark.slow,
        )
        for chosen in itertools.product(*map(list, map(enumerate, values)))
    ]
