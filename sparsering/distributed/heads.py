"""Two axes: ranks of a mesh exchange tokens for heads, then rings of ranks share the tokens.

On a mesh of h x p ranks, each rank owns a shard of the tokens, with all heads. In a call, the h
ranks of a column of the mesh exchange, all to all: each gets the tokens of all of them for its own
heads / h. The p ranks of a row then compute ring attention of these heads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from ..call import Options
from ..ground.dropout import seeds_of_heads
from ..layouts.tiles import Ranges
from ..patterns.head_shard import HeadShard
from ..route.differentiable import for_each_gradient, is_batch
from .agreement import agree_on_batch, digests_of
from .exchange import Exchange, Traffic, traffic_of_last
from .sharding import chunk_owners, local_index, positions


class Mesh(NamedTuple):
    """The process groups of this rank in a mesh of two axes, heads and tokens.

    Rank r of `ranks` has index r // p of the axis of heads, and r % p of the axis of tokens.
    """

    shape: tuple[int, int]
    ranks: dist.ProcessGroup
    heads: dist.ProcessGroup  # ranks that exchange tokens for heads
    tokens: dist.ProcessGroup  # ranks that compute the same heads

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Mesh":
        """Finds the groups; ValueError unless the mesh has all ranks of its world, in order."""
        root = mesh._get_root_mesh()
        if root.size() != dist.get_world_size():
            raise ValueError(
                f"a mesh of two axes must have all {dist.get_world_size()} ranks, or be cut from "
                f'one that has, got {root.size()}; make it by init_device_mesh, as in mesh["heads",'
                ' "tokens"]'
            )
        order = mesh.mesh.flatten()
        if not bool((order.diff() > 0).all()):
            raise ValueError(
                f"a mesh of two axes must have its ranks in ascending order, got {order.tolist()}; "
                "init_device_mesh orders them so"
            )
        whole = mesh.size() == dist.get_world_size()
        ranks = dist.group.WORLD if whole else mesh._flatten().get_group()
        assert ranks is not None
        heads, tokens = mesh.get_group(0), mesh.get_group(1)
        return cls(shape=(mesh.size(0), mesh.size(1)), ranks=ranks, heads=heads, tokens=tokens)


def has_two_axes(place: object) -> TypeGuard[DeviceMesh]:
    """Whether ranks share heads and tokens: `place` is a mesh of two axes, and no group."""
    return isinstance(place, DeviceMesh) and place.ndim == 2


def world_of(place: dist.ProcessGroup | DeviceMesh | None) -> int | tuple[int, int]:
    """Returns the `world_size` of plans for a group, or for a mesh of two axes."""
    if has_two_axes(place):
        return place.size(0), place.size(1)
    return 1 if place is None else place.size()


def check_heads(num_heads: int, groups: int, dropout: bool = False) -> None:
    """Raises ValueError unless `groups` ranks can share the query heads."""
    if num_heads % groups:
        raise ValueError(
            f"query heads must be a multiple of the mesh's {groups} ranks of heads, got "
            f"{num_heads}; give the axis of heads a divisor of it, and the axis of tokens the rest"
        )
    each = num_heads // groups
    if dropout and groups > 1 and each & (each - 1):
        raise ValueError(
            "with dropout, each rank of heads must compute 1, 2, 4, 8, ... query heads, got "
            f"{each} of {num_heads}; choose another number of ranks of heads, or dropout_p=0.0"
        )


def cut_heads(heads: HeadShard, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Returns the query, key and value of a group of heads."""
    return [query[:, heads.heads], key[:, heads.kv_heads], value[:, heads.kv_heads]]


def options_of_heads(heads: HeadShard, options: Options) -> Options:
    """Returns the options of a group of heads; dropout keeps the pairs that it kept among all."""
    rows = {name: options[name] for name in ("distance_bias", "sink")}
    own = {name: x[:, heads.heads] for name, x in rows.items() if x is not None}
    if (seed := options["dropout_seed"]) is not None:
        own["dropout_seed"] = seeds_of_heads(seed, heads.heads.start)
    return options.changed(**own)


def ring_sharding(sharding: str, shape: tuple[int, int]) -> str:
    """Returns which chunks each rank of the axis of tokens has after the exchange."""
    owners = [rank % shape[1] for rank in chunk_owners(sharding, shape[0] * shape[1])]
    return _named(owners, shape[1])


def mesh_sharding(sharding: str, shape: tuple[int, int]) -> str:
    """Returns a sharding over all ranks by which rings have `sharding`, over the axis of tokens.

    Each chunk of the ring is cut into as many as there are ranks of heads.
    """
    groups, ranks = shape
    owners = chunk_owners(sharding, ranks)
    return _named(
        [group * ranks + owner for owner in owners for group in range(groups)], groups * ranks
    )


def _named(owners: list[int], ranks: int) -> str:
    if owners == list(range(ranks)):
        return "contiguous"
    return "chunks:" + ",".join(map(str, owners))


@dataclass(frozen=True, eq=False)
class Swap:
    """The exchange of one call on a mesh: tokens for heads, and heads for tokens."""

    group: dist.ProcessGroup  # the axis of heads
    seconds: float | None  # timeout
    places: Sequence[Tensor]  # by rank of it: where its tokens are in the shard of the ring
    # by pass (is it a backward one): what was sent before the ring, until it is counted
    sent: dict[bool, Traffic] = field(default_factory=dict)

    @classmethod
    def of(cls, mesh: Mesh, shards: Sequence[Ranges], own: Ranges, seconds: float | None) -> "Swap":
        """Plans the exchange of a rank.

        `shards` are the tokens of each rank of the mesh, `own` those of this rank's ring shard.
        """
        column = shards[mesh.tokens.rank() :: mesh.shape[1]]
        return cls(mesh.heads, seconds, [_places(own, shard) for shard in column])

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Takes [B, H, own tokens, ...] of all heads; returns all tokens of the group's heads."""
        return _Swapped.apply(self, True, False, *tensors)

    def to_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Takes [B, H / h, the ring's tokens, ...]; returns the own tokens of all heads."""
        return _Swapped.apply(self, False, False, *tensors)

    def run(self, to_heads: bool, backward: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Exchanges tensors, in one message between each pair of ranks."""
        exchange = Exchange(self.group, self.seconds, tensors[0].device)
        size, rank = exchange.world_size, exchange.rank
        places = [x.to(tensors[0].device) for x in self.places]
        step = "tokens for heads" if to_heads else "heads for tokens"
        alike = [(len(x), x.shape[1], *x.shape[3:], x.dtype) for x in tensors]
        with exchange.break_on_error():
            agree_on_batch(exchange, f"{step}, backward={backward}", digests_of({"shapes": alike}))
        exchange.traffic = Traffic()

        def part(x: Tensor, peer: int) -> Tensor:
            return x.chunk(size, 1)[peer] if to_heads else x[:, :, places[peer]]

        def shape(x: Tensor, peer: int) -> tuple[int, ...]:
            heads = x.shape[1] // size if to_heads else x.shape[1]
            return len(x), heads, len(places[peer if to_heads else rank]), *x.shape[3:]

        others = [peer for peer in range(size) if peer != rank]
        sends = {peer: _packed([part(x, peer) for x in tensors]) for peer in others}
        shapes = {peer: [shape(x, peer) for x in tensors] for peer in others}
        rooms = {
            peer: tensors[0].new_empty(
                sum(
                    math.prod(own) * x.itemsize for own, x in zip(own_shapes, tensors, strict=True)
                ),
                dtype=torch.uint8,
            )
            for peer, own_shapes in shapes.items()
        }
        with exchange.break_on_error():
            exchange.start(step, sends, rooms).wait()
        found = {peer: _unpacked(rooms[peer], shapes[peer], tensors) for peer in others}
        found[rank] = [part(x, rank) for x in tensors]
        self._count(to_heads, backward, exchange.traffic)
        columns = zip(*(found[peer] for peer in range(size)), strict=True)
        if not to_heads:
            return tuple(torch.cat(parts, 1) for parts in columns)
        return tuple(self._joined(parts, places) for parts in columns)

    def _count(self, to_heads: bool, backward: bool, traffic: Traffic) -> None:
        """Counts an exchange with the ring between the two of a pass, for `last_traffic`."""
        if to_heads:  # the ring comes later, and sets the traffic of the call
            self.sent[backward] = traffic
            return
        before = self.sent.pop(backward, Traffic())
        traffic_of_last[backward] = traffic_of_last[backward].plus(before).plus(traffic)

    def _joined(self, parts: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
        """Puts the tokens of each rank at their places in the shard of the ring."""
        first = parts[0]
        whole = first.new_empty(*first.shape[:2], sum(map(len, places)), *first.shape[3:])
        for own, at in zip(parts, places, strict=True):
            whole[:, :, at] = own
        return whole


class _Swapped(Function):
    """Autograd function of the exchange: its derivatives are exchanges too, of any order."""

    @staticmethod
    def forward(swap: Swap, to_heads: bool, backward: bool, *tensors: Tensor) -> Any:
        return swap.run(to_heads, backward, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.swap, ctx.to_heads, ctx.backward, *_ = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = partial(_Swapped.apply, ctx.swap, not ctx.to_heads, True)
        if is_batch(*grads):
            return None, None, None, *for_each_gradient(back, grads)
        return None, None, None, *back(*grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Swapped.apply(ctx.swap, ctx.to_heads, ctx.backward, *tangents[3:])


def _places(own: Ranges, shard: Ranges) -> Tensor:
    return local_index(own, positions(shard)) if shard else torch.zeros(0, dtype=torch.int64)


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """Joins tensors, of any dtypes, to a row of bytes."""
    return torch.cat([x.contiguous().flatten().view(torch.uint8) for x in parts])


def _unpacked(
    row: Tensor, shapes: Sequence[tuple[int, ...]], likes: Sequence[Tensor]
) -> list[Tensor]:
    """Splits a row of bytes into tensors of these shapes, with the dtypes of `likes`."""
    pairs = list(zip(shapes, likes, strict=True))
    split = row.split([math.prod(shape) * x.itemsize for shape, x in pairs])
    # a tensor's bytes may begin anywhere in the row, and `view` needs an aligned place
    each = zip(split, pairs, strict=True)
    return [own.clone().view(x.dtype).view(shape) for own, (shape, x) in each]
