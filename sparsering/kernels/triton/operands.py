"""Kernel arguments for some heads of a call: tensors, and the tiles of the layout.

A program keeps one tile and reads ("streams") others, one after another. Streamed tensors are read
by pointers, or on Hopper and later GPUs by descriptors, with which TMA copies whole tiles. Tiles
that need a mask are always read by pointers, because TMA cannot skip rows.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problem import Problem
from . import extra_arguments
from .configs import Config, takes_ping_pong
from .launch import line, matrix, padded, precision
from .walk import Walk

MOST_HEAD_DIM = 512


class HeadGroup(NamedTuple):
    """A problem of some kv heads of a call, with their query heads.

    `_parts` in call.py makes it.
    """

    problem: Problem
    heads: slice
    kv_heads: slice


def of_call(problem: Problem, number: int, w: Walk, *, by_key: bool) -> dict[str, Any]:
    """Returns the arguments of a pass that change from call to call: tensors and lengths."""
    p = problem.layout.passes[number]
    starts, stops = (p.key_start, p.key_stop) if by_key else (p.query_start, p.query_stop)
    return {
        "query": problem.query, "key": problem.key, "value": problem.value,
        "tile_start": starts.contiguous(), "tile_stop": stops.contiguous(),
        "kv_len": problem.key.shape[2],
        "bitmap_row": problem.first_bitmap_rows[number] if problem.first_bitmap_rows else 0,
        **extra_arguments.of_call(problem, number, w, by_key=by_key),
    }  # fmt: skip


def of_inputs(problem: Problem, config: Config) -> dict[str, Any]:
    """Returns the kernel arguments that follow from shapes and options, by name."""
    query, value, bias = problem.query, problem.value, problem.block_bias
    return {
        "HEAD_DIM": query.shape[3], "PADDED_DIM": padded(query),
        "VALUE_DIM": value.shape[3], "PADDED_VALUE_DIM": padded(value),
        "BIASED": bias is not None,
        "bias_batch": 0 if bias is None else bias.stride(0),
        "bias_head": 0 if bias is None else bias.stride(1),
        "num_blocks": 0, "scale": problem.scale, "group": problem.group,
        "all_heads": problem.layout.frame.num_heads, "PRECISION": precision(query.dtype),
        "STAGES": config.stages, "WARP_SPECIALIZE": config.warp_specialize,
    }  # fmt: skip


def of_tiles(
    part: HeadGroup, number: int, w: Walk, config: Config, *, by_key: bool
) -> dict[str, Any]:
    """Returns the kernel arguments for a pass's tiles and work units; key tiles if `by_key`."""
    tile, p = (layout := part.problem.layout).block_size, layout.passes[number]
    starts = p.key_start if by_key else p.query_start
    masked = config.masked or config.streamed
    word = 32 if tile % 32 == 0 and masked >= 32 else 16
    return {
        **w._replace(built=None)._asdict(),
        **extra_arguments.arguments(part.problem, number, w, part.heads.start, by_key=by_key),
        "words": w.bitmaps.contiguous().view(torch.int32 if word == 32 else torch.int16),
        "step": p.step, "num_units": w.units.shape[2], "num_entries": w.start.shape[2],
        "num_cuts": w.cuts.shape[2], "num_tiles": starts.shape[1], "num_slots": w.slots,
        "table_batches": w.units.shape[0], "tables": w.units.shape[1], "axes": len(starts),
        "TILE": tile, "WORD": word, "MASKED": masked, "QUERIES": config.streamed,
        "KEYS": config.rows if by_key else config.streamed, "CUT": p.walked_as is not p,
        "RUNNING": number > 0,
    }  # fmt: skip


def streamed(
    part: HeadGroup,
    number: int,
    config: Config,
    unit: int,
    rows: dict[str, Tensor],
    **tensors: Tensor,
) -> dict[str, Any]:
    """Returns how kernels read `tensors` (and `rows`, a number per token): by TMA or pointers.

    Tensors get TMA descriptors if all of them permit it. A descriptor reads a fixed number of
    consecutive rows, so it needs step 1, tiles that are a multiple of this number, and no masked
    key. Strides are in units of `unit` elements. WIDE is True if offsets need int64.
    """
    layout, mask = part.problem.layout, part.problem.key_mask
    step, tile = layout.passes[number].step, layout.block_size
    reach = max(1, *(x.stride(2) for x in tensors.values()))
    arguments: dict[str, Any] = {"WIDE": tile * step * reach + MOST_HEAD_DIM >= 1 << 31}
    arguments |= {f"{name[0]}_side": 0 for name in tensors}
    masked = "key" in tensors and mask is not None
    if not config.tma or step > 1 or tile % config.streamed or masked:
        return {**arguments, "TMA": False}
    described = {name: matrix(x, config.streamed) for name, x in tensors.items()}
    lines = {f"{name}_tiles": line(x, config.streamed) for name, x in rows.items()}
    if None in (*described.values(), *lines.values()):
        return {**arguments, "TMA": False}
    for name, found in described.items():
        if found is not None:  # always true here, which the type checker cannot see
            side = {"side": found.strides["side"] // unit}
            arguments |= {f"{name[0]}_{what}": n for what, n in (found.strides | side).items()}
            arguments[f"{name}_tiles"] = found.tiles
    return {**arguments, **lines, "TMA": True}


def in_ping_pong(
    problem: Problem, config: Config, arguments: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns how `ping_pong_kernel` reads its tensors, by name; None if it cannot run the call.

    It computes no option of a call. `arguments` are those of `forward_kernel`, which reads keys
    and values by TMA and has whole tiles of 128 queries of one head in a program.
    """
    options = ("BIASED", "CAPPED", "DISTANCES", "DROPPING", "KEYS_MASKED", "DIMS")
    query, head_dim = problem.query, arguments["HEAD_DIM"]
    fits = (
        config.ping_pong
        and not problem.in_order
        and not any(arguments[name] for name in options)
        and arguments["TMA"]
        and arguments["TILE"] == arguments["ROWS"] == arguments["TOKENS"] == 128
        and head_dim == arguments["VALUE_DIM"]
        and arguments["ALIGN"] == 8
        and takes_ping_pong(config, query, head_dim)
    )
    if not fits or (queries := matrix(query, 64)) is None:
        return None
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tiles = {"query_tiles": queries.tiles}
    tiles |= {name: arguments[name] for name in ("key_tiles", "value_tiles")}
    described = {
        name: TensorDescriptor(x.base, x.shape, x.strides, x.block_shape, layout)
        for name, x in tiles.items()
    }
    apart = queries.strides | {"side": queries.strides["side"] // arguments["ALIGN"]}
    return described | {f"q_{what}": n for what, n in apart.items()}
