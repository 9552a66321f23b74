"""Applies a call's extras (such as softcap and dropout) to the scores and weights of a chunk."""

import torch
from torch import Tensor

from ...ground.dropout import kept_pairs
from ...ground.numerics import long_sum_dtype
from ..problem import Problem
from .units import Chunk, Places

Unit = int | slice
"""Index of the units of a chunk that are computed together: an int for one, a slice for all."""


class Extras:
    """Applies softcap, biases, dropout and key masks to chunks, and sums the biases' gradients."""

    def __init__(self, problem: Problem, dtype: torch.dtype) -> None:
        self.problem, self.dtype = problem, dtype
        query, key, mask = problem.query, problem.key, problem.key_mask
        bias, table = problem.block_bias, problem.distance_bias
        self.bias = None if bias is None else bias.flatten()
        self.dbias = None if bias is None else bias.new_zeros(bias.numel(), dtype=dtype)
        self.table = None if table is None else table.to(dtype).flatten()
        self.dtable = None
        if table is not None and problem.learns_distances:
            self.dtable = table.new_zeros(table.numel(), dtype=long_sum_dtype(table.device))
        self.masked = None  # bool [B * Hkv * Nk], True for keys that the key mask excludes
        if mask is not None:
            self.masked = ~mask[:, None].expand(len(query), key.shape[1], -1).flatten()

    def clear(self, chunk: Chunk, unit: Unit, *rows: Tensor) -> None:
        """Sets masked keys and values to 0 in place, since they may be NaN."""
        if self.masked is not None:
            for x in rows:
                x.masked_fill_(self.masked[chunk.k[unit]][..., None], 0.0)

    def added(self, chunk: Chunk) -> Tensor | None:
        """Returns what is added to the scores of a chunk, -inf for no pair; None if nothing is.

        Its shape is [C or 1, g or 1, m or 1, n]: units, query heads per kv head, queries, keys.
        """
        added = zero = torch.zeros((), dtype=self.dtype, device=chunk.q.device)
        if self.bias is not None and chunk.bias is not None:
            added = self.of_keys(self.bias, chunk)
        if chunk.cells is not None:
            added = torch.where(chunk.cells[:, None], added, -torch.inf)
        if self.masked is not None:
            added = torch.where(self.masked[chunk.k][:, None, None], -torch.inf, added)
        return None if added is zero else added

    def of_keys(self, bias: Tensor, chunk: Chunk) -> Tensor:
        """Gathers each key's block bias (or its tangent) from a flat tensor: [C, g, 1, n]."""
        assert chunk.bias is not None
        entries, slots = chunk.bias
        slots = slots[:, None].expand(-1, chunk.q.shape[1], -1)
        return bias[entries].gather(-1, slots)[:, :, None].to(self.dtype)

    def of_pairs(self, table: Tensor, places: Places, unit: Unit) -> Tensor:
        """Gathers the distance bias of each pair, or its tangent, as [..., g * m, n]."""
        return table[self._entries(places, unit)].flatten(-3, -2)

    def adjust(self, score: Tensor, chunk: Chunk, unit: Unit) -> tuple[Tensor, Tensor | None]:
        """Applies softcap and distance bias to scores [..., g * m, n], in place.

        Returns: the scores, and the derivative of the softcap (None without softcap).
        """
        cap, slope = self.problem.softcap, None
        if cap is not None:
            score.div_(cap).tanh_()
            slope = 1 - score * score
            score.mul_(cap)
        if self.table is not None and chunk.places is not None:
            score.add_(self.of_pairs(self.table, chunk.places, unit))
        return score, slope

    def drop(self, weight: Tensor, chunk: Chunk, unit: Unit) -> Tensor:
        """Applies dropout to weights [..., g * m, n], or to their gradients, in place."""
        p, seed, places = self.problem.dropout_p, self.problem.dropout_seed, chunk.places
        if p is None or seed is None or places is None:
            return weight
        row_seed = seed[places.batch[unit][..., None], places.stream[unit]]  # [.., m]
        head = places.head[unit][..., None, None]
        query, key = places.query[unit][..., None, :, None], places.key[unit][..., None, None, :]
        mask = kept_pairs(row_seed[..., None, :, None], p, head, query, key, places.branch)
        return weight.mul_(mask.flatten(-3, -2)).div_(1 - p)

    def add_distance_gradient(self, dscore: Tensor, chunk: Chunk, unit: Unit) -> None:
        """Adds score gradients [..., g * m, n] to the distance bias's gradient, by distance."""
        if self.dtable is not None and chunk.places is not None:
            entry = self._entries(chunk.places, unit)
            self.dtable.index_add_(0, entry.flatten(), dscore.flatten().to(self.dtable.dtype))

    def add_bias_gradient(
        self, unit_sums: list[Tensor], chunk: Chunk, unit: Unit = slice(None)
    ) -> None:
        """Adds score gradients, summed over queries, into the gradient of the block bias.

        `unit_sums` has a tensor [.., g, n] for each of the units `unit`, or one for all of them.
        """
        if self.dbias is None or chunk.bias is None:
            return
        some = slice(unit, unit + 1) if isinstance(unit, int) else unit
        entries, slots = (x[some] for x in chunk.bias)
        by_key = torch.cat([x.reshape(-1, *x.shape[-2:]) for x in unit_sums])  # [C, g, n]
        by_entry = by_key.new_zeros(entries.shape)
        by_entry.scatter_add_(-1, slots[:, None].expand(by_key.shape), by_key)
        self.dbias.index_add_(0, entries.flatten(), by_entry.flatten())

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the gradients of the block bias and of the distance bias."""
        tables = self.problem.block_bias, self.problem.distance_bias
        dbias, dtable = (
            None if grad is None or x is None else grad.view(x.shape).to(x.dtype)
            for grad, x in zip((self.dbias, self.dtable), tables, strict=True)
        )
        return dbias, dtable

    def _entries(self, places: Places, unit: Unit) -> Tensor:
        """Returns where each pair's distance bias is in the flattened table: [..., g, m, n]."""
        table = self.problem.distance_bias
        assert table is not None
        radius = table.shape[2] // 2
        query, key = places.depths
        distance = key[unit][..., None, :] - query[unit][..., :, None]
        row = places.batch[unit][..., None] * table.shape[1] + places.head[unit]  # [.., g]
        first = row * table.shape[2] + radius
        return first[..., None, None] + distance.clamp(-radius, radius)[..., None, :, :]
