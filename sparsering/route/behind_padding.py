"""Rows behind padding, in a backend whose bits depend on no company.

Such a backend cuts a row's sums where positions are multiples of a number. Behind leading hidden
keys, as left padding is, positions count from the first other key: so a padded row has the bits of
the same row alone. The keys before it are left out, for each batch entry.
"""

from operator import itemgetter

import torch

from ..call import Call
from ..kernels.backends import BACKENDS
from ..kernels.parts import Part
from ..patterns.keys import key_mask
from ..patterns.shifts import is_shift_invariant
from .decision import Parts, parts_of_call
from .work import Work, layout_of, problem_of

_BY_PLACE = {"block_bias", "slot_bias", "dropout_p"}  # options that count blocks or positions


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
        layout, rows = layout_of(tiles, shifted, size, device)
        own = mask if entries is None or len(mask) == 1 else mask[entries]
        work = Work(layout=layout, first_bitmap_rows=rows, key_mask=own[:, first:].contiguous())
        query, key, value = (x if entries is None else x[entries] for x in call.inputs)
        options = call.options
        if entries is not None:
            options = options.mapped(itemgetter(entries))
        problem = work.problem(
            query, key[:, :, first:], value[:, :, first:], call.scale, **options.in_use
        )
        found.append(Part(problem, entries, first))
    return tuple(found)
