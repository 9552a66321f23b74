"""Block shapes, warps and stages of each Triton kernel, by GPU, dtype, head dim and tile.

The defaults compile to few or no spilled registers for each generation of GPU. `sparsering tune`
measures similar ones; a call never measures, so its time and bits do not depend on chance.
"""

import contextlib
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...ground.numerics import power_of_2
from ..tuning_file import TuningFile, file_of

KERNELS = ("forward", "query", "key")
KEYS_IN_ORDER = 64  # most keys that a batch-invariant kernel reads per step


class Config(NamedTuple):
    """Options by which a kernel is compiled and launched."""

    rows: int  # tokens (times packed heads) of the tile that a program keeps
    streamed: int  # tokens that a program reads per step
    warps: int  # Triton's num_warps
    stages: int  # Triton's num_stages
    tma: bool = False  # load streamed tensors through tensor descriptors, if they permit it
    warp_specialize: bool = False  # split loading and computing between warps, if Triton can
    masked: int = 0  # tokens read per step in tile pairs with a mask; 0 stands for `streamed`
    ping_pong: bool = False  # run the forward by ping_pong.py where that can; only tuning asks it


# By generation and kernel, for head dims up to 64, 128 and 256: rows, streamed, warps, stages and,
# if given, masked. Chosen by the registers and shared memory that `ptxas` reports, not by timings.
_HALF = {
    (80, "forward"): ((128, 64, 8, 3), (128, 32, 8, 3), (64, 32, 8, 2)),
    (80, "query"): ((128, 64, 8, 3, 32), (64, 64, 8, 3), (64, 32, 8, 2)),
    (80, "key"): ((64, 32, 4, 3), (64, 64, 8, 3), (64, 32, 8, 2)),
    (90, "forward"): ((128, 64, 8, 3, 32), (128, 128, 8, 3, 64), (128, 32, 8, 2, 16)),
    (90, "query"): ((128, 128, 8, 3, 64), (128, 64, 8, 3, 32), (64, 32, 8, 2, 16)),
    (90, "key"): ((128, 128, 8, 2, 32), (128, 64, 8, 3, 32), (64, 64, 8, 2, 32)),
    (100, "forward"): ((128, 128, 8, 2, 64), (128, 128, 8, 2, 32), (128, 32, 8, 2)),
    (100, "query"): ((128, 128, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2)),
    (100, "key"): ((128, 64, 8, 3), (64, 64, 8, 2), (64, 32, 8, 2)),
}
_WIDE = {  # for head dims up to 512: sums for 64 rows would leave too few registers
    (80, "forward"): (32, 32, 8, 2),
    (80, "query"): (32, 32, 8, 2),
    (80, "key"): (16, 32, 8, 3),
    (90, "forward"): (32, 64, 8, 2, 32),
    (90, "query"): (32, 64, 8, 2),
    (90, "key"): (16, 64, 8, 2, 32),
}
_SINGLE = {  # for float32, by generation, for every kernel; products use tf32x3
    80: ((32, 32, 8, 2), (16, 32, 8, 2), (16, 16, 8, 2)),
    90: ((64, 32, 8, 2), (16, 32, 8, 2), (16, 16, 8, 2)),
}
# For `candidates`, by head dim: keys per step, stages and keys per step under a mask, of which
# `ping_pong_kernel` spills no register.
_PING_PONG = {64: ((128, 2, 64), (128, 3, 64)), 128: ((128, 2, 32), (64, 4, 32))}


def config_for(
    kernel: str, like: Tensor, head_dim: int, tile: int, packed: int = 0, heads: int = 1
) -> Config:
    """Returns the config that `sparsering tune` measured for such calls, else the default.

    `head_dim` is max(D, Dv), `tile` the block size and `packed` the result of `call.packed_rows`.
    A program of dK and dV loops over `heads` query heads.
    """
    tuned, shape = measured.choices(like.device)["configs"], (head_dim, tile, packed)
    if tuned and (found := tuned.get(config_key(kernel, like.dtype, *shape))) is not None:
        return Config(*found)
    chosen = default(kernel, like.dtype, like.device, *shape)
    by_pointers = 128 < head_dim < 256 and like.itemsize < 4 and generation(like.device) == 90
    if heads > 1 and by_pointers:  # 64 queries a step would spill many registers in the loop
        return chosen._replace(streamed=min(32, chosen.streamed), masked=0)
    return chosen


@cache
def default(
    kernel: str, dtype: torch.dtype, device: torch.device, head_dim: int, tile: int, packed: int = 0
) -> Config:
    """Returns the default config, from the tables above, for calls without a measured one."""
    size = sum(head_dim > most for most in (64, 128, 256))
    gpu = generation(device)
    if dtype.itemsize == 4:
        shape: tuple[int, ...] = _SINGLE[min(gpu, 90)][min(size, 2)]
    else:
        shape = _HALF[gpu, kernel][size] if size < 3 else _WIDE[min(gpu, 90), kernel]
    rows, streamed, warps, stages, *masked = shape
    if gpu == 90 and kernel == "forward" and head_dim & (head_dim - 1):
        streamed = min(streamed, 64)  # TMA needs a power of two; pointers take more registers
    tma = gpu >= 90 and dtype.itemsize < 4 and size < 3  # pointers spill less for wide heads
    chosen = Config(
        rows=rows,
        streamed=streamed,
        warps=warps,
        stages=stages,
        tma=tma,
        masked=masked[0] if masked else 0,
    )
    return _fitted(kernel, chosen, dtype, device, head_dim, tile, packed)


@cache
def in_order(kernel: str, dtype: torch.dtype, device: torch.device, head_dim: int) -> Config:
    """Returns a config that neither a call's tiles nor a tuning file can change.

    All steps read equally many tokens, so the order of a row's sums does not depend on which of
    them need a mask. TMA is off, because steps with a mask cannot use it.

    With a key mask, wide heads take one more step of shared memory. A row that a mask leaves alone
    has the bits of a call without it, so there is room for it in every call.
    """
    chosen = default(kernel, dtype, device, head_dim, KEYS_IN_ORDER)
    step = min(chosen.masked or chosen.streamed, KEYS_IN_ORDER)
    chosen = chosen._replace(streamed=step, masked=0, tma=False, warp_specialize=False)
    if head_dim <= 256:
        return chosen
    width = power_of_2(head_dim)
    while chosen.rows > 16 or chosen.streamed > 16:
        more = chosen._replace(stages=chosen.stages + (kernel != "key"))
        needed = _shared_bytes(kernel, more, 80, width) * dtype.itemsize
        if needed + 12 * chosen.rows * chosen.streamed <= shared_memory(device):  # and of options
            break
        name = "rows" if chosen.rows > 16 and chosen.rows >= chosen.streamed else "streamed"
        chosen = chosen._replace(**{name: getattr(chosen, name) // 2})
    return chosen


def candidates(
    kernel: str, like: Tensor, head_dim: int, tile: int, packed: int = 0, *, ping_pong: bool = False
) -> Iterator[Config]:
    """Yields the default config and similar ones, for `tune` to measure.

    With `ping_pong`, also those of `ping_pong_kernel` where it runs.
    """
    base = default(kernel, like.dtype, like.device, head_dim, tile, packed)
    near = [
        base,
        base._replace(streamed=base.streamed * 2),
        base._replace(streamed=base.streamed // 2),
        base._replace(streamed=base.streamed // 2, stages=base.stages + 1),
        base._replace(rows=base.rows // 2),
        base._replace(rows=base.rows // 2, warps=base.warps // 2),
        base._replace(warps=12 - base.warps),
        base._replace(stages=base.stages + 1),
        base._replace(stages=max(2, base.stages - 1)),
    ]
    if base.tma:
        near.append(base._replace(tma=False))
    if generation(like.device) == 100 and kernel == "forward":
        near.append(base._replace(warps=4, warp_specialize=True))
    whole = tile == 128 and packed <= tile and head_dim in _PING_PONG
    if ping_pong and kernel == "forward" and whole:
        for streamed, stages, masked in _PING_PONG[head_dim]:
            own = Config(128, streamed, base.warps, stages, base.tma, masked=masked, ping_pong=True)
            if takes_ping_pong(own, like, head_dim):
                near.append(own)
    large = (c for c in near if c.streamed >= 16 and c.rows >= 16)
    shape = like.dtype, like.device, head_dim, tile, packed
    yield from dict.fromkeys(_fitted(kernel, c, *shape) for c in large)


@contextlib.contextmanager
def trial(configs: dict[str, Config], device: torch.device) -> Iterator[None]:
    """Replaces measured configs inside the `with` block, so that `tune` can time others."""
    known = measured.choices(device)["configs"]
    before = dict(known)
    known |= configs
    try:
        yield
    finally:
        known.clear()
        known |= before


@cache
def generation(device: torch.device) -> int:
    """Returns a GPU's generation: 90 (Hopper), 100 (data center Blackwell), 80 (all others)."""
    if device.type != "cuda" or torch.version.hip:
        return 80
    return {9: 90, 10: 100}.get(torch.cuda.get_device_capability(device)[0], 80)


def _fitted(
    kernel: str,
    chosen: Config,
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int,
    tile: int,
    packed: int,
) -> Config:
    """Shrinks a config until it fits the tile and the GPU's shared memory."""
    most = max(16, power_of_2(tile))
    if most - tile >= 64:  # 160 or 192 tokens take three steps of 64, not one of 256
        most = packed = 64
    rows, streamed = min(chosen.rows, max(most, packed)), min(chosen.streamed, most)
    masked = min(chosen.masked, streamed // 2)
    masked = masked if masked >= 16 else 0
    chosen = chosen._replace(rows=rows, streamed=streamed, masked=masked)
    # largest head dim that 4 warps compute; Hopper multiplies with 4 warps at once (a warpgroup)
    narrow = 128 if generation(device) == 90 else 64
    if rows <= 64 and rows * streamed <= 64 * 64 and dtype.itemsize < 4 and head_dim <= narrow:
        chosen = chosen._replace(warps=min(4, chosen.warps))
    while True:
        width = max(16, power_of_2(head_dim))
        needed = _shared_bytes(kernel, chosen, generation(device), width) * dtype.itemsize
        if needed <= shared_memory(device) or chosen.streamed == 16:
            return chosen
        if chosen.stages > 2:
            chosen = chosen._replace(stages=chosen.stages - 1)
        elif head_dim > 256 and chosen.rows > 16:
            chosen = chosen._replace(rows=chosen.rows // 2)
        else:
            chosen = chosen._replace(streamed=chosen.streamed // 2)


def _shared_bytes(kernel: str, config: Config, gpu: int, width: int) -> int:
    """Returns an upper bound of how many numbers a kernel keeps in shared memory.

    The caller multiplies it by the bytes of a number.
    """
    tensors = 1 if kernel == "forward" and gpu <= 90 else 2
    if gpu >= 90 and config.rows >= 64:  # fewer rows are multiplied by the instructions of 8.0
        return (tensors * config.rows + 2 * config.stages * config.streamed) * width
    # This counts `stages - 1` steps of two streamed tensors, and one step's weights. A GPU of
    # capability 8.0 keeps up to 12% less.
    tokens = tensors * config.rows + 2 * (config.stages - 1) * config.streamed
    return tokens * width + config.rows * config.streamed


def takes_ping_pong(config: Config, like: Tensor, head_dim: int) -> bool:
    """Whether `ping_pong_kernel` runs a config on a tensor's GPU, for queries, keys and values."""
    rows = config.rows + 2 * config.stages * config.streamed + 8 * config.masked
    return (
        generation(like.device) == 90
        and like.itemsize == 2
        and head_dim in _PING_PONG
        and config.rows == 128
        and config.streamed in (64, 128)
        and config.masked in (16, 32, 64)
        and config.stages >= 2
        and rows * head_dim * like.itemsize + 16 * config.stages <= shared_memory(like.device)
        and _has_gluon()
    )


@cache
def _has_gluon() -> bool:
    """Whether Triton has the Gluon that ping_pong.py is written in, from version 3.6 on."""
    import triton

    version = tuple(int(x) for x in re.findall(r"\d+", triton.__version__)[:2])
    return version >= (3, 6) and find_spec("triton.experimental.gluon") is not None


@cache
def shared_memory(device: torch.device) -> int:
    """Returns how many bytes of shared memory a program may use, less 2 KiB that Triton needs."""
    if device.type != "cuda":
        return 1 << 20
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", 0) or 64 << 10) - (2 << 10)


def config_key(kernel: str, dtype: torch.dtype, head_dim: int, tile: int, packed: int = 0) -> str:
    """Returns the key of a measured config in the tuning file."""
    key = f"{kernel} {str(dtype).removeprefix('torch.')} head dim {head_dim} block {tile}"
    return key + f" packed {packed}" * (packed > tile)


def _path(device: torch.device) -> Path:
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    return file_of("triton", name, triton.__version__)


measured = TuningFile(_path)
