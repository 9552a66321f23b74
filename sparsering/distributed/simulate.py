"""Ring attention in one process without messages: it computes the part of each rank in turn."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Never

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..checks import autocast_inputs, checked_scale, refuse_tracers
from ..ground.arguments import checked_flag, checked_integer
from ..ground.numerics import sum_dtype, without_autocast
from ..patterns.algebra import Pattern
from ..route.differentiable import for_each_gradient, is_batch, transforming
from ..route.options import ANYWHERE, checked_options, for_queries, refuse_options
from .rank import REFUSED, Rank, Saved, check_ring_inputs, choose_kernels, plan_of_call
from .sharding import positions
from .wire import wire_format

_OPTIONS = ("world_size", "sharding", "offload", "scale", *ANYWHERE, "return_lse")


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
    softcap: float | None = None,
    distance_bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    **others: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes `ring_attention` over `world_size` ranks in one process; differentiable.

    Results are bitwise equal to those of real ranks that have as many threads as this process.

    Args:
        query, key, value: the whole sequence, [B, H, N, D], as for `attention`.
        world_size: number of ranks.
        pattern, sharding, scale, return_lse: as for `ring_attention`.
        offload: True computes on the accelerator (if any), while queries, keys and values stay
            where they are, such as in host memory. The accelerator stores the shards of one rank
            and the keys of one round at a time. Results are on the query's device.
        softcap, distance_bias, sink, dropout_p, dropout_seed: as for `attention`.

    Returns: out [B, Hq, N, Dv], and with `return_lse` lse [B, Hq, N].

    Raises: ValueError if an argument is invalid.
    """
    refuse_options("simulate_ring", others, _OPTIONS, REFUSED)
    check_ring_inputs(query, key, value, pattern)
    offload, return_lse = checked_flag("offload", offload), checked_flag("return_lse", return_lse)
    world_size = checked_integer("world_size", world_size, 1)
    scale = checked_scale(scale, query)
    refuse_tracers(query, key, value)
    _refuse_transforms()
    query, key, value = autocast_inputs(query, key, value)
    options = checked_options(
        query,
        key,
        pattern,
        None,
        softcap=softcap,
        distance_bias=distance_bias,
        sink=sink,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
    )
    plan = plan_of_call(pattern, query.shape[2], world_size, sharding, query, key)
    device = query.device
    if offload and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator() or device
    first = [x[:, :, :1].to(device) for x in (query, key, value)]
    backend = choose_kernels(None, first, options, pattern)
    wire, dtype = wire_format(None, query.dtype), sum_dtype(query)
    on_device = options.mapped(lambda x: x.detach().to(device))
    ranks = []
    for rank, ranges in enumerate(plan.ranges):
        places = positions(ranges).to(device)
        own = for_queries(on_device, partial(torch.index_select, dim=2, index=places))
        ranks.append(
            Rank(
                plan=plan,
                rank=rank,
                backend=backend,
                scale=scale,
                wire=wire,
                dtype=dtype,
                options=own,
            )
        )
    with without_autocast(query):
        tables = options["distance_bias"], options["sink"]
        out, lse = _Simulated.apply(_Shards(ranks, device), query, key, value, *tables)
    return (out, lse) if return_lse else out


class _Simulated(torch.autograd.Function):
    """Computes all ranks' parts; its backward computes all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, shards: "_Shards", *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        query, key, value, *tables = inputs
        assert query is not None and key is not None and value is not None
        ranks = shards.ranks
        out = query.new_empty(*query.shape[:3], value.shape[3])
        lse = query.new_empty(query.shape[:3], dtype=ranks[0].dtype)
        answers = {
            host: ranks[host].answer(shards.guests(host, query), *shards.of(host, key, value))
            for host in shards.hosts
        }
        for rank in ranks:
            own, rounds = shards.of(rank.rank, query, key, value), shards.rounds(rank, key, value)
            results = rank.forward(own, rounds, shards.answers(rank, answers))
            for whole, part in zip((out, lse), results, strict=True):
                whole[:, :, shards.places[rank.rank]] = part.to(whole.device)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.shards = shards
        ctx.tables = [None if x is None else x.detach() for x in tables]
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_transforms()
        saved, tables = ctx.saved_tensors, ctx.tables

        def run(*grads: Tensor) -> list[Tensor | None]:
            with without_autocast(grads[0]):
                return _backward(ctx.shards, Saved(*saved, *grads), *tables)

        return None, *(for_each_gradient(run, grads) if is_batch(*grads) else run(*grads))


def _refuse_transforms() -> None:
    if transforming():
        raise NotImplementedError(
            "simulate_ring does not run under torch.func (grad, vmap); call backward(), or use "
            "attention"
        )


def _backward(
    shards: "_Shards", whole: Saved, distance_bias: Tensor | None, sink: Tensor | None
) -> list[Tensor | None]:
    """Computes the gradients of query, key, value, distance bias and sink, for all ranks."""
    query, key, value, *_ = whole
    ranks, plan = shards.ranks, shards.plan
    dtable = ranks[0].blank_table()

    def part(rank: Rank) -> Saved:
        return Saved(*shards.of(rank.rank, *whole))

    rows = ranks[0].gradient_rows(whole if shards.hosts else whole.none())
    sums, answers = [], {}
    for rank in ranks:
        is_host = rank.rank in shards.hosts
        guests = partial(shards.guests, rank.rank, rows) if is_host else lambda: None
        *grads, guest_dq = rank.local_gradients(part(rank), guests, dtable)
        sums.append([x.to(query.device) for x in grads])
        if guest_dq is not None:
            answers[rank.rank] = guest_dq
    rounds = [shards.rounds(rank, key, value) for rank in ranks]
    for number in range(len(plan.rounds)):
        returned = []
        for rank, arriving in zip(ranks, rounds, strict=True):
            dq = sums[rank.rank][0].to(shards.device)
            rows_by_sender = rank.round_gradients(number, next(arriving), part(rank), dq, dtable)
            sums[rank.rank][0] = dq.to(query.device)
            returned.append({peer: x.to(query.device) for peer, x in rows_by_sender.items()})
        for rank in ranks:
            for receiver in plan.receivers(rank.rank, number):
                rank.add_returned(receiver, returned[receiver][rank.rank], *sums[rank.rank][1:])
    grads = [torch.empty_like(x) for x in (query, key, value)]
    for rank in ranks:
        for host, dq in shards.answers(rank, answers):
            at = rank.travelling_places(host, query.device)
            sums[rank.rank][0][:, :, at] += dq.to(query.device)
        for grad, total in zip(grads, sums[rank.rank], strict=True):
            grad[:, :, shards.places[rank.rank]] = total.to(grad.dtype)
    if dtable is not None and distance_bias is not None:
        dtable = dtable.to(distance_bias.device, distance_bias.dtype)
    if sink is None:
        return [*grads, dtable, None]
    dsink = torch.zeros_like(sink)
    for rank in ranks:
        own = rank.sink_gradient(part(rank), rank.options["sink"]).to(dsink.device)
        if dsink.shape[2] > 1:
            dsink[:, :, shards.places[rank.rank]] = own
        else:
            dsink += own
    return [*grads, dtable, dsink]


class _Shards:
    """Cuts tensors of the whole sequence into shards of simulated ranks, on one device."""

    def __init__(self, ranks: list[Rank], device: torch.device) -> None:
        self.ranks, self.plan, self.device = ranks, ranks[0].plan, device
        self.places = [positions(ranges) for ranges in self.plan.ranges]
        self.hosts = {host for rank in ranks for host in self.plan.hosts_of(rank.rank)}

    def of(self, rank: int, *tensors: Tensor) -> list[Tensor]:
        return [x[:, :, self.places[rank].to(x.device)].to(self.device) for x in tensors]

    def rounds(self, rank: Rank, key: Tensor, value: Tensor) -> Iterator[Tensor]:
        """Yields a tensor per round: the encoded keys and values that a rank would receive.

        Its last row is zeros, for places of the key buffer that no query visits.
        """
        for number in range(len(self.plan.rounds)):
            room, parts = rank.room(number, key, value)
            for sender, part in parts.items():
                places = self.places[sender].to(key.device)
                shards = (x[:, :, places] for x in (key, value))
                part.copy_(self.ranks[sender].pack(rank.rank, *shards))
            yield room.to(self.device)

    def guests(self, host: int, travelling: Tensor) -> Tensor:
        """Returns the rows of `travelling`, the whole sequence, that other ranks send to `host`."""
        at = positions(self.plan.guests_of(host))
        return travelling[:, :, at.to(travelling.device)].to(self.device)

    def answers(self, rank: Rank, answers: dict[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yields (host, its results for rows of `rank`) in the order of real messages."""
        hosts = self.plan.hosts_of(rank.rank)
        for offset in (offset for offsets in self.plan.answer_rounds for offset in offsets):
            if (host := (rank.rank + offset) % self.plan.world_size) in hosts:
                places = self.ranks[host].guest_places(rank.rank, self.device)
                yield host, answers[host][:, :, places]
