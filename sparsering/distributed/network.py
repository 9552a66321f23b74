"""How a rank's rows travel over a process group: posted ahead of need, waited for at need."""

from collections.abc import Callable, Iterator

from torch import Tensor

from .exchange import Exchange, Pending
from .rank import Rank, guest_places, message_rows, own_places, pack
from .sharding import num_tokens
from .steps import guest_rows, receivers, senders


class Network:
    """The messages of one rank's call. Every rank posts the same kinds in the same order."""

    def __init__(
        self, own: Rank, exchange: Exchange, key: Tensor, value: Tensor, travelling: Tensor
    ) -> None:
        """Posts the query rows that travel: rows of `travelling`, [B, Hq, tokens, columns]."""
        self.own, self.exchange, self.key, self.value = own, exchange, key, value
        self.hosts = sorted(
            {h for t in own.plan.travellers if t.owner == own.rank for h in t.hosts}
        )
        self.owners = sorted({t.owner for t in own.plan.travellers if own.rank in t.hosts})
        places = {p: own_places(own.plan, own.rank, p, key.device) for p in self.hosts}
        self.own_rows = {host: (*travelling.shape[:2], len(at)) for host, at in places.items()}
        self.seats = {o: guest_places(own.plan, o, own.rank, key.device) for o in self.owners}
        self.arriving = {
            owner: travelling.new_empty(*travelling.shape[:2], len(at), travelling.shape[3])
            for owner, at in self.seats.items()
        }
        rows: dict[tuple[int, ...], Tensor] = {}  # most hosts get the same ones
        sends = {}
        for host, at in places.items():
            which = tuple(t.rows[0][0] for t in own.plan.travellers
                          if t.owner == own.rank and host in t.hosts)  # fmt: skip
            if which not in rows:
                rows[which] = travelling[:, :, at].contiguous()
            sends[host] = rows[which]
        self.pending_guests = exchange.start("query rows to their hosts", sends, self.arriving)
        self.returning: list[tuple[Pending, dict[int, Tensor]]] = []

    def rounds(self) -> Iterator[Tensor]:
        """The rows that arrive, round by round, as sent and with a row of zeros; the next round is
        under way while one is in use.
        """
        numbers = range(len(self.own.plan.rounds))
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
        """The query rows that came to this rank, [B, Hq, rows, columns]; None where none did."""
        self.pending_guests.wait()
        if not self.owners:
            return None
        like = self.arriving[self.owners[0]]
        rows = num_tokens(guest_rows(self.own.plan, self.own.rank))
        guests = like.new_empty(*like.shape[:2], rows, like.shape[3])
        for owner, at in self.seats.items():
            guests[:, :, at] = self.arriving[owner]
        return guests

    def answers(self, own: Tensor | None, columns: int) -> Iterator[tuple[int, Tensor]]:
        """Sends back what was computed for guests (`own`); gives what came for this rank's rows,
        [B, Hq, rows, columns], and from which host.
        """
        plan, ahead = self.own.plan, []
        for number in range(len(plan.answer_rounds) + 1):
            if number < len(plan.answer_rounds):
                ahead.append(self._post_answers(plan.answer_rounds[number], own, columns))
            if number:
                pending, arriving = ahead.pop(0)
                pending.wait()
                yield from arriving.items()

    def _post_answers(
        self, offsets: tuple[int, ...], own: Tensor | None, columns: int
    ) -> tuple[Pending, dict[int, Tensor]]:
        rank, world = self.own.rank, self.own.plan.world_size
        owners = [(rank - offset) % world for offset in offsets]
        hosts = [(rank + offset) % world for offset in offsets]
        sends = {
            owner: own[:, :, self.seats[owner]].contiguous()
            for owner in owners
            if own is not None and owner in self.seats
        }
        arriving = {
            host: self.key.new_empty(*self.own_rows[host], columns, dtype=self.own.dtype)
            for host in hosts
            if host in self.own_rows
        }
        return self.exchange.start("answers to their owners", sends, arriving), arriving

    def return_gradients(
        self, number: int, parts: dict[int, Tensor], add: Callable[[int, Tensor], None]
    ) -> None:
        """Sends gradients of a round's keys back; has `add` add those of earlier rounds."""
        plan, rank = self.own.plan, self.own.rank
        width = self.key.shape[3] + self.value.shape[3]
        arriving = {
            peer: self.key.new_empty(
                message_rows(plan, peer, rank, len(self.key)), width, dtype=self.own.dtype
            )
            for peer in receivers(plan, rank, number)
        }
        pending = self.exchange.start(f"gradients of round {number + 1}", parts, arriving)
        self.returning.append((pending, arriving))
        if len(self.returning) > 1:
            self._add_returned(add)

    def finish_gradients(self, add: Callable[[int, Tensor], None]) -> None:
        """Has `add` add what is still under way."""
        while self.returning:
            self._add_returned(add)

    def _add_returned(self, add: Callable[[int, Tensor], None]) -> None:
        pending, arriving = self.returning.pop(0)
        pending.wait()
        for receiver, rows in arriving.items():
            add(receiver, rows)

    def _post_round(self, number: int) -> tuple[Tensor, Pending]:
        plan, rank = self.own.plan, self.own.rank
        room, parts = round_room(self.own, number, self.key, self.value)
        sends = {p: pack(self.own, p, self.key, self.value) for p in receivers(plan, rank, number)}
        step = f"keys of round {number + 1} of {len(plan.rounds)}"
        return room, self.exchange.start(step, sends, parts)


def round_room(
    own: Rank, number: int, key: Tensor, value: Tensor
) -> tuple[Tensor, dict[int, Tensor]]:
    """Room for the rows of a round and a row of zeros; and its parts, by sender."""
    peers = senders(own.plan, own.rank, number)
    sizes = [message_rows(own.plan, own.rank, peer, len(key)) for peer in peers]
    columns = own.wire.columns(key.shape[3], value.shape[3])
    room = key.new_empty(sum(sizes) + 1, columns, dtype=own.wire.element)
    room[-1:].zero_()
    return room, dict(zip(peers, room[:-1].split(sizes), strict=True))
