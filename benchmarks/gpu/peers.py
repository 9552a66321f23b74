"""Peers of our kernels: FlexAttention, FlashAttention-4, dense cuDNN and dense flash."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparsering as sr
from sparsering.kernels import flash
from sparsering.kernels.flex import kernel_options

from ..flex import block_mask
from .device import DEVICE, GPU, poisoned
from .timing import Call


def ours(args: Sequence[Tensor], pattern: sr.Pattern, block: int) -> Callable[[], Tensor]:
    """Call of our attention with a given block size."""
    return partial(sr.attention, *args, pattern, block_size=block, backend="triton")


def dense(args: Sequence[Tensor]) -> dict[str, Callable[[], Tensor]]:
    """Calls of torch's dense attention, one for each implementation."""
    wanted = {"dense cudnn": SDPBackend.CUDNN_ATTENTION, "dense flash": SDPBackend.FLASH_ATTENTION}
    if not GPU:
        wanted = {"dense": SDPBackend.MATH}

    def run(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*args)

    return {name: partial(run, backend) for name, backend in wanted.items()}


def sparse(
    args: Sequence[Tensor], pattern: sr.Pattern, block: int, flex: "Flex | None"
) -> dict[str, Callable[[], Tensor]]:
    """Calls of FlexAttention, if given, and of FlashAttention-4, if installed."""
    calls: dict[str, Callable[[], Tensor]] = {}
    if flex is not None:
        calls["flex"] = flex.call(args, pattern, block)
    if GPU and not any("missing" in reason for reason in flash.reasons()):
        calls["flash-attn-4"] = partial(
            sr.attention, *args, pattern, block_size=block, backend="flash"
        )
    return calls


class Flex:
    """Compiled FlexAttention on a pattern's own blocks, all of them full.

    One compilation serves all calls of one shape.
    """

    def __init__(self) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.reset()  # dynamo stops compiling after a number of shapes
        self._run: Any = torch.compile(flex_attention, dynamic=False)

    def call(self, args: Sequence[Tensor], pattern: sr.Pattern, block: int) -> Callable[[], Tensor]:
        """Builds the call; its first run builds the mask, before anything is timed."""
        masks: list[Any] = []

        def run() -> Tensor:
            if not masks:
                masks.append(block_mask(args[0], pattern, block))
            options = kernel_options(block, DEVICE)
            out: Tensor = self._run(*args, block_mask=masks[0], kernel_options=options)
            return out

        return run


def flops(heads: int, pairs: float, width: int, backward: bool) -> float:
    """FLOP of the visited pairs of each head: two products forward, five more backward."""
    return (14 if backward else 4) * heads * pairs * width


def checked(name: str, call: Call, check: Callable[[Any], float], errors: dict[str, float]) -> Call:
    """Runs the call, checks its result, stores the error in `errors`, and returns the call."""
    with poisoned() if name.startswith("ours") else contextlib.nullcontext():
        got = call()
    with torch.no_grad():
        errors[name] = check(got)
    return call
