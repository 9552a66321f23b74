"""Converts T5's `position_bias` [1, H, Nq, Nk] to a table by distance, of size O(H (Nq + Nk))."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_zero(bias: Tensor) -> bool:
    """Whether a bias is all zeros and needs no gradient, as in cross attention."""
    if torch.compiler.is_compiling() or bias.requires_grad:
        return False
    return not once(bias, "any", lambda: bool(bias.any()))


def depends_on_distance(bias: Tensor, module: Any) -> bool:
    """Whether a bias depends on the distance alone, so that its gradient may be summed by distance.

    The values are compared exactly. If the bias needs a gradient, the module must also be known to
    gather it by distance: another may have a parameter for each pair, equal only by chance.
    """
    if torch.compiler.is_compiling() or bias.dim() != 4 or bias.shape[0] != 1:
        return False
    if bias.requires_grad and not hasattr(module, "has_relative_attention_bias"):
        return False
    shifted = bias[..., 1:, 1:], bias[..., :-1, :-1]
    return once(bias, "distance", lambda: bool(torch.equal(*shifted)))


def distance_table(bias: Tensor, q_start: int) -> Tensor:
    """Converts a bias [1, H, Nq, Nk] that depends only on distance to a table [H, 2R + 1].

    Entry `R + k - p` belongs to query position p = q_start + row and key position k.
    """
    q_len, kv_len = bias.shape[2:]
    table = torch.cat((bias[0, :, :, 0].flip(-1), bias[0, :, 0, 1:]), -1)
    most_before, most_after = q_start + q_len - 1, kv_len - 1 - q_start
    radius = max(most_before, most_after, 0)
    return torch.nn.functional.pad(table, (radius - most_before, radius - most_after))


def once(shared: Any, name: Any, compute: Callable[[], Any]) -> Any:
    """Returns `compute()`, computed once for a bias or a mask that layers share."""
    if torch.compiler.is_compiling():
        return compute()
    results = vars(shared).setdefault("_sparsering_results", {})
    if name not in results:
        results[name] = compute()
    return results[name]
