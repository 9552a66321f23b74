"""Chooses query rows to send to the ranks that own the keys, instead of fetching the keys.

For global rows, which visit keys on all ranks, this moves fewer bytes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..layouts.tiles import Ranges, Spans
from ..patterns.algebra import And, Frame, Mask, Or, Pattern
from ..patterns.positions import GlobalTokens, Packed, entries_of
from .needs import TokenRanges, union
from .sharding import num_tokens


class Traveller(NamedTuple):
    """Query rows that rank `owner` sends to the ranks `hosts`, which own keys for these rows."""

    owner: int
    rows: Ranges
    hosts: tuple[int, ...]


def global_rows(pattern: Pattern, frame: Frame) -> Ranges:
    """Returns the query rows of all `GlobalTokens` masks in a pattern, as disjoint ranges."""
    rows = [row for branch in pattern.branches for row in _global_rows(branch, frame.q_len)]
    spans = Spans(*torch.tensor(rows, dtype=torch.int64).view(-1, 2).unbind(1))  # merges overlaps
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
    """Chooses query rows to send to the keys' owners, where that moves fewer bytes than the keys.

    A sent row moves about as many bytes per query head, forward and backward, as fetching one key
    token; forward alone up to twice as many.

    Args:
        needs: keys to fetch. Set label * world + owner has the keys of rank `owner` that rows with
            this label visit. Label world + i: rows of candidate i; label r: other rows of rank r.
        uses: for each item of `needs`, the number of (batch entry, kv head) pairs that need it.
        candidates: (rank, some of its rows that could be sent).
        most: largest number of rows to send; it bounds the memory of receivers.

    Returns: the rows to send, and the keys to fetch for all other query rows.
    """
    travellers: list[Traveller] = []
    # home[label] is the rank that computes the rows of group `label`, or -1 for rows that are sent.
    home = list(range(world)) + [owner for owner, _ in candidates]
    for number, (owner, rows) in enumerate(candidates):
        saved, hosts = 0, set()
        for runs, count in zip(needs, uses, strict=True):
            label = runs.number // world
            owner_needs, row_needs = label == owner, label == world + number
            hosts |= set((runs.number[row_needs] % world).tolist())
            fetched = [owner_needs, owner_needs | row_needs]
            sets = (_relabelled(runs, some, home, world, frame.kv_len) for some in fetched)
            without, together = (int(tokens.count.sum()) for tokens in sets)
            saved += (together - without) * count
        size = num_tokens(rows)
        if 2 * size * len(hosts) * frame.num_heads < saved and size <= most:
            travellers.append(Traveller(owner, rows, tuple(sorted(hosts))))
            home[world + number] = -1  # no rank fetches keys for the candidate's rows
            most -= size
    rest = [_relabelled(x, x.number >= 0, home, world, frame.kv_len) for x in needs]
    return tuple(travellers), rest


def _relabelled(
    runs: TokenRanges, some: Tensor, home: list[int], world: int, length: int
) -> TokenRanges:
    """Replaces the group of each set of keys by the rank that computes it, and unites equal ones.

    It keeps only progressions in `some` whose rank is not -1.
    """
    receiver = torch.tensor(home)[runs.number // world]
    some = some & (receiver >= 0)
    number = (receiver * world + runs.number % world)[some]
    return union([TokenRanges(runs.step, number, runs.start[some], runs.last[some])], length)
