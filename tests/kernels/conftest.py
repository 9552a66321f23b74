"""How the triton backend cuts its work, and which kernels it launches."""

from collections.abc import Iterator

import pytest

import sparsering as sr


@pytest.fixture
def cut_tiles(monkeypatch) -> Iterator[None]:
    """Tiles of more than one entry are cut into pieces."""
    from sparsering.kernels.triton import call, walk

    monkeypatch.setattr(walk, "_LEAST_ENTRIES", 1)
    monkeypatch.setattr(call, "processors", lambda device: 1000)
    sr.layout_cache.clear()
    yield
    sr.layout_cache.clear()


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """Names of the kernels that a test launches, in their order."""
    from sparsering.kernels.triton.launch import Launch

    names, run = [], Launch.run

    def note(launch, of_call) -> None:
        names.append(launch.kernel.fn.__name__)
        run(launch, of_call)

    monkeypatch.setattr(Launch, "run", note)
    return names
