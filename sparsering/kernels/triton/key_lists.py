"""Lists the keys of a selection in the order that the kernels over lists read, in one launch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...ground.numerics import power_of_2
from ...ground.streams import moved
from ...layouts.lists import ListedPairs, Lists
from ...patterns.algebra import And, Frame, Mask, Not
from ...patterns.positions import Causal, SlidingWindow
from ...patterns.selected import SelectedBlocks
from .call import interpreting
from .configs import Config
from .launch import Launch, kept, launch

_MOST_SLOTS = 4096  # most keys of a list that the registers of a program sort
_SLOTS_OF_WARP = 256
_FAR = 1 << 40  # more keys than a sequence has

Band = tuple[int, int]
"""Keys `p - left` to `p + right` of the query at position p, as (left, right)."""


def list_keys(source: ListedPairs, frame: Frame, valid: Tensor | None, branch: int) -> Lists | None:
    """Lists the keys of a selection for each query of a call; None if the kernel cannot.

    It can for indices on a GPU of at most 4,096 keys per query, outside documents and trees, if
    what limits them are causality, windows and `valid`, bool [B or 1, Nk].
    """
    selection, inside, limit = source
    slots = selection.indices.shape[-1] * selection.block_size
    bands = _bands(limit)
    if inside or bands is None or type(selection) is not SelectedBlocks or not selection.num_rows:
        return None
    runs = selection.indices.is_cuda or interpreting()
    if not runs or not 0 < slots <= _MOST_SLOTS:
        return None
    return _listed(selection, frame, valid, branch, bands)


def _listed(
    selection: SelectedBlocks,
    frame: Frame,
    valid: Tensor | None,
    branch: int,
    bands: tuple[Band, Band],
) -> Lists:
    """Lists keys that are in the first of `bands`, but not in the second."""
    from .list_kernels import list_rows_kernel

    table = selection.indices
    table = table.view((1,) * (4 - table.dim()) + table.shape).contiguous()
    batches, tables, rows, slots = table.shape
    if valid is not None:
        valid = moved(valid, table.device).contiguous()
        batches = max(batches, len(valid))
    number = slots * selection.block_size
    shape = batches, tables, frame.q_len
    keys = torch.empty(*shape, number, dtype=torch.int32, device=table.device)
    counts = torch.empty(shape, dtype=torch.int32, device=table.device)
    padded = max(16, power_of_2(number))

    def build() -> list[Launch]:
        warps = min(16, max(1, padded // _SLOTS_OF_WARP))
        config = Config(rows=1, streamed=padded, warps=warps, stages=1)
        fixed = {
            "tables": tables, "row_size": selection.row_size, "SIZE": selection.block_size,
            "NUMBER": padded, "HIDDEN": valid is not None,
        }  # fmt: skip
        return [Launch(list_rows_kernel, batches * tables * frame.q_len, config, fixed)]

    (left, right), (near_left, near_right) = bands
    of_call = {
        "indices": table, "valid": keys if valid is None else valid,
        "keys": keys, "counts": counts,
        "table_batch": table.stride(0) if len(table) > 1 else 0,
        "valid_batch": 0 if valid is None or len(valid) == 1 else frame.kv_len,
        "rows": rows, "slots": slots, "first_row": selection.first_row,
        "q_start": frame.q_start, "q_len": frame.q_len, "kv_len": frame.kv_len,
        "left": left, "right": right, "near_left": near_left, "near_right": near_right,
    }  # fmt: skip
    kind = (
        "keys of lists", shape, padded, selection.row_size, selection.block_size, table.device,
        *(None if x is None else x.data_ptr() % 16 for x in (table, valid)),
    )  # fmt: skip
    launch(kept(kind, build, table.device), of_call, table.device)
    return Lists(keys=keys, branch=branch, counts=counts)


def _bands(limit: Mask | None) -> tuple[Band, Band] | None:
    """Returns the bands of keys that a limit allows and refuses; None for other limits.

    The refused band is empty if the limit has no `Not`.
    """
    parts = limit.masks if isinstance(limit, And) else () if limit is None else (limit,)
    refused = [x.mask for x in parts if isinstance(x, Not)]
    allowed = _band([x for x in parts if not isinstance(x, Not)])
    left_out = _band(refused) if refused else (-_FAR, -_FAR)
    return None if allowed is None or left_out is None or len(refused) > 1 else (allowed, left_out)


def _band(masks: Sequence[Mask]) -> Band | None:
    """Returns the band of keys that all of some masks allow; None for masks of another kind."""
    left, right = _FAR, _FAR
    for mask in masks:
        own: Band | None = None
        match mask:
            case Causal():
                own = _FAR, 0
            case SlidingWindow(before, after, 1):
                own = _FAR if before is None else before, _FAR if after is None else after
            case And(inner):
                own = _band(inner)
        if own is None:
            return None
        left, right = min(left, own[0]), min(right, own[1])
    return left, right
