"""What a launch of a Triton kernel takes beside its tensors: strides, descriptors, options."""

import contextlib
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...numerics import power_of_2
from .tuning import Config


def launch(kernel: Any, programs: int, config: Config | None, arguments: dict[str, Any]) -> None:
    """Runs a kernel on the arguments that it names."""
    if not programs:
        return
    named = {name: arguments[name] for name in kernel.arg_names}
    device = next(x for x in named.values() if isinstance(x, Tensor)).device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[(programs,)](**named, **options(config))


def options(config: Config | None) -> dict[str, Any]:
    """How a kernel is compiled."""
    return {} if config is None else {"num_warps": config.warps, "num_stages": config.stages}


def strides(**tensors: Tensor) -> dict[str, int]:
    """NAME_batch, NAME_head and NAME_token of each, in units of ALIGN elements.

    ALIGN is 16 bytes if all are multiples of that, so that so much can be loaded at once, else 1.
    """
    least = max(16 // x.itemsize for x in tensors.values())
    of_tensors = {name: x.stride()[:3] for name, x in tensors.items()}
    unit = least if all(n % least == 0 for three in of_tensors.values() for n in three) else 1
    arguments = {"ALIGN": unit}
    for name, three in of_tensors.items():
        for dim, n in zip(("batch", "head", "token"), three, strict=True):
            arguments[f"{name}_{dim}"] = n // unit
    return arguments


class Matrix(NamedTuple):
    """A tensor [B, H, N, D] as a matrix whose rows are tokens.

    Attributes:
        tiles: a descriptor of it.
        strides: "batch" and "head": how many rows apart they are; "side": how many columns apart
            heads are, that lie side by side.
    """

    tiles: Any
    strides: dict[str, int]


def matrix(x: Tensor, rows: int) -> Matrix | None:
    """A tensor [B, H, N, D] as one matrix, tiles of `rows` tokens of a head; None if it is none."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    batch, heads, tokens, head_dim = x.shape
    of_batch, of_head, of_token, _ = x.stride()
    fits = head_dim == padded(x) and of_token * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0
    if not fits or not tokens or of_token < head_dim or of_batch % of_token:
        return None
    below = of_head % of_token == 0
    if not below and (heads - 1) * of_head + head_dim > of_token:
        return None
    apart = {"batch": of_batch // of_token, "head": 0, "side": of_head}
    if below:
        apart |= {"head": of_head // of_token, "side": 0}
    last = (batch - 1) * apart["batch"] + (heads - 1) * apart["head"]
    tiles = TensorDescriptor(x, [last + tokens, of_token], [of_token, 1], [rows, head_dim])
    return Matrix(tiles, apart)


def line(x: Tensor, count: int) -> Any:
    """A descriptor of the memory of [B, H, N] that a program takes `count` numbers of; or None."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    batch, heads, tokens = x.shape
    size = (batch - 1) * x.stride(0) + (heads - 1) * x.stride(1) + tokens
    if not tokens or x.data_ptr() % 16 or size >= 1 << 31:
        return None
    return TensorDescriptor(x, [size], [1], [count])


def precision(dtype: torch.dtype) -> str:
    """How float32 is multiplied: as it is, unless the user allows tf32."""
    if dtype != torch.float32 or torch.version.hip:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def padded(x: Tensor) -> int:
    """The head dim as kernels hold it: a power of two from 16 on."""
    return max(16, power_of_2(x.shape[-1]))


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors that share a launch."""
    if device.type != "cuda":
        return 4  # under the interpreter: few, so that small tests cut tiles too
    return torch.cuda.get_device_properties(device).multi_processor_count
