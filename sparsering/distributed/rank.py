"""What one rank computes, whatever brings it the others' rows.

A rank starts with its own keys, goes on with those that arrive, round by round, and ends with the
partial results of query rows that travelled. Everything is merged, or summed, in the order of the
plan, in float32 (float64 for float64): the same bits from run to run, and with every transport.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional import check_inputs, refuse_forward_mode
from ..layouts.compile import default_block_size
from ..numerics import merge_into
from ..ops import BACKWARD, FORWARD, check_batch, choose
from ..patterns.algebra import Pattern
from .plan import RingPlan
from .sharding import local_index, positions
from .steps import Step, guest_rows, guest_step, local_step, round_step, senders
from .wire import Wire

_KERNELS = ("cpu", "triton", "gather")


class Rank(NamedTuple):
    """One rank's part in a call.

    Attributes:
        backend: name of the kernels.
        wire: format of the rows that keys and values travel in.
        dtype: of sums and merged results.
    """

    plan: RingPlan
    rank: int
    backend: str
    scale: float
    wire: Wire
    dtype: torch.dtype


def kernels(backend: str | None, query: Tensor, key: Tensor, value: Tensor) -> str:
    """The backend that computes a rank's part; raises as `attention` where it cannot."""
    name = choose(backend, query, key, value)
    if name not in _KERNELS:
        raise NotImplementedError(
            f"{name}: a ring computes with kernels that run any layout: {', '.join(_KERNELS)}"
        )
    return name


def check_ring_inputs(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> None:
    """Raises as `attention` where inputs do not fit, or are not of the same tokens."""
    check_inputs(query, key, value, pattern)
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            "a ring needs the queries and keys of the same tokens, sharded alike, got "
            f"{query.shape[2]} and {key.shape[2]}"
        )
    refuse_forward_mode(query, key, value)


def plan_of_call(
    pattern: Pattern, length: int, world: int, sharding: str, query: Tensor, key: Tensor
) -> RingPlan:
    """The plan of a call with such heads; ValueError where the pattern does not fit."""
    check_batch(pattern, query)
    return RingPlan.build(
        pattern, length, world,
        num_heads=key.shape[1], query_heads=query.shape[1], sharding=sharding,
        block_size=default_block_size(pattern, length),
    )  # fmt: skip


class Gradients(NamedTuple):
    """What a rank differentiates with: its shards, the merged results and their gradients."""

    grad_out: Tensor
    grad_lse: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor

    def none(self) -> "Gradients":
        """Of no tokens."""
        return Gradients(*(x[:, :, :0] for x in self))


def forward(
    own: Rank,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rounds: Iterator[Tensor],
    answers: Iterator[tuple[int, Tensor]],
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a rank's queries; out in the query's dtype.

    Args:
        rounds: the rows that arrive in each round, as sent, and one of zeros: [rows + 1, columns].
        answers: what other ranks computed for this one's travelling rows, and which ones did.
    """
    step = local_step(own.plan, own.rank, query.device)
    if step.layout is not None and step.layout.frame.q_len == query.shape[2]:
        out, lse = _attend(own, step, query, key, value)
    else:
        out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=own.dtype)
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=own.dtype)
        if step.layout is not None:
            results = _attend(own, step, query, key, value)
            out[:, :, step.queries], lse[:, :, step.queries] = results
    for number, sent in enumerate(rounds):
        step = round_step(own.plan, own.rank, number, len(query), query.device)
        if step.layout is not None:
            part, part_lse = _attend(own, step, query, *_buffer(own, step, sent, key, value))
            merge_into(out[:, :, step.queries], lse[:, :, step.queries], part, part_lse)
    for host, came in answers:
        at = own_places(own.plan, own.rank, host, query.device)
        merged, merged_lse = out[:, :, at], lse[:, :, at]
        merge_into(merged, merged_lse, came[..., :-1], came[..., -1])
        out[:, :, at], lse[:, :, at] = merged, merged_lse
    return out.to(query.dtype), lse


def local_gradients(
    own: Rank, x: Gradients, guests: Callable[[], Tensor | None]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients, in `own.dtype`, of a rank's queries, keys and values from its own pairs and from
    guests' pairs with its keys; and of the guests (`guests` gives their rows, or None).
    """
    step = local_step(own.plan, own.rank, x.query.device)
    if step.layout is None:
        dq, dk, dv = (t.new_zeros(t.shape, dtype=own.dtype) for t in (x.query, x.key, x.value))
    else:
        dq, dk, dv = _differentiate(own, step, x, x.key, x.value)
        if dq.shape[2] < x.query.shape[2]:
            part, dq = dq, x.query.new_zeros(x.query.shape, dtype=own.dtype)
            dq[:, :, step.queries] = part
    rows = guests()
    if rows is None:
        return dq, dk, dv, None
    answers, of_keys, of_values = _answer_gradients(own, rows, x.key, x.value)
    dk += of_keys
    dv += of_values
    return dq, dk, dv, answers


def round_gradients(
    own: Rank, number: int, sent: Tensor, x: Gradients, dq: Tensor
) -> dict[int, Tensor]:
    """Adds what the rows that arrived in a round give to dq; returns the gradients of those rows,
    [rows, D + Dv] in `own.dtype`, by the rank that they came from.
    """
    step = round_step(own.plan, own.rank, number, len(dq), dq.device)
    rows = dq.new_zeros(step.arrived, x.key.shape[3] + x.value.shape[3])
    if step.layout is not None:
        buffer = _buffer(own, step, sent, x.key, x.value)
        part, of_keys, of_values = _differentiate(own, step, x, *buffer)
        dq[:, :, step.queries] += part
        rows = _of_arrived(step, of_keys, of_values)
    peers = senders(own.plan, own.rank, number)
    sizes = [message_rows(own.plan, own.rank, peer, len(dq)) for peer in peers]
    return dict(zip(peers, rows.split(sizes), strict=True))


def add_returned(own: Rank, receiver: int, rows: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Adds what a receiver of this rank's keys returned, [rows, D + Dv]."""
    first, width = 0, dk.shape[3]
    for b, h, index in _message(own.plan, receiver, own.rank, len(dk)):
        shape = (*dk[b, h].shape[:-2], len(index))
        part = rows[first : (first := first + math.prod(shape))].view(*shape, rows.shape[1])
        index = index.to(dk.device)
        dk[b, h].index_add_(-2, index, part[..., :width])
        dv[b, h].index_add_(-2, index, part[..., width:])


def answer(own: Rank, guests: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Partial results of guest rows with a host's keys: [B, Hq, rows, Dv + 1], the lse last."""
    step = guest_step(own.plan, own.rank, key.device)
    answers = guests.new_zeros(*guests.shape[:3], value.shape[3] + 1, dtype=own.dtype)
    answers[..., -1] = -torch.inf
    if step.layout is not None:
        out, lse = _attend(own, step, guests, key, value)
        answers[:, :, step.queries] = torch.cat((out.to(own.dtype), lse[..., None]), -1)
    return answers


def gradient_rows(own: Rank, x: Gradients) -> Tensor:
    """What a host needs of query rows to differentiate: q | dO | lse | delta, in `own.dtype`."""
    grad_out = x.grad_out.to(own.dtype)
    delta = (grad_out * x.out.to(own.dtype)).sum(-1) - x.grad_lse
    return torch.cat((x.query.to(own.dtype), grad_out, x.lse[..., None], delta[..., None]), -1)


def _answer_gradients(
    own: Rank, guests: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of guest rows [B, Hq, rows, D] and of the host's keys and values."""
    step = guest_step(own.plan, own.rank, key.device)
    width, value_width = key.shape[3], value.shape[3]
    dq = guests.new_zeros(*guests.shape[:3], width)
    if step.layout is None:
        return dq, torch.zeros_like(key), torch.zeros_like(value)
    query, grad_out, lse, delta = guests.split([width, value_width, 1, 1], -1)
    grad_out = grad_out.to(key.dtype)
    x = Gradients(
        grad_out, -delta[..., 0], query.to(key.dtype), key, value, torch.zeros_like(grad_out),
        lse[..., 0],
    )  # fmt: skip
    dq[:, :, step.queries], dk, dv = _differentiate(own, step, x, key, value)
    return dq, dk, dv


def pack(own: Rank, receiver: int, key: Tensor, value: Tensor) -> Tensor:
    """The rows that a receiver needs of this rank's keys and values, as sent."""
    rows = [key.new_empty(0, key.shape[3] + value.shape[3])]
    for b, h, index in _message(own.plan, receiver, own.rank, len(key)):
        parts = (x[b, h].index_select(-2, index.to(key.device)) for x in (key, value))
        rows.append(torch.cat(list(parts), -1).flatten(0, -2))
    return own.wire.encode(torch.cat(rows) if len(rows) > 2 else rows[-1], key.shape[3])


def message_rows(plan: RingPlan, receiver: int, sender: int, batch: int) -> int:
    """Rows of keys and values that go from a sender to a receiver."""
    return int(plan.tokens[receiver, sender]) * batch // len(plan.need_of)


def own_places(plan: RingPlan, rank: int, host: int, device: torch.device) -> Tensor:
    """Places in a rank's shard of the query rows that travel to a host."""
    rows = [t.rows for t in plan.travellers if t.owner == rank and host in t.hosts]
    return local_index(plan.ranges[rank], positions(*rows)).to(device)


def guest_places(plan: RingPlan, owner: int, host: int, device: torch.device) -> Tensor:
    """Places among a host's guests of the query rows of one owner."""
    rows = [t.rows for t in plan.travellers if t.owner == owner and host in t.hosts]
    return local_index(guest_rows(plan, host), positions(*rows)).to(device)


def _attend(
    own: Rank, step: Step, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a step's queries with the keys of its buffer."""
    assert step.layout is not None
    queries = query[:, :, step.queries]
    forward = FORWARD[own.backend]
    exact = own.dtype == torch.float32
    return forward(step.layout, queries, key, value, None, own.scale, in_float32=exact)


def _differentiate(
    own: Rank, step: Step, x: Gradients, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a step's queries, and of the keys and values of its buffer."""
    assert step.layout is not None
    grad_out, grad_lse, query, out, lse = (
        t[:, :, step.queries] for t in (x.grad_out, x.grad_lse, x.query, x.out, x.lse)
    )
    dq, dk, dv, _ = BACKWARD[own.backend](
        step.layout, grad_out, grad_lse, query, key, value, None, out, lse, own.scale,
        in_float32=own.dtype == torch.float32,
    )  # fmt: skip
    return dq, dk, dv


def _buffer(
    own: Rank, step: Step, sent: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values of a step from the rows that arrived."""
    assert step.layout is not None
    rows = own.wire.decode(sent, key.shape[3], value.shape[3])
    if step.rows is None:
        rows = rows[: step.arrived]
        rows = rows.view(*key.shape[:2], step.layout.frame.kv_len, rows.shape[1])
    else:
        rows = rows.index_select(0, step.rows.flatten()).view(*step.rows.shape, rows.shape[1])
    return rows[..., : key.shape[3]], rows[..., key.shape[3] :]


def _of_arrived(step: Step, dk: Tensor, dv: Tensor) -> Tensor:
    """[rows, D + Dv] gradients of the rows that arrived, from those of the buffer."""
    places = torch.cat((dk, dv), -1).flatten(0, -2)
    if step.rows is None:
        return places
    places = torch.nn.functional.pad(places, (0, 0, 0, 1))
    copies = step.copies
    rows = places.index_select(0, copies[0])
    for copy in copies[1:]:
        rows += places.index_select(0, copy)
    return rows


def _message(
    plan: RingPlan, receiver: int, sender: int, batch: int
) -> Iterator[tuple[Any, Any, Tensor]]:
    """The parts of a message in order: batch entry, kv head (all where alike), places of the tokens
    in the sender's shard.
    """
    everything = slice(None)
    alike = len({number for row in plan.need_of for number in row}) == 1
    for b in range(1 if alike else batch):
        for h in range(1 if alike else plan.frame.num_kv_heads):
            runs, group = plan.runs(receiver, sender, b, h)
            index = local_index(plan.ranges[sender], runs.of(group))
            yield everything if alike else b, everything if alike else h, index
