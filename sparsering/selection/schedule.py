"""Schedules: numbers that change with the training step, or once a metric is good enough."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ..checks import check_group
from ..ground.arguments import as_float, checked_integer, is_finite, shortened
from ..ground.keywords import class_with_hints

KINDS = ("linear", "cosine", "step")


@class_with_hints
@dataclass(frozen=True)
class Schedule:
    """A number as a function of the step alone, so that ranks and resumed runs agree.

    Between two points, "linear" interpolates, "cosine" follows half a cosine that is flat at both
    points, and "step" keeps the earlier value. The value is constant before the first point and
    after the last. If two points have the same step, the value jumps to the later one there.

    Args:
        points: ((step, value), ...) in order of steps.
        kind: "linear", "cosine" or "step".

    Raises: ValueError for no points, unsorted steps, numbers that are not finite, unknown kinds.

    Example:
        >>> density = Schedule(((0, 1.0), (1000, 1.0), (2000, 0.1)))  # dense, a ramp, sparse
        >>> k = max(1, round(density(step) * num_blocks))
    """

    points: tuple[tuple[float, float], ...]
    kind: str = "linear"

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            got = shortened(repr(self.kind))
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {got}")
        points = self.points
        if not isinstance(points, Sequence) or not points:
            raise ValueError(
                "points must be a sequence of at least one (step, value), got "
                f"{shortened(repr(points))}; one point gives a constant"
            )
        for point in points:
            if not isinstance(point, Sequence) or len(point) != 2 or not all(map(is_finite, point)):
                raise ValueError(
                    "each point must be a (step, value) of finite numbers, got "
                    f"{shortened(repr(point))}; a single point is written ((step, value),)"
                )
        for before, after in pairwise(points):
            if after[0] < before[0]:
                raise ValueError(
                    f"points must be in order of steps, got step {after[0]} after {before[0]}; "
                    "sort them"
                )
        object.__setattr__(self, "points", tuple((x, y) for x, y in points))

    def __call__(self, step: float) -> float:
        """Returns the schedule's value at a step; ValueError if `step` is NaN or not a number."""
        argument, step = step, as_float(step)
        if math.isnan(step):
            got = shortened(repr(argument))
            raise ValueError(f"step must be a number, got {got}; count steps from 0")
        if (num_passed := sum(x <= step for x, _ in self.points)) in (0, len(self.points)):
            return float(self.points[num_passed - 1 if num_passed else 0][1])
        (start, before), (end, after) = self.points[num_passed - 1 : num_passed + 1]
        fraction = (step - start) / (end - start)
        if self.kind == "step":
            fraction = 0.0
        elif self.kind == "cosine":
            fraction = (1 - math.cos(math.pi * fraction)) / 2
        return before + fraction * (after - before)


@class_with_hints
class GatedSchedule:
    """A schedule that advances only in steps whose metric is at least a given bar.

    A plain `Schedule` makes attention sparse even if the model has not yet learned where to attend,
    and then it may never learn. This schedule waits for the model.

    Args:
        schedule: maps the clock, which counts from 0, to the value.
        bar: the clock moves if the metric is at least this number.

    Attributes:
        clock: number of steps in which the metric was at least `bar`.

    Raises: ValueError for a bar that is not finite; TypeError if `schedule` is no `Schedule`.

    Example:
        >>> blocks = GatedSchedule(Schedule(((0, 128), (1000, 4))), bar=0.95)
        >>> k = round(blocks.step(accuracy))  # for a loss: bar=-0.1 and step(-loss)
    """

    def __init__(self, schedule: Schedule, bar: float) -> None:
        if type(schedule) is not Schedule:
            got = shortened(repr(schedule))
            raise TypeError(f"schedule must be a Schedule, got {got}; pass Schedule(points)")
        if not is_finite(bar):
            raise ValueError(
                f"bar must be a finite number, got {shortened(repr(bar))}; the schedule "
                "advances in steps whose metric is at least the bar"
            )
        self.schedule, self.bar, self.clock = schedule, bar, 0

    def step(self, metric: float, group: dist.ProcessGroup | None = None) -> float:
        """Moves the clock by one if metric >= bar, and returns the schedule's value.

        Args:
            metric: larger is better; NaN never moves the clock.
            group: ranks that all call this method; the mean of metrics keeps their clocks equal.
        """
        try:
            metric = float(metric)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            got = shortened(repr(metric))
            raise ValueError(f"metric must be a number, got {got}; pass metric.mean()") from None
        check_group(group)
        if group is not None:
            device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
            total = torch.tensor(metric, dtype=torch.float64, device=device)
            from ..distributed.agreement import agree_to_begin  # imported only if there are ranks

            agree_to_begin(group, "GatedSchedule.step", total)
            dist.all_reduce(total, group=group)
            metric = total.item() / dist.get_world_size(group)
        self.clock += metric >= self.bar
        return self.schedule(self.clock)

    def state_dict(self) -> dict[str, int]:
        """Returns the clock, from which a run can resume."""
        return {"clock": self.clock}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state that `state_dict` returned; ValueError if `state` is not such a dict."""
        if not isinstance(state, Mapping) or set(state) != {"clock"}:
            raise ValueError(
                "expected the state_dict of a GatedSchedule, with 'clock', got "
                f"{shortened(repr(state))}; GatedSchedule.state_dict() returns it"
            )
        self.clock = checked_integer("clock", state["clock"], 0)
