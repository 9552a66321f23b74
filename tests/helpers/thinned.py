"""Parameters of which `make test` runs some and `make test-all` runs all."""

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def thinned(step: int, *values: Iterable[Any]) -> list[Any]:
    """Lists all combinations of values; one in `step` is a fast test, the others are slow.

    Those are fast whose indices add up to a multiple of `step`. Each value of a list is in one of
    them if the other lists together have `step` sums of indices.
    """
    numbered = [list(enumerate(some)) for some in values]
    return [
        _parameters((value for _, value in chosen), sum(i for i, _ in chosen) % step == 0)
        for chosen in itertools.product(*numbered)
    ]


def slow_except(fast: Collection[Any], *values: Iterable[Any]) -> list[Any]:
    """Lists all combinations of values; those that `fast` does not contain are slow tests."""
    found = list(itertools.product(*values))
    return [_parameters(x, (x if len(x) > 1 else x[0]) in fast) for x in found]


def _parameters(values: Iterable[Any], is_fast: bool) -> Any:
    return pytest.param(*values, marks=() if is_fast else pytest.mark.slow)
