"""Lets the ranks of a group compute calls of an attention module, each rank for its own tokens."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from ..checks import check_group
from ..distributed.agreement import agree_on_batch, agree_on_shards, agree_to_begin
from ..distributed.exchange import Exchange
from ..distributed.ring import resolve_group, ring_attention
from ..distributed.sharding import chunk_owners, local_index, num_tokens, overlap
from ..distributed.sharding import positions as listed
from ..distributed.shards import unshard
from ..patterns.algebra import Pattern
from ..patterns.keys import KeyMask


class OverRanks:
    """Base of modules whose calls ranks can share; adds `sharding` and `group`."""

    _group: Any = None
    sharding = "contiguous"

    @property
    def group(self) -> dist.ProcessGroup | DeviceMesh | None:
        """The process group whose ranks share the tokens of a call; None for one process.

        A mesh of two axes, heads and tokens, stays a mesh.
        """
        if self._group is False:
            raise RuntimeError("a copied or unpickled module has lost its group; set module.group")
        return self._group

    @group.setter
    def group(self, group: object) -> None:
        if isinstance(group, DeviceMesh):
            ranks = resolve_group(None, group)  # raises for other meshes than of one or two axes
            group = ranks if group.ndim == 1 else group
        else:
            check_group(group)
        chunk_owners(self.sharding, getattr(group, "size", lambda: 1 << 12)())
        self._group = group

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | ({} if self._group is None else {"_group": False})

    def _ranks(self, like: object, **refused: bool) -> "CallRanks | None":
        """Returns the ranks that share this call; None if one process computes it alone.

        `refused` says for each option that ranks cannot share whether the call uses it; with a
        group, an option in use raises NotImplementedError.
        """
        if (group := self.group) is not None and any(refused.values()):
            raise refusal(", ".join(name for name, is_used in refused.items() if is_used))
        return None if group is None or group.size() == 1 else CallRanks(group, self.sharding, like)


def refusal(what: str) -> NotImplementedError:
    """Builds the error for an argument that a module cannot take over ranks."""
    way_out = "leave it out, or set module.group = None and pass the whole sequence"
    return NotImplementedError(f"over ranks, a module does not take {what}; {way_out}")


class CallRanks(contextlib.AbstractContextManager["CallRanks"]):
    """The ranks that share one call of a module; a context, so that errors reach all of them.

    As a context it tells the other ranks if this rank raises before they agree on the call, so that
    they do not wait for it.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh, sharding: str, like: object) -> None:
        self.place: dict[str, Any] = {"group": group, "sharding": sharding}
        self.sharding, self.has_agreed = sharding, False
        ranks = resolve_group(group, None)
        assert ranks is not None
        self.exchange = Exchange(ranks, None, like.device if isinstance(like, Tensor) else None)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and not self.has_agreed:
            with contextlib.suppress(RuntimeError):
                agree_on_batch(self.exchange, "", None)

    @torch.compiler.disable
    def attend(
        self, *inputs: Tensor, pattern: Pattern, valid: Tensor | None, **options: Any
    ) -> Tensor:
        """Computes attention [B, H, n, Dv] of this rank's n queries over all ranks' keys.

        `valid` is bool [B, m] for the rank's own m keys, False for hidden ones. If there are fewer
        queries than keys, or fewer keys, these move to the ranks that own equal positions of the
        others, because ring attention shards both alike.
        """
        query, key, value = inputs
        common = {
            "batch size": len(query), "dtype": query.dtype, "key_padding_mask": valid is None,
            "pattern": pattern.expression,
            "gradients": [torch.is_grad_enabled() and x.requires_grad for x in inputs],
        }  # fmt: skip
        self.has_agreed, lengths = True, [query.shape[2], key.shape[2]]
        call = "the attention of a module"
        to, of = agree_on_shards(self.exchange, call, self.sharding, lengths, common)
        length, keys = (sum(map(num_tokens, owned)) for owned in (to, of))
        by_length = pattern.own_length is not None or pattern.restarts is not None
        if length != keys and (by_length or any(x.asks_frame for x in pattern.branches)):
            raise refusal(f"{length} queries and {keys} keys in {pattern}, which counts them")
        if valid is not None:
            valid = unshard(valid.byte(), dim=1, **self.place).bool()
        if length < keys:
            query = _Moved.apply(query, self.exchange, to, of)
        if length > keys:
            key, value = _Moved.apply(torch.cat((key, value), 3), self.exchange, of, to).chunk(2, 3)
            exists = key.new_ones(keys, dtype=torch.bool) if valid is None else valid
            valid = pad(exists, (0, length - keys))
        if valid is not None:
            pattern = pattern & KeyMask(valid)
        out: Any = ring_attention(query, key, value, pattern, **self.place, **options)
        return _Moved.apply(out, self.exchange, of, to) if length < keys else out

    @torch.compiler.disable
    def attend_to_all_keys(self, *inputs: Tensor, step: int, options: str, attend: Any) -> Any:
        """Gathers all ranks' keys and values, then attends from each range of own queries.

        It calls `attend(queries, all keys, all values, start)` for each range that begins at
        position `start`, and joins each of the results [B, H, n, D] over the ranges.

        Raises ValueError on all ranks if a range does not begin at a multiple of `step`.
        """
        query, key, value = inputs
        learns = [torch.is_grad_enabled() and x.requires_grad for x in inputs]
        common: dict[str, Any] = {"options": options, "inputs": (len(query), query.dtype, learns)}
        self.has_agreed, lengths = True, [query.shape[2]] * 2
        call = "the attention of a module to all keys"
        ranges = agree_on_shards(self.exchange, call, self.sharding, lengths, common)[0]
        if cuts := [start for owned in ranges for start, _ in owned if start % step]:
            raise ValueError(
                f"shards must begin at multiples of query_block, {step}, got {cuts[0]}; pad the "
                "sequence, or use query_block=1"
            )
        key, value = unshard(torch.cat((key, value), 3), **self.place).chunk(2, 3)
        parts, first = [], 0
        for start, stop in ranges[self.exchange.rank] or [(0, 0)]:
            last = first + stop - start
            parts.append(attend(query[:, :, first:last], key, value, start))
            first = last
        return [torch.cat(rows, 2) for rows in zip(*parts, strict=True)]


class _Moved(torch.autograd.Function):
    """Autograd function that sends rows of x [B, H, n, D] to the ranks that need them.

    `options` are the exchange, and the ranges that each rank owns before (source) and after
    (target). A position that only a target has gets a row of 0. Gradients move back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *options: Any) -> Tensor:
        ctx.options = exchange, source, target = options
        rank, peers = exchange.rank, range(exchange.world_size)
        leaving = [local_index(source[rank], listed(overlap(source[rank], r))) for r in target]
        places = [local_index(target[rank], listed(overlap(r, target[rank]))) for r in source]
        sent = [x[:, :, index.to(x.device)].contiguous() for index in leaving]
        got = [x.new_empty(*x.shape[:2], len(place), x.shape[3]) for place in places]
        got[rank] = sent[rank]
        others = [{p: rows[p] for p in peers if p != rank} for rows in (sent, got)]
        with exchange.break_on_error():
            exchange.start("rows of cross attention", *others).wait()
        out = x.new_zeros(*x.shape[:2], num_tokens(target[rank]), x.shape[3])
        for place, rows in zip(places, got, strict=True):
            out[:, :, place.to(x.device)] = rows
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange, source, target = ctx.options
        call = "the backward pass of cross attention"
        agree_to_begin(exchange.group, call, grad, batch=len(grad), dtype=grad.dtype)
        return _Moved.apply(grad, exchange, target, source), None, None, None
