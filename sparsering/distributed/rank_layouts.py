"""Builds the layouts of a rank's kernel calls, whose tiles index its shard or arrived keys.

The starts of tiles are rewritten from positions to indices in the shard, or in a buffer of arrived
keys. A kernel uses the same stride, `step`, for the tokens of query tiles and of key tiles. So in
the buffer, `step` key tiles are interleaved, one token of each in turn.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..ground.once import once
from ..ground.rows import expand_counts
from ..ground.streams import moved
from ..layouts.cache import layout_cache
from ..layouts.compile import assemble, compile_passes
from ..layouts.layout import BlockLayout, Pass, by_axis, tile_counts
from ..layouts.lists import Coordinates, Lists, tiles_of
from ..layouts.tiles import Ranges
from ..patterns.algebra import Frame
from ..patterns.keys import key_mask, without_key_masks
from ..patterns.tree import common_tree
from ..route.work import Work
from .listed import lists_of_rows
from .plan import RingPlan
from .sharding import local_index, num_tokens, positions, without


@dataclass(frozen=True, eq=False)
class Step:
    """One kernel call: query rows, of this rank or sent by others, attend to one array of keys."""

    work: Work | None  # None if no query visits a key
    queries: slice  # from the first to the last query that visits a key
    # [B, Hkv, buffer length] which arrived row is at each place of the key buffer; `arrived`, a row
    # of zeros, at places that no query visits. None if the rank owns the keys, or if rows arrive in
    # the order of the buffer.
    rows: Tensor | None = None
    arrived: int = 0  # number of rows that arrive

    def ready(self) -> "Step":
        """Makes the current CUDA stream wait until the step is built; returns the step."""
        if self.work is not None and self.work.layout.built is not None:
            self.work.layout.ready()
            more = [self.rows, self.work.key_mask, *(x.keys for x in self.work.lists)]
            self.work.layout.built.wait([x for x in more if x is not None])
        return self

    @once
    def copies(self) -> list[Tensor]:
        """Where each arrived row was copied to in the key buffer, to sum its copies' gradients.

        `copies[n]` [arrived] is the place of copy n of each row, or the buffer's length if the row
        has no copy n. The gradients of a row's copies are summed in this order.
        """
        assert self.rows is not None
        places = self.rows.flatten().long()
        order = places.argsort(stable=True)
        order = order[places[order] < self.arrived]
        row = places[order]
        _, number = expand_counts(torch.bincount(row, minlength=self.arrived))
        copies = []
        for n in range(int(number.max()) + 1 if len(row) else 0):
            copy = torch.full((self.arrived,), len(places), device=row.device)
            copy[row[number == n]] = order[number == n]
            copies.append(copy.int())
        return copies or [torch.full((self.arrived,), len(places), device=row.device).int()]


def local_step(plan: RingPlan, rank: int, device: torch.device, of_guests: bool = False) -> Step:
    """Returns the call on a rank's own keys, from its queries or from rows of other ranks."""
    return _cached(plan, device, _own_keys, rank, of_guests)


def round_step(plan: RingPlan, rank: int, number: int, batch: int, device: torch.device) -> Step:
    """Returns the call on the keys that arrive in round `number`, from the rank's own queries."""
    return _cached(plan, device, _arriving_keys, rank, number, batch)


def _cached(
    plan: RingPlan, device: torch.device, compile_step: Callable[..., Step], *arguments: int
) -> Step:
    """Builds a step by `compile_step(plan, device, *arguments)`, or returns it from the cache."""

    def build() -> Step:
        step = compile_step(plan, device, *arguments)
        if step.work is None or device.type == "cpu":
            return step
        work = step.work._replace(layout=step.work.layout.shared(device))
        return replace(step, work=work)

    if plan.own_rows:  # other ranks' lists decide what arrives, and the cache's key lacks them
        return build().ready()
    plan_key = (plan.pattern, plan.frame, plan.world_size, plan.block_size, plan.sharding)
    return layout_cache.keep((*plan_key, compile_step, *arguments, device), build).ready()


def _own_keys(plan: RingPlan, device: torch.device, rank: int, of_guests: bool) -> Step:
    """Builds the step over a rank's own keys, for its queries or for rows that other ranks sent."""
    keys = plan.ranges[rank]
    queries = plan.guests_of(rank) if of_guests else keys
    passes = []
    for p in _passes(plan, queries, keys):
        start, stop = _placed(p.key_start, p.key_stop, keys, p.key_start < p.key_stop)
        covers = _covered(start, stop, p.step, plan.block_size, num_tokens(keys))
        passes.append(replace(p, key_start=start, key_stop=stop, covers=(False, covers)))
    own = positions(keys)[None]
    rows = [] if of_guests and plan.own_rows else queries
    lists = lists_of_rows(plan.pattern, plan.frame, rows) if rows else ()
    lists = _placed_lists(plan, lists, queries, own)
    step = _step(plan, passes, queries, num_tokens(keys), device, lists)
    _, masks = without_key_masks(plan.pattern)
    if step.work is None or not masks:
        return step
    # hide masked own keys, which may be NaN; those of other ranks are not sent
    hidden = key_mask(masks, plan.frame.kv_len, device)[:, own[0].to(device)]
    return replace(step, work=step.work._replace(key_mask=hidden))


def _arriving_keys(plan: RingPlan, device: torch.device, rank: int, index: int, batch: int) -> Step:
    """Builds the step over the keys that arrive in round `index`, for the rank's queries."""
    senders, shard, travel = plan.senders(rank, index), plan.ranges[rank], plan.rows_of(rank)
    keys = sorted(piece for sender in senders for piece in plan.ranges[sender])
    passes, of_places, length = [], [], 0
    for p in _passes(plan, without(shard, travel), keys):
        start, stop, position = _interleaved(p, length, plan.block_size)
        passes.append(replace(p, key_start=start, key_stop=stop, covers=(False, False)))
        of_places.append(position)
        length += position.shape[1]
    lists = lists_of_rows(plan.pattern, plan.frame, shard)
    # other ranks compute these query rows, so they list nothing here
    for listed in () if plan.own_rows else lists:
        listed.keys[:, :, listed.rows_in(local_index(shard, positions(travel)))] = -1
    if lists:
        of_places.append(_listed_positions(lists, keys, plan.frame))
        shared = torch.cat([x.expand(plan.frame.num_kv_heads, -1) for x in of_places], 1)
        lists = _placed_lists(plan, lists, shard, shared, first=length)
        length = shared.shape[1]
    step = _step(plan, passes, shard, length, device, lists)
    rows, arrived = _arrived_rows(plan, rank, senders, of_places, batch, length)
    flat = rows.flatten()
    same = len(flat) == arrived and torch.equal(flat, torch.arange(arrived))
    return replace(step, rows=None if same else moved(rows, device), arrived=arrived)


def _listed_positions(lists: tuple[Lists, ...], keys: Ranges, frame: Frame) -> Tensor:
    """Returns which keys in the ranges `keys` are listed, per kv head, padded with -1.

    The result is [Hkv or 1, most keys of a kv head], ascending, padded with -1.
    """
    heads = 1 if all(x.keys.shape[1] == 1 for x in lists) else frame.num_kv_heads
    seen = torch.zeros(heads, frame.kv_len + 1, dtype=torch.bool)
    for listed in lists:
        tables = listed.keys.shape[1]
        for table, own in enumerate(listed.keys.unbind(1)):
            row = table * heads // tables
            seen[row : max(row + 1, (table + 1) * heads // tables), own.flatten().long()] = True
    inside = torch.zeros(frame.kv_len + 1, dtype=torch.bool)
    inside[positions(keys)] = True
    found = [torch.nonzero(row & inside)[:, 0] for row in seen]
    return pad_sequence(found, batch_first=True, padding_value=-1)


def _placed_lists(
    plan: RingPlan, lists: tuple[Lists, ...], queries: Ranges, of_places: Tensor, first: int = 0
) -> tuple[Lists, ...]:
    """Converts listed keys from positions to places in an array of keys; drops absent keys.

    `of_places` [Hkv or 1, places] is the position at each place, -1 for none. Lists use only places
    from `first` on.
    """
    heads = len(of_places)
    place_of = torch.full((heads, plan.frame.kv_len + 1), -1, dtype=torch.int32)
    for row, own in zip(place_of, of_places[:, first:], strict=True):
        real = torch.nonzero(own >= 0)[:, 0]
        row[own[real]] = (first + real).int()
    query = positions(queries)
    at = of_places.clamp(min=0)
    tree = common_tree(plan.pattern)
    depths = (query[None], at[None]) if tree is None else map(tree.depths_of, (query, at))
    query_depth, depth = depths
    coordinates = Coordinates.joined(query, query_depth, query * 0, at, depth)
    placed = []
    for listed in lists:
        tables = max(listed.keys.shape[1], heads)
        keys = listed.keys.repeat_interleave(tables // listed.keys.shape[1], 1)
        here = [
            place_of[table * heads // tables][own.long()]
            for table, own in enumerate(keys.unbind(1))
        ]
        places = _compact(torch.stack(here, 1))
        if places.shape[3]:
            at_rows = coordinates
            if listed.queries is not None:
                of_query = coordinates.query[..., listed.queries].contiguous()
                at_rows = coordinates._replace(query=of_query)
            placed.append(listed._replace(keys=places, coordinates=at_rows))
    return tuple(placed)


def _compact(keys: Tensor) -> Tensor:
    """Moves the keys >= 0 of each row [..., n] to its front, and drops columns without any."""
    real = keys >= 0
    longest = int(real.sum(-1).max()) if keys.numel() else 0
    place = torch.where(real, real.cumsum(-1) - 1, longest)
    found = keys.new_full((*keys.shape[:-1], longest + 1), -1)
    return found.scatter_(-1, place, keys)[..., :longest].contiguous()


def _passes(plan: RingPlan, queries: Ranges, keys: Ranges) -> list[Pass]:
    """Compiles the passes between ranges of queries and of keys; their tiles start at positions."""
    if not (queries and keys and plan.frame.num_heads and plan.pattern.num_batches() != 0):
        return []
    tiles = tiles_of(plan.pattern)

    def build() -> list[Pass]:
        compiled = compile_passes(tiles, plan.frame, plan.block_size, queries, keys)
        passes = [assemble(c, plan.frame) for c in compiled]
        filled = (p for p in passes if p.key_tile.shape[-1])
        return [replace(p, query_origin=p.query_start, key_origin=p.key_start) for p in filled]

    if not plan.own_rows:
        return build()
    key = tiles, plan.frame, plan.block_size, tuple(queries), tuple(keys)
    return layout_cache.keep((*key, "ranges"), build)


def _step(
    plan: RingPlan,
    passes: list[Pass],
    queries: Ranges,
    length: int,
    device: torch.device,
    lists: tuple[Lists, ...],
) -> Step:
    """Builds a step over `length` keys.

    Its queries run from the first to the last that sees one.
    """
    placed = []
    for p in passes:
        visits = by_axis((p.row_ptr.diff(dim=-1) > 0).any(0), len(p.query_start))
        visits &= p.query_start < p.query_stop
        placed.append((visits, *_placed(p.query_start, p.query_stop, queries, visits)))
    starts, stops = ([x[i][x[0]] for x in placed] for i in (1, 2))
    for listed in lists:
        row = torch.nonzero((listed.keys >= 0).any(3).flatten(0, 1).any(0))[:, 0]
        row = row if listed.queries is None else listed.queries[row]
        starts, stops = [*starts, row], [*stops, row + 1]
    if not sum(map(len, starts)):
        return Step(None, slice(0, 0))
    first, last = int(torch.cat(starts).min()), int(torch.cat(stops).max())
    results = []
    for p, (visits, start, stop) in zip(passes, placed, strict=True):
        start, stop = (torch.where(visits, x - first, 0) for x in (start, stop))
        covers = _covered(start, stop, p.step, plan.block_size, last - first), p.covers[1]
        results.append(replace(p, query_start=start, query_stop=stop, covers=covers).to(device))
    frame = Frame(
        q_len=last - first,
        kv_len=length,
        num_heads=plan.frame.num_heads,
        num_kv_heads=plan.frame.num_kv_heads,
        q_start=0,
    )
    layout = BlockLayout(frame, plan.block_size, tuple(results), 0.0)
    own = tuple(listed.of_rows(slice(first, last), device) for listed in lists)
    return Step(Work(layout=layout, lists=own), slice(first, last))


def _placed(start: Tensor, stop: Tensor, ranges: Ranges, used: Tensor) -> tuple[Tensor, Tensor]:
    """Converts tiles from positions to indices in `ranges`; makes unused tiles empty."""
    shift = local_index(ranges, start) - start
    return torch.where(used, start + shift, 0), torch.where(used, stop + shift, 0)


def _covered(start: Tensor, stop: Tensor, step: int, block_size: int, length: int) -> bool:
    """Whether the tiles of each row of `start` have all `length` tokens, so none needs zeros."""
    return bool((tile_counts(start, stop, step, block_size).sum(1) == length).all())


def _interleaved(p: Pass, first: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places the visited key tiles of a pass in the key buffer, from index `first` on.

    Returns: start and stop of each tile in the buffer, [Hkv or 1, tiles]; and the position at each
    index from `first` on, [Hkv or 1, places], -1 for no key.
    """
    used = p.visited_keys()
    count = tile_counts(p.key_start, p.key_stop, p.step, block_size)
    count = torch.where(used, count, 0)
    if p.step == 1:
        start = count.cumsum(1) - count
    else:
        number, width = used.cumsum(1) - 1, int(count.max()) if count.numel() else 0
        start = number // p.step * (p.step * width) + number % p.step
    end = torch.where(used, start + (count - 1) * p.step + 1, 0)
    position = torch.full((len(used), int(end.max()) if end.numel() else 0), -1)
    tile, slot = expand_counts(count[used])
    place = start[used][tile] + p.step * slot
    position[torch.nonzero(used)[:, 0][tile], place] = p.key_start[used][tile] + p.step * slot
    return torch.where(used, start + first, 0), torch.where(used, end + first, 0), position


def _arrived_rows(
    plan: RingPlan, rank: int, senders: list[int], positions: list[Tensor], batch: int, length: int
) -> tuple[Tensor, int]:
    """Returns which arrived row each place of the buffer takes [B, Hkv, length], and their number.

    Rows arrive sorted by sender, batch entry and kv head, then in the order of
    `RingPlan.tokens_of`.
    """
    heads = plan.frame.num_kv_heads
    parts: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    arrived = 0
    for sender in senders:
        for b in range(batch):
            for h in range(heads):
                token = plan.tokens_of(rank, sender, b, h)
                parts[b, h].append((token, torch.arange(arrived, arrived + len(token))))
                arrived += len(token)
    row_of = torch.full((batch, heads, length), arrived, dtype=torch.int32)
    for (b, h), some in parts.items():
        token, row = (torch.cat(x) for x in zip(*some, strict=True))
        token, order = token.sort()
        if not len(token):
            continue
        position = torch.cat([token[:0], *(x[h * len(x) // heads] for x in positions)])
        place = torch.searchsorted(token, position).clamp(max=len(token) - 1)
        row_of[b, h] = torch.where(token[place] == position, row[order][place], arrived).int()
    return row_of, arrived
