"""Builds the plan and layouts of the next ring call while the current one computes.

    prefetch(next_pattern, 1 << 20, num_heads=8, sharding="zigzag")  # on every rank
    out = ring_attention(query, key, value, pattern, sharding="zigzag")

No message is sent, because every rank computes an equal plan. Ranks compare their arguments only in
the call itself: a rank may prefetch one call and then make another.
"""

from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..checks import check_batch, check_pattern
from ..layouts.cache import layout_cache, place_of
from ..patterns.algebra import Frame, Pattern, check_fits
from ..patterns.arguments import checked_integer
from .plan import RingPlan, default_plan
from .rank_layouts import guest_step, local_step, round_step
from .ring import resolve_group
from .sharding import check_sharding


def prefetch(
    pattern: Pattern,
    seq_len: int,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    batch_size: int = 1,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    sharding: str = "contiguous",
    device: torch.device | str = "cpu",
    backward: bool = True,
) -> "Future[Any]":
    """Builds the plan of a later `ring_attention`, and the layouts of this rank, in a thread.

    It uses the thread of `layout_cache.prefetch`. The later call finds the plan and layouts in the
    cache, or waits until they are built. No message is sent, so ranks may call this at any time, in
    any order, or not at all.

    Args:
        pattern, sharding, group, mesh: arguments of the later call. If there is only one rank, this
            builds the layout of `attention`.
        seq_len: tokens of the whole sequence.
        num_heads, num_kv_heads, batch_size, device: sizes and device of the call's tensors.
        backward: also build the tables that the backward pass reads.

    Returns: a future of the plan, or of the layout if there is only one rank. You may wait for it,
        ask for its error, or ignore it.

    Raises: ValueError at once if an argument is invalid; also the errors of
        `layout_cache.prefetch`.

    Cost: the time of `RingPlan.build` and of the layouts, on another CPU core than the caller's.
    """
    check_pattern(pattern)
    group = resolve_group(group, mesh)
    world, rank = (1, 0) if group is None else (group.size(), group.rank())
    seq_len = checked_integer("seq_len", seq_len, 0)
    batch_size = checked_integer("batch_size", batch_size, 0)
    check_batch(pattern, batch_size, "batch_size=")
    check_sharding(sharding, world)
    heads: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    if world == 1:
        return layout_cache.prefetch(pattern, seq_len, **heads, device=device, backward=backward)
    check_fits(pattern, Frame.build(seq_len, seq_len, num_heads, num_kv_heads, 0))
    place = place_of(device)  # "cuda:0" rather than "cuda", as in the keys of the cache

    def build() -> RingPlan:
        plan = default_plan(pattern, seq_len, world, sharding=sharding, **heads)
        steps = [local_step(plan, rank, place)]
        steps += [round_step(plan, rank, n, batch_size, place) for n in range(len(plan.rounds))]
        if plan.owners_at(rank):
            steps.append(guest_step(plan, rank, place))
        for step in steps:
            if step.layout is not None:
                step.layout.build_tables(backward)
            if backward and step.rows is not None:
                _ = step.copies
        return plan

    return layout_cache.prepare(build)
