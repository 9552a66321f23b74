"""Rows behind padding, in a backend whose bits depend on no company.

Such a backend cuts a row's sums where positions are multiples of a number. Behind leading hidden
keys, as left padding is, positions count from the first other key: so a padded row has the bits of
the same row alone. The keys before it are left out, for each batch entry.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .call_recipe import CallRecipe, Inputs, parts_of_call
from .dispatch import BACKENDS
from .extras import Extras
from .kernels.problem import Gradients, Problem
from .patterns.algebra import Pattern
from .patterns.shifts import is_shift_invariant
from .work import layout_of, problem_of

_BY_PLACE = {"block_bias", "slot_bias", "dropout_p"}  # options that count blocks or positions


class Part(NamedTuple):
    """A call's batch entries with equally many leading hidden keys."""

    problem: Problem  # without those keys
    entries: Tensor | None = None  # int64, None for all
    first: int = 0  # number of leading keys that are left out

    def of(self, x: Tensor) -> Tensor:
        """Selects the entries of a tensor of the call, [B, ...]."""
        return x if self.entries is None else x[self.entries]

    def put(self, to: Tensor, part: Tensor) -> None:
        """Writes what belongs to the entries into a tensor of the call; keys only the last ones."""
        rows = range(len(to)) if self.entries is None else self.entries.tolist()
        for row, of_row in zip(rows, part, strict=True):
            to[row, :, to.shape[2] - of_row.shape[1] :] = of_row


def parts_of(
    recipe: CallRecipe, inputs: Inputs, pattern: Pattern, extras: Extras
) -> tuple[Part, ...]:
    """Returns the parts of a checked call, by the number of leading hidden keys; often only one."""
    problem = problem_of(recipe, inputs, pattern, extras)
    mask, whole = problem.key_mask, (Part(problem),)
    if mask is None or not BACKENDS[recipe.backend].is_invariant or mask.device.type != "cpu":
        return whole
    if problem.lists or _BY_PLACE & extras.in_use.keys():
        return whole
    (rest, frame, size, device), *_ = parts_of_call(recipe, *inputs[:2], pattern, extras)
    if rest.tensors or not is_shift_invariant(rest):
        return whole
    leading = (mask.cumsum(1) == 0).sum(1)
    leading = torch.where(leading == frame.kv_len, 0, leading).expand(len(inputs[0]))
    counts = leading.unique().tolist()
    if not any(counts):
        return whole
    parts = []
    for first in counts:
        entries = None if len(counts) == 1 else (leading == first).nonzero()[:, 0]
        part = Part(problem, entries, first)
        shifted = frame._replace(kv_len=frame.kv_len - first, q_start=frame.q_start - first)
        layout, slots = layout_of(rest, shifted, size, device)
        table, sink = problem.distance_bias, problem.sink
        own = problem._replace(
            layout=layout,
            slots=slots,
            query=part.of(problem.query),
            key=part.of(problem.key)[:, :, first:],
            value=part.of(problem.value)[:, :, first:],
            key_mask=(mask if len(mask) == 1 else part.of(mask))[:, first:].contiguous(),
            distance_bias=None if table is None else part.of(table),
            sink=None if sink is None else part.of(sink),
        )
        parts.append(part._replace(problem=own))
    return tuple(parts)


def forward(
    recipe: CallRecipe, inputs: Inputs, pattern: Pattern, extras: Extras
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a checked call by a backend over layouts."""
    backend, parts = BACKENDS[recipe.backend], parts_of(recipe, inputs, pattern, extras)
    assert backend.forward is not None
    if len(parts) == 1:
        return backend.forward(parts[0].problem)
    query, _, value = inputs
    out = query.new_empty(*query.shape[:3], value.shape[3])
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    for part in parts:
        for to, found in zip((out, lse), backend.forward(part.problem), strict=True):
            part.put(to, found)
    return out, lse


def backward(
    name: str, parts: Sequence[Part], results: Sequence[Tensor], *, learns_distances: bool
) -> Gradients:
    """Computes a call's gradients by a backend, from its parts and (out, lse, dout, dlse)."""
    backend = BACKENDS[name]
    assert backend.backward is not None
    grads: dict[str, Tensor] = {}
    for part in parts:
        problem = part.problem._replace(learns_distances=learns_distances).in_first_slots()
        found = backend.backward(problem, *(part.of(x) for x in results))
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
