"""Kernel arguments for the extras of a call, and buffers for a distance bias's gradient.

Kernels take an argument for every extra; a placeholder stands for one that is not in use.
"""

from typing import Any

import torch
from torch import Tensor

from ...coordinates import CoordinateBias
from ...ground.dropout import threshold
from ..problem import Problem
from .configs import Config
from .launch import Launch, launch, power_of_2, processors
from .walk import Walk

DIAGONALS = ("diagonals", "ends", "diagonal_start")  # buffers for sums of dS along diagonals
PLACES = ("query_coords", "key_coords", "slopes")  # `Problem.laid_coordinates`, for kernels
PLACE_GRADIENTS = ("grad_places", "piece_places")
_FAR = 1 << 30  # a distance beyond every table
_LINES, _DISTANCES = 16, 256  # of `sum_diagonals_kernel`: lines per step, distances per program
_PROGRAMS = 8  # programs of `sum_diagonals_kernel` per multiprocessor
_MOST_SPLITS = 64  # most partial gradients per head, which `add_diagonals` adds up
_DIAGONAL_BYTES = 1 << 28  # limit in bytes of the DIAGONALS buffers, unless one kv head needs more


def arguments(
    problem: Problem, number: int, w: Walk, first_head: int, *, by_key: bool
) -> dict[str, Any]:
    """Returns the kernel arguments of a pass for extras such as softcap, in use or not."""
    p, table, mask = problem.layout.passes[number], problem.distance_bias, problem.key_mask
    seed = problem.dropout_seed if problem.dropout_p else None
    own = w.stream if by_key else p.stream
    stream = w.units if seed is None or own is None else own
    absent = {"bias", "distance_bias", "key_mask", "seed", "tile_origin", *PLACES}
    absent -= of_call(problem, number, w, by_key=by_key).keys()
    return {
        **dict.fromkeys((*absent, "grad_bias", *DIAGONALS, *PLACE_GRADIENTS), w.units),
        **(_NO_PLACES if problem.coordinate_bias is None else _of_places(problem.coordinate_bias)),
        "LEARNS_PLACES": problem.coordinate_bias is not None and bool(problem.captured),
        "first_head": first_head,
        "CAPPED": problem.softcap is not None, "cap": problem.softcap or 1.0,
        "DISTANCES": table is not None,
        "LEARNS_DISTANCES": table is not None and problem.learns_distances,
        "distance_batch": 0 if table is None else table.stride(0),
        "distance_head": 0 if table is None else table.stride(1),
        "reach": 0 if table is None else table.shape[2] // 2, "KEYS_MASKED": mask is not None,
        "mask_batch": 0 if mask is None or len(mask) == 1 else mask.shape[1],
        "DROPPING": seed is not None, "STREAMS": stream is own,
        "seed_batch": 0 if seed is None else seed.shape[1], "dropout_stream": stream.contiguous(),
        "branch": p.branch, "least": threshold(problem.dropout_p or 0.0),
        "kept_scale": 1 / (1 - (problem.dropout_p or 0.0)),
        "origin": w.start if w.origin is None else w.origin,
        "depth_shift": w.units if w.shift is None else w.shift, "BY_DEPTH": w.shift is not None,
        "origin_shift": problem.layout.frame.q_start if by_key and p.query_origin is None else 0,
    }  # fmt: skip


_SIDES = ("query", "key")
_NO_PLACES = {
    **dict.fromkeys([f"{side}_place_{what}" for side in _SIDES for what in ("batch", "dim")], 0),
    **dict.fromkeys(("DIMS", "LOW", "place_batch", "place_head"), 0),
    "PLACE_WIDTH": 1,
}
"""What `_of_places` returns of a call without a coordinate bias."""


def _of_places(bias: CoordinateBias) -> dict[str, int]:
    """Returns the sizes and strides of a coordinate bias, whose tensors are laid."""
    found = {"place_batch": 0, "place_head": 0}
    for name, x in zip(_SIDES, (bias.query_coords, bias.coords), strict=True):
        several, parts, dims, tokens = x.shape
        found[f"{name}_place_batch"] = parts * dims * tokens * (several > 1)
        found[f"{name}_place_dim"] = tokens
        found |= {"DIMS": dims, "LOW": parts == 2, "PLACE_WIDTH": power_of_2(dims + 1)}
    return found


def of_call(problem: Problem, number: int, w: Walk, *, by_key: bool) -> dict[str, Tensor]:
    """Returns the tensors of the extras in use, by kernel argument; they change with each call."""
    table, mask = problem.distance_bias, problem.key_mask
    seed = problem.dropout_seed if problem.dropout_p else None
    tensors = {"bias": problem.block_bias, "distance_bias": table}
    if (bias := problem.coordinate_bias) is not None:
        tensors |= dict(zip(PLACES, (bias.query_coords, bias.coords, bias.slopes), strict=True))
    if mask is not None:
        tensors["key_mask"] = mask.contiguous().view(torch.uint8)
    if seed is not None:
        tensors["seed"] = seed.contiguous()
    if table is not None or seed is not None:
        tiles = problem.layout.passes[number].coordinates(problem.layout.frame.q_start)[by_key]
        tensors["tile_origin"] = tiles.contiguous()
    return {name: x for name, x in tensors.items() if x is not None}


def kv_heads_at_a_time(problem: Problem, config: Config) -> int:
    """Returns for how many kv heads the buffers of a distance bias's gradient fit into memory."""
    layout = problem.layout
    tokens = min(config.rows, power_of_2(layout.block_size))
    parts, steps = (-(-layout.block_size // n) for n in (tokens, config.streamed))
    entries = max((p.key_tile.shape[-1] for p in layout.passes), default=0)
    heads = len(problem.query) * problem.group
    numbers = heads * entries * parts * steps * diagonals_of(tokens, config.streamed)
    return max(1, _DIAGONAL_BYTES // max(1, 4 * numbers))


def diagonals_of(tokens: int, keys: int) -> int:
    """Returns the length of a line: a sum per diagonal of [tokens, keys], padded to `keys`."""
    return ((keys + tokens - 2) // keys + 1) * keys


def room_for_diagonals(
    problem: Problem, w: Walk, rows: dict[str, int], config: Config
) -> dict[str, Tensor]:
    """Allocates the lines of sums (see distances.py), one for each step of `query_kernel`."""
    steps = rows["parts"] * -(-problem.layout.block_size // config.streamed)
    lines = (*problem.query.shape[:2], w.start.shape[2] * steps)
    new = torch.empty(*lines, diagonals_of(rows["TOKENS"], config.streamed), device=w.start.device)
    return {
        "diagonals": new,  # uninitialized, because only written numbers are read
        "ends": new.new_zeros(*lines, 2),
        "diagonal_start": new.new_full(lines, _FAR, dtype=torch.int32),
    }


def add_diagonals(grad: Tensor, made: dict[str, Tensor], step: int) -> None:
    """Adds the sums that kernels wrote into `made` to the gradient [B, heads, 2R + 1]."""
    from .distances import sum_diagonals_kernel

    batch, heads, lines, span = made["diagonals"].shape
    size = grad.shape[2]
    blocks, tables = -(-size // _DISTANCES), batch * heads
    wanted = _PROGRAMS * processors(grad.device) // max(1, tables * blocks)
    splits = max(1, min(wanted, _MOST_SPLITS, -(-lines // _LINES)))
    partial = grad.new_empty(batch, heads, splits, size)
    named = {
        "num_lines": lines, "split_lines": -(-lines // splits),
        "step": step, "reach": size // 2, "splits": splits,
        "SPAN": span, "LINES": _LINES, "DISTANCES": _DISTANCES,
    }  # fmt: skip
    sums = Launch(sum_diagonals_kernel, tables * splits * blocks, None, named)
    launch([sums], {**made, "grad": partial}, grad.device)
    grad += partial.sum(2)
    low, high = made["ends"].sum(2).unbind(-1)
    grad[..., 0] += low
    grad[..., -1] += high
