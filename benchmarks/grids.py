"""Measures windows over grids in row-major order and in tiles, beside SDPA in boxes.

    python -m benchmarks.grids --out benchmarks/records

`grids.json`: six grids of 1 to 3 dims with the windows of video decoders, images, and a film that
is causal in time; float32, heads of 64 channels, forward and with backward. The ways:

- `row-major` and `tiles`: `Neighbourhood` in both orders. Tokens are in their order before the
  call, as a model arranges them at its door.
- `sdpa in boxes`: what a user would write. Each box of queries attends, by
  `scaled_dot_product_attention`, to the box of keys that holds their windows, with a mask.
- `FlexAttention`: forward alone (it has no backward on a CPU), row-major, where its mask is built
  in some seconds.

`visited` is the keys that a query computes, on average, in tiles or boxes, and `keys` those that it
sees. Calls run in turns; peaks are of a forward and backward in a fresh process, beyond inputs
and masks. Errors are of 64
rows of a head, of out and of the gradient by query, against float64.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sparsering as sr
from sparsering.patterns.algebra import Frame

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
from .neighbourhoods import step

WIDTH, ROUNDS = 64, 3
BOX = {1: (256,), 2: (16, 16), 3: (4, 8, 8)}  # of queries, for SDPA
Options = dict[str, Any]
# name, heads, arguments of `Neighbourhood`, tile
GRIDS: tuple[tuple[str, int, Options, tuple[int, ...] | None], ...] = (
    ("line of 16,384, window of 257", 2, {"shape": (16384,), "window": 257}, None),
    ("image of 96 x 96, 13 x 13", 2, {"shape": (96, 96), "window": 13}, (12, 6)),
    ("film of 16 x 32 x 32, 3 x 7 x 7", 2, {"shape": (16, 32, 32), "window": (3, 7, 7)}, (2, 6, 6)),
    (
        "film of 16 x 32 x 32, 5 x 7 x 7, causal in time",
        2,
        {"shape": (16, 32, 32), "window": (5, 7, 7), "causal": (True, False, False)},
        (2, 6, 6),
    ),
    ("volume of 24 x 24 x 24, 7 x 7 x 7", 2, {"shape": (24, 24, 24), "window": 7}, (4, 4, 4)),
    ("film of 12 x 64 x 64, 11 x 11 x 11", 1, {"shape": (12, 64, 64), "window": 11}, (5, 5, 5)),
)
FORWARD_ONLY = "FlexAttention"
MOST_FLEX = 9_216  # tokens; its mask costs O(N^2)


class Boxes:
    """Exact attention by SDPA, box of queries after box, each with the box of keys it needs."""

    def __init__(self, options: Options) -> None:
        pattern, shape = sr.Neighbourhood(**options), options["shape"]
        sides = [range(0, n, b) for n, b in zip(shape, BOX[len(shape)], strict=True)]
        places = torch.arange(pattern.own_length).view(shape)
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self.visited = 0
        for corner in product(*sides):
            ends = [min(c + b, n) for c, b, n in zip(corner, BOX[len(shape)], shape, strict=True)]
            query = places[tuple(slice(a, b) for a, b in zip(corner, ends, strict=True))]
            mask, slices = torch.ones((), dtype=torch.bool), []
            for dim, first, end in zip(pattern.dims, corner, ends, strict=True):
                own = torch.arange(first, end)
                low, high = (int(x) for x in dim.reach(own.min(), own.max()))
                seen = dim.holds(own[:, None], torch.arange(low, high + 1))
                mask = mask[..., None, None] & seen
                slices.append(slice(low, high + 1))
            key = places[tuple(slices)]
            dims = range(len(shape))
            mask = mask.permute(*(2 * d for d in dims), *(2 * d + 1 for d in dims))
            mask = mask.reshape(query.numel(), key.numel())
            self.parts.append((query.flatten(), key.flatten(), mask))
            self.visited += query.numel() * key.numel()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        order = torch.cat([q for q, _, _ in self.parts])
        found = [
            F.scaled_dot_product_attention(query[:, :, q], key[:, :, k], value[:, :, k], mask)
            for q, k, mask in self.parts
        ]
        return torch.cat(found, 2)[:, :, order.argsort()]


def flex(options: Options) -> Callable[..., Tensor]:
    """Attends by compiled FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    pattern = sr.Neighbourhood(**options)
    n, dims = pattern.own_length, pattern.dims

    def near(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        inside, rest = q == q, n
        for dim in dims:
            rest //= dim.size
            inside = inside & dim.holds(q // rest % dim.size, k // rest % dim.size)
        return inside

    torch._dynamo.reset()
    mask = create_block_mask(near, None, None, n, n, device="cpu")
    return partial(torch.compile(flex_attention), block_mask=mask)


def ours(options: Options, tile: tuple[int, ...] | None = None) -> Callable[..., Tensor]:
    """Attends by the library."""
    return partial(sr.attention, pattern=sr.Neighbourhood(**options, tile=tile))


def ways_of(number: int) -> dict[str, Callable[[], Callable[..., Tensor]]]:
    """Returns what makes the call of each way on a grid."""
    _, _, options, tile = GRIDS[number]
    ways: dict[str, Callable[[], Callable[..., Tensor]]] = {"row-major": partial(ours, options)}
    if tile is not None:
        ways["tiles"] = partial(ours, options, tile)
    ways["sdpa in boxes"] = partial(Boxes, options)
    if torch.Size(options["shape"]).numel() <= MOST_FLEX:
        ways[FORWARD_ONLY] = partial(flex, options)
    return ways


def order_of(number: int, way: str) -> Tensor:
    """The row-major place of each token in the order that a way takes."""
    _, _, options, tile = GRIDS[number]
    if way == "tiles":
        return sr.GridTiles(options["shape"], tile).order
    return torch.arange(torch.Size(options["shape"]).numel())


def inputs_on(number: int) -> list[Tensor]:
    """Query, key and value [1, H, N, D] in row-major order, the same at every call."""
    _, heads, options, _ = GRIDS[number]
    return list(inputs_of(heads, torch.Size(options["shape"]).numel(), WIDTH))


def exact_rows(number: int, rows: Tensor, backward: bool) -> list[Tensor]:
    """Rows of out and of the gradient by query of head 0, in float64, row-major."""
    pattern = sr.Neighbourhood(**GRIDS[number][2])
    n = pattern.own_length
    whole = inputs_on(number)
    sent = gradient_of(whole[0])[0, 0, rows].double()
    query, key, value = (x[0, 0].double() for x in whole)
    query = query[rows].requires_grad_(backward)
    pairs = pattern.holds(rows[:, None], torch.arange(n), Frame.build(n, n, 1, 1, 0))
    score = (query @ key.T * WIDTH**-0.5).masked_fill(~pairs, -torch.inf)
    out = score.softmax(-1) @ value
    found = [out.detach()]
    if backward:
        found += torch.autograd.grad(out, query, sent)
    return found


def _in_a_process(way: str, number: int, backward: bool) -> Iterator[None]:
    """Yields before and after the call, whose kernels are built before."""
    call, order = ways_of(number)[way](), order_of(number, way)
    inputs = [x[:, :, order].contiguous() for x in inputs_on(number)]
    step(call, inputs, backward, order)
    give_back_freed()
    yield
    step(call, inputs, backward, order)
    yield


def rows_of(number: int, rounds: int) -> list[Row]:
    """Measures all ways on a grid, forward and with backward."""
    name, heads, options, tile = GRIDS[number]
    calls = {way: make() for way, make in ways_of(number).items()}
    orders = {way: order_of(number, way) for way in calls}
    inputs = inputs_on(number)
    arranged = {way: [x[:, :, orders[way]].contiguous() for x in inputs] for way in calls}
    tokens = inputs[0].shape[2]
    some = torch.arange(0, tokens, tokens // 64)
    visited: dict[str, float] = {}
    for way, call in calls.items():
        if isinstance(call, Boxes):
            visited[way] = call.visited / tokens
        elif way != FORWARD_ONLY:
            own = sr.Neighbourhood(**options, tile=tile if way == "tiles" else None)
            visited[way] = visited_keys(own.layout(tokens, num_heads=heads))
            keys = own.layout(tokens, num_heads=heads).num_pairs / tokens
    found: list[Row] = []
    for backward in (False, True):
        ways = [way for way in calls if not (backward and way == FORWARD_ONLY)]
        exact = exact_rows(number, some, backward)
        timed = {
            way: partial(step, calls[way], arranged[way], backward, orders[way]) for way in ways
        }
        errors = {}
        for way in ways:
            places = orders[way].argsort()[some]
            results = timed[way]()[: 1 + backward]
            errors[way] = distance_of([x[0, 0, places] for x in results], exact)
            if not errors[way] < 1e-4:
                raise RuntimeError(f"{way} is wrong by {errors[way]}")
        times = interleaved_times(timed, rounds)
        for way in ways:
            row: Row = {"grid": name, "way": way, "shape": list(options["shape"])}
            row |= {"tile": list(tile) if way == "tiles" and tile else None, "tokens": tokens}
            row |= {"heads": heads, "width": WIDTH, "density": keys / tokens, "keys": keys}
            row |= {"visited": visited.get(way), "backward": backward, "error": errors[way]}
            if backward:
                row["peak_mb"] = peak_extra_bytes(_in_a_process, way, number, backward) / 1e6
            found.append(row | spread_of(times[way]))
    return found


def visited_keys(layout: sr.BlockLayout) -> float:
    """Keys in the tiles that a query visits, on average."""
    total = 0
    for p in layout.passes:
        queries, keys = (p.query_stop - p.query_start)[0], (p.key_stop - p.key_start)[0]
        per_tile = queries.repeat_interleave(p.row_ptr[0, 0].diff().long())
        total += int((per_tile * keys[p.key_tile[0, 0].long()]).sum())
    return total / layout.frame.q_len


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grids", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    found: list[Row] = []
    for number in range(len(GRIDS)):
        found += rows_of(number, arguments.rounds)
        write_record(arguments.out, "grids", found)  # A run that is cut short keeps its grids.


if __name__ == "__main__":
    main()
