"""Tests on the GPU stub run in a process of their own, which `kernels/test_on_gpu_stub.py` starts.

To run some of them: SPARSERING_TEST_DEVICE=stub pytest tests/on_gpu_stub -k ...
"""

import os
from collections.abc import Iterator

import pytest
import torch

import sparsering as sr

if os.environ.get("SPARSERING_TEST_DEVICE") != "stub":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def hopper() -> Iterator[torch.device]:
    """Makes a stub of compute capability 9.0 the current device, with no layouts yet."""
    from gpu_stub import gpu

    from sparsering.kernels.triton import launch

    launch._launches.clear()
    sr.layout_cache.clear()
    with gpu(90) as device:
        yield device
    sr.layout_cache.clear()
