"""Lists of single keys: what `SelectedBlocks` of blocks below 16 tokens compile to, beside tiles.

SelectedBlocks(indices, 1) & Causal()                   each query's list, without later keys
(SlidingWindow(511) | SelectedBlocks(indices, 1)) & Causal()    a list beside tiles
Packed(lengths, SelectedBlocks(indices, 1))             lists of places in the query's document
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ..ground.arguments import per_entry
from ..ground.rows import first_in_row
from ..ground.streams import moved
from ..patterns.algebra import And, Frame, Mask, Mixture, Not, Or, Pattern
from ..patterns.positions import Causal, GlobalTokens, Packed, intersection
from ..patterns.selected import EdgeLists, KeyLists, SelectedBlocks, has_lists
from ..patterns.tree import Nodes, Tree, common_tree, distance_positions
from ..patterns.varlen_mask import Varlen

_MOST_CELLS = 1 << 18  # most (query, key) pairs that are computed at a time, on the host
_MOST_CELLS_OF_DEVICE = 1 << 24  # on a GPU, where each time costs some launches: over all heads


class Coordinates(NamedTuple):
    """Positions of queries and keys for distances and dropout, if they differ from indices."""

    # int64 [B or 1, 3, Nq]: position; depth in a tree, else position; index of the dropout seed
    query: Tensor
    # int64 [B or 1, 2, H, Nk]: position; depth in a tree, else position. H divides the kv heads.
    key: Tensor

    @staticmethod
    def differ(pattern: Pattern) -> bool:
        """Whether a pattern counts positions in documents or trees, so that they are no indices."""
        return pattern.restarts is not None or common_tree(pattern) is not None

    @classmethod
    def of(cls, pattern: Pattern, frame: Frame) -> "Coordinates | None":
        """Returns the coordinates of a call's tokens; None if positions equal indices."""
        if not cls.differ(pattern):
            return None
        query, key, stream = pattern.coordinates(frame)
        query_depth, key_depth = distance_positions(pattern, frame)
        return cls.joined(query, query_depth, stream, key[None], key_depth[:, None])

    @classmethod
    def joined(
        cls, query: Tensor, query_depth: Tensor, stream: Tensor, key: Tensor, key_depth: Tensor
    ) -> "Coordinates":
        """Stacks the coordinates of a call.

        Takes, for queries, positions [Nq], depths [B or 1, Nq] and streams [Nq]; for keys,
        positions [H, Nk] and depths [B or 1, H, Nk].
        """
        of_query = [x.expand_as(query_depth) for x in (query, query_depth, stream)]
        of_key = [x.expand_as(key_depth) for x in (key, key_depth)]
        return cls(torch.stack(of_query, 1), torch.stack(of_key, 1))


class Lists(NamedTuple):
    """The keys that queries of a branch list, one list for each of `queries`.

    Keys of a selection ascend, so that results have the same bits for each order of its slots. If
    lists have very different lengths, as with hubs of a graph, a branch has several `Lists`, each
    for the queries whose lists are about as long.
    """

    keys: Tensor  # int32 [B or 1, H, Nq, n], -1 for none; H divides Hq. A repeat does not count.
    branch: int  # index of the branch in a mixture `a + b`
    coordinates: Coordinates | None = None
    queries: Tensor | None = None  # int64, ascending indices of queries of the call; None for all
    counts: Tensor | None = None  # as `KeyLists.counts`
    # The next three are for a call with a slot bias, which has one selection. `shape` is its
    # (rows, slots per row, keys per slot). `row`, int64 [B or 1, Nq], is the row of each query.
    # `place`, int32 with the shape of `keys`, is each key's index in the caller's order, which is
    # its place in the bias. Of equal keys, the first in that order comes first.
    shape: tuple[int, int, int] = (0, 0, 0)
    row: Tensor | None = None
    place: Tensor | None = None
    # `EdgeLists` have this instead of `row`: int64 [B or 1, Nq, n], the slot of each list item in
    # the caller's order; the number of slots for an item that is none.
    slot: Tensor | None = None

    @property
    def num_pairs(self) -> float:
        """Number of (query, key) pairs, mean over batch entries and heads."""
        counted = first_in_row(self.keys, torch.iinfo(torch.int32).max)
        return float(counted.double().sum((2, 3)).mean())

    def of_rows(self, rows: slice, device: torch.device) -> "Lists":
        """Returns the lists of the queries `rows` on a device, without slot bias fields."""
        at, queries = self.coordinates, self.queries
        if queries is not None:
            ends = torch.tensor([rows.start, rows.stop])
            first, last = torch.searchsorted(queries, ends).tolist()
            rows, queries = slice(first, last), moved(queries[first:last] - rows.start, device)
        if at is not None:
            at = Coordinates(moved(at.query[..., rows], device), moved(at.key, device))
        keys = moved(self.keys[:, :, rows].contiguous(), device)
        return Lists(keys=keys, branch=self.branch, coordinates=at, queries=queries)

    def rows_in(self, queries: Tensor) -> Tensor:
        """Returns the rows of `keys` whose queries are among `queries` (indices in the call)."""
        if self.queries is None:
            return queries
        return torch.nonzero(torch.isin(self.queries, queries))[:, 0]

    def of_queries(self, x: Tensor) -> Tensor:
        """Returns the rows of a call's tensor [B, H, Nq, ...] whose queries have lists here."""
        return x if self.queries is None else x.index_select(2, moved(self.queries, x.device))

    def put(self, to: Tensor, rows: Tensor) -> None:
        """Writes rows that `of_queries` copied, now changed, back to the call's tensor `to`."""
        if self.queries is not None:
            to.index_copy_(2, moved(self.queries, to.device), rows)

    def bias(self, slot_bias: Tensor) -> Tensor:
        """Converts a slot bias [B, Hq, R * k] to a bias per list item [B, Hq, Nq, n]."""
        rows, slots, size = self.shape
        if self.slot is not None:
            index = self.slot.to(slot_bias.device)[:, None]
            index = index.expand(*slot_bias.shape[:2], -1, -1)
            of_slot = pad(slot_bias, (0, 1)).gather(2, index.flatten(2)).view(index.shape)
            return pad(of_slot, (0, self.keys.shape[3] - index.shape[3]))
        assert self.row is not None
        if not rows * slots:  # queries before row 0 have no row whose bias could be read
            return slot_bias.new_zeros(*slot_bias.shape[:2], *self.keys.shape[2:])
        of_row = slot_bias.unflatten(2, (rows, slots))  # [B, Hq, R, k]
        row = self.row[:, None, :, None].expand(*slot_bias.shape[:2], -1, slots)
        of_query = of_row.gather(2, row)  # [B, Hq, Nq, k]
        of_key = of_query.repeat_interleave(size, 3)  # [B, Hq, Nq, k * size]
        return pad(of_key, (0, self.keys.shape[3] - slots * size))

    def slot_gradient(self, grad: Tensor) -> Tensor:
        """Converts the gradient of `bias` to that of the slot bias [B, Hq, R * k]."""
        rows, slots, size = self.shape
        if self.slot is not None:
            index = self.slot.to(grad.device)[:, None].expand(*grad.shape[:2], -1, -1)
            of_slots = grad.new_zeros(*grad.shape[:2], rows * slots + 1)
            own = grad[..., : index.shape[3]].flatten(2)
            return of_slots.scatter_add_(2, index.flatten(2), own)[..., :-1].contiguous()
        assert self.row is not None
        if not rows * slots:
            return grad.new_zeros(*grad.shape[:2], 0)
        of_key = grad[..., : slots * size].unflatten(3, (slots, size))  # [B, Hq, Nq, k, size]
        of_slot = of_key.sum(4)  # [B, Hq, Nq, k]
        row = self.row[:, None, :, None].expand(*of_slot.shape)
        of_row = of_slot.new_zeros(*of_slot.shape[:2], rows, slots)  # [B, Hq, R, k]
        return of_row.scatter_add_(2, row, of_slot).flatten(2)  # [B, Hq, R * k]


def list_biases(lists: tuple[Lists, ...], slot_bias: Tensor) -> Tensor:
    """Converts a slot bias [B, Hq, R * k] to the block bias that kernels take (see `Problem`)."""
    if len(lists) == 1:
        return lists[0].bias(slot_bias)
    return torch.cat([listed.bias(slot_bias).flatten(2) for listed in lists], 2)


def list_slot_gradient(lists: tuple[Lists, ...], grad: Tensor) -> Tensor:
    """Converts the gradient of the bias that `list_biases` made to that of the slot bias."""
    if len(lists) == 1:
        return lists[0].slot_gradient(grad)
    parts = grad.split([listed.keys.shape[2:].numel() for listed in lists], 2)
    total = torch.zeros((), dtype=grad.dtype, device=grad.device)
    for listed, part in zip(lists, parts, strict=True):
        total = total + listed.slot_gradient(part.unflatten(2, listed.keys.shape[2:]))
    return total


class ListedPairs(NamedTuple):
    """Pairs that lists serve: a selection, the documents around it, and a mask that limits it."""

    selection: SelectedBlocks
    inside: tuple[Mask, ...] = ()  # masks of documents and trees around the selection, outer first
    limit: Mask | None = None  # mask that restricts the listed pairs; None for no restriction

    def within(self, mask: Mask) -> "ListedPairs":
        """Returns these pairs restricted further to those of `mask`."""
        return self._replace(limit=mask if self.limit is None else And((self.limit, mask)))

    def or_in(self, mask: Mask) -> "ListedPairs":
        """Returns pairs with a wider limit: those of `mask` are allowed in addition."""
        return self._replace(limit=None if self.limit is None else Or((self.limit, mask)))


ListKeys = Callable[[ListedPairs, Frame, Tensor | None, int], Lists | None]
"""(source, frame, `valid` of `lists_of`, branch) -> lists, or None if it does not support them."""


def split(
    pattern: Pattern, are_listed: Callable[[Pattern], bool] = has_lists
) -> tuple[Pattern, tuple[tuple[ListedPairs, ...], ...]]:
    """Splits a pattern into a pattern for tiles and, for each branch, the pairs that lists serve.

    Each pair of a branch is in the tiles, in one of the `ListedPairs` within its limit, or in both.
    `are_listed` says whether lists serve a selection in a pattern.
    """
    if not are_listed(pattern):
        return pattern, ((),) * len(pattern.branches)
    parts = [_split(branch, are_listed) for branch in pattern.branches]
    tiles = tuple(
        _nothing(branch) if own is None else own
        for branch, (own, _) in zip(pattern.branches, parts, strict=True)
    )
    sources = tuple(tuple(found) for _, found in parts)
    return Mixture(tiles) if len(tiles) > 1 else tiles[0], sources


def tiles_of(pattern: Pattern) -> Pattern:
    """Returns the part of a pattern that tiles serve, without listed pairs."""
    return split(pattern)[0]


def lists_of_pattern(
    pattern: Pattern, frame: Frame, positions: Tensor | None = None
) -> tuple[Pattern, tuple[Lists, ...]]:
    """Splits a pattern and lists its keys; returns (pattern for tiles, lists) as `lists_of`."""
    return lists_of(*split(pattern), frame, positions=positions)


def with_key_lists(
    tiles: Pattern, lists: tuple[Lists, ...], key_masks: tuple[Mask, ...], q_start: int
) -> Pattern:
    """Joins the results of `lists_of` to a pattern of the same pairs, which limits no list further.

    Each branch has at most one of the lists, which are for all queries. Key masks are for tiles.
    """
    branches: list[Mask] = list(tiles.branches)
    for x in lists:
        own = branches[x.branch]
        listed = KeyLists(x.keys, 1, 1, q_start, x.counts)
        branches[x.branch] = listed if is_nothing(own) else Or((own, listed))
    if not all(isinstance(x, KeyLists) for x in branches):
        branches = [intersection([x, *key_masks]) for x in branches]
    return Mixture(tuple(branches)) if len(branches) > 1 else branches[0]


def is_only_lists(pattern: Pattern) -> bool:
    """True if lists serve all pairs of a pattern, so that `split` leaves nothing for tiles."""
    found: bool | None = vars(pattern).get("_is_only_lists")
    if found is None:
        found = all(map(_is_listed, pattern.branches))
        if not torch.compiler.is_compiling():
            object.__setattr__(pattern, "_is_only_lists", found)
    return found


def _is_listed(mask: Mask) -> bool:
    """True if lists alone serve every pair of a mask.

    It repeats the rules of `_split` without `match`, which torch.compile does not trace.
    """
    if not has_lists(mask) or isinstance(mask, SelectedBlocks):
        return has_lists(mask)
    if isinstance(mask, Or):
        return all(map(_is_listed, mask.masks))
    if isinstance(mask, And):
        return any(map(_is_listed, mask.masks))
    return isinstance(mask, Packed | Varlen | Tree) and all(map(_is_listed, mask.pattern.branches))


_NOTHING = GlobalTokens(0)


def _nothing(branch: Mask) -> Mask:
    """Returns a mask without pairs; in `attention_varlen`, with the branch's documents."""
    return replace(branch, pattern=_NOTHING) if isinstance(branch, Varlen) else _NOTHING


def is_nothing(branch: Mask) -> bool:
    """Whether a branch for tiles has no pairs, since lists serve all of them."""
    return branch is _NOTHING or (isinstance(branch, Varlen) and branch.pattern is _NOTHING)


def _split(
    mask: Mask, are_listed: Callable[[Pattern], bool]
) -> tuple[Mask | None, list[ListedPairs]]:
    """Splits a mask into (mask for tiles, or None if tiles have no pairs; selections for lists)."""
    if not are_listed(mask):
        return mask, []
    match mask:
        case SelectedBlocks():
            return None, [ListedPairs(mask)]
        case Or(masks):
            parts = [_split(part, are_listed) for part in masks]
            own = tuple(tiles for tiles, _ in parts if tiles is not None)
            joined = (Or(own) if len(own) > 1 else own[0]) if own else None
            return joined, [source for _, sources in parts for source in sources]
        case And(masks):
            return _split_intersection(masks, are_listed)
        case Packed() | Varlen() | Tree():
            tiles, sources = _split(mask.pattern, are_listed)
            return None if tiles is None else replace(mask, pattern=tiles), [
                source._replace(
                    inside=(mask, *source.inside),
                    limit=None if source.limit is None else replace(mask, pattern=source.limit),
                )
                for source in sources
            ]
    raise NotImplementedError(f"lists of keys inside {type(mask).__name__} are not computed")


def _split_intersection(
    masks: tuple[Mask, ...], are_listed: Callable[[Pattern], bool]
) -> tuple[Mask | None, list[ListedPairs]]:
    """Splits `a & b & ...` as `_split` does: each selection is limited by the other masks."""
    parts = [_split(mask, are_listed) for mask in masks]
    others = [intersection([*masks[:i], *masks[i + 1 :]]) for i in range(len(masks))]
    listed = [
        [source.within(other) for source in sources]
        for (_, sources), other in zip(parts, others, strict=True)
    ]
    # If a part has no tiles, its lists have all pairs of the intersection. Take the shortest ones.
    alone = [found for (tiles, _), found in zip(parts, listed, strict=True) if tiles is None]
    if alone:
        return None, min(alone, key=lambda found: sum(map(_slots, found)))
    tiles = intersection([tiles for tiles, _ in parts if tiles is not None])
    return tiles, [source for found in listed for source in found]


def _slots(source: ListedPairs) -> float:
    """Returns how many keys a query lists, as a mean over queries."""
    return source.selection.mean_slots * source.selection.block_size


def lists_of(
    tiles: Pattern,
    sources: tuple[tuple[ListedPairs, ...], ...],
    frame: Frame,
    *,
    coordinates: Coordinates | None = None,
    valid: Tensor | None = None,
    has_slot_bias: bool = False,
    positions: Tensor | None = None,
    list_keys: ListKeys | None = None,
) -> tuple[Pattern, tuple[Lists, ...]]:
    """Lists the keys of each branch that its tiles do not have: (the pattern for tiles, lists).

    Args:
        tiles, sources: as `split` returns them.
        coordinates: of the call, by `Coordinates.of`.
        valid: bool [B or 1, Nk], False for keys that no query sees.
        has_slot_bias: the call has a slot bias: then a branch with a list has no tiles, and its
            list has all its pairs.
        positions: int64 [Nq] of the queries to list for; default all of the frame.
        list_keys: a backend's function that lists keys, for the sources that it supports.

    Cost: O(Nq n) time and memory, of `EdgeLists` with the mean length n of a list; with a slot bias
        beside tiles O(Nq Nk) time.
    """
    if 0 in (frame.q_len, frame.kv_len, frame.num_heads):
        return tiles, ()
    branches: list[Mask] = list(tiles.branches)
    found: list[Lists] = []
    for number, of_branch in enumerate(sources):
        if not of_branch:
            continue
        if isinstance(ready := of_branch[0].selection, KeyLists):
            keys, counts = ready.indices, ready.counts
            found.append(Lists(keys=keys, branch=number, coordinates=coordinates, counts=counts))
            continue
        own, beside = branches[number], None
        if not is_nothing(own):
            if has_slot_bias:  # tiles cannot add a slot bias, so lists take their pairs as well
                beside, branches[number] = own, _nothing(own)
                of_branch = tuple(x.or_in(own) for x in of_branch)
            else:
                of_branch = tuple(x.within(Not(own)) for x in of_branch)
        for queries in _of_like_length(of_branch, frame, positions, beside is not None):
            of_group, at = positions, coordinates
            if queries is not None:
                of_group = _positions(frame, positions, queries.device)[queries]
                at = _of_queries(coordinates, queries, of_group, frame.kv_len)
            listed = []
            for source in of_branch:
                by_kernel = None
                if list_keys is not None and of_group is None and not has_slot_bias:
                    by_kernel = list_keys(source, frame, valid, number)
                by_torch = source, frame, of_group, valid, number, has_slot_bias, beside
                listed.append(by_kernel or _list_keys(*by_torch))
            joined = listed[0] if len(listed) == 1 else _joined(listed)
            found.append(joined._replace(coordinates=at, queries=queries))
    return Mixture(tuple(branches)) if len(branches) > 1 else branches[0], tuple(found)


_SHORT_LIST = 16  # slots; shorter lists are not worth a group of their own


def _of_like_length(
    sources: tuple[ListedPairs, ...], frame: Frame, positions: Tensor | None, has_all: bool
) -> list[Tensor | None]:
    """Groups queries by the length of their lists (up to 16 slots, 32, 64, ...), to save padding.

    Returns: the query indices of each group, int64, ascending; or [None], which stands for all
    queries, if no list is of `EdgeLists`. A query without slots is in no group, unless another
    source may list keys for it (`has_all`).
    """
    uneven = [(x.selection, x.inside) for x in sources if isinstance(x.selection, EdgeLists)]
    if not uneven:
        return [None]
    # documents and trees are on the CPU
    on_host = any(inside for _, inside in uneven)
    device = torch.device("cpu") if on_host else uneven[0][0].begin.device
    positions = _positions(frame, positions, device)
    count = torch.zeros_like(positions)
    for selection, inside in uneven:
        of_entries = []
        for entry in range(max((mask.num_batches() or 1 for mask in inside), default=1)):
            here = _seat(inside, entry, positions, frame).position
            slots = selection.counts_of(_rows_at(selection, here)).to(device)
            of_entries.append(torch.where(here >= 0, slots, 0))
        count += torch.stack(of_entries).amax(0)
    has_all = has_all or len(uneven) < len(sources)
    bounds = _SHORT_LIST << torch.arange(40, device=device)
    level = torch.where((count > 0) | has_all, torch.bucketize(count, bounds), -1)
    found: list[Tensor | None] = [
        torch.nonzero(level == number)[:, 0] for number in level.unique().tolist() if number >= 0
    ]
    return found or [None]


def _positions(frame: Frame, positions: Tensor | None, device: torch.device) -> Tensor:
    """Returns the positions of the queries whose keys are listed, int64 [Nq], on a device."""
    if positions is None:
        return torch.arange(frame.q_start, frame.q_start + frame.q_len, device=device)
    return moved(positions, device)


def _rows_at(selection: SelectedBlocks, position: Tensor) -> Tensor:
    """Returns the selection's row of each position [Nq], clamped to an existing row."""
    last = max(0, selection.num_rows - 1)
    return (position // selection.row_size - selection.first_row).clamp(0, last)


def _of_queries(
    at: Coordinates | None, queries: Tensor, position: Tensor, kv_len: int
) -> Coordinates:
    """Returns the coordinates of some queries and of all keys; by default positions are depths."""
    if at is None:
        key = torch.arange(kv_len, device=queries.device).expand(1, 2, 1, -1)
        query = torch.stack((position, position, torch.zeros_like(position)))
        return Coordinates(query[None], key.contiguous())
    return at._replace(query=at.query[..., moved(queries, at.query.device)].contiguous())


def _joined(lists: list[Lists]) -> Lists:
    """Joins several lists [..., n] of one branch to one, sorted; repeated keys count once."""
    batches, heads = (max(x.keys.shape[dim] for x in lists) for dim in (0, 1))
    keys = [_of_heads(x.keys, heads).expand(batches, -1, -1, -1) for x in lists]
    return lists[0]._replace(keys=_ascending(torch.cat(keys, -1)), counts=None)


class _Seat(NamedTuple):
    """Positions of the queries in the document or tree path that a selection counts in.

    In documents this is the query's document, in a tree the path from the root to the query.
    """

    position: Tensor  # [Nq] position in that sequence, -1 outside all documents
    length: Tensor | int  # [Nq] tokens of that sequence, or one number for all queries
    # Each function converts keys [..., n, k] of a slice of n queries to the next outer sequence.
    outwards: tuple[Callable[[Tensor, slice], Tensor], ...]

    def keys(self, own: Tensor, part: slice) -> Tensor:
        """Converts keys [..., n, k] of the queries `part` to keys of the call; -1 stays."""
        for step in self.outwards:
            own = step(own, part)
        return own


def _seat(inside: tuple[Mask, ...], entry: int, position: Tensor, frame: Frame) -> _Seat:
    """Converts queries at `position` [Nq] to positions in the documents or tree paths of `inside`.

    That is their document or their path in a tree; `inside` lists these masks, the outer one first.
    """
    length: Tensor | int = frame.kv_len
    steps = []
    for mask in inside:
        if isinstance(mask, Tree):
            nodes = _nodes(mask, entry)
            inner = (position >= 0) & (position < nodes.start[-1])
            token = torch.where(inner, position, 0)
            steps.append(_path(nodes, nodes.of_token(token)))
            position = torch.where(inner, nodes.depth_of(token), -1)
            length = nodes.longest
            continue
        q_lengths, kv_lengths = _documents(mask, entry)
        q_ends, kv_ends = q_lengths.cumsum(0), kv_lengths.cumsum(0)
        document = torch.searchsorted(q_ends, position, right=True)
        inner = (position >= 0) & (document < len(q_ends))
        document = torch.where(inner, document, 0)
        start = (kv_ends - kv_lengths)[document]
        steps.append(_shift(start))
        shifted = position - (q_ends - kv_lengths)[document]
        position = torch.where(inner, shifted, -1)
        length = torch.where(inner, kv_lengths[document], 0)
    return _Seat(position, length, tuple(reversed(steps)))


def _documents(mask: Mask, entry: int) -> tuple[Tensor, Tensor]:
    """Returns (query lengths, key lengths) of the documents that a mask has in a batch entry."""
    if isinstance(mask, Varlen):
        return torch.tensor(mask.q_lengths), torch.tensor(mask.kv_lengths)
    assert isinstance(mask, Packed)
    lengths = torch.tensor(mask.entries[entry % len(mask.entries)], dtype=torch.int64)
    return lengths, lengths


def _nodes(tree: Tree, entry: int) -> Nodes:
    """Returns the nodes of a tree in one batch entry."""
    if not per_entry(tree.lengths):
        return tree.nodes
    lengths, parents = tree.entries[entry], tree.parents[entry]
    return replace(tree, lengths=lengths, parents=parents, pattern=Causal()).nodes  # type: ignore[arg-type]


def _shift(start: Tensor) -> Callable[[Tensor, slice], Tensor]:
    """Returns a function that converts keys counted in a document to keys of the whole sequence.

    `start` [Nq] has the first key of each query's document.
    """

    def step(keys: Tensor, part: slice) -> Tensor:
        return torch.where(keys >= 0, keys + start[part, None].to(keys.dtype), keys)

    return step


def _path(nodes: Nodes, of_query: Tensor) -> Callable[[Tensor, slice], Tensor]:
    """Returns a function that converts depths on the path to a query into tokens of the tree.

    `of_query` [Nq] has the node of each query; a depth below the query's node becomes -1.
    """

    def step(depths: Tensor, part: slice) -> Tensor:
        wanted = depths.long()
        node = of_query[part, None].expand(wanted.shape).clone()
        while bool((too_deep := (nodes.depth[node] > wanted) & (wanted >= 0)).any()):
            here = node[too_deep]
            far = nodes.jump[here]
            deeper = (far >= 0) & (nodes.depth[far.clamp(min=0)] > wanted[too_deep])
            node[too_deep] = torch.where(deeper, far, nodes.parent[here])
        token = nodes.start[node] + wanted - nodes.depth[node]
        on_path = (wanted >= 0) & (token < nodes.start[node + 1])
        return torch.where(on_path, token, -1).to(depths.dtype)

    return step


class _Seated(NamedTuple):
    """A selection, ready to be read: its blocks, and each query's row and position in them."""

    seats: list[_Seat]  # one for all batch entries, or one per entry
    rows: list[Tensor]  # for each seat, the row of the table that each query has, [Nq]
    slots: Tensor | None  # int64 [seats, Nq, most], each query's slots; only for `EdgeLists`
    table: Tensor  # [B or 1, H or 1, R, k] block numbers, as in `SelectedBlocks.indices`
    positions: Tensor  # [Nq] positions in the call
    batches: int
    heads: int

    @property
    def width(self) -> int:
        """Number of slots per query."""
        return self.table.shape[3] if self.slots is None else self.slots.shape[2]

    def parts(self, width: int) -> Iterator[slice]:
        """Yields slices of the queries that bound memory, if each query lists `width` keys."""
        most = _MOST_CELLS
        if self.table.device.type != "cpu":
            most = _MOST_CELLS_OF_DEVICE // (self.batches * self.heads)
        step = max(1, most // max(1, width))
        for start in range(0, len(self.positions), step):
            yield slice(start, start + step)

    def listed(self, number: int, part: slice) -> Tensor:
        """Returns the blocks that the queries `part` of a seat select, [B or 1, H or 1, n, k]."""
        if self.slots is not None:
            own = self.slots[number, part]
            return self.table[:, :, own.clamp(min=0), 0].masked_fill_(own < 0, -1)
        one = len(self.seats) == 1 or len(self.table) == 1
        table = self.table if one else self.table[number : number + 1]
        return table[:, :, self.rows[number][part]]

    def of(self, tables: Tensor, number: int) -> Tensor:
        """Returns a view of `tables` with the batch entries that seat `number` serves."""
        return tables if len(self.seats) == 1 else tables[number : number + 1]


def _list_keys(
    source: ListedPairs,
    frame: Frame,
    positions: Tensor | None,
    valid: Tensor | None,
    branch: int,
    has_slot_bias: bool,
    beside: Mask | None,
) -> Lists:
    """Lists the keys of one selection for each query; with `beside`, also that mask's keys.

    1. Find the seats of the queries: rows of the table, places in documents and trees. 2. List the
    keys of their slots. 3. Replace keys outside the limit and hidden keys by -1. 4. With a slot
    bias, append the other keys of the branch, which are pairs of `beside`.
    """
    seated = _seated(source, frame, positions, valid, beside)
    keys, place = _keys_of_slots(seated, source.selection.block_size, frame, has_slot_bias)
    valid = None if valid is None else valid.to(keys.device)
    _take_away(keys, seated, source.limit, valid, frame)
    rows, width = source.selection.indices.shape[-2:]
    found = Lists(
        keys=keys,
        branch=branch,
        shape=(rows, width, source.selection.block_size),
        row=torch.stack(seated.rows) if has_slot_bias else None,
        place=place,
        slot=_slots_or_none(seated, rows * width),
    )
    return found if beside is None else _with_others(found, seated, beside, valid, frame)


def _slots_or_none(seated: _Seated, none: int) -> Tensor | None:
    """Returns `Lists.slot` for `EdgeLists`, with `none` in unused slots, else None."""
    return None if seated.slots is None else torch.where(seated.slots < 0, none, seated.slots)


def _seated(
    source: ListedPairs,
    frame: Frame,
    positions: Tensor | None,
    valid: Tensor | None,
    beside: Mask | None,
) -> _Seated:
    """Reads a selection's table, and finds the seat and row of each query, per batch entry."""
    selection, inside, limit = source
    table = selection.indices
    bounds = [mask for mask in (limit, beside) if mask is not None]
    # Masks with tensors or lengths are evaluated on the CPU; other lists stay on their device.
    on_host = inside or any(mask.tensors or mask.asks_frame for mask in bounds)
    table = table.cpu() if on_host or beside is not None else table
    table = table.view((1,) * (4 - table.dim()) + table.shape)
    if not table.shape[2]:  # a table without rows lists nothing: give it one row of -1
        table = pad(table, (0, 0, 0, 1), value=-1)
    positions = _positions(frame, positions, table.device)
    of_seats = [mask.num_batches() or 1 for mask in inside]
    of_bounds = [mask.num_batches() or 1 for mask in bounds]
    of_valid = 1 if valid is None else len(valid)
    seats = [_seat(inside, b, positions, frame) for b in range(max(of_seats, default=1))]
    rows = [_rows_at(selection, seat.position) for seat in seats]
    slots = None
    if isinstance(selection, EdgeLists):
        slots = moved(selection.slots_of(torch.stack(rows)), table.device)
    return _Seated(
        seats=seats,
        rows=rows,
        slots=slots,
        table=table,
        positions=positions,
        batches=max(len(table), of_valid, 1, *of_seats, *of_bounds),
        heads=max(table.shape[1], *(mask.num_tables(frame) for mask in bounds), 1),
    )


def _keys_of_slots(
    seated: _Seated, size: int, frame: Frame, has_slot_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Lists the keys of all selected blocks [B, H, Nq, n]; -1 where there is no such key.

    Returns: keys int32 [B, H, Nq, slots * size], -1 for none; with a slot bias, also `Lists.place`,
    which has the index of each key in the caller's order.
    """
    device, heads = seated.table.device, seated.heads
    inside = torch.arange(size, dtype=torch.int32, device=device)
    shape = seated.batches, heads, len(seated.positions), seated.width * size
    keys = torch.empty(shape, dtype=torch.int32, device=device)
    place = torch.empty_like(keys) if has_slot_bias else None
    blocks = -(-frame.kv_len // size)  # larger numbers than this are clamped to it, for "no block"
    for part in seated.parts(shape[3]):
        for number, seat in enumerate(seated.seats):
            listed = seated.listed(number, part).clamp_(-1, blocks).int()
            if place is None:
                listed = _ascending(listed)
            else:
                listed, slot = _ascending_slots(listed, blocks)
                seated.of(place, number)[:, :, part] = _of_heads(_keys_of(slot, inside), heads)
            each = _keys_of(listed, inside)
            own, tokens = seat.position[part, None], seat.length
            tokens = tokens[part, None] if isinstance(tokens, Tensor) else tokens
            each.masked_fill_((each < 0) | (each >= tokens) | (own < 0), -1)
            seated.of(keys, number)[:, :, part] = _of_heads(seat.keys(each, part), heads)
    return keys, place


def _entries(seated: _Seated, frame: Frame) -> list[tuple[int, int, int]]:
    """Returns (batch entry, table, first query head) for every table, batch entries outermost."""
    heads, group = seated.heads, frame.num_heads
    return [(b, h, h * group // heads) for b in range(seated.batches) for h in range(heads)]


def _take_away(
    keys: Tensor, seated: _Seated, limit: Mask | None, valid: Tensor | None, frame: Frame
) -> None:
    """Overwrites listed keys with -1, in place, where `limit` or `valid` does not allow them."""
    entries = _entries(seated, frame)
    limits = [limit.at(b, head, frame) for b, _, head in entries] if limit is not None else []
    shared = None  # the limit if all tables share it: a GPU evaluates it at once, in few launches
    if keys.device.type != "cpu" and all(mask is limit for mask in limits):
        shared, limits = limit, []
    for part in seated.parts(keys.shape[3]):
        here, to = seated.positions[part, None], keys[:, :, part]
        if shared is not None:
            to.masked_fill_(~shared.holds(here, to.long(), frame), -1)
        for (b, h, _), mask in zip(entries, limits, strict=False):
            to[b, h].masked_fill_(~mask.holds(here, to[b, h].long(), frame), -1)
        for b in range(seated.batches if valid is not None else 0):
            assert valid is not None
            seen = valid[b % len(valid)][to[b].clamp(min=0).long()]
            to[b].masked_fill_(~seen, -1)


def _with_others(
    found: Lists, seated: _Seated, beside: Mask, valid: Tensor | None, frame: Frame
) -> Lists:
    """Appends the keys of mask `beside` to each query's list; without a slot, they get no bias."""
    every = torch.arange(frame.kv_len)
    # one tensor of keys for each (batch entry, head, query), in this order
    more = [
        (cells.expand(frame.kv_len) if valid is None else cells & valid[b % len(valid)])
        .nonzero()[:, 0]
        .int()
        for b, _, head in _entries(seated, frame)
        for here in seated.positions.split(max(1, _MOST_CELLS // max(1, frame.kv_len)))
        for cells in beside.at(b, head, frame).holds(here[:, None], every, frame)
    ]
    others = pad_sequence(more, batch_first=True, padding_value=-1)  # [B * H * Nq, most]
    others = others.view(*found.keys.shape[:3], -1)  # [B, H, Nq, most]
    keys = torch.cat((found.keys, others), -1)
    places = torch.arange(found.keys.shape[3], keys.shape[3], dtype=torch.int32)
    assert found.place is not None
    return found._replace(keys=keys, place=torch.cat((found.place, places.expand_as(others)), -1))


def _keys_of(blocks: Tensor, inside: Tensor) -> Tensor:
    """Replaces block numbers [..., k] by the keys in the blocks, [..., k * size].

    `inside` is the range 0 to size - 1; a block below 0 gives keys below 0.
    """
    size = len(inside)
    return (blocks[..., None] * size + inside).flatten(-2) if size > 1 else blocks


def _of_heads(tables: Tensor, heads: int) -> Tensor:
    """Repeats tables [B, H, ...] to [B, heads, ...]."""
    return tables.repeat_interleave(heads // tables.shape[1], 1)


def _ascending_slots(listed: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Sorts rows of block numbers in -1 to `blocks`; returns them and the slots they came from.

    Equal numbers keep the order of their slots, because number and slot are sorted as one integer.
    """
    slots = listed.shape[-1]
    bits = slots.bit_length()
    wide = listed.long() if (blocks + 2) << bits > torch.iinfo(torch.int32).max else listed
    slot = torch.arange(slots, dtype=wide.dtype, device=wide.device)
    both = _ascending((wide << bits).bitwise_or_(slot))
    return (both >> bits).int(), both.bitwise_and_((1 << bits) - 1).int()


def _ascending(listed: Tensor) -> Tensor:
    """Sorts each row of integers; on the CPU in place with numpy, ten times as fast as torch."""
    if listed.device.type == "cpu":
        with suppress(RuntimeError):  # torch runs without numpy too
            listed.numpy().sort(-1)
            return listed
    return listed.sort(dim=-1).values
