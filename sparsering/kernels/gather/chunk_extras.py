"""Extras of a call on a chunk's scores and weights, and the gradients of their tables."""

import torch
from torch import Tensor

from ...dropout import kept_pairs
from ..problem import Problem
from .units import Chunk, Places

Unit = int | slice
"""Index of the units of a chunk that are computed together: one unit, or all."""


class Extras:
    """Applies the extras of one problem to its chunks, and sums the gradients of its tables."""

    def __init__(self, problem: Problem, dtype: torch.dtype) -> None:
        self.problem, self.dtype = problem, dtype
        query, key, mask = problem.query, problem.key, problem.key_mask
        bias, table = problem.block_bias, problem.distance_bias
        self.bias = None if bias is None else bias.flatten()
        self.dbias = None if bias is None else bias.new_zeros(bias.numel(), dtype=dtype)
        self.table = None if table is None else table.to(dtype).flatten()
        self.dtable = None
        if table is not None and problem.learns_distances:  # float64: each sum has many terms
            self.dtable = table.new_zeros(table.numel(), dtype=torch.float64)
        self.masked = None
        if mask is not None:
            masked = ~mask[:, None].expand(len(query), key.shape[1], -1)
            self.masked = masked.flatten()  # [B * Hkv * Nk], as the rows of flattened keys

    def clear(self, chunk: Chunk, unit: Unit, *rows: Tensor) -> None:
        """Zeroes masked keys and values in place, because their numbers may be NaN."""
        if self.masked is not None:
            for x in rows:
                x.masked_fill_(self.masked[chunk.k[unit]][..., None], 0.0)

    def added(self, chunk: Chunk) -> Tensor | None:
        """Returns the summand of a chunk's scores: the block bias, and -inf outside the pattern.

        Shape [C or 1, g or 1, m or 1, n]; None if there is nothing to add.
        """
        added, zero = None, torch.zeros((), dtype=self.dtype, device=chunk.q.device)
        if self.bias is not None and chunk.bias is not None:
            entries, slots = chunk.bias
            slots = slots[:, None].expand(-1, chunk.q.shape[1], -1)
            added = self.bias[entries].gather(-1, slots)[:, :, None].to(self.dtype)
        if chunk.cells is not None:
            kept = zero if added is None else added
            added = torch.where(chunk.cells[:, None], kept, -torch.inf)
        if self.masked is not None:
            kept = zero if added is None else added
            added = torch.where(self.masked[chunk.k][:, None, None], -torch.inf, kept)
        return added

    def adjust(self, score: Tensor, chunk: Chunk, unit: Unit) -> tuple[Tensor, Tensor | None]:
        """Applies softcap and distance bias to scores [..., g * m, n], in place.

        Returns: the scores, and the derivative of the cap, None without a cap.
        """
        cap, slope = self.problem.softcap, None
        if cap is not None:
            score.div_(cap).tanh_()
            slope = 1 - score * score
            score.mul_(cap)
        if self.table is not None and chunk.places is not None:
            entry = self._entries(chunk.places, unit)
            score.add_(self.table[entry].flatten(-3, -2))
        return score, slope

    def drop(self, weight: Tensor, chunk: Chunk, unit: Unit) -> Tensor:
        """Applies dropout to weights [..., g * m, n], or to their gradients, in place."""
        p, seed, places = self.problem.dropout_p, self.problem.dropout_seed, chunk.places
        if p is None or seed is None or places is None:
            return weight
        of_row = seed[places.batch[unit][..., None], places.stream[unit]]  # [.., m]
        kept = kept_pairs(
            of_row[..., None, :, None],
            p,
            places.head[unit][..., None, None],
            places.query[unit][..., None, :, None],
            places.key[unit][..., None, None, :],
            places.branch,
        )
        return weight.mul_(kept.flatten(-3, -2)).div_(1 - p)

    def add_distance_gradient(self, dscore: Tensor, chunk: Chunk, unit: Unit) -> None:
        """Adds gradients of scores [..., g * m, n] to the table entries of their distances."""
        if self.dtable is not None and chunk.places is not None:
            entry = self._entries(chunk.places, unit)
            self.dtable.index_add_(0, entry.flatten(), dscore.flatten().double())

    def add_bias_gradient(self, of_units: list[Tensor], chunk: Chunk) -> None:
        """Adds sums over queries [.., g, n], one per key, to the block bias of the key's entry."""
        if self.dbias is None or chunk.bias is None:
            return
        entries, slots = chunk.bias
        of_keys = torch.cat([x.reshape(-1, *x.shape[-2:]) for x in of_units])  # [C, g, n]
        of_entries = of_keys.new_zeros(entries.shape)
        of_entries.scatter_add_(-1, slots[:, None].expand(of_keys.shape), of_keys)
        self.dbias.index_add_(0, entries.flatten(), of_entries.flatten())

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the gradients of the block bias and of the distance bias."""
        given = (self.problem.block_bias, self.problem.distance_bias)
        found = (self.dbias, self.dtable)
        of_bias, of_table = (
            None if x is None or like is None else x.view(like.shape).to(like.dtype)
            for x, like in zip(found, given, strict=True)
        )
        return of_bias, of_table

    def _entries(self, places: Places, unit: Unit) -> Tensor:
        """Returns the index into the flattened distance table for each pair, [.., g, m, n]."""
        table = self.problem.distance_bias
        assert table is not None
        radius = table.shape[2] // 2
        distance = places.key[unit][..., None, :] - places.query[unit][..., :, None]
        row = places.batch[unit][..., None] * table.shape[1] + places.head[unit]  # [.., g]
        first = row * table.shape[2] + radius
        return first[..., None, None] + distance.clamp(-radius, radius)[..., None, :, :]
