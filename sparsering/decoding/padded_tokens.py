"""Moves padding behind the new tokens, for `KVCache.attend(valid=)`, where it may be anywhere."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import check_tensor, refuse_meta
from ..ground.arguments import shortened


def padding_last(
    inputs: Sequence[Tensor], lengths: Any, valid: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], list[int], Tensor]:
    """Moves padding tokens behind the others in each batch entry, and sets them to zero.

    Args:
        inputs: query, key and value [B, H, n, D].
        lengths: must be None, because `valid` says more.
        valid: bool [B, n], False for padding.

    Returns: the inputs, the number of tokens of each batch entry, and int64 [B, n]: where each
        token has gone, so that `taken` moves results back. The host waits for a GPU's `valid`.
    """
    for name, x in zip(("query", "key", "value"), inputs, strict=True):
        check_tensor(name, x, "[batch, heads, tokens, head dim]")
    query = inputs[0]
    shape = query.shape[:1] + query.shape[2:3]
    check_tensor("valid", valid, f"[{', '.join(map(str, shape))}]")
    if lengths is not None:
        raise ValueError(
            f"attend needs lengths or valid, got both, lengths {shortened(repr(lengths))}; leave "
            "lengths out"
        )
    if valid.dtype != torch.bool or valid.shape != shape or query.dim() != 4:
        raise ValueError(
            f"valid must be bool {list(shape)}, False for padding, got {valid.dtype} "
            f"{tuple(valid.shape)}; valid.bool() converts ones and zeros"
        )
    refuse_meta(valid, named="valid")
    there = valid.to(query.device)
    order = (~there).to(torch.int8).argsort(dim=1, stable=True)
    moved = [taken(torch.where(there[:, None, :, None], x, 0), order) for x in inputs]
    return (moved[0], moved[1], moved[2]), valid.sum(1).tolist(), order.argsort(1)


def taken(x: Tensor, place: Tensor) -> Tensor:
    """Reorders the tokens of [B, H, n, D] by `place`, int64 [B, n]."""
    return x.gather(2, place[:, None, :, None].expand_as(x))
