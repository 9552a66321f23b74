"""Exchanges messages between ranks, after they agreed on the call; every wait has a timeout.

If two ranks expect different sizes of a message, gloo aborts a process or corrupts memory. So
nothing is posted before all ranks agree on the call. A dead or silent peer raises `RingError`.
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
    """A ring call failed; says which rank noticed, with which peer (None: unknown), at what step.

    The process group is unusable afterwards: make a new one with `torch.distributed.new_group`, or
    start the processes again.
    """

    def __init__(self, message: str, rank: int, peer: int | None, step: str) -> None:
        whom = "" if peer is None else f", peer {peer}"
        super().__init__(f"rank {rank}{whom}, step {step!r}: {message}")
        self.message, self.rank, self.peer, self.step = message, rank, peer, step

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.rank, self.peer, self.step)


class RingMismatchError(RingError, ValueError):
    """Ranks passed arguments that do not match; raised on all of them, before any payload."""


class Traffic(NamedTuple):
    """Payload that a rank's last call moved, without control messages.

    Attributes:
        sent_bytes, received_bytes, messages: of this rank.
        compression: the wire format of keys and values, None for their own dtype.
        error: relative root mean square error of this rank's keys or values in that format,
            whichever is larger. 0 for their own dtype, and in a backward pass with a named format,
            where it is not measured again.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0
    compression: str | None = None
    error: float = 0.0


class Exchange:
    """Sends and receives the messages of one call over a process group; counts their bytes.

    `timeout` is in seconds, None for the group's own. `device` is that of the payload: messages of
    a group without a CPU backend lie there too. All ranks start the same exchanges in order.
    """

    def __init__(
        self, group: dist.ProcessGroup, timeout: float | None, device: torch.device | None = None
    ) -> None:
        self.group, self.timeout, self.device = group, timeout, device
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
    def break_on_error(self) -> Iterator[None]:
        """Marks the group as broken if its body raises: messages may still be under way."""
        try:
            yield
        except RingMismatchError:  # raised on all ranks: no message is under way
            raise
        except BaseException as error:
            _broken[self.group] = f"{type(error).__name__}: {_first_line(error)}"
            raise

    def agree(self, record: Sequence[int]) -> list[list[int]]:
        """Gathers the records of all ranks, of equal length; every call begins with this."""
        kinds = {kind.type for kind in self.group._device_types}
        device: torch.device | str = "cpu" if "cpu" in kinds or not kinds else min(kinds)
        if device != "cpu" and self.device is not None and self.device.type in kinds:
            device = self.device  # the current device may be another rank's
        own = torch.tensor(record, dtype=torch.int64, device=device)
        others = {p: torch.empty_like(own) for p in range(self.world_size) if p != self.rank}
        self._start("agreement", dict.fromkeys(others, own), others).wait()
        records = {**others, self.rank: own}
        return torch.stack([records[p] for p in range(self.world_size)]).tolist()

    def start(
        self, step: str, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> "Pending":
        """Posts sends and receives of contiguous tensors, by peer; skips empty tensors."""
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
        if operations and operations[0][2].device.type != "cpu":  # one batch cannot deadlock
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
    """Messages under way; keeps their tensors alive until they are done."""

    def __init__(self, exchange: Exchange, step: str, tensors: list[Tensor]) -> None:
        self.exchange, self.step, self.tensors = exchange, step, tensors
        self.works: list[tuple[int | None, dist.Work]] = []
        self.failure: RingError | None = None

    def wait(self) -> None:
        """Waits until all messages are sent and received; RingError on failure or timeout.

        After a failure it still waits for the messages of the other peers, so that each of them
        reports the peer that really failed.
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
        """Records the first failure, which `wait` raises at its end."""
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
"""Process groups in which a failed call may have left messages under way, and its error."""


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
