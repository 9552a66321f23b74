"""Shows the progress of training: a live bar on a terminal (with rich), plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec

Show = Callable[[int, float, float], None]
Draw = Callable[[int, float, float, str], None]
LINE_EVERY_S = 5.0


@contextmanager
def live_progress(steps: int, done: int) -> Iterator[Show]:
    """Yields `show(step, loss, tokens_per_s)`, which the caller calls after each step."""
    on_terminal = sys.stdout.isatty() and find_spec("rich") is not None
    with _bar(steps, done) if on_terminal else nullcontext(_plain_lines(steps)) as draw:
        first: tuple[int, float] | None = None

        def show(step: int, loss: float, speed: float) -> None:
            nonlocal first
            now = time.monotonic()
            first = first or (step, now)
            num_steps = step - first[0]
            seconds = round((steps - step) * (now - first[1]) / max(num_steps, 1))
            left = f"{seconds // 60}:{seconds % 60:02d}" if num_steps else "?"
            draw(step, loss, speed, left)

        yield show


@contextmanager
def _bar(steps: int, done: int) -> Iterator[Draw]:
    import rich.progress as rich

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
        yield lambda step, loss, speed, left: progress.update(
            task, completed=step, loss=loss, speed=speed, left=left
        )


def _plain_lines(steps: int) -> Draw:
    last = -LINE_EVERY_S

    def draw(step: int, loss: float, speed: float, left: str) -> None:
        nonlocal last
        now = time.monotonic()
        if step == steps or now - last >= LINE_EVERY_S:
            last = now
            print(
                f"step {step:>5}/{steps}  loss {loss:.3f}  {speed:,.0f} tokens/s  {left} left",
                flush=True,
            )

    return draw
