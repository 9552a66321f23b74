"""Chooses a few cases of a large product of parameters for `make test`; `make test-all` runs all.

Above the `parametrize` decorators of independent axes:

    @pytest.mark.covering(2, keep=[{"backend": "cpu", "dropout": 0.5}])

Each two values of two axes then meet in one of the fast cases; with 1, each value is in one of
them. The cases that agree with an entry of `keep` are fast too. All others are slow. `keep` is for
a case that alone finds a defect (`make mutants`).
"""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from typing import Any

import pytest


@cache
def covering(sizes: tuple[int, ...], strength: int) -> list[tuple[int, ...]]:
    """Lists rows of indices, one index for each axis, in which all of `strength` axes meet.

    Each row is the first that has the most combinations that no row before it has: a greedy choice,
    the same in every run. Axes that are fewer than `strength` give the whole product.
    """
    if strength >= len(sizes):
        return list(itertools.product(*map(range, sizes)))
    groups = list(itertools.combinations(range(len(sizes)), strength))

    def met(row: tuple[int, ...]) -> set[Hashable]:
        return {(group, tuple(row[axis] for axis in group)) for group in groups}

    left = list(itertools.product(*map(range, sizes)))
    missing = set().union(*map(met, left))
    chosen = []
    while missing:
        row = max(left, key=lambda row: len(met(row) & missing))
        missing -= met(row)
        left.remove(row)
        chosen.append(row)
    return chosen


def mark_slow_outside_coverings(items: Iterable[pytest.Item]) -> None:
    """Marks as slow what the `covering` marks of tests leave to `make test-all`."""
    for item in items:
        mark = item.get_closest_marker("covering")
        if mark is not None and not _is_fast(item, *mark.args, **mark.kwargs):
            item.add_marker(pytest.mark.slow)


def _is_fast(item: Any, strength: int, keep: Sequence[dict[str, Any]] = ()) -> bool:
    """Whether the case is of the covering of its test's axes, or agrees with an entry of `keep`.

    A value that is marked slow has no fast case, so it is none of its axis.
    """
    case = item.callspec.params
    if any(all(case[name] == value for name, value in entry.items()) for entry in keep):
        return True
    sizes, row = [], []
    for mark in item.iter_markers("parametrize"):
        names, values = mark.args
        names = [x.strip() for x in names.split(",")] if isinstance(names, str) else names
        fast = [_values(x, len(names)) for x in values if not _is_slow(x)]
        own = [case[name] for name in names]
        places = [i for i, found in enumerate(fast) if all(map(_is_same, found, own))]
        if not places:
            return False
        sizes.append(len(fast))
        row.append(places[0])
    return tuple(row) in covering(tuple(sizes), strength)


def _values(value: Any, count: int) -> Sequence[Any]:
    """Returns the values of all names of a `parametrize`, of one of its entries."""
    if hasattr(value, "values") and hasattr(value, "marks"):
        return value.values
    return [value] if count == 1 else value


def _is_slow(value: object) -> bool:
    return any(mark.name == "slow" for mark in getattr(value, "marks", ()))


def _is_same(a: object, b: object) -> bool:
    """Whether a and b are one object, or equal numbers, which a range makes again each time."""
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)
