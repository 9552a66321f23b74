"""Attention over `GatheredTiles` and lists, in as few operators of torch at any length.

An exported program computes it in place of our operators. It holds the scores of all visited pairs
at once, since a program has no loop over parts of them. Scores and sums are in `sum_dtype`.

Shapes: B batch entries, or 1 if tables differ by entry; K heads of keys and G query heads of each,
without those whose tables differ; U units of m queries and n keys.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ..ground.numerics import add_sink, capped, entry_of_distance, finite_or_zero, sum_dtype
from ..layouts.gathered_tiles import GatheredTiles, differs, folded, unfolded


class TableCall(NamedTuple):
    """The tensors and numbers of a call, as `Problem` has them; an option is None if not in use."""

    query: Tensor  # [B, Hq, Nq, D]
    key: Tensor  # [B, Hkv, Nk, D]
    value: Tensor  # [B, Hkv, Nk, Dv]
    scale: float
    q_start: int = 0  # position of the first query; only `runs` need it
    softcap: float | None = None
    distance_bias: Tensor | None = None  # [B, Hq, 2R + 1]
    block_bias: Tensor | None = None  # [B, Hq, blocks]
    sink: Tensor | None = None  # [B, Hq, Nq or 1]
    key_mask: Tensor | None = None  # bool [B or 1, Nk]
    runs: Tensor | None = None  # int64 [B or 1, Nk], pairs attend where the numbers are equal

    def in_sum_dtype(self) -> "TableCall":
        """Returns the call in the dtype of sums; values of keys that nobody sees are 0."""
        dtype = sum_dtype(self.query)
        value = self.value.to(dtype)
        if self.key_mask is not None:  # 0 * NaN is NaN
            value = torch.where(self.key_mask[:, None, :, None], value, 0.0)
        options = self.distance_bias, self.block_bias, self.sink
        distance_bias, block_bias, sink = (None if x is None else x.to(dtype) for x in options)
        return self._replace(
            query=self.query.to(dtype),
            key=self.key.to(dtype),
            value=value,
            distance_bias=distance_bias,
            block_bias=block_bias,
            sink=sink,
        )


class Sums(NamedTuple):
    """A softmax over some keys of each row, not yet divided by its sum."""

    out: Tensor  # [..., Dv] sum of e^(s - highest) v
    total: Tensor  # [...] sum of e^(s - highest)
    highest: Tensor  # [...] largest score, -inf for a row without keys


class ListedBlocks(NamedTuple):
    """Blocks of keys that rows of queries list: a selection whose numbers the program has."""

    blocks: Tensor  # int64 [B or 1, H, R, k] block numbers of the call's rows, -1 for none
    block_size: int  # keys in a block
    row_size: int  # queries in a row
    first: int  # position of the first query of the first row
    holds: Callable[[Tensor, Tensor], Tensor]  # (query position, key) -> whether a pair attends
    slot_bias: Tensor | None = None  # [B, Hq, R, k], added to the scores of each slot


def attend_by_tables(
    call: TableCall, tables: GatheredTiles, lists: Sequence[ListedBlocks] = ()
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a call over tiles and lists, as `attention` does.

    Cost: O(pairs in visited tiles, with padding) time and memory, and of lists O(their keys times
    the head dim).
    """
    dtype, call = call.query.dtype, call.in_sum_dtype()
    found = [over_tiles(call, tables)] if tables.units else []
    found += [over_lists(call, listed) for listed in lists]
    if found:
        out, total, highest = (
            torch.cat(x, 3) if len(x) > 1 else x[0] for x in zip(*found, strict=True)
        )
        out, lse = merged(Sums(out, total, highest))
    else:
        out = call.query.new_zeros(*call.query.shape[:3], call.value.shape[3])
        lse = call.query.new_full(call.query.shape[:3], -torch.inf)
    if call.sink is not None:
        out, lse = add_sink(out, lse, call.sink)
    return out.to(dtype), lse


def merged(sums: Sums) -> tuple[Tensor, Tensor]:
    """Merges the R parts of each row: (out, lse) of `Sums` [B, Hq, Nq, R].

    A row without keys has out 0 and lse -inf.
    """
    out, total, highest = sums
    most = highest.amax(3)
    none, lse = most == -torch.inf, finite_or_zero(most)
    if highest.shape[3] == 1:
        out, total = out[..., 0, :], total[..., 0]
    else:
        share = (highest - lse[..., None]).exp()
        out = (share[..., None, :] @ out)[..., 0, :]
        total = (share * total).sum(3)
    out = torch.where(none[..., None], 0.0, out / total[..., None])
    return out, torch.where(none, -torch.inf, lse + total.log())


def over_tiles(call: TableCall, tables: GatheredTiles) -> Sums:
    """Sums over the tiles that each query visits: [B, Hq, Nq, R], R the most units of a query."""
    rows = _Folded.of(call, *tables.place.shape[:2])
    found = []
    for units in tables.units:
        cells = distance = None
        if units.kind.numel():
            m, w = len(units.query_slot), len(units.key_slot)
            own = tables.cells[:, :m, :w].index_select(0, units.kind.flatten())
            own = own.unflatten(0, units.kind.shape).transpose(1, 2)  # [U, m, c, w]
            cells = own.flatten(2)
        if call.distance_bias is not None:
            distance = units.key_place[:, None] - units.query_place[:, :, None]
            distance = _entry_of(distance, units.table, call.distance_bias)
        slots = _Gathered(
            query=units.query,
            key=units.key,
            cells=cells,
            distance=distance,
            block=units.block,
        )
        found.append(_over_slots(rows, slots, call.softcap, call.block_bias))
    parts = [torch.cat(x, 3) if len(x) > 1 else x[0] for x in zip(*found, strict=True)]
    place = tables.place.flatten(0, 2)  # [Bt * T * Nq, R]
    out, total, highest = (
        x.flatten(1, 2).index_select(2, place.clamp(min=0).flatten()).unflatten(2, place.shape)
        for x in parts
    )  # [B, K * G, rows, R, ...]
    highest = torch.where(place < 0, -torch.inf, highest)
    return Sums(*(unfolded(x, tables.place.shape[:3]) for x in (out, total, highest)))


def over_lists(call: TableCall, listed: ListedBlocks) -> Sums:
    """Sums over the blocks that each query's row lists: [B, Hq, Nq, 1]."""
    (batches, heads, num_rows, slots), device = listed.blocks.shape, listed.blocks.device
    size, (q_len, kv_len) = listed.block_size, (call.query.shape[2], call.key.shape[2])
    kv_heads = min(heads, call.key.shape[1])
    rows = _Folded.of(call, batches, heads)

    def count(stop: int) -> Tensor:
        return torch.arange(stop, device=device)

    # Equal blocks stand side by side, the first slot in front, which alone counts.
    ascending = (listed.blocks * slots + count(slots)).sort(3).values
    blocks, slot = ascending.div(slots, rounding_mode="floor"), ascending % slots
    is_new = torch.nn.functional.pad(blocks[..., 1:] != blocks[..., :-1], (1, 0), value=True)
    keys = (blocks[..., None] * size + count(size)).flatten(3)  # [B or 1, H, R, n]
    counted = ((blocks >= 0) & is_new)[..., None].expand(-1, -1, -1, -1, size).flatten(3)
    counted, keys = counted & (keys < kv_len), keys.clamp(0, max(0, kv_len - 1))
    position = listed.first + count(num_rows * listed.row_size).unflatten(0, (num_rows, -1))
    cells = counted[..., None, :] & listed.holds(position[:, :, None], keys[..., None, :])
    table = count(batches * heads)
    of_keys = table.div(heads, rounding_mode="floor") * kv_heads
    of_keys = of_keys + (table % heads * kv_heads).div(heads, rounding_mode="floor")
    distance = bias = None
    if call.distance_bias is not None:
        distance = keys[..., None, :] - position[:, :, None]
        each = table.view(batches, heads, 1, 1, 1)
        distance = _entry_of(distance, each, call.distance_bias).flatten(0, 2)
    if listed.slot_bias is not None:
        bias = listed.slot_bias.to(call.query.dtype).flatten(2)  # [B, Hq, R * k]
    row = count(batches * heads * num_rows)[:, None]
    query = (position - call.q_start).clamp(0, q_len - 1)
    found = _over_slots(
        rows,
        _Gathered(
            query=(query + table[:, None, None] * q_len).flatten(0, 1),
            key=(keys + of_keys.view(batches, heads, 1, 1) * kv_len).flatten(0, 2),
            cells=cells.flatten(0, 2),
            distance=distance,
            block=slot.flatten(0, 2) + row * slots,
        ),
        call.softcap,
        bias,
    )
    shape = batches, heads, num_rows * listed.row_size
    own = (unfolded(x.flatten(1, 2), shape) for x in found)  # [B, Hq, R * queries of a row, ...]
    return Sums(*(x.narrow(2, call.q_start - listed.first, q_len).unsqueeze(3) for x in own))


class _Folded(NamedTuple):
    """A call's tensors as tables index them, by `folded`: B is 1 if tables differ by entry."""

    query: Tensor  # [B, K, G, tokens, D], times the scale
    key: Tensor  # [B, K, tokens, D]
    value: Tensor  # [B, K, tokens, Dv]
    valid: Tensor | None  # bool [B or 1, tokens], False for keys that nobody sees
    runs: tuple[Tensor, Tensor] | None  # of queries and of keys, [B or 1, tokens] each
    distance_bias: Tensor | None  # [B, K, G, tables * (2R + 1)]
    tables: tuple[int, int]  # batch entries and heads with tables of their own

    @classmethod
    def of(cls, call: TableCall, batches: int, heads: int) -> "_Folded":
        kv_heads = min(heads, call.key.shape[1])  # heads of keys that tables index apart
        key = folded(call.key, batches, kv_heads)

        def of_tokens(x: Tensor, apart: int) -> Tensor:
            each = x[:, None, :, None].expand(batches if differs(batches) else -1, apart, -1, -1)
            return folded(each, batches, apart)[:, 0, :, 0]

        runs = None
        if call.runs is not None:
            own = call.runs.narrow(1, call.q_start, call.query.shape[2])
            runs = of_tokens(own, heads), of_tokens(call.runs, kv_heads)
        bias, tables = call.distance_bias, (batches, heads)
        return cls(
            query=_of_queries(call.query * call.scale, tables, key.shape[1]),
            key=key,
            value=folded(call.value, batches, kv_heads),
            valid=None if call.key_mask is None else of_tokens(call.key_mask, kv_heads),
            runs=runs,
            distance_bias=None if bias is None else _of_numbers(bias, tables, key.shape[1]),
            tables=tables,
        )


def _of_queries(x: Tensor, tables: tuple[int, int], kv_heads: int) -> Tensor:
    """Folds [B, Hq, N, D] to [B, K, G, numbers, D]."""
    return folded(x, *tables).unflatten(1, (kv_heads, -1))


def _of_numbers(x: Tensor, tables: tuple[int, int], kv_heads: int) -> Tensor:
    """Folds [B, Hq, N] to [B, K, G, numbers]."""
    return _of_queries(x[..., None], tables, kv_heads)[..., 0]


class _Gathered(NamedTuple):
    """U units of m queries and n keys, as rows of folded tensors."""

    query: Tensor  # int64 [U, m]
    key: Tensor  # int64 [U, n]
    cells: Tensor | None  # bool [U, m or 1, n], the pairs that attend; None if all do
    distance: Tensor | None  # int64 [U, m, n] index in the distance bias
    block: Tensor  # int64 [U, c] index in the block bias of every n / c keys, or empty


def _over_slots(
    rows: _Folded, slots: _Gathered, softcap: float | None, block_bias: Tensor | None
) -> Sums:
    """Sums over the keys of units: [B, K, G, U * m]; the block bias is [B, Hq, blocks]."""
    (units, m), (_, n), group = slots.query.shape, slots.key.shape, rows.query.shape[2]
    q = rows.query.index_select(3, slots.query.flatten()).unflatten(3, (units, m))
    q = q.transpose(2, 3).flatten(3, 4)  # [B, K, U, G * m, D]
    k, v = (x.index_select(2, slots.key.flatten()).unflatten(2, (units, n)) for x in rows[1:3])
    score = capped(q @ k.transpose(3, 4), softcap).unflatten(3, (group, m))  # [B, K, U, G, m, n]
    if rows.distance_bias is not None and slots.distance is not None:
        bias = rows.distance_bias.index_select(3, slots.distance.flatten())
        score = score + bias.unflatten(3, (units, m, n)).transpose(2, 3)
    if block_bias is not None:
        bias = _of_numbers(block_bias, rows.tables, rows.key.shape[1])
        bias = bias.index_select(3, slots.block.flatten()).unflatten(3, slots.block.shape)
        each = bias[..., None].expand(-1, -1, -1, -1, -1, n // slots.block.shape[1])
        score = score + each.flatten(4).transpose(2, 3)[..., None, :]
    attend = [] if slots.cells is None else [slots.cells[None]]  # [B or 1, U, m or 1, n] each
    if rows.valid is not None:
        attend.append(_of_units(rows.valid, slots.key)[:, :, None])
    if rows.runs is not None:
        query, key = _of_units(rows.runs[0], slots.query), _of_units(rows.runs[1], slots.key)
        attend.append(query[..., None] == key[:, :, None])
    if attend:
        cells = reduce(torch.logical_and, attend)
        score = torch.where(cells[:, None, :, None], score, -torch.inf)
    highest = score.amax(5)
    weight = (score - finite_or_zero(highest)[..., None]).exp()
    out = (weight.flatten(3, 4) @ v).unflatten(3, (group, m))
    return Sums(*(x.transpose(2, 3).flatten(3, 4) for x in (out, weight.sum(5), highest)))


def _of_units(x: Tensor, index: Tensor) -> Tensor:
    """Gathers x [B, tokens] by index [U, n]: [B, U, n]."""
    return x.index_select(1, index.flatten()).unflatten(1, index.shape)


def _entry_of(distance: Tensor, table: Tensor, bias: Tensor) -> Tensor:
    """Returns the index of distances in the folded distance bias, whose tables are numbered."""
    numbers = bias.shape[2]
    shape = (-1, *(1,) * (distance.dim() - 1)) if table.dim() < distance.dim() else table.shape
    return entry_of_distance(distance, bias) + table.view(shape) * numbers
