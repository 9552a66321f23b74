"""`PatternRefiner`: improves a table of key blocks by the softmax mass that blocks receive."""

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import check_group, refuse_meta
from ..ground.arguments import checked_integer, digest_of, is_finite, shortened
from ..ground.keywords import class_with_hints
from ..ground.rows import first_in_row
from .loss import checked_mass, checked_slots

UNIT = 1 << 32
"""Mass is summed as integers in units of 1 / UNIT, so that sums do not depend on their order."""


@class_with_hints
class PatternRefiner:
    """Keeps a table of `k` key blocks for each row of queries, and improves it by observed mass.

    A row is a group of neighbouring queries. The table suits data where a row needs the same blocks
    in every example (images, video, tables). For text, choose blocks by `block_scores` instead.

    Each update adds the observed mass of a block to its running mean:
    `M = ema * M + (1 - ema) * mean`. It then swaps at most `swaps` blocks in each row: the block of
    largest M outside the table replaces the block of least M in it, while the entering M exceeds
    (1 + margin) times the leaving M. Of blocks with equal M, the lowest index comes first. Row r
    never loses the first `sink` blocks, nor the `local` blocks that end at block
    r * blocks // rows. A block that was swapped out cannot return for `cooldown` updates. A block
    that was never observed has no M and is never swapped; a block that is not observed for a while
    keeps its M.

    So a block outside the table must be *observed* before it can enter. A pattern yields no mass
    for blocks that it does not visit: now and then observe some rows over all blocks, as in the
    example. All masses of a row must be shares of the softmax over all blocks; shares of a softmax
    over visited blocks alone would be too large.

    Args:
        num_kv_heads: number of key/value heads; each has a table.
        rows: number of rows, that is, groups of queries.
        blocks: number of key blocks.
        k: blocks in the table of a row, at least sink + local and at most blocks.
        ema: weight of the old running mean, at least 0 and below 1.
        swaps: largest number of swaps of a row in an update.
        margin: a block replaces another only if its M is larger by this share.
        sink, local: numbers of blocks that never leave, as described above.
        cooldown: number of updates for which a block that was swapped out stays out.
        seed: seed of the first table, which is random.

    Attributes:
        table: int64 [H, R, k] on the CPU, the blocks of each row. An update that changes the table
            assigns a new tensor; otherwise it stays the same object.

    Raises: ValueError if arguments contradict one another.

    Example:
        >>> refiner = PatternRefiner(2, rows=64, blocks=64, k=6)
        >>> pattern = SelectedBlocks(refiner.table, 64)
        >>> observed = torch.rand(64) < 0.1  # a tenth of the rows, over all blocks
        >>> indices = torch.where(observed[:, None], torch.arange(64), -1)
        >>> scores = block_scores(query, key, 64, query_block=64, method="exact", causal=False)
        >>> refiner.observe(scores.exp(), indices)  # exact scores are logs of the mass
        >>> if refiner.update():
        ...     pattern = SelectedBlocks(refiner.table, 64)
    """

    def __init__(
        self,
        num_kv_heads: int,
        rows: int,
        blocks: int,
        k: int,
        *,
        ema: float = 0.9,
        swaps: int = 1,
        margin: float = 0.1,
        sink: int = 1,
        local: int = 1,
        cooldown: int = 2,
        seed: int = 0,
    ) -> None:
        rows, blocks = checked_integer("rows", rows, 1), checked_integer("blocks", blocks, 1)
        self.shape = checked_integer("num_kv_heads", num_kv_heads, 1), rows, blocks
        self.k = k = checked_integer("k", k, 1)
        self.swaps = checked_integer("swaps", swaps, 1)
        self.cooldown = checked_integer("cooldown", cooldown, 0)
        sink, local = checked_integer("sink", sink, 0), checked_integer("local", local, 0)
        forced = sink + local
        if not forced <= k <= blocks:
            raise ValueError(
                f"k must be at least sink + local = {forced} and at most blocks = {blocks}, got "
                f"{k}; pass another k, or force fewer blocks"
            )
        if not (is_finite(ema) and 0 <= ema < 1 and is_finite(margin) and margin >= 0):
            raise ValueError(
                "ema must be at least 0 and below 1, and margin finite and at least 0, got "
                f"{shortened(repr(ema))} and {shortened(repr(margin))}; ema=0 uses only the latest "
                "observations"
            )
        seed = checked_integer("seed", seed, -(1 << 63), (1 << 63) - 1)
        self.ema, self.margin = ema, margin
        row, block = torch.arange(rows)[:, None], torch.arange(blocks)
        current = row * blocks // rows
        self._protected = (block < sink) | ((block <= current) & (block > current - local))
        draw = torch.rand(self.shape, generator=torch.Generator().manual_seed(seed))
        order = (draw - 2.0 * self._protected).argsort(dim=2, stable=True)
        self.table: Tensor = order[..., :k].contiguous()
        self._mass = torch.zeros(self.shape, dtype=torch.float64)
        self._observed = torch.zeros(self.shape, dtype=torch.bool)
        zeros = (torch.zeros(self.shape, dtype=torch.int64) for _ in range(3))
        self._sums, self._counts, self._barred_until = zeros
        self._updates = torch.zeros((), dtype=torch.int64)

    def __copy__(self) -> Self:
        """Copies the state, too, because `observe` adds to its sums in place."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), **{name: getattr(self, name).clone() for name in STATE})
        return other

    def observe(self, mass: Tensor, indices: Tensor) -> None:
        """Records the softmax mass that blocks received, for the next update.

        Args:
            mass: [B, H or a multiple, R, m], the mass of m blocks for each row: softmax weights
                summed over the block's keys, the row's queries, and heads that share a kv head.
            indices: int64, broadcasts to [B, H, R, m]: the block that each mass belongs to. Indices
                outside 0 .. blocks - 1, and repeats of a block in a row, are ignored.

        Raises: ValueError for invalid shapes, and masses that are negative or not finite.

        Cost: O(B H R m), on the CPU; waits for the device of the mass.
        """
        heads, rows, blocks = self.shape
        mass = checked_mass(mass, heads, rows).double()
        indices = checked_slots(indices, mass.shape)
        refuse_meta(mass, indices, named="mass and indices")
        mass, indices = mass.cpu(), indices.cpu()
        valid = first_in_row(indices, blocks)
        mass = torch.where(valid, mass, 0.0)
        if not bool((mass >= 0).all() & (mass < 1 << 20).all()):
            raise ValueError(
                "observed masses must be at least 0 and below 2^20, as sums of a row's softmax "
                f"weights are, got some from {mass.min().item()} to {mass.max().item()}; pass "
                "index -1 where a block was not observed"
            )
        slot = torch.where(valid, indices, 0)
        units = (mass * UNIT).round().long()
        for entry in range(len(mass)):
            self._sums.scatter_add_(2, slot[entry], units[entry])
            self._counts.scatter_add_(2, slot[entry], valid[entry].long())

    def update(self, group: dist.ProcessGroup | None = None) -> bool:
        """Adds the mass observed since the last update to the running means, then swaps blocks.

        Args:
            group: ranks that all call this method; they sum observations, for the same swaps.

        Returns: whether the table changed.

        Raises: ValueError on all ranks of `group`, if the arguments or the state of their refiners
            differ in more than the observations since the last update.

        Cost: O(n log(blocks)) time, where n = num_kv_heads * rows * blocks. With a group, the ranks
            also sum 16 * n bytes in an all-reduce.
        """
        sums, counts = self._group_sums(group)
        updated = counts > 0
        mean = sums.double() / counts.clamp(min=1) / UNIT
        running = self.ema * self._mass + (1 - self.ema) * mean
        self._mass = torch.where(updated, torch.where(self._observed, running, mean), self._mass)
        self._observed = self._observed | updated
        self._sums, self._counts = torch.zeros_like(sums), torch.zeros_like(counts)
        self._updates = self._updates + 1
        inside = torch.zeros(self.shape, dtype=torch.bool).scatter_(2, self.table, True)
        can_enter = self._observed & ~inside & (self._barred_until < self._updates)
        can_leave = self._observed & inside & ~self._protected
        most = min(self.swaps, self.k, self.shape[2])
        enter_mass, entering = _least(torch.where(can_enter, -self._mass, torch.inf), most)
        leave_mass, leaving = _least(torch.where(can_leave, self._mass, torch.inf), most)
        # Without a candidate, a mass is inf, and the comparison is False.
        swap = -enter_mass > (1 + self.margin) * leave_mass
        if not bool(swap.any()):
            return False
        slot = (self.table[..., None] == leaving[:, :, None]) & swap[:, :, None]  # [H, R, k, swaps]
        self.table = torch.where(slot.any(3), (slot * entering[:, :, None]).sum(3), self.table)
        barred = torch.zeros(self.shape, dtype=torch.bool).scatter_(2, leaving, swap)
        self._barred_until = torch.where(barred, self._updates + self.cooldown, self._barred_until)
        return True

    def state_dict(self) -> dict[str, Tensor]:
        """Copies all state. A run resumed from it, even between updates, continues bit for bit."""
        return {name.lstrip("_"): getattr(self, name).clone() for name in STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state that `state_dict` returned; ValueError if sizes or dtypes differ."""
        own = self.state_dict()
        fits = isinstance(state, Mapping) and set(state) == set(own)
        if not fits or any(
            not isinstance(y := state[name], Tensor) or (y.shape, y.dtype) != (x.shape, x.dtype)
            for name, x in own.items()
        ):
            names = sorted(state) if isinstance(state, Mapping) else shortened(repr(state))
            raise ValueError(
                "expected the state_dict of a PatternRefiner with (heads, rows, blocks) = "
                f"{self.shape} and k={self.k}, got one with {names}; construct the refiner with "
                "the arguments of the saved one"
            )
        for name in STATE:
            setattr(self, name, state[name.lstrip("_")].detach().cpu().clone())

    def _group_sums(self, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Returns (masses, counts), added up over ranks; ValueError if the ranks' states differ."""
        check_group(group)
        if group is None:
            return self._sums, self._counts
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        numbers = self.ema, self.margin, self.swaps, self.cooldown
        settings = torch.tensor(numbers, dtype=torch.float64)
        # each rank observed its own batches
        names = (name for name in STATE if name not in ("_sums", "_counts"))
        state = settings, self._protected, *(getattr(self, name) for name in names)
        own = torch.tensor([_digest(x) for x in state])
        # ~ reverses the order, so that the maximum of ~x is ~ of the minimum of x
        extremes = torch.cat((own, ~own)).to(device)
        from ..distributed.agreement import agree_to_begin  # imported only if there are ranks

        agree_to_begin(group, "PatternRefiner.update", extremes, sizes=tuple(self._sums.shape))
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        most, least = extremes.cpu().chunk(2)
        if not torch.equal(most, ~least):
            raise ValueError(
                "expected refiners with the same arguments and state on all ranks of the group, "
                "got different ones; give all the same seed, and call update(group) on all ranks"
            )
        totals = torch.stack((self._sums, self._counts)).to(device)
        dist.all_reduce(totals, group=group)
        sums, counts = totals.cpu().unbind()
        return sums, counts


STATE = ("table", "_mass", "_observed", "_sums", "_counts", "_barred_until", "_updates")


def _digest(x: Tensor) -> int:
    return digest_of(x.contiguous().view(torch.int64) if x.dtype == torch.float64 else x.long())


def _least(value: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` smallest values [H, R, count] and their block numbers, lowest first."""
    least, block = value.sort(dim=2, stable=True)
    return least[..., :count], block[..., :count]
