"""A balancer for uneven patterns: deals equal chunks of a sequence to ranks by what they cost."""

import torch

from ..layouts.terms import distinct_heads
from ..patterns.algebra import Frame, Pattern
from .needs import count_pairs, cut, needed_keys
from .sharding import owned_ranges

PAIRS_PER_TOKEN = 2048
"""How many (query, key) pairs are taken to cost as much time as receiving one key token: one to ten
thousand would be right for GPUs (NVLink, a network), some 250 for processes on one CPU.
"""
_CHUNKS_PER_RANK = 8


def balanced(pattern: Pattern, frame: Frame, world_size: int) -> str:
    """A sharding with as many chunks on each rank, about equal loads and few tokens to move.

    The heaviest chunks are dealt first, each to the rank where it adds the least: to its load,
    less what it no longer needs to fetch from, or send to, the chunks that are there.
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
