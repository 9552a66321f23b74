"""Lists of single keys over ranks: finds which keys of other ranks each rank's queries list."""

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
    """Returns the keys that the queries at positions `rows` list, as positions.

    () without lists.
    """
    if not has_lists(pattern):
        return ()
    return lists_of_pattern(pattern, frame, positions(rows))[1]


class Listed(NamedTuple):
    """Results of `listed`: keys that queries list on other ranks, and how many pairs these make."""

    # One item for each distinct list of a kv head. Its set `label * world + owner` has the keys of
    # rank `owner` that the rows of group `label` list; it is empty if the rows are on that rank.
    needs: tuple[TokenRanges, ...]
    # index into `needs` by [batch entry][kv head]; one batch entry if all have equal lists
    need_of: tuple[tuple[int, ...], ...]
    # float64 [groups, world] number of listed pairs by group and owner, summed over query heads,
    # mean over batch entries
    pairs: Tensor


def listed(pattern: Pattern, frame: Frame, queries: Cut, keys: Cut, world: int) -> Listed | None:
    """Finds which keys of other ranks each group of query rows lists; None without lists.

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
    """Joins the keys that tiles and lists need; returns the fields `needs` and `need_of` of a plan.

    `in_tiles` and `of_tiles` are these fields of the plan for tiles. `in_lists` has, for each item,
    the keys that lists need, and `of_lists` the item of each [batch entry][kv head].
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
    """Collects the listed keys of each distinct set of lists, and which set each kv head has.

    Kv heads and batch entries with equal lists share an item, even if there are no rows.
    """
    need_of = [[0] * frame.num_kv_heads for _ in range(batches)]
    found = []
    for item, (tables, places) in enumerate(_by_tables(lists, need_of, frame).items()):
        seen = torch.zeros(frame.kv_len + 1, dtype=torch.bool)
        for branch, entry, table in set(tables):
            # -1, for no key, marks the last place, which is not read
            seen[lists[branch].keys[entry, table].flatten().long()] = True
        found.append(torch.nonzero(seen[:-1])[:, 0])
        for batch, head in places:
            need_of[batch][head] = item
    return found, need_of


_Table = tuple[int, int, int]
"""Identifies one head's lists: (index among the `Lists`, batch entry, head) of their tensor."""


def _by_tables(
    lists: tuple[Lists, ...], need_of: list[list[int]], frame: Frame
) -> dict[tuple[_Table, ...], list[tuple[int, int]]]:
    """Groups (batch entry, kv head) pairs by the lists of their query heads.

    The key of a group is the tables of all its query heads in all branches.
    """
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
