"""Peers of our kernels: FlexAttention, FlashAttention-3 and -4, dense cuDNN and dense flash."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparsering as sr
from sparsering.kernels.backends import reasons_against
from sparsering.kernels.library import flash
from sparsering.route.decision import checked_call

from ..flex import block_mask, kernel_options
from .device import DEVICE, GPU, poisoned
from .timing import Call


def ours(args: Sequence[Tensor], pattern: sr.Pattern, block: int) -> Callable[[], Tensor]:
    """Call of our attention with a given block size."""
    return partial(sr.attention, *args, pattern, block_size=block, backend="triton")


def dense(args: Sequence[Tensor]) -> dict[str, Callable[[], Tensor]]:
    """Calls of torch's dense attention, one for each implementation, and of FlashAttention-3."""
    wanted = {"dense cudnn": SDPBackend.CUDNN_ATTENTION, "dense flash": SDPBackend.FLASH_ATTENTION}
    if not GPU:
        wanted = {"dense": SDPBackend.MATH}
    grouped = args[0].shape[1] != args[1].shape[1]

    def run(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*args, enable_gqa=grouped)

    calls = {name: partial(run, backend) for name, backend in wanted.items()}
    return calls | {f"dense {name}": call for name, call in flash_3(args).items()}


def flash_3(args: Sequence[Tensor], window: int | None = None) -> dict[str, Callable[[], Tensor]]:
    """A call of FlashAttention-3, dense or in a causal window, if it is installed."""
    if not GPU or find_spec("flash_attn_interface") is None:
        return {}

    def run() -> Tensor:
        from flash_attn_interface import flash_attn_func

        options = {} if window is None else {"causal": True, "window_size": (window, 0)}
        result = flash_attn_func(*(x.transpose(1, 2) for x in args), **options)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out.transpose(1, 2)

    return {"flash-attn-3": run}


def sparse(
    args: Sequence[Tensor], pattern: sr.Pattern, block: int, flexes: "dict[str, Flex]"
) -> dict[str, Callable[[], Tensor]]:
    """Calls of FlexAttention in several ways, and of FlashAttention-4, if installed."""
    calls: dict[str, Callable[[], Tensor]] = {
        name: flex.call(args, partial(block_mask, args[0], pattern, block), block)
        for name, flex in flexes.items()
    }
    call = checked_call((args[0], args[1], args[2]), pattern)
    if not reasons_against("flash", call.inputs) and not flash.refuses(call):
        calls["flash-attn-4"] = partial(whole_blocks, args, pattern)
    return calls


def whole_blocks(args: Sequence[Tensor], pattern: sr.Pattern) -> Tensor:
    """Runs FlashAttention-4's block sparsity, forward only: on Hopper its backward was wrong."""
    with torch.no_grad():
        return sr.attention(*args[:3], pattern, backend="flash")


class Flex:
    """Compiled FlexAttention.

    One compilation serves all calls of one shape and one kind of mask. All objects of a case are
    made before the first call, because each makes dynamo forget what it compiled.

    Args:
        mode: of `torch.compile`.
        backend: FlexAttention's own, such as "FLASH"; its kernels take no block sizes of ours.
    """

    def __init__(self, mode: str | None = None, backend: str = "") -> None:
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.reset()  # dynamo stops compiling after a number of shapes
        self._run: Any = torch.compile(flex_attention, dynamic=False, mode=mode)
        self._backend = backend

    def call(
        self, args: Sequence[Tensor], mask: Callable[[], Any], block: int
    ) -> Callable[[], Tensor]:
        """Builds the call; its first run builds the mask, before anything is timed."""
        masks: list[Any] = []
        grouped = args[0].shape[1] != args[1].shape[1]
        options = {"BACKEND": self._backend} if self._backend else kernel_options(block, DEVICE)

        def run() -> Tensor:
            if not masks:
                masks.append(mask())
            out: Tensor = self._run(
                *args, block_mask=masks[0], kernel_options=options, enable_gqa=grouped
            )
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
