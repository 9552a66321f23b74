"""Global query rows, which see keys everywhere: they go to the keys, instead of all keys coming to
them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..algebra import And, Frame, Mask, Or, Pattern
from ..patterns import GlobalTokens, Packed
from ..tiles import Ranges
from .needs import Runs, union
from .sharding import num_tokens


class Traveller(NamedTuple):
    """Query rows that go to the keys, instead of the keys coming to them.

    Attributes:
        owner: the rank they belong to.
        rows: their positions.
        hosts: the other ranks that hold keys which they visit.
    """

    owner: int
    rows: Ranges
    hosts: tuple[int, ...]


def global_rows(pattern: Pattern, frame: Frame) -> Ranges:
    """The query rows that `GlobalTokens` masks of a pattern name; of packed documents too."""
    found = [row for branch in pattern.branches for row in _global_rows(branch, frame.q_len)]
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(found):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        elif start < stop:
            joined.append((start, stop))
    return joined


def _global_rows(mask: Mask, length: int) -> list[tuple[int, int]]:
    match mask:
        case GlobalTokens(count, True, _):
            return [(0, min(count, length))]
        case And(masks) | Or(masks):
            return [row for part in masks for row in _global_rows(part, length)]
        case Packed(lengths, inner):
            found, start = [], 0
            for own in lengths:
                found += [(start + a, start + b) for a, b in _global_rows(inner, own)]
                start += own
            return found
    return []


def choose_travellers(
    needs: list[Runs], uses: list[int], rows: list[Ranges], frame: Frame, world: int
) -> tuple[tuple[Traveller, ...], list[Runs]]:
    """The global rows that cost less to send than what they alone see costs to fetch, and the needs
    without them.

    A row goes out as a query and comes back as a partial output: about as much, per query head, as
    a token's key and value.

    Args:
        needs: sets of receivers, and world + owner for the global rows of each owner.
        uses: how many (batch entry, kv head) have each of the needs.
        rows: the global rows of each rank.
    """
    staying, leaving = torch.ones(world, dtype=torch.bool), torch.zeros(world, dtype=torch.bool)
    saved = torch.zeros(world, dtype=torch.int64)
    for runs, count in zip(needs, uses, strict=True):
        home, away = (
            _with_global_rows(runs, which, frame.kv_len)
            .sizes(world * world)
            .view(world, world)
            .sum(1)
            for which in (staying, leaving)
        )
        saved += (home - away) * count
    travellers = []
    for owner in torch.nonzero(saved)[:, 0].tolist():
        hosts = set()
        for runs in needs:
            group = runs.group[runs.group // world == world + owner]
            hosts |= set((group % world).tolist())
        count = num_tokens(rows[owner])
        if count * len(hosts) * frame.num_heads < int(saved[owner]):
            travellers.append(Traveller(owner, rows[owner], tuple(sorted(hosts))))
            staying[owner] = False
    return tuple(travellers), [_with_global_rows(runs, staying, frame.kv_len) for runs in needs]


def _with_global_rows(runs: Runs, staying: Tensor, length: int) -> Runs:
    """The needs of ranks, with those of their global rows where these stay."""
    world = len(staying)
    receiver, sender = runs.group // world, runs.group % world
    kept = (receiver < world) | staying[receiver % world]
    group = (receiver % world * world + sender)[kept]
    return union([(group, runs.start[kept], runs.last[kept], runs.step)], length)
