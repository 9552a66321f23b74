"""Turns edges of a graph into a list of keys for each query, for `SelectedBlocks.from_edges`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ground.arguments import kind_of

_MOST_PADDED = 4  # with more slots than this per edge, a padded table is not worth its memory


class ListedEdges(NamedTuple):
    """Keys of each query in ascending order: a padded table, or lists one behind the other."""

    keys: Tensor  # int64 [R, k], padded with -1; or [E, 1], divided into lists by `starts`
    slots: Tensor  # int64 [E], index of each edge in the flattened keys
    starts: Tensor | None  # int64 [R + 1]: query r has keys[starts[r] : starts[r + 1]]


def listed_edges(index: Any, num_queries: int) -> ListedEdges:
    """Lists the keys of each query, from edges [2, E]; as a table unless it is mostly padding.

    Raises ValueError for an index that is no int64 [2, E] of distinct edges (query, key).
    """
    query, key = _checked(index, num_queries)
    by_key = key.sort(stable=True).indices
    order = by_key[query[by_key].sort(stable=True).indices]  # by query, then by key
    rows, keys = query[order], key[order]
    again = (rows[1:] == rows[:-1]) & (keys[1:] == keys[:-1])
    if bool(again.any()):
        place = int(again.nonzero()[0, 0])
        first, second = sorted(order[place : place + 2].tolist())
        raise ValueError(
            f"from_edges takes each edge once, got query {int(rows[place])} and key "
            f"{int(keys[place])} in columns {first} and {second}; index.unique(dim=1) removes "
            "duplicates"
        )
    count = query.bincount(minlength=num_queries)
    most = int(count.max()) if len(count) else 0
    number = torch.arange(len(order), device=order.device)
    slots = torch.empty_like(order)
    if num_queries * most > _MOST_PADDED * len(order):
        slots[order] = number
        return ListedEdges(keys=keys[:, None], slots=slots, starts=pad(count.cumsum(0), (1, 0)))
    places = rows * most + number - (count.cumsum(0) - count)[rows]
    lists = torch.full((num_queries * most,), -1, dtype=torch.int64, device=order.device)
    lists[places] = keys
    slots[order] = places
    return ListedEdges(keys=lists.view(num_queries, most), slots=slots, starts=None)


def _checked(index: Any, num_queries: int) -> tuple[Tensor, Tensor]:
    """Returns queries [E] and keys [E] of an edge index [2, E]; ValueError says what is wrong."""
    if not isinstance(index, Tensor) or index.dtype != torch.int64:
        raise ValueError(
            f"from_edges needs an int64 tensor [2, E] of (query, key), got {kind_of(index)}; "
            "torch.as_tensor(..., dtype=torch.int64) makes one"
        )
    if index.dim() != 2 or index.shape[0] != 2:
        pairs = index.dim() == 2 and index.shape[1] == 2
        way_out = "transpose it with .T" if pairs else "torch.stack((queries, keys)) makes one"
        raise ValueError(
            "from_edges needs a tensor [2, E], a row of queries and a row of their keys, got "
            f"shape {tuple(index.shape)}; {way_out}"
        )
    query, key = index.detach()
    wrong = (query < 0) | (query >= num_queries) | (key < 0)
    if bool(wrong.any()):
        edge = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"from_edges needs queries from 0 to {num_queries - 1} and keys from 0 on, got query "
            f"{int(query[edge])} and key {int(key[edge])} in column {edge}; row 0 of the index has "
            "the queries (an edge_index of torch_geometric has sources first: pass "
            "edge_index.flip(0))"
        )
    return query, key
