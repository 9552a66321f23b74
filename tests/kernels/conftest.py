"""How kernels cut their work, and which ones Triton launches."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from exactness import SWEEPS
from helpers.device_runs import ON_GPU

import sparsering as sr


@pytest.fixture(params=SWEEPS)
def sweep(request, monkeypatch) -> str:
    """How the CPU kernel sums dK and dV."""
    most = float("inf") if request.param == "by head" else 0
    monkeypatch.setattr("sparsering.kernels.cpu.call._MOST_REPEATED_WORK", most)
    return request.param


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


@pytest.fixture
def bfloat16_products(monkeypatch) -> None:
    """Triton's interpreter computes in bfloat16 as a GPU does.

    It stores bfloat16 as integers, which its products multiply as such, and it rounds by cutting
    bits off. Here products are of float32, which holds bfloat16, and torch rounds.
    """
    if ON_GPU:
        return
    from triton import language
    from triton.runtime import interpreter

    from sparsering.kernels.triton import call

    product, converted = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def convert(data, source, target, rounding):
        if (source, target) == (language.float32, language.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(data)).to(torch.bfloat16)
            return rounded.view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (language.bfloat16, language.float32):
            return data.astype(np.uint32) << 16
        return converted(data, source, target, rounding)

    def multiply(builder, a, b, *rest):
        if a.dtype.scalar == language.bfloat16:
            a, b = (builder.cast_impl(x, language.float32) for x in (a, b))
        return product(builder, a, b, *rest)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiply)
    monkeypatch.setattr(call, "_WRONG_INTERPRETED", ())
