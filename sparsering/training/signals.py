"""Ends training between two steps after SIGINT or SIGTERM, on all ranks at the same step."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from .ranks import Ranks

_ONE_SIGNAL_S = 0.25  # signals within so many seconds count as one


@contextmanager
def stop_signal(ranks: Ranks) -> Iterator[Callable[[], int | None]]:
    """Yields a function that says which stop signal any rank has received, or None.

    All ranks call the function together. A second signal has its usual effect at once, unless it
    comes within a quarter of a second, because a terminal and a parent process may both pass on one
    Ctrl-C. Python sets handlers only in the main thread, so in other threads signals keep their
    usual effect.
    """
    numbers: list[int] = []
    times: list[float] = []
    in_main_thread = threading.current_thread() is threading.main_thread()
    stopping = (signal.SIGINT, signal.SIGTERM) if in_main_thread else ()
    handlers = {number: signal.getsignal(number) for number in stopping}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        if not numbers:
            numbers.append(number)
            times.append(time.monotonic())
        elif time.monotonic() - times[0] > _ONE_SIGNAL_S:
            restore()
            signal.raise_signal(number)

    for number in handlers:
        signal.signal(number, note)
    try:
        yield lambda: ranks.any_signal(numbers[0] if numbers else None)
    finally:
        restore()
