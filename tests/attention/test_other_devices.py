"""Devices that no test machine has: `gather` keeps to what MPS has, as far as a CPU can show.

MPS has no float64. A mode refuses every operator that makes a float64 tensor, while layouts, which
are made on the CPU, come from the cache. Tensors of FakeTensorMode have a device, but no numbers.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import sparsering as sr
from sparsering.ground.numerics import long_sum_dtype
from sparsering.kernels.gather import chunk_extras
from sparsering.selection import selection_report

PATTERN = sr.LongNet((16, 32), (1, 2)) & sr.Causal()


class NoFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            assert not (isinstance(x, Tensor) and x.dtype == torch.float64), f"{operator}: float64"
        return result


@pytest.fixture
def as_on_mps(monkeypatch):
    """Sums of many terms have the dtype that they have on MPS."""
    monkeypatch.setattr(chunk_extras, "long_sum_dtype", lambda _: long_sum_dtype(MPS))


MPS = torch.device("mps")
EXTRAS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "softcap": lambda: {"softcap": 5.0},
    "distance_bias": lambda: {"distance_bias": torch.randn(2, 65, requires_grad=True)},
    "block_bias": lambda: {
        "block_bias": torch.randn(1, 1, 9, requires_grad=True),
        "block_size": 16,
    },
    "sink": lambda: {"sink": torch.randn(2, requires_grad=True)},
    "dropout": lambda: {"dropout_p": 0.3, "dropout_seed": 5},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("extra", EXTRAS)
def test_gather_makes_no_float64(as_on_mps, extra, dtype):
    options = EXTRAS[extra]()
    pattern = sr.SlidingWindow(20) if extra == "block_bias" else PATTERN
    if extra == "block_bias":
        count = pattern.layout(64, num_heads=2, block_size=16).num_blocks
        options["block_bias"] = torch.randn(1, 1, count, requires_grad=True)
    args = [torch.randn(1, 2, 64, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    leaves = [*args, *(x for x in options.values() if isinstance(x, Tensor))]
    exact = sr.attention(*args, pattern, backend="gather", **options)  # the layout is kept
    wanted = torch.autograd.grad(exact.float().square().sum(), leaves)
    with NoFloat64():
        out = sr.attention(*args, pattern, backend="gather", **options)
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
    assert torch.equal(out, exact)
    for got, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(
            got, expected, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-4
        )


def test_the_mode_notices_float64():
    with pytest.raises(AssertionError, match="float64"), NoFloat64():
        torch.zeros(3).double()


@pytest.mark.parametrize("backend", [None, "gather", "reference"])
def test_float64_on_mps_is_refused_by_name(backend):
    with FakeTensorMode():
        x = torch.empty(1, 2, 64, 16, dtype=torch.float64, device="mps")
        with pytest.raises(NotImplementedError, match=r"gather|reference") as refused:
            sr.attention(x, x, x, PATTERN, backend=backend)
    assert "MPS has no float64: pass float32, or move the tensors to the CPU" in str(refused.value)


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_gather_is_the_default_and_keeps_device_and_dtype(device):
    with FakeTensorMode():
        x = torch.empty(1, 2, 64, 16, device=device, dtype=torch.bfloat16)
        out, lse = sr.attention(x, x, x, PATTERN, return_lse=True)
    assert out.shape == x.shape and out.dtype == x.dtype and out.device.type == device
    assert lse.shape == x.shape[:3] and lse.dtype == torch.float32 and lse.device.type == device


def test_a_report_on_mps_is_refused_by_name():
    with FakeTensorMode():
        x = torch.empty(1, 2, 64, 16, device="mps")
        table = sr.SelectedBlocks(torch.zeros(1, 2, 4, 1, dtype=torch.int64), 16)
        with pytest.raises(NotImplementedError, match="move the tensors to the CPU"):
            selection_report(x, x, x, table)


def test_sums_are_float64_where_it_surely_is():
    kinds = {
        name: long_sum_dtype(torch.device(name)) for name in ("cpu", "cuda", "meta", "mps", "xpu")
    }
    assert [name for name, dtype in kinds.items() if dtype == torch.float64] == [
        "cpu",
        "cuda",
        "meta",
    ]
