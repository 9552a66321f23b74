"""T5's `position_bias` [1, H, Nq, Nk] as a table of distances, which takes O(Nq + Nk)."""

from typing import Any

import torch
from torch import Tensor

_KNOWN = "_sparsering_by_distance"


def is_nothing(bias: Tensor) -> bool:
    """Whether a bias is all zeros that nothing learns from, as cross attention has it."""
    if torch.compiler.is_compiling() or bias.requires_grad:
        return False
    return not _once(bias, "any", lambda: bool(bias.any()))


def goes_by_distance(bias: Tensor, module: Any) -> bool:
    """Whether entries are those of distances alone, and learn as such.

    By their numbers, exactly; where they learn, only in a module that is known to gather them by
    distance: others may have a parameter for each pair, which are equal by chance.
    """
    if torch.compiler.is_compiling() or bias.dim() != 4 or bias.shape[0] != 1:
        return False
    if bias.requires_grad and not hasattr(module, "has_relative_attention_bias"):
        return False
    along = bias[..., 1:, 1:], bias[..., :-1, :-1]
    return _once(bias, "distance", lambda: bool(torch.equal(*along)))


def distance_table(bias: Tensor, q_start: int) -> Tensor:
    """[H, 2R + 1] entries by distance, of a bias [1, H, Nq, Nk] that goes by it.

    Entry `R + k - p` is that of query position p = q_start + row and key position k.
    """
    q_len, kv_len = bias.shape[2:]
    table = torch.cat((bias[0, :, :, 0].flip(-1), bias[0, :, 0, 1:]), -1)
    most_before, most_after = q_start + q_len - 1, kv_len - 1 - q_start
    radius = max(most_before, most_after, 0)
    return torch.nn.functional.pad(table, (radius - most_before, radius - most_after))


def _once(bias: Tensor, what: str, ask: Any) -> bool:
    """What is asked of a tensor that layers share, asked once."""
    known: dict[str, bool] = getattr(bias, _KNOWN, None) or {}
    if what not in known:
        known = {**known, what: ask()}
        setattr(bias, _KNOWN, known)
    return known[what]
