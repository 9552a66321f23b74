"""Plans rings with lists of single keys, if each rank passes only the rows for its own tokens.

Then only one rank knows which keys its rows list. So each rank unites these keys with those that
its tiles need, and tells the owners which keys it listed.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..patterns.algebra import And, Mixture, Or, Pattern
from ..patterns.selected import SelectedBlocks, has_lists, selections_of
from .exchange import Exchange, RingMismatchError
from .listed import keys_by_item, lists_of_rows, united
from .needs import TokenRanges, cut
from .plan import RingPlan


def without_tables(pattern: Pattern) -> Pattern:
    """Returns a pattern whose lists have no rows, since ranks compare only the rest of it."""
    if isinstance(pattern, And | Or | Mixture):
        masks = tuple(map(without_tables, pattern.masks))
        return type(pattern)(masks)  # type: ignore[arg-type]
    if isinstance(pattern, SelectedBlocks) and has_lists(pattern):
        return pattern.without_rows()
    return pattern


def may_be_own_rows(pattern: Pattern, tokens: int) -> bool:
    """Whether the lists may be a shard's own: they have exactly the rows of `tokens` tokens."""
    lists = list(filter(has_lists, selections_of(pattern)))
    return bool(lists) and all(x.num_rows == -(-tokens // x.row_size) for x in lists)


def plan_of_own_rows(exchange: Exchange, tiles: RingPlan, pattern: Pattern) -> RingPlan:
    """Returns this rank's plan if each rank passed only its own rows of lists; all ranks call it.

    The plan knows what this rank sends and receives, and how much others do.

    Args:
        tiles: the plan of the pattern's tiles, equal on all ranks.
        pattern: the pattern of this rank, with its own rows.

    Raises: RingMismatchError on all ranks if the rows of one are not those of its tokens, or list
        numbers past the whole sequence.
    """
    rank, world, frame = exchange.rank, exchange.world_size, tiles.frame
    fault, shard = _fault(pattern, tiles, rank), tiles.ranges[rank]
    lists = () if fault else lists_of_rows(pattern, frame, shard)
    found, need_of = keys_by_item(lists, pattern.num_batches() or 1, frame)
    keys = cut(tiles.ranges)
    foreign: list[list[Tensor]] = []  # [item][owner] keys that this rank lists but others own
    for token in found:
        owner = keys.rank[keys.piece_at(token)]
        foreign.append([token[(owner == r) & (r != rank)] for r in range(world)])
    own = [[_set(rank, r, token, world) for r, token in enumerate(x)] for x in foreign]
    needs, united_of = united(tiles.needs, tiles.need_of, own, need_of, frame.kv_len)
    sizes = [x.sizes(world**2).view(world, world)[rank] for x in needs]
    row = torch.zeros(world, dtype=torch.int64)
    for item in (item for of_batch in united_of for item in of_batch):
        row += sizes[item]
    counts = [len(token) for of_item in foreign for token in of_item]
    records = exchange.agree([int(bool(fault)), *counts, *row.tolist()])
    if any(wrong := [record[0] for record in records]):
        first = wrong.index(1)
        text = fault or f"rank {first} refused its own rows; its own error says why"
        raise RingMismatchError(text, rank, first, "agreement")
    table = torch.tensor(records)[:, 1:]
    listed = table[:, : len(counts)].view(world, len(foreign), world)  # [receiver, item, owner]
    for receiver, of_items in _received(exchange, foreign, listed[:, :, rank]).items():
        for item, token in enumerate(of_items):
            own[item].append(_set(receiver, rank, token, world))
    needs, united_of = united(tiles.needs, tiles.need_of, own, need_of, frame.kv_len)
    of_item = tuple(map(tuple, united_of))
    plan = replace(tiles, pattern=pattern, needs=tuple(needs), need_of=of_item, own_rows=True)
    RingPlan.tokens.store(plan, table[:, len(counts) :])
    return plan


def _fault(pattern: Pattern, tiles: RingPlan, rank: int) -> str:
    """Returns an error message if this rank's rows of lists do not fit its shard, else ""."""
    if tiles.sharding != "contiguous":
        return (
            "lists of each rank's own rows need sharding='contiguous', got "
            f"{tiles.sharding!r}; pass the whole table, or sharding='contiguous'"
        )
    frame, shard = tiles.frame, tiles.ranges[rank]
    for selection in filter(has_lists, selections_of(pattern)):
        first = shard[0][0] // selection.row_size if shard else selection.first_row
        if selection.first_row != first:
            return (
                f"a rank's own rows of SelectedBlocks must have first_row={first}, of its first "
                f"token, got {selection.first_row}; pass first_row={first}"
            )
        blocks = -(-frame.kv_len // selection.block_size)
        if selection.indices.numel() and int(selection.indices.max()) >= blocks:
            return (
                f"SelectedBlocks must list numbers below {blocks}, of the blocks of the whole "
                f"sequence of {frame.kv_len} keys, got {int(selection.indices.max())}; numbers "
                "count from the first token of rank 0"
            )
    return ""


def _set(receiver: int, owner: int, token: Tensor, world: int) -> TokenRanges:
    """Returns the keys `token` as the set that `owner` sends to `receiver`."""
    return TokenRanges(1, torch.full_like(token, receiver * world + owner), token, token)


def _received(
    exchange: Exchange, foreign: list[list[Tensor]], counts: Tensor
) -> dict[int, list[Tensor]]:
    """Tells other ranks which of their keys this rank lists; returns what they list here, by rank.

    `counts` [receiver, item] is the number of this rank's keys that each receiver lists. Returns,
    for each receiver, the keys of each item.
    """
    place = exchange.device_of_numbers
    peers = [peer for peer in range(exchange.world_size) if peer != exchange.rank]
    sends = {peer: torch.cat([of_item[peer] for of_item in foreign]).to(place) for peer in peers}
    room = {
        peer: torch.empty(int(counts[peer].sum()), dtype=torch.int64, device=place)
        for peer in peers
    }
    exchange.start("listed keys to their owners", sends, room).wait()
    return {peer: list(x.cpu().split(counts[peer].tolist())) for peer, x in room.items()}
