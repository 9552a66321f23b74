"""A balancer for uneven patterns: deals equal chunks of a sequence to ranks by cost."""

import torch

from ..layouts.terms import distinct_heads
from ..patterns.algebra import Frame, Pattern
from .needs import count_pairs, cut, needed_keys
from .sharding import owned_ranges

PAIRS_PER_TOKEN = 2048
"""Number of (query, key) pairs that are assumed to take as long as receiving one key token. About
1,000 to 10,000 fit GPUs (NVLink, a network), about 250 fit processes on one CPU.
"""
_CHUNKS_PER_RANK = 8


def balanced(pattern: Pattern, frame: Frame, world_size: int) -> str:
    """Returns a sharding of equally many chunks per rank, with even loads and few tokens to move.

    It deals the heaviest chunk first. Each chunk goes to the rank with the lowest cost: the rank's
    load, minus the transfers that the chunk saves because it shares tokens with chunks there.
    """
    if frame.kv_len < _CHUNKS_PER_RANK * world_size or world_size == 1:
        return "contiguous"
    chunks = _CHUNKS_PER_RANK * world_size
    pieces = cut(owned_ranges("contiguous", frame.kv_len, chunks))
    load = torch.zeros(chunks, dtype=torch.float64)
    tokens = torch.zeros(chunks, chunks, dtype=torch.float64)
    for branches, places in distinct_heads(pattern, frame).items():
        pairs = count_pairs(list(branches), frame, pieces, pieces, chunks, chunks)
        load += pairs.sum(1) * len(places)
        runs = needed_keys(list(branches), frame, pieces, pieces, chunks)
        tokens += runs.sizes(chunks * chunks).view(chunks, chunks) * len(places)
    tokens = tokens + tokens.T
    together = torch.zeros(chunks, world_size, dtype=torch.float64)  # tokens that need not move
    sums, room = torch.zeros(world_size, dtype=torch.float64), [_CHUNKS_PER_RANK] * world_size
    owners = [0] * chunks
    for chunk in load.argsort(descending=True, stable=True).tolist():
        cost = sums - PAIRS_PER_TOKEN * together[chunk]
        cost[torch.tensor(room) == 0] = torch.inf
        rank = int(cost.argmin())
        owners[chunk], room[rank] = rank, room[rank] - 1
        sums[rank] += load[chunk]
        together[:, rank] += tokens[:, chunk]
    return "chunks:" + ",".join(map(str, owners))
