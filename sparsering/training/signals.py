"""Ends training between two steps after SIGINT or SIGTERM, on all ranks at the same step."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from .ranks import Ranks


@contextmanager
def stop_signal(ranks: Ranks) -> Iterator[Callable[[], int | None]]:
    """Yields a function that returns the number of a SIGINT or SIGTERM that any rank got, or None.

    All ranks call the function together. A second signal has its usual effect at once. Python sets
    handlers only in the main thread, so in other threads signals keep their usual effect.
    """
    numbers: list[int] = []
    in_main_thread = threading.current_thread() is threading.main_thread()
    stopping = (signal.SIGINT, signal.SIGTERM) if in_main_thread else ()
    handlers = {number: signal.getsignal(number) for number in stopping}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        numbers.append(number)
        restore()

    for number in handlers:
        signal.signal(number, note)
    try:
        yield lambda: ranks.any_signal(numbers[0] if numbers else None)
    finally:
        restore()
