"""Where the tests of the Triton kernels run, and how often each case runs there.

On a GPU, `SPARSERING_TEST_DEVICE=cuda pytest tests/kernels/test_triton.py
tests/kernels/test_triton_extras.py` runs every case twice, with equal bits, and once with a
pipeline of one stage, which computes the same. Without the variable, Triton's interpreter runs each
case once.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

ON_GPU = os.environ.get("SPARSERING_TEST_DEVICE") == "cuda"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def checked(
    run: Callable[[], Sequence[Tensor]],
    check: Callable[[Sequence[Tensor]], None],
    *,
    repeated: bool = ON_GPU,
) -> None:
    """Checks the results of a case; where it is repeated, also other runs of it."""
    first = run()
    check(first)
    if not repeated:
        return
    for number, (a, b) in enumerate(zip(first, run(), strict=True)):
        same = torch.equal(*(x.detach().contiguous().flatten().view(torch.uint8) for x in (a, b)))
        assert same, f"result {number} has other bits in a second run"
    with one_stage():
        check(run())


@contextmanager
def one_stage() -> Iterator[None]:
    """Compiles the kernels of calls inside without overlap of loads and products."""
    from sparsering.kernels.triton import call

    usual = call.config_for
    call.config_for = lambda *rest: usual(*rest)._replace(stages=1)
    try:
        yield
    finally:
        call.config_for = usual


def placed(x: Any) -> Any:
    """A tensor on the device of the tests, with its strides; its gradient arrives where x is."""
    away = isinstance(x, Tensor) and x.device.type != DEVICE.type
    return _Placed.apply(x, DEVICE) if away else x


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, device: torch.device) -> Tensor:
        memory = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
        return memory.to(device).as_strided(x.shape, x.stride(), x.storage_offset())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.cpu(), None
