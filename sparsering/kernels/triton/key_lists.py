"""Lists the keys of a selection in the order that the kernels over lists read, in one launch."""

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
    allowed: Band = (_FAR, _FAR)
    refused: Band = (-_FAR, -_FAR)
    several = False
    for mask in limit.masks if isinstance(limit, And) else () if limit is None else (limit,):
        if isinstance(mask, Not):
            band = _band(mask.mask)
            if band is None or several:
                return None
            refused, several = band, True
        elif (band := _band(mask)) is None:
            return None
        else:
            allowed = _narrower(allowed, band)
    return allowed, refused


def _band(mask: Mask) -> Band | None:
    """Returns the band of keys that a mask allows; None for masks of another kind."""
    match mask:
        case Causal():
            return _FAR, 0
        case SlidingWindow(left, right, 1):
            return _FAR if left is None else left, _FAR if right is None else right
        case And(masks):
            band: Band = (_FAR, _FAR)
            for part in masks:
                if (own := _band(part)) is None:
                    return None
                band = _narrower(band, own)
            return band
    return None


def _narrower(some: Band, other: Band) -> Band:
    """Returns the band of keys that are in both of two bands."""
    return min(some[0], other[0]), min(some[1], other[1])
