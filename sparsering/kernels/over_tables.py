"""Attention over `GatheredTiles`, in a few operators of torch, equally many at any length.

An exported program computes it in place of our operators. It holds the scores of all visited pairs
at once, since a program has no loop over parts of them. Scores and sums are in `sum_dtype`.

Shapes: B batch entries, or 1 if tables differ by entry; K heads of keys and G query heads of each,
without those whose tables differ; U units of m queries and n keys.
"""

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ..ground.numerics import add_sink, capped, finite_or_zero, sum_dtype
from ..layouts.gathered_tiles import GatheredTiles, GatheredUnits, folded, unfolded


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


def attend_by_tables(call: TableCall, tables: GatheredTiles) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a call over tiles, as `attention` does.

    Cost: O(pairs in visited tiles, with padding) time and memory.
    """
    dtype, call = call.query.dtype, call.in_sum_dtype()
    if tables.units:
        out, lse = merged(over_tiles(call, tables))
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
    batches, heads = tables.place.shape[:2]
    kv_heads = min(heads, call.key.shape[1])  # heads of keys that tables index apart
    key, value = (folded(x, batches, kv_heads) for x in (call.key, call.value))

    def of_queries(x: Tensor) -> Tensor:
        """Folds [B, Hq, N, D] to [B, K, G, numbers, D]."""
        return folded(x, batches, heads).unflatten(1, (key.shape[1], -1))

    def of_tokens(x: Tensor, apart: int) -> Tensor:
        """Folds [B or 1, N] to [B or 1, apart * N], for tables that index so many heads apart."""
        each = x[:, None, :, None].expand(batches if batches > 1 else -1, apart, -1, -1)
        return folded(each, batches, apart)[:, 0, :, 0]

    query = of_queries(call.query * call.scale)
    valid = None if call.key_mask is None else of_tokens(call.key_mask, kv_heads)
    runs = None
    if call.runs is not None:
        own = call.runs.narrow(1, call.q_start, call.query.shape[2])
        runs = of_tokens(own, heads), of_tokens(call.runs, kv_heads)
    found = []
    for units in tables.units:
        score = capped(_scores(query, key, units), call.softcap)
        if (bias := call.distance_bias) is not None:
            score = score + _distance_biases(of_queries(bias[..., None]), units, bias.shape[2])
        if (bias := call.block_bias) is not None:
            score = score + _block_biases(of_queries(bias[..., None]), units)
        cells = _cells(units, tables.cells, valid, runs)
        if cells is not None:
            score = torch.where(cells, score, -torch.inf)
        found.append(_sums(score, _gathered(value, units.key)))
    parts = [torch.cat(x, 3) if len(x) > 1 else x[0] for x in zip(*found, strict=True)]
    rows = tables.place.flatten(0, 2)  # [Bt * T * Nq, R]
    out, total, highest = (
        x.flatten(1, 2).index_select(2, rows.clamp(min=0).flatten()).unflatten(2, rows.shape)
        for x in parts
    )  # [B, K * G, rows, R, ...]
    highest = torch.where(rows < 0, -torch.inf, highest)
    return Sums(*(unfolded(x, tables.place.shape[:3]) for x in (out, total, highest)))


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    """Gathers rows of x [B, K, tokens, D] by index [U, n]: [B, K, U, n, D]."""
    return x.index_select(2, index.flatten()).unflatten(2, index.shape)


def _scores(query: Tensor, key: Tensor, units: GatheredUnits) -> Tensor:
    """Returns [B, K, U, G, m, n] of query [B, K, G, tokens, D] and key [B, K, tokens, D]."""
    q = query.index_select(3, units.query.flatten()).unflatten(3, units.query.shape)
    q = q.transpose(2, 3).flatten(3, 4)  # [B, K, U, G * m, D]
    score = q @ _gathered(key, units.key).transpose(3, 4)
    return score.unflatten(3, (query.shape[2], -1))


def _distance_biases(table: Tensor, units: GatheredUnits, numbers: int) -> Tensor:
    """Reads a distance bias of [B, K, G, tables * numbers, 1] for pairs: [B, K, U, G, m, n]."""
    distance = units.key_place[:, None, :] - units.query_place[:, :, None]
    index = (distance.clamp(-(numbers // 2), numbers // 2) + numbers // 2
             + units.table[:, :, None] * numbers)  # fmt: skip
    found = table[..., 0].index_select(3, index.flatten())
    return found.unflatten(3, index.shape).transpose(2, 3)


def _block_biases(bias: Tensor, units: GatheredUnits) -> Tensor:
    """Reads a block bias of [B, K, G, tables * blocks, 1] for keys: [B, K, U, G, 1, n]."""
    found = bias[..., 0].index_select(3, units.block.flatten())
    found = found.unflatten(3, units.block.shape).transpose(2, 3)  # [B, K, U, G, c]
    each = found[..., None].expand(-1, -1, -1, -1, -1, len(units.key_slot))
    return each.flatten(4)[..., None, :]


def _cells(
    units: GatheredUnits, cells: Tensor, valid: Tensor | None, runs: tuple[Tensor, Tensor] | None
) -> Tensor | None:
    """Returns which pairs attend, [B or 1, 1, U, 1, m or 1, n]; None if all do.

    `valid` is bool [B or 1, tokens], False for keys that nobody sees; `runs` are the numbers of
    queries' and keys' runs, [B or 1, tokens] each.
    """
    found = []
    if units.kind.numel():
        m, w = len(units.query_slot), len(units.key_slot)
        own = cells[:, :m, :w].index_select(0, units.kind.flatten())
        own = own.unflatten(0, units.kind.shape).transpose(1, 2).flatten(2)  # [U, m, c * w]
        found.append(own[None, None, :, None])
    if valid is not None:
        found.append(_of_slots(valid, units.key)[:, None, :, None, None])
    if runs is not None:
        query, key = _of_slots(runs[0], units.query), _of_slots(runs[1], units.key)
        found.append((query[..., None] == key[:, :, None])[:, None, :, None])
    return reduce(torch.logical_and, found) if found else None


def _of_slots(x: Tensor, index: Tensor) -> Tensor:
    """Gathers x [B, tokens] by index [U, n]: [B, U, n]."""
    return x.index_select(1, index.flatten()).unflatten(1, index.shape)


def _sums(score: Tensor, value: Tensor) -> Sums:
    """Sums over the keys of units, as [B, K, G, U * m].

    Takes score [B, K, U, G, m, n] and value [B, K, U, n, Dv].
    """
    highest = score.amax(5)
    weight = (score - finite_or_zero(highest)[..., None]).exp()
    out = (weight.flatten(3, 4) @ value).unflatten(3, score.shape[3:5])
    return Sums(*(x.transpose(2, 3).flatten(3, 4) for x in (out, weight.sum(5), highest)))
