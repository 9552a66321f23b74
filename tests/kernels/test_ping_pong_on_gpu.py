"""The forward kernel of two warp groups on a Hopper GPU, which no machine of ours has.

SPARSERING_TEST_DEVICE=cuda pytest -x tests/kernels/test_ping_pong_on_gpu.py
"""

import pytest
import torch
from helpers.device_runs import ON_GPU, placed
from oracles.attention_oracle import errors
from torch import Tensor

import sparsering as sr
from sparsering.kernels.triton import call as backend
from sparsering.kernels.triton import launch as triton_launch
from sparsering.kernels.triton.configs import Config

pytestmark = pytest.mark.skipif(
    not ON_GPU or torch.cuda.get_device_capability() != (9, 0), reason="it needs a Hopper GPU"
)

CONFIGS = {
    64: [Config(128, 128, 8, 3, tma=True, masked=64, ping_pong=True)],
    128: [
        Config(128, 128, 8, 2, tma=True, masked=32, ping_pong=True),
        Config(128, 64, 8, 4, tma=True, masked=32, ping_pong=True),
    ],
}
PATTERNS = {
    "causal": (sr.Causal(), 1000, 1000),
    "a window": (sr.SlidingWindow(300), 700, 1500),
    "cut tiles": (sr.Full(), 100, 20000),
    "two branches": ((sr.Causal() & sr.SlidingWindow(40)) + sr.Full(), 1100, 1100),
    "blocks": (sr.RandomBlocks(0.3, 128), 2048, 2048),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", CONFIGS)
@pytest.mark.parametrize("name", PATTERNS)
def test_results_are_those_of_the_plain_kernel(name, width, dtype, monkeypatch):
    pattern, queries, keys = PATTERNS[name]
    sizes = ((2, 4, queries), (2, 2, keys), (2, 2, keys))
    tensors = [torch.randn(*size, width).to(dtype) for size in sizes]
    exact = sr.attention(
        *(x.double() for x in tensors), pattern, backend="reference", return_lse=True
    )
    launched: list[str] = []
    usual = triton_launch.Launch.run
    monkeypatch.setattr(
        triton_launch.Launch,
        "run",
        lambda self, x: launched.append(self.kernel.fn.__name__) or usual(self, x),
    )

    def attend(config: Config) -> list[Tensor]:
        monkeypatch.setattr(backend, "config_for", lambda *rest: config)
        options = {"backend": "triton", "return_lse": True, "block_size": 128}
        return [x.cpu() for x in sr.attention(*map(placed, tensors), pattern, **options)]

    for config in CONFIGS[width]:
        plain = attend(config._replace(ping_pong=False))
        launched.clear()
        first = attend(config)
        assert "ping_pong_kernel" in launched and "forward_kernel" not in launched
        for a, b, c in zip(first, exact, plain, strict=True):
            assert errors(a, b)[1] <= 2 * errors(c, b)[1] + 1e-5
        for _ in range(20):  # a race may need several runs
            assert all(torch.equal(a, b) for a, b in zip(attend(config), first, strict=True))
