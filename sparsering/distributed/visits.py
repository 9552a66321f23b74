"""Which heads see the same masks, and axes cut where ranks' tokens end."""

import torch

from ..layouts.tiles import Ranges
from ..patterns.algebra import Frame, Mask, Pattern
from .needs import Cut
from .sharding import without


def distinct_heads(pattern: Pattern, frame: Frame) -> dict[tuple[Mask, ...], list[tuple[int, int]]]:
    """The branches that query heads see, each with the (batch entry, query head) that see them."""
    found: dict[tuple[Mask, ...], list[tuple[int, int]]] = {}
    batch = pattern.num_batches()
    for entry in range(1 if batch is None else batch):
        for head in range(frame.num_heads):
            branches = tuple(branch.at(entry, head, frame) for branch in pattern.branches)
            found.setdefault(branches, []).append((entry, head))
    return found


def distinct_kv_heads(
    pattern: Pattern, frame: Frame
) -> dict[tuple[Mask, ...], list[tuple[int, int]]]:
    """The masks whose union the queries of a kv head see, each with its (batch entry, kv head)."""
    seen: dict[tuple[int, int], dict[Mask, None]] = {}
    for branches, places in distinct_heads(pattern, frame).items():
        for entry, head in places:
            seen.setdefault((entry, frame.kv_head(head)), {}).update(dict.fromkeys(branches))
    found: dict[tuple[Mask, ...], list[tuple[int, int]]] = {}
    for place, masks in seen.items():
        found.setdefault(tuple(masks), []).append(place)
    return found


def cut(ranges: tuple[Ranges, ...], apart: list[tuple[int, Ranges]] | None = None) -> Cut:
    """All ranks' ranges, labelled by rank; `apart` (owner, rows) are labelled world + number."""
    apart = [] if apart is None else apart
    pieces = []
    for rank, own in enumerate(ranges):
        marked = sorted(row for owner, rows in apart if owner == rank for row in rows)
        pieces += [(piece, rank, rank) for piece in without(own, marked)]
    for number, (owner, rows) in enumerate(apart):
        pieces += [(row, owner, len(ranges) + number) for row in rows]
    pieces.sort()
    ranks, labels = (
        torch.tensor([piece[i] for piece in pieces], dtype=torch.int64) for i in (1, 2)
    )
    return Cut([piece for piece, _, _ in pieces], ranks, labels)
