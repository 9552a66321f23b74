"""Global query rows visit keys on all ranks: they are sent to the keys, not all keys to them."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..layouts.tiles import Ranges, Spans
from ..patterns.algebra import And, Frame, Mask, Or, Pattern
from ..patterns.positions import GlobalTokens, Packed, entries_of
from .needs import TokenRanges, union
from .sharding import num_tokens


class Traveller(NamedTuple):
    """Query rows that their owner sends to `hosts`, the other ranks that own keys they visit."""

    owner: int
    rows: Ranges
    hosts: tuple[int, ...]


def global_rows(pattern: Pattern, frame: Frame) -> Ranges:
    """Query rows that a pattern's `GlobalTokens` make global, in packed documents too."""
    rows = [row for branch in pattern.branches for row in _global_rows(branch, frame.q_len)]
    spans = Spans(*torch.tensor(rows, dtype=torch.int64).view(-1, 2).unbind(1))  # joins them
    return list(zip(spans.begin.tolist(), spans.end.tolist(), strict=True))


def _global_rows(mask: Mask, length: int) -> list[tuple[int, int]]:
    match mask:
        case GlobalTokens(count, True, _):
            return [(0, min(count, length))]
        case And(masks) | Or(masks):
            return [row for part in masks for row in _global_rows(part, length)]
        case Packed(lengths, inner):
            rows = []
            for documents in entries_of(lengths):
                start = 0
                for size in documents:
                    rows += [(start + a, start + b) for a, b in _global_rows(inner, size)]
                    start += size
            return rows
    return []


def choose_travellers(
    needs: list[TokenRanges],
    uses: list[int],
    candidates: list[tuple[int, Ranges]],
    frame: Frame,
    world: int,
    most: int,
) -> tuple[tuple[Traveller, ...], list[TokenRanges]]:
    """Chooses query rows that cost clearly less to send than to fetch the keys only they visit.

    A row leaves as a query and returns as a partial output in float32. Per query head, forward and
    backward together move about as many bytes as for a token's key and value and their gradients;
    forward alone moves up to twice as many.

    Args:
        needs: needed keys, in sets of receivers, and of world + number for each candidate.
        uses: number of (batch entry, kv head) that have each of the needs.
        candidates: (owner, rows) of global rows.
        most: number of rows that may travel, which bounds the memory of hosts.

    Returns: the travellers, and the needs of ranks without the travellers' own.
    """
    travellers: list[Traveller] = []
    home = list(range(world)) + [owner for owner, _ in candidates]  # rank that fetches for a label
    for number, (owner, rows) in enumerate(candidates):
        saved, hosts = 0, set()
        for runs, count in zip(needs, uses, strict=True):
            label = runs.number // world
            owner_needs, row_needs = label == owner, label == world + number
            hosts |= set((runs.number[row_needs] % world).tolist())
            without, together = (
                int(_relabelled(runs, some, home, world, frame.kv_len).count.sum())
                for some in (owner_needs, owner_needs | row_needs)
            )
            saved += (together - without) * count
        size = num_tokens(rows)
        if 2 * size * len(hosts) * frame.num_heads < saved and size <= most:
            travellers.append(Traveller(owner, rows, tuple(sorted(hosts))))
            home[world + number] = -1
            most -= size
    rest = [_relabelled(x, x.number >= 0, home, world, frame.kv_len) for x in needs]
    return tuple(travellers), rest


def _relabelled(
    runs: TokenRanges, some: Tensor, home: list[int], world: int, length: int
) -> TokenRanges:
    """Assigns some of the needs to the rank that is home to their label; -1 drops them."""
    receiver = torch.tensor(home)[runs.number // world]
    some = some & (receiver >= 0)
    number = (receiver * world + runs.number % world)[some]
    return union([TokenRanges(runs.step, number, runs.start[some], runs.last[some])], length)
