"""Shows the progress of training: a line every few seconds."""

import time
from collections.abc import Callable

Validations = Callable[[], list[tuple[int, float]]]  # (step, loss) of each
Show = Callable[[int, float, float, Validations], None]
LINE_EVERY_S = 5.0


def progress_lines(steps: int) -> Show:
    """Returns `show(step, loss, tokens_per_s, validations)`, which the caller calls each step."""
    first: tuple[int, float] | None = None
    last = -LINE_EVERY_S

    def show(step: int, loss: float, speed: float, validations: Validations) -> None:
        nonlocal first, last
        now = time.monotonic()
        first = first or (step, now)
        if step < steps and now - last < LINE_EVERY_S:
            return
        last, num_steps = now, step - first[0]
        seconds = round((steps - step) * (now - first[1]) / max(num_steps, 1))
        left = f"{seconds // 60}:{seconds % 60:02d}" if num_steps else "?"
        at, validated = validations()[-1]
        line = f"step {step:>5}/{steps}  loss {loss:.3f} (validation {validated:.3f} at step {at})"
        print(f"{line}  {speed:,.0f} tokens/s  {left} left", flush=True)

    return show
