"""Ring attention over a process group: local shards in, local shards out.

A call agrees on what all ranks were given, takes the plan, and computes with what it receives. The
backward pass fetches keys and values again, so that nothing but a rank's own shards is kept between
the two.
"""

import math
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..functional import attention, autocast_inputs, default_scale
from ..numerics import sum_dtype
from ..patterns.algebra import Pattern
from ..patterns.expression import parse
from .agreement import Call, agree_on_call, check_lengths, error_budget, tell_failure
from .exchange import Exchange, Traffic
from .network import Network
from .rank import (
    Gradients,
    Rank,
    add_returned,
    answer,
    check_ring_inputs,
    forward,
    gradient_rows,
    kernels,
    local_gradients,
    own_places,
    plan_of_call,
    round_gradients,
)
from .sharding import chunk_owners
from .wire import wire

_last_traffic = {False: Traffic(), True: Traffic()}


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    sharding: str = "contiguous",
    compression: str | None = None,
    timeout: float | timedelta | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a pattern, of a sequence that is sharded over ranks; differentiable.

    Every rank of the group calls it with the same pattern and options and gets its own part of what
    `attention` gives for the whole sequence. A rank receives just the keys that its queries visit
    and it lacks; the backward pass receives them again and returns their gradients in float32.
    Beside its shards a rank needs room for what is under way, two rounds of at most a shard each,
    and for a round laid out for the kernel: as much, or up to a shard for each dilated branch;
    whatever the number of ranks. One rank alone does not communicate.

    As with any collective, all ranks make their calls on one group in the same order; calls from
    several threads need a group each. A call that raised in the middle leaves its group unusable.

    Args:
        query: [B, Hq, n, D], this rank's part as `shard` cuts it; n may be 0.
        key: [B, Hkv, n, D], of the same tokens as the queries.
        value: [B, Hkv, n, Dv].
        pattern: a mask or a mixture, on positions of the whole sequence.
        group, mesh: the ranks: a process group or a `DeviceMesh` of one axis (`mesh["sp"]`);
            default all.
        sharding: which rank owns which tokens; see `RingPlan`. With "auto" and "balanced" the
            shards must be those of the plan's choice.
        compression: the format that keys and values travel in: None for their own dtype, "bf16",
            "fp8" or "int8" (a byte a number, one scale per row), or "auto", the smallest whose
            error on these keys and values, relative and root mean square, is below 0.01
            ("auto:0.001": another bound). What it did is in `last_traffic`.
        timeout: seconds (or a timedelta) that a rank waits for its peers at each step; default the
            group's.
        scale, return_lse, backend: as for `attention`, with the backends that run layouts.

    Returns: out [B, Hq, n, Dv] in the query's dtype, and with `return_lse` lse [B, Hq, n].

    Raises:
        ValueError: arguments that cannot be right on this rank.
        RingMismatchError: (a ValueError and a RingError) ranks called with what does not fit
            together; on all of them, before any payload.
        RingError: a peer died or did not answer in time; says who and when.

    Example:
        >>> out = ring_attention(query, key, value, Causal(), mesh=mesh["sp"], sharding="zigzag")
    """
    group = resolve_group(group, mesh)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    try:
        check_ring_inputs(query, key, value, pattern)
        if seconds is not None and not (0 < seconds < math.inf):
            raise ValueError(f"timeout must be a number of seconds above 0 or None, got {timeout}")
        if not (scale is None or isinstance(scale, int | float)):
            raise ValueError(f"scale must be a number or None, got {scale!r}; wrap it in float()")
        if sharding not in ("auto", "balanced"):
            chunk_owners(sharding, 1 if group is None else group.size())
        if error_budget(compression) is None:
            wire(compression, query.dtype)
        query, key, value = autocast_inputs(query, key, value)
        name = kernels(backend, query, key, value)
    except Exception:
        if group is not None and group.size() > 1 and not torch.compiler.is_compiling():
            tell_failure(group, seconds)
        raise
    if scale is None:
        scale = default_scale(query)
    if group is None or group.size() == 1:
        _last_traffic.update({False: Traffic(), True: Traffic()})
        return attention(  # type: ignore[call-overload]
            query, key, value, pattern, scale=scale, return_lse=return_lse, backend=name
        )
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    out, lse = ring_op(
        query, key, value, pattern.tensors, pattern.expression, scale, group.group_name, sharding,
        compression, seconds, name, differentiable,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def last_traffic(*, backward: bool = False) -> Traffic:
    """What this process's last call of `ring_attention` moved, forward or backward."""
    return _last_traffic[backward]


ring_attention.last_traffic = last_traffic  # type: ignore[attr-defined]


def resolve_group(
    group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> dist.ProcessGroup | None:
    """The process group that is meant; None where this process is alone. Raises ValueError."""
    if group is not None and mesh is not None:
        raise ValueError("expected group or mesh, got both; a mesh of one axis has its own group")
    if mesh is not None:
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh must have one axis, got {mesh.ndim} ({mesh.mesh_dim_names}); pick the one "
                'that the sequence is sharded over, as in mesh["sp"]'
            )
        return mesh.get_group()
    if group is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "this process is not in the group; only its members call, each with its own group"
        )
    return group


@torch.library.custom_op("sparsering::ring_attention", mutates_args=())
def ring_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: Sequence[Tensor],
    pattern: str,
    scale: float,
    group: str,
    sharding: str,
    compression: str | None,
    timeout: float | None,
    backend: str,
    differentiable: bool,
) -> tuple[Tensor, Tensor]:
    """Forward: (out, lse)."""
    call = Call(False, tuple(tensors), pattern, scale, sharding, compression, differentiable)
    own, exchange = _begin(call, group, timeout, backend, query, key, value)
    with exchange.going_on(), torch.autocast(query.device.type, enabled=False):
        network = Network(own, exchange, key, value, query)

        def answers() -> Iterator[tuple[int, Tensor]]:
            guests = network.guests()
            answered = None if guests is None else answer(own, guests, key, value)
            yield from network.answers(answered, value.shape[3] + 1)

        out, lse = forward(own, query, key, value, network.rounds(), answers())
    _last_traffic[False] = exchange.traffic
    return out.contiguous(), lse.contiguous()


@torch.library.custom_op("sparsering::ring_attention_backward", mutates_args=())
def ring_backward_op(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    pattern: str,
    scale: float,
    group: str,
    sharding: str,
    compression: str | None,
    timeout: float | None,
    backend: str,
    differentiable: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    call = Call(True, tuple(tensors), pattern, scale, sharding, compression, differentiable)
    own, exchange = _begin(call, group, timeout, backend, query, key, value)
    x = Gradients(grad_out, grad_lse, query, key, value, out, lse)
    travels = any(t.owner == own.rank for t in own.plan.travellers)
    with exchange.going_on(), torch.autocast(query.device.type, enabled=False):
        rows = gradient_rows(own, x if travels else x.none())
        network = Network(own, exchange, key, value, rows)
        rounds = network.rounds()
        dq, dk, dv, answered = local_gradients(own, x, network.guests)

        def add(receiver: int, rows: Tensor) -> None:
            add_returned(own, receiver, rows, dk, dv)

        for number, sent in enumerate(rounds):
            parts = round_gradients(own, number, sent, x, dq)
            network.return_gradients(number, parts, add)
        network.finish_gradients(add)
        for host, came in network.answers(answered, query.shape[3]):
            dq[:, :, own_places(own.plan, own.rank, host, query.device)] += came
    _last_traffic[True] = exchange.traffic
    dq, dk, dv = (x.to(query.dtype).contiguous() for x in (dq, dk, dv))
    return dq, dk, dv


def _begin(
    call: Call,
    group: str,
    timeout: float | None,
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> tuple[Rank, Exchange]:
    """What every call starts with: agreement, then the plan."""
    members = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    exchange = Exchange(members, timeout)
    with exchange.going_on():
        lengths, compression, error = agree_on_call(exchange, call, query, key, value)
    exchange.traffic = Traffic(compression=compression, error=error)
    pattern = parse(call.pattern, [tensor.cpu() for tensor in call.tensors])
    plan = plan_of_call(pattern, sum(lengths), len(lengths), call.sharding, query, key)
    check_lengths(plan, lengths, exchange.rank)
    format_ = wire(compression, query.dtype)
    return Rank(plan, exchange.rank, backend, call.scale, format_, sum_dtype(query)), exchange


@ring_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    out = query.new_empty(*query.shape[:3], value.shape[3])
    return out, query.new_empty(query.shape[:3], dtype=sum_dtype(query))


@ring_backward_op.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (query, key, value))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, tensors, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, *tensors)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, out, lse, *tensors = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    grads = ring_backward_op(grad_out, grad_lse, query, key, value, out, lse, tensors, *ctx.options)
    return (*grads, [None] * len(tensors), *(None for _ in ctx.options))


ring_op.register_autograd(_differentiate, setup_context=_save)


def _refuse_second_derivatives(ctx: Any, *grads: object) -> None:
    raise NotImplementedError(
        "a ring has no second derivatives; attention(..., backend='reference') has them"
    )


ring_backward_op.register_autograd(_refuse_second_derivatives)
