"""Sends messages between ranks; raises `RingError` if a peer died or does not answer in time.

If two ranks expect different sizes of a message, gloo aborts a process or corrupts memory. So
ranks first compare the arguments of their calls, and only then send tensors.
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
from torch.profiler import record_function

from ..ground.keywords import class_with_hints
from ..ground.streams import capturing

_RECORD = 32  # integers in the first message of an agreement


class RingError(RuntimeError):
    """A ring call failed: `rank` raised this at `step`, because of `peer` (None if unknown).

    The group is then unusable: make one with `torch.distributed.new_group`, or new processes.
    """

    def __init__(self, message: str, rank: int, peer: int | None, step: str) -> None:
        whom = "" if peer is None else f", peer {peer}"
        super().__init__(f"rank {rank}{whom}, step {step!r}: {message}")
        self.message, self.rank, self.peer, self.step = message, rank, peer, step

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.rank, self.peer, self.step)


class RingMismatchError(RingError, ValueError):
    """Arguments differ between ranks; raised on all ranks, before keys or values are sent."""


@class_with_hints
class Traffic(NamedTuple):
    """Counts of the tensors that this rank sent and received in a call, without control messages.

    Attributes:
        sent_bytes, received_bytes, messages: totals of this rank.
        compression: the format in which keys and values are sent; None if they keep their dtype.
        error: relative root mean square error in that format, of this rank's keys or values,
            whichever is larger; in a backward pass, 0 unless `compression` was "auto".
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0
    compression: str | None = None
    error: float = 0.0

    def plus(self, other: "Traffic") -> "Traffic":
        """Adds the counts of other messages of the same call."""
        return self._replace(
            sent_bytes=self.sent_bytes + other.sent_bytes,
            received_bytes=self.received_bytes + other.received_bytes,
            messages=self.messages + other.messages,
        )


traffic_of_last = {False: Traffic(), True: Traffic()}
"""By pass (is it a backward one): the traffic of this process's last call."""


class Exchange:
    """Sends and receives the messages of one call between ranks, and counts their bytes.

    Args:
        timeout: seconds that a rank waits for a peer; None means the timeout of the group.
        device: device of the tensors to send. It must be given if the group has no CPU backend.

    Raises: RuntimeError while a CUDA graph is captured: the host must read other ranks' arguments.
    """

    def __init__(
        self, group: dist.ProcessGroup, timeout: float | None, device: torch.device | None = None
    ) -> None:
        self.group, self.timeout, self.device = group, timeout, device
        if device is not None and capturing(device):
            raise RuntimeError(
                "a CUDA graph cannot capture a call over several ranks: the host compares their "
                "arguments at each call; capture only the work before and after the call"
            )
        if reason := _broken.get(group):
            text = f"an earlier call on this process group failed ({reason}); make a new group"
            raise RingError(text, dist.get_rank(group), None, "agreement")
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.traffic = Traffic()

    @contextmanager
    def break_on_error(self) -> Iterator[None]:
        """Marks the group as unusable if the `with` block raises: messages may be unfinished."""
        try:
            yield
        except RingMismatchError:  # raised on all ranks, after their last message
            raise
        except BaseException as error:
            _broken[self.group] = f"{type(error).__name__}: {_first_line(error)}"
            raise

    def agree(self, record: Sequence[int]) -> list[list[int]]:
        """Sends integers to all ranks; returns the integers of all ranks, [rank][item].

        The first message has the same size in every call of the library, because gloo aborts a
        process that expects another size; so ranks in different calls can notice it. A peer's
        record is cut, or filled with zeros, to the length of this rank's own.
        """
        first = [len(record), *record[: _RECORD - 1]]
        rows = self._records(first + [0] * (_RECORD - len(first)))
        counts, found = [row[0] for row in rows], [row[1:] for row in rows]
        if len(record) >= _RECORD and len(set(counts)) == 1:
            rest = self._records(record[_RECORD - 1 :])
            found = [one + two for one, two in zip(found, rest, strict=True)]
        return [row[: len(record)] + [0] * (len(record) - len(row)) for row in found]

    @property
    def device_of_numbers(self) -> torch.device | str:
        """Device for messages of plain integers: the CPU if the process group supports it."""
        kinds = {kind.type for kind in self.group._device_types}
        if "cpu" in kinds or not kinds:
            return "cpu"
        if self.device is not None and self.device.type in kinds:
            return self.device  # has an index; "cuda" without one could be another rank's GPU
        return min(kinds)

    def _records(self, record: Sequence[int]) -> list[list[int]]:
        """Sends equally many integers to all ranks; returns those of each rank, [rank][item]."""
        own = torch.tensor(list(record), dtype=torch.int64, device=self.device_of_numbers)
        others = {p: torch.empty_like(own) for p in range(self.world_size) if p != self.rank}
        self.start("agreement", dict.fromkeys(others, own), others).wait()
        records = {**others, self.rank: own}
        return torch.stack([records[p] for p in range(self.world_size)]).tolist()

    def start(
        self, step: str, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> "Pending":
        """Starts to send and receive contiguous tensors {peer: tensor}; skips empty tensors."""
        sends, receives = ({p: x for p, x in m.items() if x.numel()} for m in (sends, receives))
        sent, received = (sum(x.nbytes for x in m.values()) for m in (sends, receives))
        before = self.traffic
        totals = before.sent_bytes + sent, before.received_bytes + received
        self.traffic = Traffic(*totals, before.messages + len(sends), *before[3:])
        pending = Pending(self, step, [*receives.values(), *sends.values()])
        operations: list[tuple[Any, int, Tensor]]
        operations = [(dist.irecv, peer, x) for peer, x in receives.items()]
        operations += [(dist.isend, peer, x) for peer, x in sends.items()]
        # NCCL could deadlock on separate messages, but not on a batch of all of them
        if operations and operations[0][2].device.type != "cpu":
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
    """Messages that are under way; it keeps their tensors alive until `wait` returns."""

    def __init__(self, exchange: Exchange, step: str, tensors: list[Tensor]) -> None:
        self.exchange, self.step, self.tensors = exchange, step, tensors
        self.works: list[tuple[int | None, dist.Work]] = []
        self.failure: RingError | None = None

    def wait(self) -> None:
        """Waits until all messages are sent and received; raises RingError if one failed.

        After a failure it still waits for the other peers. Otherwise they would report this rank as
        failed, instead of the peer that failed first.
        """
        deadline = None
        if self.exchange.timeout is not None:
            deadline = time.monotonic() + self.exchange.timeout
        for peer, work in self.works:
            with self.failing(peer), record_function("sparsering::messages"):
                if deadline is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        self.works, self.tensors = [], []
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def failing(self, peer: int | None) -> Iterator[None]:
        """Records an error of the `with` block, so that `wait` raises it after all messages."""
        try:
            yield
        except RuntimeError as error:
            if self.failure is None:
                text = (
                    f"the peer does not answer ({_first_line(error)}); it died, hangs or raised an "
                    "error; start it again and make a new process group"
                )
                self.failure = RingError(text, self.exchange.rank, peer, self.step)
                self.failure.__cause__ = error


_broken: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
"""Process groups that a failed call made unusable, with the error of that call."""


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
