"""Shows the progress of long work on stderr: a bar in a terminal, plain lines elsewhere.

with progress("tune", len(candidates), "candidate") as work:
    for candidate in candidates:
        ...
        work.advance(note=f"best {best:.1f} ms")

Commands show bars and lines; `--quiet` shows neither. Functions that a user's program calls show a
bar in a terminal and nothing elsewhere, because the program's output is its own. Bars come from
`tqdm`, which the extra `cli` installs; without it, lines take their place.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

Shown = Literal["nothing", "bars", "bars and lines"]

LINE_EVERY_S = 5.0
_BAR = "{desc} {n_fmt}/{total_fmt} |{bar}| {rate_fmt}, {remaining} left{postfix}"

_shown: Shown = "bars"
_busy = False  # True inside of shown work, so that work within it shows nothing


@contextmanager
def showing(shown: Shown) -> Iterator[None]:
    """Sets for all work in the block how it is shown: as nothing, bars, or bars and lines."""
    global _shown
    before, _shown = _shown, shown
    try:
        yield
    finally:
        _shown = before


@contextmanager
def progress(
    title: str, total: int, unit: str, *, done: int = 0, after_s: float = 1.0
) -> Iterator["Progress"]:
    """Yields a `Progress`, on which a loop over `total` units of work reports what is done.

    Nothing is shown before `after_s` seconds, by a process that is not the first of a group
    (`RANK`), or inside of other work that is shown.

    Args:
        title: what is done, in a word or two.
        total: number of units; `Progress.advance` counts them.
        unit: name of one unit, such as "step".
        done: units that an earlier process did; they do not count for the rate.
        after_s: seconds without a sign. 0 shows the first unit too.
    """
    global _busy
    terminal = sys.stderr is not None and sys.stderr.isatty()
    hidden = _busy or _shown == "nothing" or os.environ.get("RANK", "0") != "0"
    if hidden or (_shown == "bars" and not terminal):
        yield Progress(total, done)
        return
    bar = _bar(title, total, unit, done, after_s) if terminal else None
    work = Progress(total, done) if bar is not None else _Lines(title, total, unit, done, after_s)
    work.bar = bar
    _busy = True
    try:
        yield work
    finally:
        _busy = False
        if bar is not None:
            bar.close()


@contextmanager
def unshown(total: int, done: int = 0) -> Iterator["Progress"]:
    """Yields a `Progress` that shows nothing, because another process shows the same work."""
    yield Progress(total, done)


class Progress:
    """Counts how many of `total` units of some work are done; `progress` yields one."""

    bar: Any = None  # of tqdm

    def __init__(self, total: int, done: int):
        self.total, self.done = total, done

    def advance(self, units: int = 1, note: str = "") -> None:
        """Counts units as done; `note` is shown beside the bar or at the end of the line."""
        self.done += units
        if self.bar is not None:
            self.bar.set_postfix_str(note, refresh=False)
            self.bar.update(units)

    def expect(self, total: int) -> None:
        """Changes the number of units, for work that finds out on the way how many there are."""
        self.total = total
        if self.bar is not None:
            self.bar.total = total

    def say(self, line: str) -> None:
        """Prints a line to stdout, above the bar."""
        if self.bar is None:
            print(line, flush=True)
        else:
            self.bar.write(line)


class _Lines(Progress):
    """Progress as lines on stderr, one every 5 seconds, for an output that is no terminal."""

    def __init__(self, title: str, total: int, unit: str, done: int, after_s: float):
        super().__init__(total, done)
        self.title, self.unit, self.after_s = title, unit, after_s
        self.before, self.began = done, time.monotonic()
        self.printed_at: float | None = None

    def advance(self, units: int = 1, note: str = "") -> None:
        super().advance(units, note)
        now = time.monotonic()
        if self.printed_at is None:
            due = now - self.began >= self.after_s
        else:
            due = self.done >= self.total or now - self.printed_at >= LINE_EVERY_S
        if not due:
            return
        self.printed_at = now
        rate = (self.done - self.before) / max(now - self.began, 1e-9)
        left = max(0, self.total - self.done) / max(rate, 1e-9)
        parts = [f"{self.title} {self.done:,}/{self.total:,}", note, _pace(rate, self.unit)]
        parts.append(f"{_clock(left)} left")
        print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)


def _bar(title: str, total: int, unit: str, done: int, after_s: float) -> Any:
    """Returns a tqdm bar that first appears after `after_s` seconds.

    None if tqdm is not installed.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(
        desc=title,
        total=total,
        unit=f" {unit}s",
        initial=done,
        delay=after_s,
        bar_format=_BAR,
        dynamic_ncols=True,
        leave=False,
    )


def _pace(rate: float, unit: str) -> str:
    """Writes units per second as text, or seconds per unit if a unit takes more than a second."""
    return f"{rate:,.1f} {unit}s/s" if rate >= 1 else f"{1 / max(rate, 1e-9):,.1f} s/{unit}"


def _clock(seconds: float) -> str:
    """Writes seconds as minutes:seconds, or hours:minutes:seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
