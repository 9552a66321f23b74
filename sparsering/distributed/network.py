"""Messages with a rank's rows over a process group: posted early, waited for when needed."""

from collections.abc import Callable, Iterator

from torch import Tensor

from .exchange import Exchange, Pending
from .rank import Rank
from .sharding import num_tokens


class Network:
    """Messages of one rank's call. All ranks post the same kinds of messages in the same order."""

    def __init__(
        self, rank: Rank, exchange: Exchange, key: Tensor, value: Tensor, travelling: Tensor
    ) -> None:
        """Posts the query rows that go to hosts, out of `travelling` [B, Hq, tokens, columns]."""
        self.rank, self.plan, self.exchange = rank, rank.plan, exchange
        self.key, self.value = key, value
        hosts, owners = self.plan.hosts_of(rank.rank), self.plan.owners_at(rank.rank)
        places = {host: rank.travelling_places(host, key.device) for host in hosts}
        self.travelled = {host: (*travelling.shape[:2], len(at)) for host, at in places.items()}
        self.seats = {owner: rank.guest_places(owner, key.device) for owner in owners}
        self.arriving = {
            owner: travelling.new_empty(*travelling.shape[:2], len(at), travelling.shape[3])
            for owner, at in self.seats.items()
        }
        copies: dict[tuple[tuple[int, int], ...], Tensor] = {}  # most hosts get the same rows
        sends = {}
        for host, at in places.items():
            rows = tuple(self.plan.rows_of(rank.rank, host))
            if rows not in copies:
                copies[rows] = travelling[:, :, at].contiguous()
            sends[host] = copies[rows]
        self.pending_guests = exchange.start("query rows to their hosts", sends, self.arriving)
        self.returning: list[tuple[Pending, dict[int, Tensor]]] = []

    def rounds(self) -> Iterator[Tensor]:
        """Iterates over the rounds' arrived rows: encoded as sent, then one row of zeros.

        The next round is already under way while the caller uses one.
        """
        numbers = range(len(self.plan.rounds))
        first = [self._post_round(number) for number in numbers[:1]]

        def iterate() -> Iterator[Tensor]:
            ahead = first
            for number in numbers:
                room, pending = ahead.pop()
                if number + 1 < len(numbers):
                    ahead.append(self._post_round(number + 1))
                pending.wait()
                yield room

        return iterate()

    def guests(self) -> Tensor | None:
        """Waits for query rows of other ranks, [B, Hq, rows, columns]; None if there are none."""
        self.pending_guests.wait()
        if not self.arriving:
            return None
        like = next(iter(self.arriving.values()))
        rows = num_tokens(self.plan.guests_of(self.rank.rank))
        guests = like.new_empty(*like.shape[:2], rows, like.shape[3])
        for owner, at in self.seats.items():
            guests[:, :, at] = self.arriving[owner]
        return guests

    def answers(self, answered: Tensor | None, columns: int) -> Iterator[tuple[int, Tensor]]:
        """Sends results to the guests' owners; yields the results for this rank's own rows.

        Yields: (host, [B, Hq, rows, columns]).
        """
        rounds, ahead = self.plan.answer_rounds, []
        for number in range(len(rounds) + 1):
            if number < len(rounds):
                ahead.append(self._post_answers(rounds[number], answered, columns))
            if number:
                pending, arriving = ahead.pop(0)
                pending.wait()
                yield from arriving.items()

    def _post_answers(
        self, offsets: tuple[int, ...], answered: Tensor | None, columns: int
    ) -> tuple[Pending, dict[int, Tensor]]:
        rank, world = self.rank.rank, self.plan.world_size
        owners = [(rank - offset) % world for offset in offsets]
        hosts = [(rank + offset) % world for offset in offsets]
        sends = {
            owner: answered[:, :, self.seats[owner]].contiguous()
            for owner in owners
            if answered is not None and owner in self.seats
        }
        arriving = {
            host: self.key.new_empty(*self.travelled[host], columns, dtype=self.rank.dtype)
            for host in hosts
            if host in self.travelled
        }
        return self.exchange.start("answers to their owners", sends, arriving), arriving

    def return_gradients(
        self, number: int, parts: dict[int, Tensor], add: Callable[[int, Tensor], None]
    ) -> None:
        """Sends a round's key gradients to their owners; calls `add` on those of earlier rounds."""
        rank, width = self.rank.rank, self.key.shape[3] + self.value.shape[3]
        arriving = {}
        for receiver in self.plan.receivers(rank, number):
            rows = self.plan.message_rows(receiver, rank, len(self.key))
            arriving[receiver] = self.key.new_empty(rows, width, dtype=self.rank.dtype)
        pending = self.exchange.start(f"gradients of round {number + 1}", parts, arriving)
        self.returning.append((pending, arriving))
        if len(self.returning) > 1:
            self._add_returned(add)

    def finish_gradients(self, add: Callable[[int, Tensor], None]) -> None:
        """Waits for the last gradients and calls `add` on them."""
        while self.returning:
            self._add_returned(add)

    def _add_returned(self, add: Callable[[int, Tensor], None]) -> None:
        pending, arriving = self.returning.pop(0)
        pending.wait()
        for receiver, rows in arriving.items():
            add(receiver, rows)

    def _post_round(self, number: int) -> tuple[Tensor, Pending]:
        room, parts = self.rank.room(number, self.key, self.value)
        receivers = self.plan.receivers(self.rank.rank, number)
        sends = {peer: self.rank.pack(peer, self.key, self.value) for peer in receivers}
        step = f"keys of round {number + 1} of {len(self.plan.rounds)}"
        return room, self.exchange.start(step, sends, parts)
