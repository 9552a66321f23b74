"""Sends and receives rows over a process group; it starts messages early and waits late."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

from torch import Tensor

from .exchange import Exchange, Pending
from .rank import Rank
from .saved import Pair
from .sharding import num_tokens

_Arriving = TypeVar("_Arriving")


class Network:
    """Messages of one rank in a call: keys, travelling query rows, and results on their way back.

    The constructor starts to send some of this rank's query rows `travelling` [B, Hq, tokens,
    columns] to other ranks, their hosts. Rows that arrive from other ranks are called guests.
    `pairs` are this rank's keys and values, and in passes with tangents those of both.
    """

    def __init__(
        self, rank: Rank, exchange: Exchange, pairs: Sequence[Pair], travelling: Tensor
    ) -> None:
        self.rank, self.plan, self.exchange = rank, rank.plan, exchange
        self.pairs, (self.key, self.value) = pairs, pairs[0]
        key = self.key
        owners = sorted({t.owner for t in self.plan.travellers if rank.rank in t.hosts})
        hosts = self.plan.hosts_of(rank.rank)
        places = {host: rank.travelling_places(host, key.device) for host in hosts}
        outer, width = travelling.shape[:2], travelling.shape[3]
        self.travelling_shapes = {host: (*outer, len(at)) for host, at in places.items()}
        self.guest_places = {owner: rank.guest_places(owner, key.device) for owner in owners}
        shapes = {owner: (*outer, len(at), width) for owner, at in self.guest_places.items()}
        self.arriving = {owner: travelling.new_empty(shape) for owner, shape in shapes.items()}
        copies: dict[tuple[tuple[int, int], ...], Tensor] = {}  # shared by hosts with equal rows
        sends = {}
        for host, at in places.items():
            if (rows := tuple(self.plan.rows_of(rank.rank, host))) not in copies:
                copies[rows] = travelling[:, :, at].contiguous()
            sends[host] = copies[rows]
        self.pending_guests = exchange.start("query rows to their hosts", sends, self.arriving)

    def rounds(self) -> Iterator[Tensor]:
        """Yields, for each round, the keys and values that arrive, encoded; then a row of zeros."""
        posts = map(self._post_round, range(len(self.plan.rounds)))
        # `list` runs the iterator once, which starts the first round's messages now
        return _arrivals(chain(list(islice(posts, 1)), posts))

    def guests(self) -> Tensor | None:
        """Waits for the query rows that other ranks sent: [B, Hq, rows, columns].

        None without any.
        """
        self.pending_guests.wait()
        if not self.arriving:
            return None
        like = next(iter(self.arriving.values()))
        rows = num_tokens(self.plan.guests_of(self.rank.rank))
        guests = like.new_empty(*like.shape[:2], rows, like.shape[3])
        for owner, at in self.guest_places.items():
            guests[:, :, at] = self.arriving[owner]
        return guests

    def answers(self, results: Tensor | None, columns: int) -> Iterator[tuple[int, Tensor]]:
        """Sends results of other ranks' query rows back; receives the results of this rank's rows.

        Yields: (rank that computed them, results [B, Hq, rows, columns]) of own query rows.
        """
        rounds = self.plan.answer_rounds
        posts = (self._post_answers(offsets, results, columns) for offsets in rounds)
        return chain.from_iterable(map(dict.items, _arrivals(posts)))

    def _post_answers(
        self, offsets: tuple[int, ...], results: Tensor | None, columns: int
    ) -> tuple[dict[int, Tensor], Pending]:
        """Starts the messages of one round of answers.

        Returns (tensors that will arrive, messages).
        """
        rank, world, sends, arriving = self.rank.rank, self.plan.world_size, {}, {}
        for offset in offsets:
            owner, host = (rank - offset) % world, (rank + offset) % world
            if results is not None and owner in self.guest_places:
                sends[owner] = results[:, :, self.guest_places[owner]].contiguous()
            if host in self.travelling_shapes:
                shape = *self.travelling_shapes[host], columns
                arriving[host] = self.key.new_empty(shape, dtype=self.rank.dtype)
        return arriving, self.exchange.start("answers to their owners", sends, arriving)

    def return_gradients(self, parts: Iterable[dict[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
        """Sends each round's key gradients to the keys' owners.

        Yields (rank, what it sent here).
        """
        posts = (self._post_gradients(number, part) for number, part in enumerate(parts))
        return chain.from_iterable(map(dict.items, _arrivals(posts)))

    def _post_gradients(
        self, number: int, part: dict[int, Tensor]
    ) -> tuple[dict[int, Tensor], Pending]:
        """Starts to send a round's key gradients; returns (tensors that will arrive, messages)."""
        rank, width = self.rank.rank, self.key.shape[3] + self.value.shape[3]
        arriving = {}
        for receiver in self.plan.receivers(rank, number):
            rows = self.plan.message_rows(receiver, rank, len(self.key))
            arriving[receiver] = self.key.new_empty(rows, width, dtype=self.rank.dtype)
        return arriving, self.exchange.start(f"gradients of round {number + 1}", part, arriving)

    def _post_round(self, number: int) -> tuple[Tensor, Pending]:
        """Starts to send and receive a round's keys; returns (memory that they fill, messages)."""
        room, parts = self.rank.room(number, *self.pairs)
        receivers = self.plan.receivers(self.rank.rank, number)
        sends = {peer: self.rank.pack(peer, *self.pairs) for peer in receivers}
        step = f"keys of round {number + 1} of {len(self.plan.rounds)}"
        return room, self.exchange.start(step, sends, parts)


def _arrivals(posts: Iterable[tuple[_Arriving, Pending]]) -> Iterator[_Arriving]:
    """Yields what arrives, message by message; always starts the next message before it waits."""
    posts = iter(posts)
    under_way = next(posts, None)
    while under_way is not None:
        following = next(posts, None)
        arriving, pending = under_way
        pending.wait()
        under_way = following
        yield arriving
        del arriving  # frees the memory for the next message
