"""Progress of the training steps: a live bar on a terminal (with rich), plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Show = Callable[[int, float, float], None]


@contextmanager
def live_progress(steps: int, done: int) -> Iterator[Show]:
    """Yields `show(step, loss, tokens_per_s)`, to be called after each step.

    Args:
        steps: steps of the whole run.
        done: steps done before the run was resumed.
    """
    if sys.stdout.isatty():
        try:
            import rich.progress as rich
        except ImportError:
            pass
        else:
            with _rich_progress(rich, steps, done) as show:
                yield show
            return
    yield _plain_lines(steps)


@contextmanager
def _rich_progress(rich, steps: int, done: int) -> Iterator[Show]:  # type: ignore[no-untyped-def]
    columns = (
        rich.TextColumn("step"),
        rich.MofNCompleteColumn(),
        rich.BarColumn(bar_width=24),
        rich.TextColumn("loss {task.fields[loss]:.3f}"),
        rich.TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        rich.TextColumn("{task.fields[left]} left"),
    )
    with rich.Progress(*columns) as progress:
        task = progress.add_task(
            "train", total=steps, completed=done, loss=float("nan"), speed=0.0, left="?"
        )
        left = _TimeLeft(steps)

        def show(step: int, loss: float, speed: float) -> None:
            progress.update(task, completed=step, loss=loss, speed=speed, left=left(step))

        yield show


def _plain_lines(steps: int, every_s: float = 5.0) -> Show:
    left = _TimeLeft(steps)
    shown_at = -every_s

    def show(step: int, loss: float, speed: float) -> None:
        nonlocal shown_at
        remaining = left(step)
        now = time.monotonic()
        if step == steps or now - shown_at >= every_s:
            shown_at = now
            print(
                f"step {step:>5}/{steps}  loss {loss:.3f}  {speed:,.0f} tokens/s  {remaining} left",
                flush=True,
            )

    return show


class _TimeLeft:
    """Estimates the time left: remaining steps x mean time per step, with validation and saves."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.first: tuple[int, float] | None = None

    def __call__(self, step: int) -> str:
        now = time.monotonic()
        if self.first is None:
            self.first = (step, now)
            return "?"
        first_step, began = self.first
        seconds = round((self.steps - step) * (now - began) / max(step - first_step, 1))
        return f"{seconds // 60}:{seconds % 60:02d}"
