"""Plans on meshes of two axes: which bytes the exchanges of heads and the rings move."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..ground.arguments import checked_integer, shortened
from ..ground.keywords import class_with_hints
from ..layouts.cache import layout_cache
from ..layouts.tiles import Ranges
from ..patterns.algebra import Frame, Pattern
from ..patterns.head_shard import HeadShard
from .heads import check_heads, mesh_sharding, ring_sharding
from .plan import PAIRS_PER_TOKEN, RingPlan, checked_widths, whole
from .sharding import check_sharding, num_tokens, owned_ranges


@class_with_hints
@dataclass(frozen=True, eq=False, repr=False)
class MeshPlan:
    """Says what each rank of a mesh of heads and tokens receives and computes.

    Attributes:
        pattern, frame, block_size: as of `RingPlan`, for all heads.
        shape: (h, p). Rank r has index r // p of the axis of heads, and r % p of that of tokens.
        sharding, ranges: which tokens each of the h * p ranks owns, as of `RingPlan`.
        rings: the plan of each group of heads over p ranks, which runs between the exchanges.
        reason: why `RingPlan.best` chose the mesh; else "".
    """

    pattern: Pattern
    frame: Frame
    shape: tuple[int, int]
    block_size: int
    sharding: str
    ranges: tuple[Ranges, ...]
    rings: tuple[RingPlan, ...]
    reason: str = ""

    @property
    def world_size(self) -> int:
        """Number of ranks, h * p."""
        return self.shape[0] * self.shape[1]

    def __repr__(self) -> str:
        ranks = f"{self.frame.q_len} tokens over {self.shape[0]} x {self.shape[1]} ranks"
        return f"<MeshPlan {shortened(str(self.pattern))}, {ranks}, {shortened(self.sharding)}>"

    def tokens_received(self, rank: int) -> int | float:
        """Number of (token, kv head) pairs that a rank's ring receives, per batch entry."""
        ring, place = self._ring_of(rank)
        return ring.tokens_received(place)

    def load(self, rank: int) -> int | float:
        """Number of (query, key) pairs that a rank computes, as `RingPlan.load` counts them."""
        ring, place = self._ring_of(rank)
        return ring.load(place)

    def bytes_received(
        self,
        rank: int,
        *,
        head_dim: int | tuple[int, int],
        dtype: torch.dtype,
        compression: str | None = None,
        backward: bool = False,
    ) -> int | float:
        """Bytes of tensors that a rank receives in a forward or a backward pass, per batch entry.

        They are those of its ring, as `RingPlan.bytes_received` counts them, and those of both
        exchanges. Exchanges keep the dtype of the tensors. With `return_lse=True`, the second
        exchange also brings the lse, which is not counted.

        Args:
            head_dim, dtype, compression, backward: as for `RingPlan.bytes_received`.
        """
        ring, place = self._ring_of(rank)
        options: dict[str, Any] = {"compression": compression, "backward": backward}
        of_ring = ring.bytes_received(place, head_dim=head_dim, dtype=dtype, **options)
        d, dv = checked_widths(head_dim)
        heads, kv_heads = ring.frame.num_heads, ring.frame.num_kv_heads
        inputs, outputs = heads * d + kv_heads * (d + dv), heads * dv  # numbers of a token
        arriving, returning = (outputs, inputs) if backward else (inputs, outputs)
        of_peers, own = self._exchanged(rank)
        return whole(of_ring + (of_peers * arriving + own * returning) * dtype.itemsize)

    @property
    def loads(self) -> torch.Tensor:
        """The `load` of each rank, float64 [h * p]."""
        return torch.cat([ring.loads for ring in self.rings])

    @property
    def cost(self) -> float:
        """Predicted cost of the busiest rank, in the unit of `RingPlan.cost`."""
        frame, costs = self.frame, []
        for rank in range(self.world_size):
            ring, place = self._ring_of(rank)
            of_peers, own = self._exchanged(rank)
            # A row of query or out is half a key with its value.
            rows = ring.frame.num_heads / 2 * (of_peers + own)
            rows += ring.frame.num_kv_heads * of_peers + float(ring.tokens_received(place))
            received = rows / max(1, frame.num_kv_heads)
            costs.append(
                float(ring.load(place)) / max(1, frame.num_heads) + PAIRS_PER_TOKEN * received
            )
        return float(f"{max(costs):.6g}")

    def _ring_of(self, rank: int) -> tuple[RingPlan, int]:
        """Returns the plan of a rank's ring, and the rank's place in it."""
        rank = checked_integer("rank", rank, 0, self.world_size - 1)
        return self.rings[rank // self.shape[1]], rank % self.shape[1]

    def _exchanged(self, rank: int) -> tuple[int, int]:
        """Counts a rank's exchanged tokens: (tokens of its peers, own tokens times its peers)."""
        groups, ranks = self.shape
        column = [num_tokens(self.ranges[g * ranks + rank % ranks]) for g in range(groups)]
        own = column[rank // ranks]
        return sum(column) - own, own * (groups - 1)


def build_mesh_plan(
    pattern: Pattern,
    frame: Frame,
    shape: tuple[int, int],
    *,
    block_size: int,
    sharding: str,
) -> MeshPlan:
    """Builds a plan, or returns it from the cache; `RingPlan.build` checks its arguments.

    The sharding "auto" or "balanced" is that of the ring. Each of its chunks is cut into h, one
    for each rank of heads.
    """
    groups, ranks = shape
    check_heads(frame.num_heads, groups)
    check_sharding(sharding, groups * ranks)
    length = frame.kv_len

    def ring(pattern: Pattern, heads: int, kv_heads: int, sharding: str) -> RingPlan:
        counts = {"num_heads": heads, "num_kv_heads": kv_heads, "block_size": block_size}
        plan: RingPlan = RingPlan.build(pattern, length, ranks, sharding=sharding, **counts)
        return plan

    def build() -> MeshPlan:
        own = sharding
        if own in ("auto", "balanced"):
            of_all = ring(pattern, frame.num_heads, frame.num_kv_heads, own)
            own = mesh_sharding(of_all.sharding, shape)
        rings = []
        for group in range(groups):
            heads = HeadShard(frame.num_heads, frame.num_kv_heads, group, groups)
            counts = frame.num_heads // groups, len(heads.kv_heads)
            rings.append(ring(heads.of(pattern, length), *counts, ring_sharding(own, shape)))
        return MeshPlan(
            pattern=pattern,
            frame=frame,
            shape=shape,
            block_size=block_size,
            sharding=own,
            ranges=owned_ranges(own, length, groups * ranks),
            rings=tuple(rings),
        )

    key = "mesh plan", pattern, frame, shape, block_size, sharding
    return layout_cache.keep(key, build)


def best_mesh(
    pattern: Pattern, frame: Frame, ranks: int, *, block_size: int, sharding: str
) -> MeshPlan:
    """Returns the plan of least cost among the meshes of `ranks` ranks, with the reason."""
    plans, refused = [], []
    for groups in range(1, ranks + 1):
        if ranks % groups or frame.num_heads % groups:
            continue
        shape = groups, ranks // groups
        try:
            plan = build_mesh_plan(pattern, frame, shape, block_size=block_size, sharding=sharding)
        except ValueError:
            if groups == 1:  # the arguments are wrong, not the number of groups
                raise
            refused.append(shape)
            continue
        plans.append(plan)
    best = min(plans, key=lambda plan: plan.cost)
    costs = ", ".join(f"{plan.shape} {plan.cost:.3g}" for plan in plans)
    reason = f"{best.shape} has the least cost of the busiest rank, in pairs of a head: {costs}"
    if refused:
        reason += f"; the masks of heads cannot be shared by {', '.join(map(str, refused))}"
    return replace(best, reason=reason)
