"""The ring in one process: every rank's part computed in turn, bit for bit as by many processes."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..functional import autocast_inputs, default_scale
from ..numerics import sum_dtype
from ..patterns.algebra import Pattern
from .network import round_room
from .plan import RingPlan
from .rank import (
    Gradients,
    Rank,
    add_returned,
    answer,
    check_ring_inputs,
    forward,
    gradient_rows,
    guest_places,
    kernels,
    local_gradients,
    own_places,
    pack,
    plan_of_call,
    round_gradients,
)
from .sharding import positions
from .steps import guest_rows, receivers
from .wire import wire


def simulate_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    world_size: int,
    sharding: str = "contiguous",
    offload: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """What `ring_attention` computes on `world_size` ranks, in one process; differentiable.

    The same results bit for bit, with as many threads. With `offload`, queries, keys and values may
    lie in host memory: what one rank holds, and what arrives in one round, is on the accelerator
    (where there is one) at a time, and results go back to where the query is.

    Args:
        query, key, value: the whole sequence, [B, H, N, D], as for `attention`.
        world_size: ranks.
        sharding, scale, return_lse: as for `ring_attention`.

    Returns: out [B, Hq, N, Dv], and with `return_lse` lse [B, Hq, N].

    Raises: ValueError where inputs do not fit.
    """
    check_ring_inputs(query, key, value, pattern)
    query, key, value = autocast_inputs(query, key, value)
    plan = plan_of_call(pattern, query.shape[2], world_size, sharding, query, key)
    device = query.device
    if offload and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator() or device
    if scale is None:
        scale = default_scale(query)
    sample = (x[:, :, :1].to(device) for x in (query, key, value))
    call = (plan, kernels(None, *sample), scale, wire(None, query.dtype), sum_dtype(query))
    with torch.autocast(query.device.type, enabled=False):
        out, lse = _Simulated.apply(query, key, value, call, device)
    return (out, lse) if return_lse else out


class _Simulated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: tuple[Any, ...], device: Any
    ) -> tuple[Tensor, Tensor]:
        plan = call[0]
        ranks = _ranks(call)
        out = query.new_empty(*query.shape[:3], value.shape[3])
        lse = query.new_empty(query.shape[:3], dtype=ranks[0].dtype)
        shards = _Shards(plan, device)
        hosts = {h for t in plan.travellers for h in t.hosts}
        answers = {
            h: answer(ranks[h], shards.guests(h, query), *shards.of(h, key, value)) for h in hosts
        }
        for own in ranks:
            rounds = shards.rounds(own, key, value)
            q, k, v = shards.of(own.rank, query, key, value)
            results = forward(own, q, k, v, rounds, shards.answers(own.rank, answers))
            for whole, part in zip((out, lse), results, strict=True):
                whole[:, :, shards.places[own.rank]] = part.to(whole.device)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.call, ctx.device = call, device
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        whole = Gradients(grad_out, grad_lse, *ctx.saved_tensors)
        with torch.autocast(grad_out.device.type, enabled=False):
            return (*_backward(ctx, whole), None, None)


def _backward(ctx: Any, whole: Gradients) -> list[Tensor]:
    """Gradients of the whole query, key and value."""
    query, key, value = whole.query, whole.key, whole.value
    plan, ranks, shards = ctx.call[0], _ranks(ctx.call), _Shards(ctx.call[0], ctx.device)

    def part(rank: int) -> Gradients:
        return Gradients(*shards.of(rank, *whole))

    hosts = {h for t in plan.travellers for h in t.hosts}
    rows = gradient_rows(ranks[0], whole if hosts else whole.none())
    sums, answers = [], {}
    for own in ranks:
        guests = partial(shards.guests, own.rank, rows) if own.rank in hosts else _nobody
        *grads, answered = local_gradients(own, part(own.rank), guests)
        sums.append([x.to(query.device) for x in grads])
        if answered is not None:
            answers[own.rank] = answered
    rounds = [shards.rounds(own, key, value) for own in ranks]
    for number in range(len(plan.rounds)):
        returned = []
        for own, arriving in zip(ranks, rounds, strict=True):
            dq = sums[own.rank][0].to(ctx.device)
            parts = round_gradients(own, number, next(arriving), part(own.rank), dq)
            sums[own.rank][0] = dq.to(query.device)
            returned.append({peer: x.to(query.device) for peer, x in parts.items()})
        for own in ranks:
            for receiver in receivers(plan, own.rank, number):
                add_returned(own, receiver, returned[receiver][own.rank], *sums[own.rank][1:])
    grads = [torch.empty_like(x) for x in (query, key, value)]
    for own in ranks:
        for host, came in shards.answers(own.rank, answers):
            at = own_places(plan, own.rank, host, query.device)
            sums[own.rank][0][:, :, at] += came.to(query.device)
        for grad, total in zip(grads, sums[own.rank], strict=True):
            grad[:, :, shards.places[own.rank]] = total.to(grad.dtype)
    return grads


class _Shards:
    """The ranks' parts of whole tensors, moved to a device."""

    def __init__(self, plan: RingPlan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.places = [positions(own) for own in plan.ranges]

    def of(self, rank: int, *tensors: Tensor) -> list[Tensor]:
        return [x[:, :, self.places[rank].to(x.device)].to(self.device) for x in tensors]

    def rounds(self, own: Rank, key: Tensor, value: Tensor) -> Iterator[Tensor]:
        """What arrives at a rank, packed by its senders."""
        for number in range(len(self.plan.rounds)):
            room, parts = round_room(own, number, key, value)
            for sender, part in parts.items():
                places = self.places[sender].to(key.device)
                shards = (x[:, :, places] for x in (key, value))
                part.copy_(pack(own._replace(rank=sender), own.rank, *shards))
            yield room.to(self.device)

    def guests(self, host: int, travelling: Tensor) -> Tensor:
        """The rows that come to a host, out of those of the whole sequence."""
        at = positions(guest_rows(self.plan, host))
        return travelling[:, :, at.to(travelling.device)].to(self.device)

    def answers(self, rank: int, answers: dict[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """What hosts computed for a rank's rows, in the order in which it would arrive."""
        hosts = {h for t in self.plan.travellers if t.owner == rank for h in t.hosts}
        for offset in (offset for offsets in self.plan.answer_rounds for offset in offsets):
            host = (rank + offset) % self.plan.world_size
            if host in hosts:
                places = guest_places(self.plan, rank, host, self.device)
                yield host, answers[host][:, :, places]


def _nobody() -> None:
    """No guests."""


def _ranks(call: tuple[Any, ...]) -> list[Rank]:
    plan, *rest = call
    return [Rank(plan, rank, *rest) for rank in range(plan.world_size)]
