"""Second derivatives of a call on a GPU: torch's operators compute them, and the host never waits.

A call's first derivatives are from Triton kernels. Those of them (`create_graph=True`) are from
`kernels/gather/second_order.py`, whose chunks launch some hundred operators each.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import WINDOW, learnt, rows, steady
from gpu_stub import capturing, gpu
from torch import Tensor

import sparsering as sr

TOKENS, SLOTS = 256, 32


def listed() -> Callable[[], sr.Pattern]:
    chosen = torch.randint(-1, TOKENS, (1, 1, TOKENS, SLOTS), device="cuda")
    return lambda: sr.SelectedBlocks(chosen.clone(), 1) & sr.Causal()


def beside_a_window() -> Callable[[], sr.Pattern]:
    lists = listed()
    return lambda: (lists() | sr.SlidingWindow(31)) & sr.Causal()


def extras() -> dict[str, Any]:
    options = {"distance_bias": torch.zeros(2, 65), "sink": torch.zeros(2)}
    options = {name: x.cuda().requires_grad_() for name, x in options.items()}
    return {**options, "softcap": 30.0, "dropout_p": 0.1, "dropout_seed": 3}


def with_slot_bias() -> dict[str, Any]:
    return {**extras(), "slot_bias": torch.zeros(1, 2, TOKENS, SLOTS).cuda().requires_grad_()}


def masked() -> Callable[[], sr.Pattern]:
    valid = torch.arange(TOKENS, device="cuda") < TOKENS - 10
    return lambda: WINDOW & sr.KeyMask(valid)


TILES = Counter(forward_kernel=1, prepare_kernel=2, query_kernel=2, key_kernel=2)
LISTS = Counter(list_forward_kernel=1, prepare_kernel=2, list_query_kernel=2, list_key_kernel=2)
ROWS = Counter(list_rows_kernel=1)  # lists the keys of a selection without a slot bias, once
# name: (pattern, options, launches of Triton kernels, most operators of torch)
CASES: dict[str, tuple[Callable, Callable[[], dict[str, Any]], Counter, int]] = {
    "tiles": (lambda: lambda: WINDOW, dict, TILES, 450),
    "lists": (listed, dict, LISTS + ROWS, 740),
    "a window beside lists": (beside_a_window, dict, TILES + LISTS + ROWS, 1120),
    "tiles with extras": (masked, extras, TILES + Counter(sum_diagonals_kernel=2), 1940),
    "lists with extras": (
        listed,
        with_slot_bias,
        LISTS + Counter(list_distance_kernel=2),
        3660,
    ),
}


def second_derivatives(pattern: Callable[[], sr.Pattern], options: dict[str, Any]) -> Callable:
    """Returns a call that differentiates a loss of gradients, by query, key, value and biases."""
    args = learnt(*(rows(tokens=TOKENS) for _ in range(3)))
    by = [*args, *(x for x in options.values() if isinstance(x, Tensor))]

    def call() -> tuple[Tensor, ...]:
        out = sr.attention(*args, pattern(), backend="triton", **options)
        first = torch.autograd.grad(out.float().square().sum(), by, create_graph=True)
        return torch.autograd.grad(sum(x.float().square().sum() for x in first), by)

    return call


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in ("tiles", "lists"))) for n in CASES],
)
def test_second_derivatives_wait_for_nothing(capability, name):
    pattern, options, kernels, operators = CASES[name]
    with gpu(capability):
        call = second_derivatives(pattern(), options())
        counts = steady(call, triton=kernels.total(), torch=operators)
        assert Counter(x.kernel for x in counts.launches) == kernels
        with capturing() as capture:
            call()
        assert not capture.surviving()
