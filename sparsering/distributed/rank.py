"""Computes one rank's part of a ring call; network.py or simulate.py brings other ranks' rows.

A rank attends to its own keys, then to the keys that arrive, round by round. It may send some query
rows to other ranks (their hosts); it merges their results last. It also attends from
query rows that other ranks send to it (its guests). Sums and merges follow the order of the plan,
in float32 (float64 for float64), so that every run and every transport gives the same bits.

Tangents of keys and values travel beside them. With the lse of a whole row, what each array of keys
adds to the row's tangents is a sum (`Rank.tangent`), and so are tangents of gradients. A rank
therefore computes the latter as it computes gradients, with other kernels.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..call import NO_OPTIONS, Options
from ..checks import check_batch, check_inputs
from ..ground.numerics import add_sink, merge_into
from ..kernels.backends import BACKENDS, NAMES, choose, second_order
from ..kernels.problem import (
    GradientRows,
    Problem,
    Tangents,
    results_of_sums,
    sink_gradient,
    sink_gradient_tangent,
)
from ..patterns.algebra import Pattern
from ..patterns.selected import has_lists
from ..route.options import ANYWHERE, OPTIONS
from .plan import RingPlan, default_plan
from .rank_layouts import Step, local_step, round_step
from .saved import Moves, Moving, Pair, Saved
from .sharding import local_index, positions
from .wire import Wire

REFUSED = {  # why rings refuse other options of `attention`, by name or by `Option.by`
    "q_start": "each rank's queries and keys are of the same tokens",
    "block_size": "the plan chooses the blocks",
    "block": "it needs the blocks of a whole sequence; call attention in one process",
    "slot": "it needs the rows of a whole sequence; call attention in one process",
}


TENSORS = [name for name in ANYWHERE if OPTIONS[name].schema == "Tensor?"]
"""The options that are tensors, in the order of operators."""


def choose_kernels(
    backend: str | None, inputs: Sequence[Tensor], options: Options, pattern: Pattern
) -> str:
    """Returns the name of a rank's backend; NotImplementedError unless it runs every layout."""
    name, lists = choose(backend, inputs, options.in_use, pattern), has_lists(pattern)
    if not BACKENDS[name].reads_layouts or (lists and not BACKENDS[name].runs_lists):
        able = ((n, BACKENDS[n]) for n in NAMES)
        fits = (n for n, x in able if x.reads_layouts and (x.runs_lists or not lists))
        kind = "lists of keys" if lists else "all layouts"
        raise NotImplementedError(
            f"{name}: a ring needs a backend for {kind}, such as {', '.join(fits)}"
        )
    return name


def check_ring_inputs(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> None:
    """Raises ValueError as `attention` does, and if the numbers of queries and keys differ."""
    check_inputs(query, key, value, pattern)
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            "a ring needs queries and keys of the same tokens, got "
            f"{query.shape[2]} queries and {key.shape[2]} keys; shard both alike"
        )


def tangents_of_options(tangents: Sequence[Tensor | None]) -> Options:
    """Returns the tangents of options as `Options`; they come in the order of `TENSORS`."""
    return NO_OPTIONS.changed(**dict(zip(TENSORS, tangents, strict=False)))


def plan_of_call(
    pattern: Pattern, length: int, world: Any, sharding: str, query: Tensor, key: Tensor
) -> Any:
    """Builds the plan of a ring call; ValueError if the pattern does not fit its tensors."""
    check_batch(pattern, query.shape[0])
    heads = {"num_heads": query.shape[1], "num_kv_heads": key.shape[1]}
    return default_plan(pattern, length, world, sharding=sharding, **heads)


@dataclass(frozen=True, eq=False)
class Rank:
    """One rank's computations in a ring call; `Network` or `simulate_ring` moves the rows."""

    plan: RingPlan
    rank: int
    backend: str
    scale: float
    wire: Wire  # format of the key and value rows that ranks send
    dtype: torch.dtype  # dtype of sums and merged results
    options: Options  # fields of `Problem`; a sink per query is for this rank's queries only
    tangents: Options = NO_OPTIONS  # of the options

    def forward(
        self,
        shards: Sequence[Tensor],
        rounds: Iterator[Tensor],
        answers: Iterator[tuple[int, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Computes (out, lse) of the rank's queries: own keys, then arriving ones, then answers.

        Args:
            shards: the rank's queries, keys and values.
            rounds: a tensor [rows + 1, columns] for each round: the encoded rows that arrive, and a
                last row of zeros.
            answers: (rank that computed them, partial results of query rows that were sent to it).
        """
        query, key, value = shards
        step = local_step(self.plan, self.rank, query.device)
        # if the layout has all queries, its results need no copy
        if step.work is not None and step.work.layout.frame.q_len == query.shape[2]:
            out, lse = self._attend(step, query, key, value)
        else:
            out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=self.dtype)
            lse = query.new_full(query.shape[:3], -torch.inf, dtype=self.dtype)
            if step.work is not None:
                part, part_lse = self._attend(step, query, key, value)
                out[:, :, step.queries], lse[:, :, step.queries] = part, part_lse
        for number, sent in enumerate(rounds):
            step = round_step(self.plan, self.rank, number, len(query), query.device)
            if step.work is not None:
                part, part_lse = self._attend(step, query, *self._buffer(step, sent, key, value))
                merge_into(out[:, :, step.queries], lse[:, :, step.queries], part, part_lse)
        for host, results in answers:
            at = self.travelling_places(host, query.device)
            merged, merged_lse = out[:, :, at], lse[:, :, at]
            merge_into(merged, merged_lse, results[..., :-1], results[..., -1])
            out[:, :, at], lse[:, :, at] = merged, merged_lse
        if (sink := self.options["sink"]) is not None:
            out, lse = add_sink(out, lse, sink.to(self.dtype))
        return out.to(query.dtype), lse

    def tangent(
        self, x: Moving, rounds: Iterator[Tensor], answers: Iterator[tuple[int, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Returns the forward-mode tangents of (out, lse) of this rank's queries, in `dtype`.

        Args:
            rounds: as for `forward`; behind each encoded row are its tangents.
            answers: (rank that computed them, `answer_tangents` of query rows that were sent).
        """
        sums = self._blank_sums(x.query, x.value)

        def add(step: Step, pairs: Sequence[Pair]) -> None:
            part = self._tangent_sums(step, (x.query, x.query_t, x.lse), pairs)
            sums[:, :, step.queries] += part

        step = local_step(self.plan, self.rank, x.query.device)
        if step.work is not None:
            add(step, x.pairs)
        for number, sent in enumerate(rounds):
            step = round_step(self.plan, self.rank, number, len(x.query), x.query.device)
            if step.work is not None:
                add(step, self._buffers(step, sent, x.pairs))
        for host, results in answers:
            sums[:, :, self.travelling_places(host, x.query.device)] += results
        sink, sink_t = self.options["sink"], self.tangents["sink"]
        return results_of_sums((sums[..., :-1], sums[..., -1]), x.out, x.lse, sink, sink_t)

    def answer_tangents(self, guests: Tensor, x: Moving) -> Tensor:
        """Sums tangents of query rows from other ranks over own keys: [B, Hq, rows, Dv + 1].

        `guests` are these rows, [B, Hq, rows, 2 D + 1], as `tangent_rows` of their owners.
        """
        step = local_step(self.plan, self.rank, x.key.device, of_guests=True)
        sums = self._blank_sums(guests, x.value)
        if step.work is not None:
            width = x.key.shape[3]
            query, query_t, lse = guests.split([width, width, 1], -1)
            rows = query.to(x.key.dtype), query_t.to(x.key.dtype), lse[..., 0]
            sums[:, :, step.queries] = self._tangent_sums(step, rows, x.pairs)
        return sums

    def tangent_rows(self, x: Moving) -> Tensor:
        """Joins q, its tangent and lse of query rows, for another rank's `answer_tangents`."""
        return torch.cat([t.to(self.dtype) for t in (x.query, x.query_t, x.lse[..., None])], -1)

    def _blank_sums(self, query: Tensor, value: Tensor) -> Tensor:
        return query.new_zeros(*query.shape[:3], value.shape[3] + 1, dtype=self.dtype)

    def _tangent_sums(
        self, step: Step, rows: tuple[Tensor, Tensor, Tensor], pairs: Sequence[Pair]
    ) -> Tensor:
        """Sums the tangents of a step's queries over the step's keys: [B, Hq, rows, Dv + 1].

        `rows` are q, its tangent and lse of all the rank's rows, or of all guests. The last column
        is the sum for lse.
        """
        query, query_t, lse = rows
        problem = self._problem(step, query, *pairs[0])
        tangents = self._tangents(step, query_t, *pairs[1])
        run = second_order(self.backend).tangent_sums
        moved, lse_t = run(problem, lse[:, :, step.queries], tangents)
        return torch.cat((moved, lse_t[..., None]), -1)

    def _tangents(self, step: Step, query_t: Tensor, key_t: Tensor, value_t: Tensor) -> Tangents:
        """Returns the forward-mode tangents of a step's `Problem`."""
        return Tangents(
            query=query_t[:, :, step.queries],
            key=key_t,
            value=value_t,
            distance_bias=self.tangents["distance_bias"],
        )

    def sink_gradient(self, x: Saved, sink: Tensor) -> Tensor:
        """Returns this rank's part of the sink's gradient, which ranks add up, or its rows of it.

        If `x` moves, it is the tangent of the gradient.
        """
        if x.moves is not None:
            return sink_gradient_tangent(sink, self.tangents["sink"], self._gradient_rows(x))
        return sink_gradient(sink, x.lse, self._delta(x))

    def blank_table(self) -> Tensor | None:
        """Returns zeros like the distance bias, to add its gradient to; None without a bias."""
        table = self.options["distance_bias"]
        return None if table is None else torch.zeros_like(table, dtype=self.dtype)

    def local_gradients(
        self, x: Saved, guests: Callable[[], Tensor | None], dtable: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Computes the gradients of all pairs that have this rank's keys, also those of guests.

        If `x` moves, they are the tangents of gradients, here and in `round_gradients`. It calls
        `guests` last, because this call waits for the query rows of other ranks. It adds the
        gradient of the distance bias to `dtable`.

        Returns: dq, dk and dv of this rank; dq of the query rows of other ranks, or None if there
            are none.
        """
        step = local_step(self.plan, self.rank, x.query.device)
        if step.work is None:
            dq, dk, dv = (t.new_zeros(t.shape, dtype=self.dtype) for t in (x.query, x.key, x.value))
        else:
            dq, dk, dv = self._differentiate(step, x, x.pairs, dtable)
            if dq.shape[2] < x.query.shape[2]:
                part, dq = dq, x.query.new_zeros(x.query.shape, dtype=self.dtype)
                dq[:, :, step.queries] = part
        if (rows := guests()) is None:
            return dq, dk, dv, None
        guest_dq, guest_dk, guest_dv = self._answer_gradients(rows, x.pairs, dtable)
        dk += guest_dk
        dv += guest_dv
        return dq, dk, dv, guest_dq

    def round_gradients(
        self, number: int, sent: Tensor, x: Saved, dq: Tensor, dtable: Tensor | None
    ) -> dict[int, Tensor]:
        """Adds gradients of pairs with a round's keys to `dq`, `dtable`; returns those of the keys.

        Returns: {sender: gradients [rows, D + Dv] of the keys and values that came from it}.
        """
        step = round_step(self.plan, self.rank, number, len(dq), dq.device)
        rows = dq.new_zeros(step.arrived, x.key.shape[3] + x.value.shape[3])
        if step.work is not None:
            buffers = self._buffers(step, sent, x.pairs)
            part, *grads = self._differentiate(step, x, buffers, dtable)
            dq[:, :, step.queries] += part
            rows = torch.cat(grads, -1).flatten(0, -2)  # one row per key of the buffer
            if step.rows is not None:  # an arrived row may be in the buffer several times
                padded = torch.nn.functional.pad(rows, (0, 0, 0, 1))
                rows = padded.index_select(0, step.copies[0])
                for copy in step.copies[1:]:
                    rows += padded.index_select(0, copy)
        sizes = self._arriving_sizes(number, len(dq))
        return dict(zip(sizes, rows.split([*sizes.values()]), strict=True))

    def add_returned(self, receiver: int, rows: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Adds the gradients [rows, D + Dv] that rank `receiver` returned to `dk` and `dv`."""
        first, width = 0, dk.shape[3]
        for b, h, index in self._message(receiver, len(dk)):
            shape = (*dk[b, h].shape[:-2], len(index))
            part = rows[first : (first := first + math.prod(shape))].view(*shape, rows.shape[1])
            index = index.to(dk.device)
            dk[b, h].index_add_(-2, index, part[..., :width])
            dv[b, h].index_add_(-2, index, part[..., width:])

    def answer(self, guests: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends from query rows that other ranks sent to this rank's keys.

        Returns out and lse in one tensor, [B, Hq, rows, Dv + 1].
        """
        step = local_step(self.plan, self.rank, key.device, of_guests=True)
        answers = guests.new_zeros(*guests.shape[:3], value.shape[3] + 1, dtype=self.dtype)
        answers[..., -1] = -torch.inf
        if step.work is not None:
            out, lse = self._attend(step, guests, key, value)
            answers[:, :, step.queries] = torch.cat((out.to(self.dtype), lse[..., None]), -1)
        return answers

    def _answer_gradients(
        self, guests: Tensor, pairs: Sequence[Pair], dtable: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (dq, dk, dv) of query rows from other ranks and this rank's keys and values.

        `guests` are these rows, [B, Hq, rows, D + Dv + 2], as `gradient_rows` of their owners
        packed them; twice as wide if there are tangents.
        """
        key, value = pairs[0]
        step = local_step(self.plan, self.rank, key.device, of_guests=True)
        width, value_width = key.shape[3], value.shape[3]
        dq = guests.new_zeros(*guests.shape[:3], width)
        if step.work is None:
            return dq, torch.zeros_like(key), torch.zeros_like(value)
        sizes = [width, value_width, 1, 1]
        query, grad_out, lse, delta, *moved = guests.split(sizes * len(pairs), -1)
        query, grad_out = query.to(key.dtype), grad_out.to(key.dtype)
        no_out = torch.zeros_like(grad_out)  # with it, rowsum(dO * O) - grad_lse equals delta
        x = Saved(
            query=query,
            key=key,
            value=value,
            out=no_out,
            lse=lse[..., 0],
            grad_out=grad_out,
            grad_lse=-delta[..., 0],
        )
        if moved:
            query_t, grad_out_t, lse_t, delta_t = moved
            key_t, value_t = pairs[1]
            moves = Moves(
                query=query_t.to(key.dtype),
                key=key_t,
                value=value_t,
                grad_out=grad_out_t.to(key.dtype),
                lse=lse_t[..., 0],
                delta=delta_t[..., 0],
            )
            x = x._replace(moves=moves)
        dq[:, :, step.queries], dk, dv = self._differentiate(step, x, pairs, dtable)
        return dq, dk, dv

    def gradient_rows(self, x: Saved) -> Tensor:
        """Joins q, dO, lse and delta of query rows, which another rank's backward pass takes.

        If `x` moves, the tangents of these four follow.
        """
        parts = [x.query, x.grad_out, x.lse[..., None], self._delta(x)[..., None]]
        if (t := x.moves) is not None:
            parts += [t.query, t.grad_out, t.lse[..., None], t.delta[..., None]]
        return torch.cat([part.to(self.dtype) for part in parts], -1)

    def _gradient_rows(self, x: Saved) -> GradientRows:
        """Returns dO, lse and delta with their tangents, as second-order kernels take them."""
        assert x.moves is not None
        return GradientRows(
            grad_out=x.grad_out,
            lse=x.lse,
            delta=self._delta(x),
            grad_out_t=x.moves.grad_out,
            lse_t=x.moves.lse,
            delta_t=x.moves.delta,
        )

    def _delta(self, x: Saved) -> Tensor:
        """Returns rowsum(dO * O) - dlse, [B, Hq, rows]."""
        return (x.grad_out.to(self.dtype) * x.out.to(self.dtype)).sum(-1) - x.grad_lse

    def pack(self, receiver: int, *pairs: Pair) -> Tensor:
        """Encodes the keys and values that rank `receiver` needs: rows [n, columns] to send.

        With a second pair, their tangents, each row continues with its tangent in the same format.
        """
        sent = [self._encoded(receiver, *pair) for pair in pairs]
        return sent[0] if len(sent) == 1 else torch.cat(sent, 1)

    def _encoded(self, receiver: int, key: Tensor, value: Tensor) -> Tensor:
        """Encodes the needed rows of one pair of key and value tensors."""
        rows = [key.new_empty(0, key.shape[3] + value.shape[3])]
        for b, h, index in self._message(receiver, len(key)):
            parts = (x[b, h].index_select(-2, index.to(key.device)) for x in (key, value))
            rows.append(torch.cat(list(parts), -1).flatten(0, -2))
        return self.wire.encode(torch.cat(rows) if len(rows) > 2 else rows[-1], key.shape[3])

    def room(self, number: int, *pairs: Pair) -> tuple[Tensor, dict[int, Tensor]]:
        """Allocates memory for a round's arriving rows, with a row of zeros at the end.

        Returns: the memory, and {sender: the part of the memory for its rows}.
        """
        key, value = pairs[0]
        sizes = self._arriving_sizes(number, len(key))
        columns = self.wire.columns(key.shape[3], value.shape[3]) * len(pairs)
        room = key.new_empty(sum(sizes.values()) + 1, columns, dtype=self.wire.element)
        room[-1:].zero_()
        return room, dict(zip(sizes, room[:-1].split([*sizes.values()]), strict=True))

    def _arriving_sizes(self, number: int, batch: int) -> dict[int, int]:
        """Returns {sender: number of rows that arrive from it} for a round."""
        senders = self.plan.senders(self.rank, number)
        return {sender: self.plan.message_rows(self.rank, sender, batch) for sender in senders}

    def travelling_places(self, host: int, device: torch.device) -> Tensor:
        """Returns where in this rank's shard the query rows are that go to rank `host`."""
        rows = positions(self.plan.rows_of(self.rank, host))
        return local_index(self.plan.ranges[self.rank], rows).to(device)

    def guest_places(self, owner: int, device: torch.device) -> Tensor:
        """Returns where rows of rank `owner` are among all query rows that came to this rank."""
        rows = positions(self.plan.rows_of(owner, self.rank))
        return local_index(self.plan.guests_of(self.rank), rows).to(device)

    def _problem(self, step: Step, query: Tensor, key: Tensor, value: Tensor) -> Problem:
        """Builds the `Problem` for a step's kernels.

        The sink is left out, `forward` adds it once.
        """
        assert step.work is not None
        options = dict(self.options.changed(sink=None).in_use)  # `forward` adds the sink last
        rows = query[:, :, step.queries]
        exact = self.dtype == torch.float32
        return step.work.problem(rows, key, value, self.scale, in_float32=exact, **options)

    def _attend(self, step: Step, query: Tensor, *keys: Tensor) -> tuple[Tensor, Tensor]:
        """Computes (out, lse) of a step's queries over the given keys and values."""
        return BACKENDS[self.backend].forward(self._problem(step, query, *keys))

    def _differentiate(
        self, step: Step, x: Saved, pairs: Sequence[Pair], dtable: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes (dq, dk, dv) of a step's pairs; adds the distance bias's gradient to `dtable`.

        `pairs` are the step's keys and values. If `x` moves, a second pair has their tangents, and
        the results are tangents of gradients.
        """
        problem = self._problem(step, x.query, *pairs[0])
        if x.moves is None:
            results = (t[:, :, step.queries] for t in (x.out, x.lse, x.grad_out, x.grad_lse))
            grads = BACKENDS[self.backend].backward(problem, *results)
        else:
            rows = self._gradient_rows(x.mapped(lambda t: t[:, :, step.queries]))
            tangents = self._tangents(step, x.moves.query, *pairs[1])
            run = second_order(self.backend).tangent_of_gradient_sums
            grads = run(problem, rows, tangents)
        if dtable is not None and grads.distance_bias is not None:
            dtable += grads.distance_bias
        return grads.query, grads.key, grads.value

    def _buffers(self, step: Step, raw: Tensor, pairs: Sequence[Pair]) -> list[Pair]:
        """Decodes arrived rows to (key, value), and tangents if any, in the order of the step."""
        parts = raw.tensor_split(len(pairs), 1)
        return [self._buffer(step, part, *pairs[0]) for part in parts]

    def _buffer(self, step: Step, raw: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Decodes arrived rows and arranges them as the step's keys and values [B, Hkv, n, D]."""
        assert step.work is not None
        rows = self.wire.decode(raw, key.shape[3], value.shape[3])
        if step.rows is None:
            rows = rows[: step.arrived]
            rows = rows.view(*key.shape[:2], step.work.layout.frame.kv_len, rows.shape[1])
        else:
            rows = rows.index_select(0, step.rows.flatten()).view(*step.rows.shape, rows.shape[1])
        return rows[..., : key.shape[3]], rows[..., key.shape[3] :]

    def _message(self, receiver: int, batch: int) -> Iterator[tuple[Any, Any, Tensor]]:
        """Yields what a message to `receiver` has: (batch entry, kv head, indices in the shard)."""
        plan = self.plan
        for b, h in product(range(batch), range(plan.frame.num_kv_heads)):
            index = local_index(plan.ranges[self.rank], plan.tokens_of(receiver, self.rank, b, h))
            if plan.alike:  # all batch entries and heads need equal tokens, so one part is enough
                yield slice(None), slice(None), index
                return
            yield b, h, index
