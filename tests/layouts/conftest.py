"""A layout cache of its own for each test that asks for it."""

from collections.abc import Iterator

import pytest

import sparsering as sr


@pytest.fixture
def empty_cache() -> Iterator[None]:
    """Give each test a cache of its own, and put the limit back."""
    limit = sr.layout_cache.info().limit
    sr.layout_cache.clear()
    yield
    sr.layout_cache.set_limit(limit)
    sr.layout_cache.clear()
