"""Measures windows over 2-D and 3-D grids beside a dense mask and FlexAttention.

    python -m benchmarks.neighbourhoods --out benchmarks/records

`neighbourhoods.json`: a grid of 96 x 96 with windows of 13 x 13, and one of 16 x 24 x 24 with
windows of 5 x 7 x 7, 4 heads of 64 channels, float32, forward and with backward. The peers are
`scaled_dot_product_attention` with the mask as a bool tensor [N, N], and compiled FlexAttention
with a `mask_mod` that compares coordinates, which has no backward on a CPU. Masks are made once,
outside of the times; `mask_ms` and `mask_mb` are what they cost. Calls run in turns; peaks are of
fresh processes, beyond inputs and masks. Errors are of one head's output and gradients, all rows,
against float64 in plain torch, each relative to its largest exact number.

Where the package natten is installed, a row `natten` has the error of its own output on smaller
grids: without a GPU it runs unfused, which is no time to compare with.
"""

import argparse
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sparsering as sr

from .measure import (
    Row,
    distance_of,
    give_back_freed,
    gradient_of,
    inputs_of,
    interleaved_times,
    peak_extra_bytes,
    spread_of,
    write_record,
)

HEADS, WIDTH, ROUNDS = 4, 64, 7
Grid = tuple[tuple[int, ...], tuple[int, ...]]  # shape and radius
GRIDS: tuple[Grid, ...] = (((96, 96), (6, 6)), ((16, 24, 24), (2, 3, 3)))
SMALL_GRIDS: tuple[Grid, ...] = (((40, 48), (6, 6)), ((8, 14, 16), (2, 3, 3)))
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def first_keys(coordinate: Tensor, size: int, radius: int) -> Tensor:
    """First key of each query's window in one dim: NATTEN shifts windows inwards at borders."""
    return (coordinate - radius).clamp(0, size - 1 - 2 * radius)


def windows(grid: Grid) -> Tensor:
    """Keys of each query, int64 [N, window]."""
    shape, radius = grid
    keys = torch.zeros(1, 1, dtype=torch.int64)
    for size, reach in zip(shape, radius, strict=True):
        own = first_keys(torch.arange(size), size, reach)[:, None] + torch.arange(2 * reach + 1)
        keys = keys[:, None, :, None] * size + own[None, :, None]  # [before, size, keys, window]
        keys = keys.flatten(2).flatten(0, 1)
    return keys


def dense_mask(grid: Grid) -> Tensor:
    """Returns the pairs that attend, bool [N, N]."""
    keys = windows(grid)
    return torch.zeros(len(keys), len(keys), dtype=torch.bool).scatter_(1, keys, True)


def flex_mask(grid: Grid) -> Any:
    """FlexAttention's BlockMask."""
    from torch.nn.attention.flex_attention import create_block_mask

    shape, radius = grid

    def near(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        inside, stride = q == q, 1
        for size, reach in zip(reversed(shape), reversed(radius), strict=True):
            begin = first_keys(q // stride % size, size, reach)
            key = k // stride % size
            inside = inside & (key >= begin) & (key <= begin + 2 * reach)
            stride *= size
        return inside

    length = torch.Size(shape).numel()
    return create_block_mask(near, None, None, length, length, device="cpu")


def ours(grid: Grid) -> Attend:
    """Attends by the library."""
    return partial(sr.attention, pattern=sr.Neighbourhood(*grid))


def masked(grid: Grid) -> Attend:
    """Attends by sdpa and a bool tensor of all pairs."""
    return partial(F.scaled_dot_product_attention, attn_mask=dense_mask(grid))


def flex(grid: Grid) -> Attend:
    """Attends by compiled FlexAttention."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    return partial(torch.compile(flex_attention), block_mask=flex_mask(grid))


WAYS: dict[str, Callable[[Grid], Attend]] = {
    "sparsering": ours,
    "sdpa with a bool mask": masked,
    "FlexAttention": flex,
}
FORWARD_ONLY = "FlexAttention"  # on a CPU


def step(
    attend: Attend, inputs: list[Tensor], backward: bool, order: Tensor | slice = slice(None)
) -> list[Tensor]:
    """Runs a call; returns out, and with `backward` the gradients of the inputs.

    `order` is that of the tokens in the inputs: the gradient of out is arranged by it, too.
    """
    if not backward:
        with torch.no_grad():
            return [attend(*inputs)]
    leaves = [x.requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient_of(out)[:, :, order])]


def exact(grid: Grid, inputs: list[Tensor], backward: bool, head: int = 0) -> list[Tensor]:
    """Results of one head in float64, [N, D] each, from each query's keys, some rows at a time."""
    leaves = [x[0, head].detach().double().requires_grad_(backward) for x in inputs]
    query, key, value = leaves
    sent = gradient_of(inputs[0])[0, head].double()
    out, grads = torch.zeros_like(query), [torch.zeros_like(x) for x in leaves]
    keys = windows(grid)
    for rows in torch.arange(len(keys)).split(512):
        score = torch.einsum("nd,nkd->nk", query[rows], key[keys[rows]]) * WIDTH**-0.5
        part = torch.einsum("nk,nkd->nd", score.softmax(-1), value[keys[rows]])
        out[rows] = part.detach()
        if backward:
            for total, grad in zip(
                grads, torch.autograd.grad(part, leaves, sent[rows]), strict=True
            ):
                total += grad
    return [out.detach(), *(grads if backward else [])]


def inputs_on(grid: Grid) -> list[Tensor]:
    """Query, key and value [1, H, N, D], the same at every call."""
    return list(inputs_of(HEADS, torch.Size(grid[0]).numel(), WIDTH))


def _in_a_process(way: str, grid: Grid, backward: bool) -> Iterator[None]:
    """Yields before and after the call, whose kernels are built before."""
    attend, inputs = WAYS[way](grid), inputs_on(grid)
    step(attend, inputs, backward)
    give_back_freed()
    yield
    step(attend, inputs, backward)
    yield


def rows(grid: Grid, rounds: int) -> list[Row]:
    """Measures all ways on a grid, forward and with backward."""
    found: list[Row] = []
    inputs, calls, masks = inputs_on(grid), {}, {}
    tokens = inputs[0].shape[2]
    for way, make in WAYS.items():
        begin = time.perf_counter()
        calls[way] = make(grid)
        masks[way] = (time.perf_counter() - begin) * 1e3
    begin = time.perf_counter()
    layout = sr.Neighbourhood(*grid).layout(tokens, num_heads=HEADS)
    masks["sparsering"] = (time.perf_counter() - begin) * 1e3
    pairs = windows(grid).numel()
    for backward in (False, True):
        ways = [way for way in WAYS if not (backward and way == FORWARD_ONLY)]
        results = {way: step(calls[way], inputs, backward) for way in ways}
        right = exact(grid, inputs, backward)
        times = interleaved_times(
            {way: partial(step, calls[way], inputs, backward) for way in ways}, rounds
        )
        for way in ways:
            error = distance_of([x[0, 0] for x in results[way]], right)
            if not error < 1e-4:
                raise RuntimeError(f"{way} is wrong by {error}")
            row: Row = {"way": way, "grid": list(grid[0]), "radius": list(grid[1])}
            row |= {"tokens": tokens, "pairs": pairs, "heads": HEADS, "width": WIDTH}
            row |= {"density": layout.density, "backward": backward, "mask_ms": masks[way]}
            row |= {"mask_mb": tokens**2 / 1e6} if way.startswith("sdpa") else {}
            peak = peak_extra_bytes(_in_a_process, way, grid, backward)
            found.append(row | {"peak_mb": peak / 1e6, **spread_of(times[way]), "error": error})
    return found


def natten_rows(grids: tuple[Grid, ...]) -> list[Row]:
    """Errors of natten's own output, where it is installed."""
    if importlib.util.find_spec("natten") is None:
        return []
    import natten

    found = []
    for grid in grids:
        inputs = inputs_on(grid)
        call = {2: natten.na2d, 3: natten.na3d}[len(grid[0])]
        spread = [x.transpose(1, 2).unflatten(1, grid[0]) for x in inputs]  # [1, *grid, H, D]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = call(*spread, kernel_size=tuple(2 * r + 1 for r in grid[1]))
        out = out.flatten(1, -3).transpose(1, 2)
        right = exact(grid, inputs, False)
        our = step(ours(grid), inputs, False)[0]
        row: Row = {"way": f"natten {natten.__version__}, unfused", "grid": list(grid[0])}
        row |= {"radius": list(grid[1]), "backward": False}
        row |= {"error": distance_of([out[0, 0]], right), "from_ours": distance_of([our], [out])}
        found.append(row)
    return found


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.neighbourhoods", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    for make in WAYS.values():  # builds kernels and imports, which are no mask's cost
        step(make(((9, 9), (1, 1))), inputs_on(((9, 9), (1, 1))), False)
    sr.Neighbourhood((9, 9), 1).layout(81, num_heads=HEADS)
    results = [row for grid in GRIDS for row in rows(grid, arguments.rounds)]
    write_record(arguments.out, "neighbourhoods", results + natten_rows(SMALL_GRIDS))


if __name__ == "__main__":
    main()
