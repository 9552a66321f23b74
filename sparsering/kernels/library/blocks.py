"""Patterns of whole blocks, for other libraries' kernels that visit blocks without any mask."""

import torch
from torch import Tensor

from ...layouts.layout import Pass
from ...patterns.algebra import Frame


def whole_blocks(p: Pass, frame: Frame, block: int) -> Tensor | str:
    """Returns which blocks of tokens a pass visits, bool [B or 1, H or 1, rows, columns].

    Returns a text that says why not if the pass does not consist of whole blocks of `block` x
    `block` tokens. Lengths must be multiples of it.
    """
    rows, columns = frame.q_len // block, frame.kv_len // block
    is_regular = p.step == 1 and all(
        torch.equal(start, torch.arange(n, device=start.device)[None] * block)
        for start, n in ((p.query_start, rows), (p.key_start, columns))
    )
    if not is_regular or len(p.bitmaps):
        return (
            f"it needs blocks of {block} tokens in which every query sees every key, or none; "
            "this pattern has others"
        )
    row = p.query_tiles().long().clamp(max=rows - 1)  # [Bt, Ht, entries]
    is_entry = torch.arange(row.shape[2], device=row.device) < p.num_entries[..., None]
    column = torch.where(is_entry, p.key_tile.long(), columns)  # padding has a column of its own
    visits = row.new_zeros(*row.shape[:2], rows * (columns + 1), dtype=torch.bool)
    visits.scatter_(2, row * (columns + 1) + column, True)
    return visits.unflatten(2, (rows, columns + 1))[..., :columns]


def listed(visits: Tensor) -> tuple[Tensor, Tensor]:
    """Lists the blocks that are True in `visits` [B or 1, H or 1, rows, columns].

    Returns: how many a row has, int32 [..., rows], and which, int32 [..., rows, columns]: the
        visited ones first, ascending.
    """
    order = visits.int().argsort(dim=3, descending=True, stable=True)
    return visits.sum(3, dtype=torch.int32), order.int()


def without_rows(out: Tensor, lse: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
    """Sets out to 0 and lse to -inf where `empty` [..., Nq] says that a row has no keys."""
    return torch.where(empty[..., None], 0.0, out), torch.where(empty, -torch.inf, lse)
