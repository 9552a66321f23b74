"""Launches of Triton kernels: strides, tensor descriptors and compile options."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ground.numerics import power_of_2
from ...ground.streams import capturing
from .configs import Config

_launches: dict[Any, list["Launch"]] = {}  # launches of recent calls, by shapes and options
_REGISTERS = 65536  # of a multiprocessor
_MOST_KINDS = 256  # most kinds of calls (shapes, dtypes, options) whose launches a cache keeps


class Launch:
    """A kernel, its grid, and the arguments that do not change between calls of equal shapes.

    Each call passes the other arguments, and all tensors, by name, or by `names[parameter]`. The
    parameter `x_tiles` gets a TMA descriptor of the call's tensor `x`, or without TMA `x` itself.
    The first run compiles the kernel; later runs launch it without Triton's checks of arguments.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        config: Config | None,
        arguments: Mapping[str, Any],
        **names: str,
    ) -> None:
        self.kernel, self.grid, self.config = kernel, (programs, 1, 1), config
        self.fixed = [arguments.get(name) for name in kernel.arg_names]
        self.places: list[tuple[int, str, Any, int]] = []
        for place, name in enumerate(kernel.arg_names):
            source = names.get(name, name.removesuffix("_tiles"))
            tiles: Any = arguments.get(name)
            if hasattr(tiles, "block_shape"):
                self.places.append((place, source, tiles, tiles.shape[0] - tiles.base.shape[2]))
                tiles.base = self.fixed[place] = None  # else the tensor would stay alive
            elif name not in arguments or isinstance(tiles, Tensor):
                self.places.append((place, source, None, 0))
                self.fixed[place] = None
        self.compiled: Any = None

    def arguments(self, of_call: Mapping[str, Any]) -> list[Any]:
        """Returns all arguments of a call in the order of the kernel's parameters."""
        arguments = self.fixed.copy()
        for place, name, tiles, rows_before in self.places:
            x = of_call[name]
            if tiles is not None:
                shape = [rows_before + x.shape[2], *tiles.shape[1:]]
                _, _, *rest = vars(tiles).values()  # strides, block shape, and options
                x = type(tiles)(x, shape, *rest)
            arguments[place] = x
        return arguments

    def run(self, of_call: Mapping[str, Any]) -> None:
        """Launches the kernel on the current device."""
        arguments = self.arguments(of_call)
        if self.compiled is None:
            self.compiled = self.kernel[self.grid](*arguments, **options(self.config))
        else:
            self.compiled[self.grid](*arguments)


def kept(kind: Any, build: Callable[[], Any], device: torch.device, own: Any = _launches) -> Any:
    """Returns `build()`, or what it returned earlier for an equal `kind`, from the cache `own`.

    During a CUDA graph capture it caches nothing.
    """
    if (found := own.get(kind)) is not None or capturing(device):
        return found or build()  # tables built in a capture are empty until the replay
    if len(own) >= _MOST_KINDS:
        for oldest in list(own)[:1]:
            own.pop(oldest, None)  # no KeyError if another thread removed it
    return own.setdefault(kind, build())


def kinds(named: Mapping[str, Any]) -> list[Any]:
    """Returns arguments as a cache key: tensors by dtype and alignment, other values unchanged."""
    return [(x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x for x in named.values()]


def launch(launches: Iterable[Launch], of_call: Mapping[str, Any], device: torch.device) -> None:
    """Runs kernels one after another on a device, with the tensors and numbers of this call."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for x in launches:
            if x.grid[0]:
                x.run(of_call)


def options(config: Config | None) -> dict[str, Any]:
    """Returns Triton's compile options for a config; {} leaves them to Triton."""
    if config is None:
        return {}
    if config.ping_pong:  # three groups of four warps; the compiler moves registers between them
        return {"num_warps": 4, "maxnreg": _REGISTERS // (3 * 4 * 32) // 8 * 8}
    return {"num_warps": config.warps, "num_stages": config.stages}


def strides(**tensors: Tensor) -> dict[str, int]:
    """Returns NAME_batch, NAME_head and NAME_token: strides of tensors in units of ALIGN elements.

    ALIGN is the number of elements in 16 bytes if it divides all strides, which permits wide loads;
    else it is 1.
    """
    least = max(16 // x.itemsize for x in tensors.values())
    of_tensors = {name: x.stride()[:3] for name, x in tensors.items()}
    unit = 1 if math.gcd(*sum(of_tensors.values(), ())) % least else least
    arguments = {"ALIGN": unit}
    for name, three in of_tensors.items():
        for dim, n in zip(("batch", "head", "token"), three, strict=True):
            arguments[f"{name}_{dim}"] = n // unit
    return arguments


class Matrix(NamedTuple):
    """A tensor [B, H, N, D] as a matrix whose rows are tokens."""

    tiles: Any  # a descriptor of the matrix
    # "batch" and "head" count rows; "side" is the columns between heads if they lie side by side,
    # else 0
    strides: dict[str, int]


def matrix(x: Tensor, rows: int) -> Matrix | None:
    """Views [B, H, N, D] as a matrix, so that TMA reads `rows` tokens; None if TMA cannot."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    batch, heads, tokens, head_dim = x.shape
    of_batch, of_head, of_token, _ = x.stride()
    fits = head_dim == padded(x) and of_token * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0
    if not fits or not tokens or of_token < head_dim or of_batch % of_token:
        return None
    below = of_head % of_token == 0
    if not below and (heads - 1) * of_head + head_dim > of_token:
        return None
    head, side = (of_head // of_token, 0) if below else (0, of_head)
    apart = {"batch": of_batch // of_token, "head": head, "side": side}
    last = (batch - 1) * apart["batch"] + (heads - 1) * apart["head"]
    tiles = TensorDescriptor(x, [last + tokens, of_token], [of_token, 1], [rows, head_dim])
    return Matrix(tiles, apart)


def line(x: Tensor, count: int) -> Any:
    """Returns a TMA descriptor that reads `count` numbers of [B, H, N]; None if TMA cannot."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    batch, heads, tokens = x.shape
    size = (batch - 1) * x.stride(0) + (heads - 1) * x.stride(1) + tokens
    if not tokens or x.data_ptr() % 16 or size >= 1 << 31:
        return None
    return TensorDescriptor(x, [size], [1], [count])


def precision(dtype: torch.dtype) -> str:
    """Returns how tensor cores multiply float32, as Triton's `input_precision`.

    The default is three products of tf32 ("tf32x3"), which are nearly as exact as float32 products,
    for which there are no tensor cores. torch's settings can ask for float32 products ("ieee") or a
    single product of tf32.
    """
    if dtype != torch.float32 or torch.version.hip:
        return "ieee"
    chosen = torch.backends.cuda.matmul.fp32_precision
    return chosen if chosen in ("ieee", "tf32") else "tf32x3"


def padded(x: Tensor) -> int:
    """Returns the head dim that kernels compute with: the next power of two, at least 16."""
    return max(16, power_of_2(x.shape[-1]))


def kind_of(*tensors: Tensor) -> tuple[tuple[Any, ...], ...]:
    """Returns a cache key for tensors: shapes, strides, dtypes and alignment, but no values."""
    return tuple((x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors)


@cache
def processors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU; 4 under Triton's interpreter."""
    if device.type != "cuda":
        return 4  # small, so that small tests cut tiles too
    return torch.cuda.get_device_properties(device).multi_processor_count
