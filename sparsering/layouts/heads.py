"""Which masks heads see: those that see the same share what is made of them."""

from ..patterns.algebra import Frame, Mask, Pattern

Heads = dict[tuple[Mask, ...], list[tuple[int, int]]]
"""Masks, each with the (batch entry, head) that see them."""


def distinct_heads(pattern: Pattern, frame: Frame) -> Heads:
    """The branches that query heads see."""
    seen: Heads = {}
    num_batches = pattern.num_batches()
    for batch in range(1 if num_batches is None else num_batches):
        for head in range(frame.num_heads):
            branches = tuple(branch.at(batch, head, frame) for branch in pattern.branches)
            seen.setdefault(branches, []).append((batch, head))
    return seen


def distinct_kv_heads(pattern: Pattern, frame: Frame) -> Heads:
    """The masks whose union the queries of a kv head see."""
    of_place: dict[tuple[int, int], dict[Mask, None]] = {}
    for branches, places in distinct_heads(pattern, frame).items():
        for batch, head in places:
            of_place.setdefault((batch, frame.kv_head(head)), {}).update(dict.fromkeys(branches))
    seen: Heads = {}
    for place, masks in of_place.items():
        seen.setdefault(tuple(masks), []).append(place)
    return seen
