"""Sends rows of a sharded sequence to the ranks that want them, and their gradients back.

Every rank knows which rows each rank has and wants, so no rank needs to ask another.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ground.numerics import sum_dtype
from .exchange import Exchange

Span = tuple[int, int]
"""A range of rows (start, exclusive stop)."""


def fetched(
    own: Tensor,
    owned: Sequence[Span],
    wanted: Sequence[Span],
    group: dist.ProcessGroup | None,
    name: str,
) -> Tensor:
    """Returns the rows that this rank wants, from the ranks that own them; differentiable.

    Every rank of the group makes the call, also one that wants none.

    Args:
        own: [B, n, ...], the rows that this rank owns.
        owned, wanted: for each rank the rows of the whole sequence. Each wanted row has one owner.
        name: of the rows, for errors.
    """
    if group is None or group.size() == 1:
        start, stop = wanted[0]
        return own[:, start - owned[0][0] : stop - owned[0][0]]
    return _Fetched.apply(own, tuple(owned), tuple(wanted), group, name)


class _Fetched(torch.autograd.Function):
    """Autograd function of `fetched`: backward sends each gradient row to the row's owner."""

    @staticmethod
    def forward(
        context: Any,
        own: Tensor,
        owned: tuple[Span, ...],
        wanted: tuple[Span, ...],
        group: dist.ProcessGroup,
        name: str,
    ) -> Tensor:
        context.plan = owned, wanted, group, name
        context.shape, context.dtype = own.shape, own.dtype
        rank = group.rank()
        (first, _), (start, stop) = owned[rank], wanted[rank]
        out = own.new_zeros(len(own), stop - start, *own.shape[2:])
        sends, receives = {}, {}
        for peer in range(group.size()):
            low, high = _common(owned[rank], wanted[peer])
            mine = own[:, low - first : high - first]
            if peer == rank:
                out[:, low - start : high - start] = mine
                continue
            sends[peer] = mine.contiguous()
            low, high = _common(owned[peer], wanted[rank])
            receives[peer] = own.new_empty(len(own), high - low, *own.shape[2:])
        _exchange(group, own, name, sends, receives)
        for peer, rows in receives.items():
            low, high = _common(owned[peer], wanted[rank])
            out[:, low - start : high - start] = rows
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,) = gradients
        owned, wanted, group, name = context.plan
        rank = group.rank()
        grad = grad.to(sum_dtype(grad))
        (first, _), (start, _) = owned[rank], wanted[rank]
        own = grad.new_zeros(context.shape)
        sends, receives = {}, {}
        for peer in range(group.size()):
            low, high = _common(owned[peer], wanted[rank])
            part = grad[:, low - start : high - start]
            if peer == rank:
                own[:, low - first : high - first] += part
                continue
            sends[peer] = part.contiguous()
            low, high = _common(owned[rank], wanted[peer])
            receives[peer] = grad.new_empty(len(grad), high - low, *grad.shape[2:])
        _exchange(group, grad, f"gradients of {name}", sends, receives)
        for peer, rows in receives.items():
            low, high = _common(owned[rank], wanted[peer])
            own[:, low - first : high - first] += rows
        return own.to(context.dtype), None, None, None, None


def _common(one: Span, two: Span) -> Span:
    """Returns the rows that two spans share; an empty span if they share none."""
    low, high = max(one[0], two[0]), min(one[1], two[1])
    return (low, high) if low < high else (one[0], one[0])


def _exchange(
    group: dist.ProcessGroup,
    like: Tensor,
    step: str,
    sends: dict[int, Tensor],
    receives: dict[int, Tensor],
) -> None:
    """Sends tensors to ranks and receives others, both {rank: tensor}; errors name the `step`."""
    exchange = Exchange(group, None, like.device)
    with exchange.break_on_error():
        exchange.start(step, sends, receives).wait()
