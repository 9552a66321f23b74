"""Backends that a test of attention runs on, one after the other."""

from collections.abc import Iterator

import pytest
import torch
from each_backend import below_float64


@pytest.fixture(params=["gather", "cpu"])
def each_cpu_backend(request) -> Iterator[str]:
    """Below float64, `attend` runs on this backend."""
    with below_float64(request.param):
        yield request.param


@pytest.fixture(params=["gather", "cpu", "triton"])
def each_backend(request) -> Iterator[str]:
    """Below float64, `attend` runs on this backend. Triton's kernels are interpreted: slow."""
    dtype = request.getfixturevalue("dtype") if "dtype" in request.fixturenames else torch.float32
    if request.param == "triton" and dtype not in (torch.float32, torch.float16):
        pytest.skip("the backend does not run in this dtype here")
    with below_float64(request.param):
        yield request.param
