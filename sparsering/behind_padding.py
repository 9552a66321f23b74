"""Rows behind padding, in a backend whose bits depend on no company.

Such a backend cuts a row's sums where positions are multiples of a number. Behind leading hidden
keys, as left padding is, positions count from the first other key: so a padded row has the bits of
the same row alone. The keys before it are left out, for each batch entry.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from .call import Call
from .decision import Parts, parts_of_call
from .dispatch import BACKENDS
from .kernels.problem import Gradients, Problem
from .patterns.keys import key_mask
from .patterns.shifts import is_shift_invariant
from .work import Work, layout_of, problem_of

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


def parts_of(call: Call, backend: str, parts: Parts | None = None) -> tuple[Part, ...]:
    """Returns the parts of a call, by the number of leading hidden keys; often only one.

    `parts`: those of the call's pattern, if known.
    """
    if BACKENDS[backend].is_invariant and call.query.device.type == "cpu":
        parts = parts or parts_of_call(call, backend)
        if found := _without_padding(call, parts):
            return found
    return (Part(problem_of(call, backend, parts)),)


def _without_padding(call: Call, parts: Parts) -> tuple[Part, ...]:
    """Returns the parts of a call without leading hidden keys; () if none is hidden, or can be."""
    (tiles, frame, size, device), masks, sources = parts
    if not masks or sources or _BY_PLACE & call.options.in_use.keys():
        return ()
    if tiles.tensors or not is_shift_invariant(tiles):
        return ()
    mask = key_mask(masks, frame.kv_len, device)
    leading = (mask.cumsum(1) == 0).sum(1)
    leading = torch.where(leading == frame.kv_len, 0, leading).expand(len(call.query))
    counts = leading.unique().tolist()
    if not any(counts):
        return ()
    found = []
    for first in counts:
        entries = None if len(counts) == 1 else (leading == first).nonzero()[:, 0]
        shifted = frame._replace(kv_len=frame.kv_len - first, q_start=frame.q_start - first)
        layout, slots = layout_of(tiles, shifted, size, device)
        own = mask if entries is None or len(mask) == 1 else mask[entries]
        work = Work(layout=layout, slots=slots, key_mask=own[:, first:].contiguous())
        query, key, value = (x if entries is None else x[entries] for x in call.inputs)
        options = call.options
        if entries is not None:
            options = options.mapped(itemgetter(entries))
        problem = work.problem(
            query, key[:, :, first:], value[:, :, first:], call.scale, **options.in_use
        )
        found.append(Part(problem, entries, first))
    return tuple(found)


def forward(call: Call, backend: str, parts: Parts | None = None) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a call by a backend over layouts; arguments as of `parts_of`."""
    run, found = BACKENDS[backend].forward, parts_of(call, backend, parts)
    assert run is not None
    if len(found) == 1:
        return run(found[0].problem)
    query, value = call.query, call.value
    out = query.new_empty(*query.shape[:3], value.shape[3])
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    for part in found:
        for to, result in zip((out, lse), run(part.problem), strict=True):
            part.put(to, result)
    return out, lse


def backward(
    name: str, parts: Sequence[Part], results: Sequence[Tensor], *, learns_distances: bool
) -> Gradients:
    """Computes a call's gradients by a backend, from its parts and (out, lse, dout, dlse)."""
    backend = BACKENDS[name]
    assert backend.backward is not None
    grads: dict[str, Tensor] = {}
    for part in parts:
        problem = part.problem._replace(learns_distances=learns_distances)
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
