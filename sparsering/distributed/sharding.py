"""Shardings: strings that say which rank owns which chunk of a sequence.

`"contiguous"`: rank r of P owns chunk r of P. `"zigzag"`: rank r owns chunks r and 2P - 1 - r of
2P, which shares causal work equally. `"chunks:0,1,1,0"` lists the owner of each chunk. A chunk has
ceil(N / chunks) tokens; the last chunks may have fewer, or none.
"""

import torch
from torch import Tensor

from ..ground.arguments import shortened
from ..layouts.tiles import Ranges

SHARDINGS = ("contiguous", "zigzag", "balanced", "auto")


def chunk_owners(sharding: str, world_size: int) -> list[int]:
    """Returns the rank that owns each chunk; ValueError if the sharding is not valid."""
    ranks, name = list(range(world_size)), sharding if isinstance(sharding, str) else ""
    if name == "contiguous":
        return ranks
    if name == "zigzag":
        return ranks + ranks[::-1]
    if name in ("auto", "balanced"):
        raise ValueError(
            f"sharding {sharding!r} depends on the pattern; pass "
            f"RingPlan.build(pattern, ..., sharding={sharding!r}).sharding instead"
        )
    try:
        kind, _, numbers = name.partition(":")
        owners = [int(owner) for owner in numbers.split(",")]
        if kind != "chunks" or not all(0 <= owner < world_size for owner in owners):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"sharding must be one of {', '.join(map(repr, SHARDINGS))} or 'chunks:' with the rank "
            f"(below {world_size}) that owns each chunk, as in 'chunks:0,1,1,0', got "
            f"{shortened(repr(sharding))}"
        ) from None
    return owners


def check_sharding(sharding: str, world_size: int) -> None:
    """Raises ValueError for an invalid sharding; "auto" and "balanced" are valid."""
    if not isinstance(sharding, str) or sharding not in ("auto", "balanced"):
        chunk_owners(sharding, world_size)


def owned_ranges(sharding: str, seq_len: int, world_size: int) -> tuple[Ranges, ...]:
    """Returns the ranges of positions that each rank owns, ascending, in the order of its shard."""
    owners = chunk_owners(sharding, world_size)
    size = -(-seq_len // len(owners))
    owned: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for chunk, owner in enumerate(owners):
        start, stop = min(chunk * size, seq_len), min((chunk + 1) * size, seq_len)
        if start == stop:
            continue
        if owned[owner] and owned[owner][-1][1] == start:
            start = owned[owner].pop()[0]
        owned[owner].append((start, stop))
    return tuple(tuple(ranges) for ranges in owned)


def num_tokens(ranges: Ranges) -> int:
    """Counts the positions in `ranges`."""
    return sum(stop - start for start, stop in ranges)


def overlap(ranges: Ranges, others: Ranges) -> Ranges:
    """Returns the ranges of positions that are in both `ranges` and `others`."""
    return [(max(a, c), min(b, d)) for a, b in ranges for c, d in others if max(a, c) < min(b, d)]


def positions(*ranges: Ranges) -> Tensor:
    """Lists all positions in the given lists of ranges, as an int64 tensor."""
    pieces = [torch.arange(start, stop) for owned in ranges for start, stop in owned]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *pieces])


def local_index(ranges: Ranges, position: Tensor) -> Tensor:
    """Converts positions of the sequence to indices in a shard with the positions in `ranges`."""
    starts = torch.tensor([start for start, _ in ranges], dtype=torch.int64)
    sizes = torch.tensor([stop - start for start, stop in ranges], dtype=torch.int64)
    number = (torch.searchsorted(starts, position, right=True) - 1).clamp(min=0)
    return position + (sizes.cumsum(0) - sizes - starts)[number]


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """Removes `others` from `ranges`; both are ascending."""
    rest = []
    for start, stop in ranges:
        for low, high in others:
            if low < stop and start < high:
                rest.append((start, low))
                start = high
        rest.append((start, stop))
    return [(start, stop) for start, stop in rest if start < stop]
