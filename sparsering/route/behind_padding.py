"""Gives a left-padded row the same bits as the row alone, in batch-invariant backends.

Such a backend cuts a row's sums where positions are multiples of a number. So in a batch entry that
begins with hidden keys, as left padding does, positions are counted from its first visible key, and
the keys before it are left out.
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

_BY_PLACE = {"block_bias", "slot_bias", "dropout_p"}  # options that depend on absolute positions


def parts_of(call: Call, backend: str, parts: Parts | None = None) -> tuple[Part, ...]:
    """Splits a call into problems, so that padded rows get the bits of the rows alone.

    `parts` are those of the call's pattern, if they are known.
    """
    if BACKENDS[backend].is_invariant and call.query.device.type == "cpu":
        parts = parts or parts_of_call(call, backend)
        if found := _without_padding(call, parts):
            return found
    return (Part(problem_of(call, backend, parts)),)


def _without_padding(call: Call, parts: Parts) -> tuple[Part, ...]:
    """Returns a part for each number of leading hidden keys; () if there are none to leave out.

    That needs a mask of keys, and a pattern and options that depend on distances alone.
    """
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
