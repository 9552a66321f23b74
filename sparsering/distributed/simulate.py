"""Ring attention in one process without messages: it computes the part of each rank in turn."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Never

import torch
from torch import Tensor

from ..call import NO_OPTIONS, Options
from ..checks import autocast_inputs, checked_scale, refuse_tracers
from ..ground.arguments import checked_flag, checked_integer
from ..ground.numerics import sum_dtype, without_autocast
from ..patterns.algebra import Pattern
from ..patterns.expression import parse_owned
from ..patterns.head_shard import HeadShard
from ..patterns.tree import check_distances
from ..route.differentiable import Derivatives, differentiable
from ..route.options import (
    ANYWHERE,
    checked_options,
    for_queries,
    operator_schema,
    refuse_options,
)
from .heads import check_heads, cut_heads, options_of_heads
from .rank import (
    REFUSED,
    TENSORS,
    Rank,
    check_ring_inputs,
    choose_kernels,
    plan_of_call,
    tangents_of_options,
)
from .saved import Moving, Pair, Saved, no_tokens, saved_moves
from .sharding import positions
from .wire import wire_format

_OPTIONS = ("world_size", "sharding", "offload", "scale", *ANYWHERE, "return_lse")


def simulate_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    world_size: int | tuple[int, int],
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
        world_size: number of ranks; or (h, p), for a mesh of h ranks of heads and p of tokens.
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
    if not isinstance(world_size, tuple | list):
        world_size = checked_integer("world_size", world_size, 1)
    scale = checked_scale(scale, query)
    refuse_tracers(query, key, value)
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
    # raises if the pattern does not fit; `layout_cache` keeps the plan for the passes
    plan = plan_of_call(pattern, query.shape[2], world_size, sharding, query, key)
    first = [x[:, :, :1].to(_device(query, offload)) for x in (query, key, value)]
    call = {
        "scale": scale,
        "offload": offload,
        "backend": choose_kernels(None, first, options, pattern),
    }
    if isinstance(world_size, int):
        call |= {"world_size": world_size, "sharding": sharding}
        out, lse = _in_turn((query, key, value), pattern, options, **call)
    else:
        groups, ranks = plan.shape
        check_heads(query.shape[1], groups, options["dropout_p"] is not None)
        parts = []
        for group, ring in enumerate(plan.rings):
            heads = HeadShard(query.shape[1], key.shape[1], group, groups)
            inputs, own = cut_heads(heads, query, key, value), options_of_heads(heads, options)
            ring_call = {**call, "world_size": ranks, "sharding": ring.sharding}
            parts.append(_in_turn(inputs, ring.pattern, own, **ring_call))
        out, lse = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    return (out, lse) if return_lse else out


def _in_turn(
    inputs: Sequence[Tensor], pattern: Pattern, options: Options, **call: Any
) -> tuple[Tensor, Tensor]:
    """Runs the operator: the ranks of one ring, one after the other."""
    query, key, value = inputs
    text, operands = pattern.operands
    return _simulate(
        query=query,
        key=key,
        value=value,
        **{name: options[name] for name in ANYWHERE},
        tensors=operands,
        pattern=text,
        **call,
    )


def _device(query: Tensor, offload: bool) -> torch.device:
    """Returns the device that computes: with `offload` a GPU, if the machine has one."""
    if offload and torch.accelerator.is_available():
        return torch.accelerator.current_accelerator() or query.device
    return query.device


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of the whole sequence, rank by rank; arguments as in `_SCHEMA`."""
    shards, (query, key, value), _ = _begin(arguments)
    ranks = shards.ranks
    out = query.new_empty(*query.shape[:3], value.shape[3])
    lse = query.new_empty(query.shape[:3], dtype=ranks[0].dtype)
    with without_autocast(query):
        answers = {
            host: ranks[host].answer(shards.guests(host, query), *shards.of(host, key, value))
            for host in shards.hosts
        }
        for rank in ranks:
            own = shards.of(rank.rank, query, key, value)
            rounds = shards.rounds(rank, (key, value))
            results = rank.forward(own, rounds, shards.answers(rank, answers))
            shards.write((out, lse), rank, results)
    return out, lse


def _backward(*arguments: Any) -> list[Tensor | None]:
    """Returns the gradients of query, key, value, distance bias and sink, and None for the seed."""
    *inputs, out, lse, grad_out, grad_lse, _ = arguments
    shards, (query, key, value), options = _begin(inputs)
    x = Saved(
        query=query, key=key, value=value, out=out, lse=lse, grad_out=grad_out, grad_lse=grad_lse
    )
    with without_autocast(query):
        return _gradients(shards, x, options)


def _tangent(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Computes the tangents of (out, lse), in their dtypes."""
    inputs, (out, lse, *tangents) = arguments[:_LENGTH], arguments[_LENGTH:]
    shards, own, _ = _begin(inputs, tangents)
    with without_autocast(out):
        out_t, lse_t = _result_tangents(shards, Moving.of(own, out, lse, tangents))
    return out_t.to(out.dtype), lse_t


def _backward_tangent(*arguments: Any) -> list[Tensor | None]:
    """Computes the tangents of the gradients of `_backward`, then those of (out, lse)."""
    inputs, (out, lse, grad_out, grad_lse, *rest) = arguments[:_LENGTH], arguments[_LENGTH:]
    *tangents, grad_out_t, grad_lse_t, _ = rest
    shards, own, options = _begin(inputs, tangents)
    with without_autocast(out):
        x = Moving.of(own, out, lse, tangents)
        out_t, lse_t = _result_tangents(shards, x)
        saved = saved_moves(x, (out_t, lse_t), (grad_out, grad_lse), (grad_out_t, grad_lse_t))
        return [*_gradients(shards, saved, options), out_t.to(out.dtype), lse_t]


_SCHEMA = operator_schema(ANYWHERE, "int world_size, str sharding, bool offload, str backend")
_NAMES = [argument.split()[-1] for argument in _SCHEMA.split(", ")]
_LENGTH = len(_NAMES)
_simulate = differentiable(
    "simulate_ring",
    _SCHEMA,
    Derivatives(
        forward=_forward,
        backward=_backward,
        tangent=_tangent,
        backward_tangent=_backward_tangent,
    ),
)


def _begin(
    arguments: Sequence[Any], tangents: Sequence[Tensor | None] = ()
) -> tuple["_Shards", tuple[Tensor, Tensor, Tensor], Options]:
    """Plans a call from the operator's arguments: (shards, (query, key, value), options).

    `tangents` are those of the operator's tensors, query, key and value first.
    """
    given = dict(zip(_NAMES, arguments, strict=True))
    query, key, value = (given[name] for name in ("query", "key", "value"))
    pattern = parse_owned(given["pattern"], given["tensors"])
    if given["distance_bias"] is not None:
        check_distances(pattern)
    plan = plan_of_call(pattern, query.shape[2], given["world_size"], given["sharding"], query, key)
    options = NO_OPTIONS.changed(**{name: given[name] for name in ANYWHERE})
    moves = tangents_of_options(tangents[3:])
    device = _device(query, given["offload"])
    wire, dtype = wire_format(None, query.dtype), sum_dtype(query)
    ranks = []
    for rank, ranges in enumerate(plan.ranges):
        cut = partial(torch.index_select, dim=2, index=positions(ranges).to(device))
        own, own_moves = (
            for_queries(x.mapped(lambda t: t.to(device)), cut) for x in (options, moves)
        )
        ranks.append(
            Rank(
                plan=plan,
                rank=rank,
                backend=given["backend"],
                scale=given["scale"],
                wire=wire,
                dtype=dtype,
                options=own,
                tangents=own_moves,
            )
        )
    return _Shards(ranks, device), (query, key, value), options


def _result_tangents(shards: "_Shards", whole: Moving) -> tuple[Tensor, Tensor]:
    """Computes the tangents of (out, lse) of the whole sequence, rank by rank."""
    ranks = shards.ranks
    parts = [whole.mapped(partial(shards.cut, rank.rank)) for rank in ranks]
    rows = ranks[0].tangent_rows(whole if shards.hosts else whole.mapped(no_tokens))
    answers = {
        host: ranks[host].answer_tangents(shards.guests(host, rows), parts[host])
        for host in shards.hosts
    }
    found = [torch.empty_like(x, dtype=ranks[0].dtype) for x in (whole.out, whole.lse)]
    for rank, part in zip(ranks, parts, strict=True):
        rounds = shards.rounds(rank, *whole.pairs)
        shards.write(found, rank, rank.tangent(part, rounds, shards.answers(rank, answers)))
    out_t, lse_t = found
    return out_t, lse_t


def _gradients(shards: "_Shards", whole: Saved, options: Options) -> list[Tensor | None]:
    """Computes the list that `_backward` returns, or its tangents if `whole` has tangents."""
    query, key, value, *_ = whole
    distance_bias, sink = options["distance_bias"], options["sink"]
    ranks, plan = shards.ranks, shards.plan
    dtable = ranks[0].blank_table()

    def part(rank: Rank) -> Saved:
        return whole.mapped(partial(shards.cut, rank.rank))

    rows = ranks[0].gradient_rows(whole if shards.hosts else whole.mapped(no_tokens))
    sums, answers = [], {}
    for rank in ranks:
        is_host = rank.rank in shards.hosts
        guests = partial(shards.guests, rank.rank, rows) if is_host else lambda: None
        *grads, guest_dq = rank.local_gradients(part(rank), guests, dtable)
        sums.append([x.to(query.device) for x in grads])
        if guest_dq is not None:
            answers[rank.rank] = guest_dq
    rounds = [shards.rounds(rank, *whole.pairs) for rank in ranks]
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
        shards.write(grads, rank, sums[rank.rank])
    if dtable is not None and distance_bias is not None:
        dtable = dtable.to(distance_bias.device, distance_bias.dtype)
    dsink = None if sink is None else torch.zeros_like(sink)
    if dsink is not None:
        for rank in ranks:
            own = rank.sink_gradient(part(rank), rank.options["sink"]).to(dsink.device)
            if dsink.shape[2] > 1:
                dsink[:, :, shards.places[rank.rank]] = own
            else:
                dsink += own
    of_options = {"distance_bias": dtable, "sink": dsink}
    return [*grads, *(of_options.get(name) for name in TENSORS)]


class _Shards:
    """Cuts tensors of a whole sequence into the shards of simulated ranks, and writes them back."""

    def __init__(self, ranks: list[Rank], device: torch.device) -> None:
        self.ranks, self.plan, self.device = ranks, ranks[0].plan, device
        self.places = [positions(ranges) for ranges in self.plan.ranges]
        self.hosts = {host for rank in ranks for host in self.plan.hosts_of(rank.rank)}

    def cut(self, rank: int, x: Tensor) -> Tensor:
        """Returns the tokens of `x` that a rank owns, on the device that computes."""
        return x[:, :, self.places[rank].to(x.device)].to(self.device)

    def of(self, rank: int, *tensors: Tensor) -> list[Tensor]:
        return [self.cut(rank, x) for x in tensors]

    def write(self, whole: Sequence[Tensor], rank: Rank, parts: Sequence[Tensor]) -> None:
        """Writes a rank's tokens into tensors of the whole sequence."""
        for x, part in zip(whole, parts, strict=True):
            x[:, :, self.places[rank.rank]] = part.to(x.device, x.dtype)

    def rounds(self, rank: Rank, *pairs: Pair) -> Iterator[Tensor]:
        """Yields a tensor per round: the encoded keys and values that a rank would receive.

        Its last row is zeros, for places of the key buffer that no query visits. A second pair has
        their tangents.
        """
        for number in range(len(self.plan.rounds)):
            room, parts = rank.room(number, *pairs)
            for sender, part in parts.items():
                places = self.places[sender].to(pairs[0][0].device)
                shards = [(key[:, :, places], value[:, :, places]) for key, value in pairs]
                part.copy_(self.ranks[sender].pack(rank.rank, *shards))
            yield room.to(self.device)

    def guests(self, host: int, travelling: Tensor) -> Tensor:
        """Returns the rows of `travelling` (all tokens) that other ranks would send to `host`."""
        at = positions(self.plan.guests_of(host))
        return travelling[:, :, at.to(travelling.device)].to(self.device)

    def answers(self, rank: Rank, answers: dict[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yields (host, results of `rank`'s query rows there), in the order of real messages."""
        hosts = self.plan.hosts_of(rank.rank)
        for offset in (offset for offsets in self.plan.answer_rounds for offset in offsets):
            if (host := (rank.rank + offset) % self.plan.world_size) in hosts:
                places = self.ranks[host].guest_places(rank.rank, self.device)
                yield host, answers[host][:, :, places]
