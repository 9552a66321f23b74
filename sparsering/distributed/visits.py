"""Which heads see the same masks, and axes cut where ranks' tokens end."""

import torch

from ..algebra import Frame, Mask, Pattern
from ..tiles import Ranges
from .needs import Cut
from .sharding import without


def distinct_heads(pattern: Pattern, frame: Frame) -> dict[tuple[Mask, ...], list[tuple[int, int]]]:
    """The branches that query heads see, each with the (batch entry, query head) that see them."""
    found: dict[tuple[Mask, ...], list[tuple[int, int]]] = {}
    for batch in range(1 if pattern.num_batches() is None else pattern.num_batches() or 0):
        for head in range(frame.num_heads):
            branches = tuple(branch.at(batch, head, frame) for branch in pattern.branches)
            found.setdefault(branches, []).append((batch, head))
    return found


def distinct_kv_heads(
    pattern: Pattern, frame: Frame
) -> dict[tuple[Mask, ...], list[tuple[int, int]]]:
    """The masks whose union the queries of a kv head see, each with its (batch entry, kv head)."""
    seen: dict[tuple[int, int], dict[Mask, None]] = {}
    for branches, places in distinct_heads(pattern, frame).items():
        for batch, head in places:
            seen.setdefault((batch, frame.kv_head(head)), {}).update(dict.fromkeys(branches))
    found: dict[tuple[Mask, ...], list[tuple[int, int]]] = {}
    for place, masks in seen.items():
        found.setdefault(tuple(masks), []).append(place)
    return found


def cut(ranges: tuple[Ranges, ...], apart: list[Ranges] | None = None) -> Cut:
    """All ranks' ranges, labelled by rank; parts of them listed apart are labelled world + rank."""
    pieces = []
    for rank, own in enumerate(ranges):
        marked = apart[rank] if apart is not None and rank < len(apart) else ()
        pieces += [(piece, rank) for piece in without(own, marked)]
        pieces += [(piece, len(ranges) + rank) for piece in marked]
    pieces.sort()
    labels = torch.tensor([label for _, label in pieces], dtype=torch.int64)
    return Cut([piece for piece, _ in pieces], labels)
