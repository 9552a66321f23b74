"""A call as one problem, or as several: batch entries with different left padding are split."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import Call
from .problem import Gradients, Problem

Forward = Callable[[Problem], tuple[Tensor, Tensor]]
Backward = Callable[[Problem, Tensor, Tensor, Tensor, Tensor], Gradients]


class Part(NamedTuple):
    """A problem over some batch entries of a call; those with equal left padding go together.

    Keys at the front of these entries that a mask hides, such as left padding, are left out of it.
    """

    problem: Problem
    entries: Tensor | None = None  # int64 indices of the batch entries; None for all
    first: int = 0  # number of leading keys that are left out

    def of(self, x: Tensor) -> Tensor:
        """Selects the part's batch entries from a tensor [B, ...] of the whole call."""
        return x if self.entries is None else x[self.entries]

    def put(self, to: Tensor, part: Tensor) -> None:
        """Writes the part's results into a tensor of the call, [B, ...].

        Keys that were left out at the front keep what the tensor has there.
        """
        rows = range(len(to)) if self.entries is None else self.entries.tolist()
        for row, of_row in zip(rows, part, strict=True):
            to[row, :, to.shape[2] - of_row.shape[1] :] = of_row


def run_parts(
    forward: Forward, call: Call, parts: Callable[[], Sequence[Part]]
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a call by running a backend on each of the call's parts."""
    found = parts()
    if len(found) == 1:
        return forward(found[0].problem)
    query, value = call.query, call.value
    out = query.new_empty(*query.shape[:3], value.shape[3])
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    for part in found:
        for to, result in zip((out, lse), forward(part.problem), strict=True):
            part.put(to, result)
    return out, lse


def differentiate(
    backward: Backward, parts: Sequence[Part], results: Sequence[Tensor], *, learns_distances: bool
) -> Gradients:
    """Computes a call's gradients part by part; `results` are (out, lse) and their gradients."""
    grads: dict[str, Tensor] = {}
    for part in parts:
        problem = part.problem._replace(learns_distances=learns_distances)
        found = backward(problem, *(part.of(x) for x in results))
        if len(parts) == 1 and not part.first:
            return found
        for field, grad in found._asdict().items():
            if isinstance(grad, Tensor):
                if field not in grads:
                    more = part.first * (field in ("key", "value"))
                    _, heads, rows, *rest = grad.shape
                    grads[field] = grad.new_zeros(len(results[0]), heads, rows + more, *rest)
                part.put(grads[field], grad)
    return Gradients(
        query=grads["query"],
        key=grads["key"],
        value=grads["value"],
        distance_bias=grads.get("distance_bias"),
        sink=grads.get("sink"),
    )
