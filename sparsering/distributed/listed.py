"""Lists of single keys over ranks: the keys that each rank's queries list, by their owners."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..ground.rows import first_in_row
from ..layouts.lists import Lists, lists_of_pattern
from ..layouts.tiles import Ranges
from ..patterns.algebra import Frame, Pattern
from ..patterns.selected import has_lists
from .needs import Cut, TokenRanges, union
from .sharding import num_tokens, positions


def lists_of_rows(pattern: Pattern, frame: Frame, rows: Ranges) -> tuple[Lists, ...]:
    """Lists the keys of the query rows in `rows`, in their order, as positions of the sequence."""
    if not has_lists(pattern):
        return ()
    return lists_of_pattern(pattern, frame, positions(rows))[1]


class Listed(NamedTuple):
    """The keys that groups of query rows list, and the pairs that they form."""

    # Set `label * world + owner` has the keys of rank `owner` that the rows of group `label` list,
    # unless the rank has these rows itself. Kv heads with equal lists share an item.
    needs: tuple[TokenRanges, ...]
    need_of: tuple[tuple[int, ...], ...]  # index into `needs`, [batch entry (or one)][kv head]
    pairs: Tensor  # float64 [groups, world], summed over query heads, mean over batch entries


def listed(pattern: Pattern, frame: Frame, queries: Cut, keys: Cut, world: int) -> Listed | None:
    """Finds the keys that each group of query rows lists; None if the pattern has no lists.

    Cost: O(listed keys), and O(Nk) for each group of rows and each kv head with lists of its own.
    """
    if not has_lists(pattern) or 0 in (frame.kv_len, frame.num_heads) or pattern.num_batches() == 0:
        return None
    labels = int(queries.label.max()) + 1
    owner_of = keys.rank[keys.piece_at(torch.arange(frame.kv_len))]
    batches = pattern.num_batches() or 1
    need_of: list[list[int]] = []
    found: dict[int, list[TokenRanges]] = {}  # by item of `needs`
    pairs = torch.zeros(max(labels, world), world, dtype=torch.float64)
    for label in range(labels):
        mine = queries.label == label
        rows = [piece for piece, own in zip(queries.ranges, mine.tolist(), strict=True) if own]
        if not num_tokens(rows):
            continue
        home = int(queries.rank[mine][0])
        lists = lists_of_rows(pattern, frame, rows)
        tokens, need_of = keys_by_item(lists, batches, frame)
        for item, token in enumerate(tokens):
            token = token[owner_of[token] != home]
            number = label * world + owner_of[token]
            found.setdefault(item, []).append(TokenRanges(1, number, token, token))
        for x in lists:
            counted = x.keys[first_in_row(x.keys, frame.kv_len)].long()
            share = frame.num_heads / x.keys.shape[:2].numel()  # heads and entries share a list
            pairs[label] += torch.bincount(owner_of[counted], minlength=world).double() * share
    needs = tuple(union(parts, frame.kv_len) for parts in found.values())
    return Listed(needs, tuple(map(tuple, need_of)), pairs)


def united(
    in_tiles: Sequence[TokenRanges],
    of_tiles: Sequence[Sequence[int]],
    in_lists: Sequence[Sequence[TokenRanges]],
    of_lists: Sequence[Sequence[int]],
    length: int,
) -> tuple[list[TokenRanges], list[list[int]]]:
    """Unites what tiles and lists need; returns the fields `needs` and `need_of` of a plan.

    Args:
        in_tiles, of_tiles: these fields of the tiles' plan.
        in_lists, of_lists: for each item the keys that lists need, and the item of each
            [batch entry][kv head].
    """
    items: dict[tuple[int, int], int] = {}  # by item of tiles and of lists
    need_of = [
        [
            items.setdefault((tile, own), len(items))
            for tile, own in zip(of_tiles[batch % len(of_tiles)], row, strict=True)
        ]
        for batch, row in enumerate(of_lists)
    ]
    pairs = ([in_tiles[tile], *in_lists[own]] for tile, own in items)
    return [union(parts, length) for parts in pairs], need_of


def keys_by_item(
    lists: tuple[Lists, ...], batches: int, frame: Frame
) -> tuple[list[Tensor], list[list[int]]]:
    """Returns the keys, ascending, that rows list, and their index by [batch entry][kv head].

    Kv heads and batch entries with equal lists share an item, whether or not there are rows.
    """
    need_of = [[0] * frame.num_kv_heads for _ in range(batches)]
    found = []
    for item, (tables, places) in enumerate(_by_tables(lists, need_of, frame).items()):
        seen = torch.zeros(frame.kv_len + 1, dtype=torch.bool)
        for branch, entry, table in set(tables):
            seen[lists[branch].keys[entry, table].flatten().long()] = True  # -1: the last place
        found.append(torch.nonzero(seen[:-1])[:, 0])
        for batch, head in places:
            need_of[batch][head] = item
    return found, need_of


_Table = tuple[int, int, int]
"""A branch's list of keys: (branch's index among the lists, batch entry, head) of its tensor."""


def _by_tables(
    lists: tuple[Lists, ...], need_of: list[list[int]], frame: Frame
) -> dict[tuple[_Table, ...], list[tuple[int, int]]]:
    """Groups (batch entry, kv head) whose query heads have the same tables of listed keys."""
    size = frame.num_heads // frame.num_kv_heads
    found: dict[tuple[_Table, ...], list[tuple[int, int]]] = {}
    for batch, row in enumerate(need_of):
        for kv_head in range(len(row)):
            tables = tuple(
                (branch, batch % len(x.keys), head * x.keys.shape[1] // frame.num_heads)
                for branch, x in enumerate(lists)
                for head in range(kv_head * size, (kv_head + 1) * size)
            )
            found.setdefault(tables, []).append((batch, kv_head))
    return found
