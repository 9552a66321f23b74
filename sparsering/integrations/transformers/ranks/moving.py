"""Rows of other ranks that indexers and compressors need, in calls that ranks share."""

import torch
from torch import Tensor

from ....distributed.fetching import Span, fetched
from ....distributed.sharding import owned_ranges
from ..call.calls import SharedCall


def own_spans(shared: SharedCall) -> list[Span]:
    """Returns the span of tokens [start, stop) that each rank owns; empty if it owns none.

    It is for calls whose layers list keys, which are always sharded contiguously.
    """
    ranks = 1 if shared.group is None else shared.group.size()
    found: list[Span] = []
    for ranges in owned_ranges(shared.sharding, shared.length, ranks):
        found.append(ranges[0] if ranges else (shared.length, shared.length))
    return found


def own_rank(shared: SharedCall) -> int:
    """Returns this process's rank among those that share the call; 0 for one process."""
    return 0 if shared.group is None else shared.group.rank()


def keys_so_far(own: Tensor, shared: SharedCall) -> Tensor:
    """Returns a row's index keys [B, N, D], with zeros for tokens of later ranks.

    Args:
        own: [B, n, D], the index keys of the tokens that this rank runs. They get no gradient.
    """
    spans = own_spans(shared)
    wanted = [(0, stop if stop > start else 0) for start, stop in spans]
    with torch.no_grad():
        known = fetched(own[:, : shared.num_tokens], spans, wanted, shared.group, "index keys")
        return torch.nn.functional.pad(known, (0, 0, 0, shared.length - known.shape[1]))
