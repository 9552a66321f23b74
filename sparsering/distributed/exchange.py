"""Messages between the ranks of a process group: agreement first, then payload, each wait bounded.

A size that two ranks see differently aborts a process or corrupts memory (gloo), so nothing is
posted before all ranks agree on what will move. A peer that is dead or silent becomes a
`RingError`.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor


class RingError(RuntimeError):
    """A ring could not go on; says which rank saw it, with which peer (None: all) and at what step.

    The process group is unusable after it: make a new one with `torch.distributed.new_group`, or
    start the processes again.
    """

    def __init__(self, message: str, rank: int, peer: int | None, step: str) -> None:
        whom = "" if peer is None else f", peer {peer}"
        super().__init__(f"rank {rank}{whom}, step {step!r}: {message}")
        self.message, self.rank, self.peer, self.step = message, rank, peer, step

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.rank, self.peer, self.step)


class RingMismatchError(RingError, ValueError):
    """Ranks called with what does not fit together; raised on all of them, before any payload."""


class Traffic(NamedTuple):
    """Payload that a rank's last call moved. Control messages are not in it.

    Attributes:
        sent_bytes, received_bytes, messages: of this rank.
        compression: the wire format of keys and values, None for their own dtype.
        error: of this rank's keys and values in that format: the root mean square of the
            difference to that of the numbers, the larger of both. 0 for their own dtype, and in a
            backward pass with a named format, where it is not measured again.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0
    compression: str | None = None
    error: float = 0.0


class Exchange:
    """Messages of one call over a process group; counts what it moves.

    `timeout` is in seconds, None for the group's. All ranks start the same exchanges in one order.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None) -> None:
        self.group, self.timeout = group, timeout
        if reason := _broken.get(group):
            raise RingError(
                f"an earlier call on this process group failed ({reason}); make a new group",
                dist.get_rank(group),
                None,
                "agreement",
            )
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.traffic = Traffic()

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """What is raised in here leaves messages under way: no later call may meet them."""
        try:
            yield
        except RingMismatchError:  # all ranks agree that nothing follows
            raise
        except BaseException as error:
            _broken[self.group] = f"{type(error).__name__}: {_first_line(error)}"
            raise

    def agree(self, record: Sequence[int]) -> list[list[int]]:
        """The records of all ranks, of equal length; what every call begins with."""
        kinds = {kind.type for kind in self.group._device_types}
        device = "cpu" if "cpu" in kinds or not kinds else kinds.pop()
        mine = torch.tensor(record, dtype=torch.int64, device=device)
        others = {p: torch.empty_like(mine) for p in range(self.world_size) if p != self.rank}
        self._start("agreement", dict.fromkeys(others, mine), others).wait()
        records = {**others, self.rank: mine}
        return torch.stack([records[p] for p in range(self.world_size)]).tolist()

    def start(
        self, step: str, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> "Pending":
        """Posts messages to and from peers, of contiguous tensors; empty ones are left out."""
        sends, receives = ({p: x for p, x in m.items() if x.numel()} for m in (sends, receives))
        sent, received = (sum(x.nbytes for x in m.values()) for m in (sends, receives))
        before = self.traffic
        self.traffic = before._replace(
            sent_bytes=before.sent_bytes + sent,
            received_bytes=before.received_bytes + received,
            messages=before.messages + len(sends),
        )
        return self._start(step, sends, receives)

    def _start(
        self, step: str, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> "Pending":
        pending = Pending(self, step, [*receives.values(), *sends.values()])
        operations: list[tuple[Any, int, Tensor]]
        operations = [(dist.irecv, peer, x) for peer, x in receives.items()]
        operations += [(dist.isend, peer, x) for peer, x in sends.items()]
        if operations and operations[0][2].device.type != "cpu":  # one launch: no deadlock
            batch = [dist.P2POp(op, x, group=self.group, group_peer=p) for op, p, x in operations]
            with pending.failing(None):
                pending.works = [(None, work) for work in dist.batch_isend_irecv(batch)]
            return pending
        for operation, peer, x in operations:
            side = "group_src" if operation is dist.irecv else "group_dst"
            with pending.failing(peer):
                pending.works.append((peer, operation(x, group=self.group, **{side: peer})))
        return pending


class Pending:
    """Messages under way; holds their tensors."""

    def __init__(self, exchange: Exchange, step: str, tensors: list[Tensor]) -> None:
        self.exchange, self.step, self.tensors = exchange, step, tensors
        self.works: list[tuple[int | None, dist.Work]] = []
        self.failure: RingError | None = None

    def wait(self) -> None:
        """Returns when all has arrived and left; RingError where that fails or takes too long.

        What goes to other peers than the one that failed still goes, so that they see for
        themselves who did.
        """
        deadline = None
        if self.exchange.timeout is not None:
            deadline = time.monotonic() + self.exchange.timeout
        for peer, work in self.works:
            with self.failing(peer):
                if deadline is None:
                    work.wait()
                else:
                    left = max(deadline - time.monotonic(), 0.001)
                    work.wait(timedelta(seconds=left))
        self.works, self.tensors = [], []
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def failing(self, peer: int | None) -> Iterator[None]:
        """Notes the first failure, which `wait` raises."""
        try:
            yield
        except RuntimeError as error:
            if self.failure is None:
                self.failure = RingError(
                    f"the peer does not answer ({_first_line(error)}); it died, hangs or left the "
                    "call; start it again and make a new process group",
                    self.exchange.rank,
                    peer,
                    self.step,
                )
                self.failure.__cause__ = error


_broken: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
"""Groups that a call left with messages under way, and why."""


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
