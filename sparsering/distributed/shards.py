"""Cuts a tensor of the whole sequence into shards, one per rank, and joins shards again."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..checks import check_tensor
from ..ground.arguments import checked_integer, index_of, shortened
from ..ground.keywords import with_hints
from ..layouts.tiles import Ranges
from ..route.differentiable import for_each_gradient, is_batch
from .agreement import agree_on_shards, agree_to_begin
from .exchange import Exchange
from .ring import resolve_group
from .sharding import num_tokens, owned_ranges


@with_hints()
def shard(
    tensor: Tensor,
    *,
    dim: int = 2,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    mesh: DeviceMesh | None = None,
    sharding: str = "contiguous",
) -> Tensor:
    """Returns this rank's shard of a tensor that every rank has in full, without messages.

    Differentiable: the gradient is zero outside the shard.

    Args:
        tensor: any tensor with tokens in `dim`, such as queries, positions, ids or labels.
        dim: the dim that counts tokens; default 2, as in [B, H, N, D].
        group, mesh, sharding: as for `ring_attention`; instead of "auto", pass `RingPlan.sharding`.

    Returns: a copy of the tokens that the rank owns, in the order of its shard; it may be empty.

    Raises: ValueError for a dim out of range, or an invalid sharding.
    """
    group = resolve_group(group, mesh)
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    dim = _checked_dim(tensor, dim)
    return _cut(tensor, dim, owned_ranges(sharding, tensor.shape[dim], world)[rank])


@with_hints()
def unshard(
    tensor: Tensor,
    *,
    dim: int = 2,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    mesh: DeviceMesh | None = None,
    sharding: str = "contiguous",
    length: int | None = None,
) -> Tensor:
    """Returns the whole tensor, joined from the shards of all ranks; every rank must call it.

    Differentiable: the gradient of a shard is the sum of its gradients on all ranks.

    Args:
        tensor: this rank's shard.
        dim, group, mesh, sharding: as for `shard`.
        length: tokens of the whole tensor; default the sum over the shards.

    Raises: ValueError (on all ranks) if dtypes or sizes of other dims differ between ranks, or if
        lengths do not fit the sharding; RingError if a peer does not answer in the group's timeout.
    """
    group = resolve_group(group, mesh)
    dim = _checked_dim(tensor, dim)
    if group is None or group.size() == 1:
        ranges = owned_ranges(sharding, tensor.shape[dim], 1)
    else:
        rest = [*tensor.shape[:dim], *tensor.shape[dim + 1 :]]
        common = {"dim": dim, "dtype": tensor.dtype, "sizes of other dims": rest}
        exchange = Exchange(group, None, tensor.device)
        (ranges,) = agree_on_shards(exchange, "unshard", sharding, [tensor.shape[dim]], common)
    total = sum(map(num_tokens, ranges))
    if length is not None and checked_integer("length", length, 0) != total:
        raise ValueError(f"length must be the sum of shards, {total}, got {length}; leave it out")
    return tensor if len(ranges) == 1 else _Gather.apply(tensor, dim, group, ranges)


class _Gather(torch.autograd.Function):
    """Autograd function of `unshard`; its backward sums gradients over ranks and cuts a shard."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup, ranges: tuple[Ranges, ...]
    ) -> Tensor:
        ctx.options = dim, group, ranges
        sizes = [num_tokens(owned) for owned in ranges]
        shape = list(tensor.shape)
        shape[dim] = max(sizes)
        padded = tensor.new_zeros(shape)  # all_gather needs equal sizes
        padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        shape[dim] = sum(sizes)
        whole = tensor.new_empty(shape)
        for part, owned in zip(parts, ranges, strict=True):
            first = 0
            for start, stop in owned:
                count = stop - start
                whole.narrow(dim, start, count).copy_(part.narrow(dim, first, count))
                first += count
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dim, group, ranges = ctx.options

        def run(grad: Tensor) -> tuple[Tensor]:
            grad = grad.contiguous().clone()
            sizes = {"dtype": grad.dtype, "sizes": tuple(grad.shape)}
            agree_to_begin(group, "the backward pass of unshard", grad, **sizes)
            dist.all_reduce(grad, group=group)
            return (_cut(grad, dim, ranges[group.rank()]),)

        (grad,) = for_each_gradient(run, [grad]) if is_batch(grad) else run(grad)
        return grad, None, None, None


def _cut(tensor: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """Returns the tokens of a tensor that are in `ranges`, joined along `dim`."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
    return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0).clone()


def _checked_dim(tensor: Tensor, dim: int) -> int:
    check_tensor("tensor", tensor, "with tokens in `dim`")
    if (place := index_of(dim)) is None or not -tensor.dim() <= place < tensor.dim():
        raise ValueError(
            f"dim must be one of the tensor's {tensor.dim()} dims, got {shortened(repr(dim))}; "
            "pass the dim that counts tokens"
        )
    return place % tensor.dim()
