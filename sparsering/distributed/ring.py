"""Ring attention over a process group: takes and returns each rank's shard.

All ranks first check that their arguments agree. Then each rank builds the same plan, exchanges
keys and values, and attends to them as they arrive. The backward pass fetches keys and values
again, so that between the two passes a rank stores only its own shard.
"""

import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Never

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..checks import autocast_inputs, check_group, checked_scale, has_tangent
from ..functional import attention
from ..ground.arguments import checked_flag, is_finite, shortened
from ..ground.dropout import (
    batch_seeds,
    checked_probability,
    checked_seed,
    drawn_seed,
    seeds_of_heads,
)
from ..ground.keywords import with_hints
from ..ground.numerics import sum_dtype, without_autocast
from ..layouts.lists import tiles_of
from ..patterns.algebra import Pattern
from ..patterns.expression import parse
from ..patterns.head_shard import HeadShard
from ..patterns.tree import check_distances
from ..route.differentiable import Derivatives, differentiable, is_recorded
from ..route.options import ANYWHERE, OPTIONS, checked_options, refuse_options
from .agreement import (
    SCHEMA,
    Derivative,
    RingCall,
    agree_on_call,
    agree_on_mesh,
    check_lengths,
    error_budget,
    report_failure,
)
from .exchange import Exchange, Traffic, traffic_of_last
from .heads import Mesh, Swap, check_heads, has_two_axes, options_of_heads
from .network import Network
from .own_rows import plan_of_own_rows
from .rank import (
    REFUSED,
    TENSORS,
    Rank,
    check_ring_inputs,
    choose_kernels,
    plan_of_call,
    tangents_of_options,
)
from .saved import Moving, Saved, no_tokens, saved_moves
from .sharding import check_sharding
from .wire import wire_format

_OPTIONS = (
    *("group", "mesh", "sharding", "compression", "timeout", "scale"),
    *ANYWHERE,
    *("return_lse", "backend"),
)
_LENGTH = len(SCHEMA.split(", "))


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    mesh: DeviceMesh | None = None,
    sharding: str = "contiguous",
    compression: str | None = None,
    timeout: float | timedelta | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    distance_bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **others: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes exact attention over a sequence that is sharded over ranks; differentiable.

    It has the derivatives of `attention`: first ones, second ones, and in forward mode.

    Every rank of the group calls it with the same pattern and options, and gets its own rows of the
    result of `attention` for the whole sequence. A rank receives only the keys that its queries
    visit and other ranks own. The backward pass receives them again and returns their gradients in
    float32 (float64 for float64). Keys arrive in rounds of at most a shard. Besides its shards, a
    rank needs memory for two rounds, and for a copy of a round's keys in kernel order: at most a
    shard, or a shard per dilated branch. This memory does not grow with the number of ranks. A
    single rank does not communicate.

    All ranks must make their calls on a group in the same order. Threads that call at the same time
    need a group each. After a failed call, its group is unusable.

    Args:
        query: [B, Hq, n, D], this rank's shard, as `shard` cuts it; n may be 0.
        key: [B, Hkv, n, D], of the same tokens as the queries.
        value: [B, Hkv, n, Dv].
        pattern: a mask or a mixture, on positions of the whole sequence. A `SelectedBlocks` of
            blocks below 16 keys is the whole table on all ranks, or on each the rows of its own
            tokens: `SelectedBlocks(own, 1, query_block=1, first_row=its first token)`, where `own`
            numbers keys of the whole sequence. It needs contiguous shards, on one axis.
        group, mesh: pass one of them, a process group or a `DeviceMesh` of one axis
            (`mesh["sp"]`); default all ranks. On a mesh of two axes, heads and tokens, h x p ranks
            share the tokens; they exchange tokens for heads, compute rings of p ranks over heads /
            h, and exchange the outputs back.
        sharding: which rank owns which tokens; see `RingPlan`. For "auto" and "balanced", cut the
            shards by `RingPlan.sharding`.
        compression: the format in which keys and values are sent: None for their own dtype, "bf16",
            "fp8" or "int8" (a byte per number, a scale per row), or "auto": the smallest format
            whose relative root mean square error on these keys and values is at most 0.01
            ("auto:0.001" sets another bound). `last_traffic` reports the format and its error.
        timeout: seconds (or a timedelta) that a rank waits for its peers at each step; default the
            group's.
        scale, return_lse, backend: as for `attention`; the backend must run layouts.
        softcap, distance_bias, sink, dropout_p, dropout_seed: as for `attention`, equal on all
            ranks. Only a sink per query differs: each rank passes the rows of its queries. The
            gradient of a bias or sink is this rank's part; the whole gradient is the sum over
            ranks. Without a seed, rank 0 draws one.

    Returns: out [B, Hq, n, Dv] in the query's dtype, and with `return_lse` lse [B, Hq, n].

    Raises:
        ValueError: an argument is invalid on this rank.
        RingMismatchError: (a ValueError and a RingError) arguments differ between ranks; raised on
            all ranks, before keys or values are sent.
        RingError: a peer died or did not answer in time; names the peer and the step.
        RuntimeError: during the capture of a CUDA graph, because each call compares arguments.

    Example:
        >>> out = ring_attention(query, key, value, Causal(), mesh=mesh["sp"], sharding="zigzag")
    """
    place = mesh if group is None else group
    if torch.compiler.is_compiling() and has_two_axes(place):
        given: dict[str, Any] = {
            "group": group, "mesh": mesh, "sharding": sharding, "compression": compression,
            "timeout": timeout, "scale": scale, "softcap": softcap, "sink": sink,
            "distance_bias": distance_bias, "dropout_p": dropout_p, "dropout_seed": dropout_seed,
            "return_lse": return_lse, "backend": backend,
        }  # fmt: skip
        untraced = torch.compiler.disable(ring_attention)  # as a decorator it would import much
        return untraced(query, key, value, pattern, **given, **others)
    group, axes = resolve_place(group, mesh)
    seconds = None
    try:
        refuse_options("ring_attention", others, _OPTIONS, REFUSED)
        seconds = _seconds(timeout)
        checked_flag("return_lse", return_lse)
        check_ring_inputs(query, key, value, pattern)
        scale = checked_scale(scale, query)
        if axes is not None:
            check_heads(query.shape[1], axes.shape[0], checked_probability(dropout_p) > 0)
        check_sharding(sharding, 1 if group is None else group.size())
        if error_budget(compression) is None:
            wire_format(compression, query.dtype)
        query, key, value = autocast_inputs(query, key, value)
        seed_is_given = dropout_seed is not None
        if checked_probability(dropout_p):
            dropout_seed = checked_seed(dropout_seed) if seed_is_given else drawn_seed(query)
        options: dict[str, Any] = {"softcap": softcap, "distance_bias": distance_bias, "sink": sink}
        options |= {"dropout_p": dropout_p, "dropout_seed": dropout_seed}
        checked = checked_options(query, key, pattern, None, **options)
        name = choose_kernels(backend, (query, key, value), checked, pattern)
    except Exception:
        if group is not None and group.size() > 1 and not torch.compiler.is_compiling():
            report_failure(group, seconds, query)
        raise
    if group is None or group.size() == 1:
        traffic_of_last.update({False: Traffic(), True: Traffic()})
        options |= {"scale": scale, "return_lse": return_lse, "backend": name}
        return attention(query, key, value, pattern, **options)
    if isinstance(dropout_seed, Tensor):  # `_begin` derives a seed per batch entry from it
        checked = checked.changed(dropout_seed=dropout_seed.expand(len(query)))
    leaves = [checked[name] for name in ANYWHERE if OPTIONS[name].learns]
    leaves = [x for x in (query, key, value, *leaves) if x is not None]
    text, operands = pattern.operands
    call = RingCall(
        query=query,
        key=key,
        value=value,
        tensors=operands,  # type: ignore[arg-type]
        pattern=text,
        scale=scale,
        options=checked,
        seed_is_given=seed_is_given,
        group=group.group_name,
        sharding=sharding,
        compression=compression,
        timeout=seconds,
        backend=name,
        differentiable=is_recorded(*leaves) or has_tangent(*leaves),
        first_head=0,
    )
    if axes is None:
        out, lse = _over_tokens(call)
    else:
        out, lse = _over_heads_and_tokens(call, pattern, axes, return_lse)
    return (out, lse) if return_lse else out


def _over_tokens(call: RingCall) -> tuple[Tensor, Tensor]:
    """Runs the operator: ring attention of the ranks of one group."""
    arguments = call._asdict()
    options = arguments.pop("options")
    return _ring(**arguments, **{name: options[name] for name in ANYWHERE})


def _over_heads_and_tokens(
    call: RingCall, pattern: Pattern, mesh: Mesh, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """Exchanges tokens for heads, runs a ring for these heads, and exchanges the results back.

    Without `return_lse`, the lse stays that of the ring.
    """
    exchange = Exchange(mesh.ranks, call.timeout, call.query.device)
    with exchange.break_on_error():
        lengths, seed = agree_on_mesh(exchange, mesh.shape, call, pattern)
    query, key = call.query, call.key
    plan = plan_of_call(pattern, sum(lengths), mesh.shape, call.sharding, query, key)
    check_lengths(plan.sharding, plan.ranges, lengths, exchange.rank)
    group = mesh.heads.rank()
    heads = HeadShard(query.shape[1], key.shape[1], group, mesh.shape[0])
    ring = plan.rings[group]
    swap = Swap.of(mesh, plan.ranges, ring.ranges[mesh.tokens.rank()], call.timeout)
    moving = [query, *(x.repeat_interleave(heads.repeats, 1) for x in (key, call.value))]
    options, sink = call.options, call.options["sink"]
    if sink is not None and sink.shape[2] > 1:  # its rows are of this rank's tokens
        moving, options = [*moving, sink], options.changed(sink=None)
    query, key, value, *sinks = swap.to_heads(*moving)
    options = options_of_heads(heads, options.changed(dropout_seed=None))
    if sinks:
        options = options.changed(sink=sinks[0])
    if options["dropout_p"] is not None:
        options = options.changed(dropout_seed=torch.tensor(seed).expand(len(query)))
    text, operands = ring.pattern.operands
    out, lse = _over_tokens(
        call._replace(
            query=query,
            key=key,
            value=value,
            tensors=operands,
            pattern=text,
            options=options,
            seed_is_given=True,
            group=mesh.tokens.group_name,
            sharding=ring.sharding,
            first_head=heads.heads.start,
        )
    )
    if not return_lse:
        return swap.to_tokens(out)[0], lse
    lse, out = swap.to_tokens(lse, out)
    return out, lse


def _seconds(timeout: object) -> float | None:
    """Returns the timeout in seconds, or None; ValueError unless it is positive."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not is_finite(seconds) or not seconds > 0:  # type: ignore[operator]
        raise ValueError(
            "timeout must be a number of seconds above 0, a timedelta or None, got "
            f"{shortened(repr(timeout))}; leave it out for the group's own timeout"
        )
    return float(seconds)  # type: ignore[arg-type]


@with_hints()
def last_traffic(*, backward: bool = False) -> Traffic:
    """Returns the traffic of this process's last `ring_attention`, forward or backward.

    Forward-mode tangents count as a forward pass, and tangents of gradients as a backward pass.
    """
    return traffic_of_last[checked_flag("backward", backward)]


ring_attention.last_traffic = last_traffic  # type: ignore[attr-defined] # one import gives both


def resolve_group(
    group: dist.ProcessGroup | DeviceMesh | None, mesh: DeviceMesh | None
) -> dist.ProcessGroup | None:
    """Returns the process group of `group` or `mesh`, or None if there is only one process.

    That of a mesh of two axes has all its ranks, in their order.
    """
    return resolve_place(group, mesh)[0]


def resolve_place(
    group: dist.ProcessGroup | DeviceMesh | None, mesh: DeviceMesh | None
) -> tuple[dist.ProcessGroup | None, Mesh | None]:
    """Returns the group as `resolve_group`, and the groups of a mesh of two axes, else None."""
    if group is not None and mesh is not None:
        raise ValueError("pass group or mesh, got both; a mesh brings its own group")
    if isinstance(group, DeviceMesh):
        mesh = group
    if has_two_axes(mesh):
        axes = Mesh.of(mesh)
        return axes.ranks, axes
    if mesh is not None:
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            names = getattr(mesh, "mesh_dim_names", None)
            raise ValueError(
                f"mesh must be a DeviceMesh of one axis, or of two (heads, tokens), got "
                f"{type(mesh).__name__} of axes {names}; pick the axes that share the sequence, as "
                'in mesh["sp"]'
            )
        return mesh.get_group(), None
    check_group(group)
    if group is None:
        if dist.is_available() and dist.is_initialized():
            return dist.group.WORLD, None
        if (world := os.environ.get("WORLD_SIZE", "1")) not in ("", "1"):
            raise ValueError(
                f"{world} processes were started (WORLD_SIZE), but no process group exists; call "
                'torch.distributed.init_process_group("gloo"), or "nccl" on GPUs, first'
            )
        return None, None
    assert isinstance(group, dist.ProcessGroup)
    return group, None


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of this rank's queries in a call with the arguments of `RingCall`."""
    call = RingCall.of(arguments)
    query, key, value, *_ = call
    rank, exchange = _begin(Derivative.NONE, call)
    with exchange.break_on_error(), without_autocast(query):
        network = Network(rank, exchange, [(key, value)], query)

        def answers() -> Iterator[tuple[int, Tensor]]:  # runs after the last round of keys
            guests = network.guests()
            results = None if guests is None else rank.answer(guests, key, value)
            yield from network.answers(results, value.shape[3] + 1)

        out, lse = rank.forward((query, key, value), network.rounds(), answers())
    traffic_of_last[False] = exchange.traffic
    return out.contiguous(), lse.contiguous()


def _backward(*arguments: Any) -> list[Tensor | None]:
    """Returns gradients of query, key, value, distance bias and sink; None for the dropout seed."""
    *inputs, out, lse, grad_out, grad_lse, _ = arguments
    call = RingCall.of(inputs)
    query, key, value, *_ = call
    rank, exchange = _begin(Derivative.GRADIENTS, call)
    x = Saved(
        query=query, key=key, value=value, out=out, lse=lse, grad_out=grad_out, grad_lse=grad_lse
    )
    with exchange.break_on_error(), without_autocast(query):
        grads = _exchange_gradients(rank, exchange, x, call)
    traffic_of_last[True] = exchange.traffic
    return grads


def _tangent(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Returns the forward-mode tangents of (out, lse) of this rank's queries."""
    inputs, (out, lse, *tangents) = arguments[:_LENGTH], arguments[_LENGTH:]
    call = RingCall.of(inputs)
    rank, exchange = _begin(Derivative.TANGENTS, call, tangents)
    with exchange.break_on_error(), without_autocast(out):
        out_t, lse_t = _exchange_tangents(rank, exchange, Moving.of(call[:3], out, lse, tangents))
    traffic_of_last[False] = exchange.traffic
    return out_t.to(out.dtype), lse_t.contiguous()


def _backward_tangent(*arguments: Any) -> list[Tensor | None]:
    """Returns the tangents of `_backward`'s gradients, and then of (out, lse).

    The gradients of a row need the tangents of its results first, so keys are sent twice.
    """
    inputs, (out, lse, grad_out, grad_lse, *rest) = arguments[:_LENGTH], arguments[_LENGTH:]
    *tangents, grad_out_t, grad_lse_t, _ = rest
    call = RingCall.of(inputs)
    rank, exchange = _begin(Derivative.GRADIENT_TANGENTS, call, tangents)
    with exchange.break_on_error(), without_autocast(out):
        x = Moving.of(call[:3], out, lse, tangents)
        moves = _exchange_tangents(rank, exchange, x)
        saved = saved_moves(x, moves, (grad_out, grad_lse), (grad_out_t, grad_lse_t))
        grads = _exchange_gradients(rank, exchange, saved, call)
    traffic_of_last[True] = exchange.traffic
    out_t, lse_t = moves
    return [*grads, out_t.to(out.dtype), lse_t.contiguous()]


def _exchange_tangents(rank: Rank, exchange: Exchange, x: Moving) -> tuple[Tensor, Tensor]:
    """Moves keys, values and their tangents between ranks; returns the tangents of (out, lse)."""
    travels = bool(rank.plan.hosts_of(rank.rank))
    rows = rank.tangent_rows(x if travels else x.mapped(no_tokens))
    network = Network(rank, exchange, x.pairs, rows)

    def answers() -> Iterator[tuple[int, Tensor]]:  # runs after the last round of keys
        guests = network.guests()
        results = None if guests is None else rank.answer_tangents(guests, x)
        yield from network.answers(results, x.value.shape[3] + 1)

    return rank.tangent(x, network.rounds(), answers())


def _exchange_gradients(
    rank: Rank, exchange: Exchange, x: Saved, call: RingCall
) -> list[Tensor | None]:
    """Moves keys, values and gradients between ranks; returns the list that `_backward` returns.

    If `x` moves, all of them are tangents of gradients.
    """
    query = x.query
    table, sink = call.options["distance_bias"], call.options["sink"]
    dtable = rank.blank_table()
    travels = bool(rank.plan.hosts_of(rank.rank))
    rows = rank.gradient_rows(x if travels else x.mapped(no_tokens))
    network = Network(rank, exchange, x.pairs, rows)
    rounds = enumerate(network.rounds())
    dq, dk, dv, answers = rank.local_gradients(x, network.guests, dtable)
    parts = (rank.round_gradients(number, sent, x, dq, dtable) for number, sent in rounds)
    for receiver, rows in network.return_gradients(parts):
        rank.add_returned(receiver, rows, dk, dv)
        del rows  # frees the memory for the next round
    for host, part in network.answers(answers, query.shape[3]):
        dq[:, :, rank.travelling_places(host, query.device)] += part
    grads = [x.to(query.dtype).contiguous() for x in (dq, dk, dv)]
    of_options = {
        "distance_bias": None if dtable is None else dtable.to(table.dtype),
        "sink": None if sink is None else rank.sink_gradient(x, sink),
    }
    return [*grads, *(of_options.get(name) for name in TENSORS)]


_ring = differentiable(  # the operator that autograd and torch.compile see
    "ring_attention",
    SCHEMA,
    Derivatives(
        forward=_forward,
        backward=_backward,
        tangent=_tangent,
        backward_tangent=_backward_tangent,
    ),
)


def _begin(
    kind: Derivative, call: RingCall, tangents: Sequence[Tensor | None] = ()
) -> tuple[Rank, Exchange]:
    """Compares the call's arguments among ranks, then plans this rank's part.

    `tangents` are those of the operator's tensors, query, key and value first.
    """
    query, key, *_ = call
    group = dist.distributed_c10d._resolve_process_group(call.group)  # type: ignore[arg-type]
    exchange = Exchange(group, call.timeout, query.device)
    pattern = parse(call.pattern, [tensor.cpu() for tensor in call.tensors])
    if call.options["distance_bias"] is not None:
        check_distances(pattern)
    with exchange.break_on_error():
        lengths, compression, error, seed, own_rows = agree_on_call(exchange, kind, call, pattern)
    planned = tiles_of(pattern) if own_rows else pattern
    plan = plan_of_call(planned, sum(lengths), len(lengths), call.sharding, query, key)
    check_lengths(plan.sharding, plan.ranges, lengths, exchange.rank)
    if own_rows:
        with exchange.break_on_error():
            plan = plan_of_own_rows(exchange, plan, pattern)
    exchange.traffic = Traffic(compression=compression, error=error)  # resets the message counts
    seeds = None
    if call.options["dropout_p"] is not None:
        seeds = batch_seeds(torch.tensor(seed), len(query), query.device)[:, None]
        seeds = seeds_of_heads(seeds, call.first_head)
    options = call.options.changed(dropout_seed=seeds)
    wire, dtype = wire_format(compression, query.dtype), sum_dtype(query)
    return Rank(
        plan=plan,
        rank=exchange.rank,
        backend=call.backend,
        scale=call.scale,
        wire=wire,
        dtype=dtype,
        options=options,
        tangents=tangents_of_options(tangents[3:]),
    ), exchange
