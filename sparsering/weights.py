"""Attention weights, on the visited blocks or summed over queries: for inspection, not training."""

import itertools
from dataclasses import dataclass
from typing import Never

import torch
from torch import Tensor
from torch.nn.functional import pad

from .checks import checked_rows, refuse_forward_mode, refuse_tracers
from .ground.keywords import class_with_hints
from .ground.numerics import capped, entry_of_distance, finite_or_zero, sum_dtype, without_autocast
from .kernels.backends import choose
from .layouts.layout import BlockLayout
from .patterns.algebra import Pattern
from .patterns.tree import distance_positions
from .route.decision import Decision, checked_call
from .route.options import refuse_options
from .route.run import attend, value_gradient

_OPTIONS = ("scale", "q_start", "block_size", "block_bias", "softcap", "distance_bias", "sink")
_REFUSED = {  # why `attention_weights` and `key_mass` do not take other options of `attention`
    "dropout_p": "they compute the softmax's weights, before dropout",
    "dropout_seed": "they compute the softmax's weights, before dropout",
    "slot": "it needs the slots of a selection; block_mass computes the mass of its blocks",
}


@class_with_hints
@dataclass(frozen=True, eq=False, repr=False)
class BlockWeights:
    """Holds attention weights, on the visited blocks only.

    Attributes:
        values: [B, H, num_blocks, block, block], ordered as `layout.entries`; zero for no pair.
        layout: the layout that lists the blocks.
    """

    values: Tensor
    layout: BlockLayout

    def __repr__(self) -> str:
        return f"<BlockWeights {tuple(self.values.shape)} of {self.layout!r}>"

    def to_dense(self) -> Tensor:
        """Returns dense weights [B, H, Nq, Nk]; rows sum to 1, or to 0 if they have no key.

        For a pair in several branches, sums its weights. With a sink, rows sum to less than 1.
        """
        frame = self.layout.frame
        batch, heads = self.values.shape[:2]
        tables = []
        for b, h in itertools.product(range(batch), range(heads)):
            # an extra row and column receive the weights of ragged tiles' padding
            dense = self.values.new_zeros(frame.q_len + 1, frame.kv_len + 1)
            for first, q, k, _ in self.layout.visits(b, h):
                part = self.values[b, h, first : first + len(q)]
                dense = dense.index_put((q[:, :, None], k[:, None]), part, accumulate=True)
            tables.append(dense[:-1, :-1])
        return _stacked(tables, self.values.new_zeros(batch, heads, frame.q_len, frame.kv_len))


def attention_weights(
    query: Tensor,
    key: Tensor,
    pattern: Pattern,
    *,
    scale: float | None = None,
    q_start: int | None = None,
    block_size: int | None = None,
    block_bias: Tensor | None = None,
    softcap: float | None = None,
    distance_bias: Tensor | None = None,
    sink: Tensor | None = None,
    **others: Never,
) -> BlockWeights:
    """Computes the softmax weights of `attention`, on the visited blocks; differentiable.

    Args:
        query, key, pattern: as `attention`.
        scale, q_start, block_bias, softcap, distance_bias, sink: as `attention`.
        block_size: as `pattern.layout`.

    Returns: `BlockWeights` in float32 (float64 for float64 inputs). With a sink, rows sum to less
        than 1: the sink has the rest.

    Raises: as `attention`.

    Cost: memory O(B H num_blocks block_size^2).

    Example:
        >>> weights = attention_weights(query, key, SlidingWindow(256) & Causal())
        >>> blocks = weights.values[0, 0]  # [num_blocks, block, block], in layout.entries' order
        >>> dense = weights.to_dense()  # [B, H, Nq, Nk], for short sequences
    """
    refuse_options("attention_weights", others, _OPTIONS, _REFUSED)
    call = checked_call(
        (query, key, key),
        pattern,
        scale=scale,
        q_start=q_start,
        block_size=block_size,
        block_bias=block_bias,
        softcap=softcap,
        distance_bias=distance_bias,
        sink=sink,
    )
    refuse_tracers(query, key)
    query, key, options = call.query, call.key, call.options
    with without_autocast(query):
        _, lse = attend(call, Decision.of(call, choose(None, call.inputs, options.in_use)))
        (heads, q_len), (kv_heads, kv_len) = query.shape[1:3], key.shape[1:3]
        counts = {"num_heads": heads, "num_kv_heads": kv_heads, "q_start": call.q_start}
        layout = pattern.layout(q_len, kv_len, **counts, block_size=block_size, device=query.device)
        group = heads // max(1, kv_heads)
        # the padding of ragged tiles reads an extra row of zeros
        q, k = (pad(x.to(lse.dtype), (0, 0, 0, 1)) for x in (query, key))
        lse = pad(finite_or_zero(lse), (0, 1))
        positions = distance_positions(pattern, layout.frame)
        position, key_position = (
            pad(x.to(lse.device), (0, 1)).expand(len(query), -1) for x in positions
        )
        batch, blocks, size = len(query), layout.num_blocks, layout.block_size
        bias, table = options["block_bias"], options["distance_bias"]
        tables = []
        for b, h in itertools.product(range(batch), range(heads)):
            weights, missing = [], blocks
            for first, rows, columns, cells in layout.visits(b, h):
                score = call.scale * (q[b, h, rows] @ k[b, h // group, columns].mT)
                score = capped(score, options["softcap"])
                if table is not None:
                    distance = key_position[b, columns][:, None] - position[b, rows][..., None]
                    score = score + table[b, h, entry_of_distance(distance, table)]
                if bias is not None:
                    score = score + bias[b, h, first : first + len(rows), None, None]
                shifted = torch.where(cells, score - lse[b, h, rows][..., None], -torch.inf)
                weights.append(shifted.exp())
                missing -= len(rows)
            tables.append(torch.cat((*weights, lse.new_zeros(missing, size, size))))
        zeros = lse.new_zeros(batch, heads, blocks, size, size)
        return BlockWeights(_stacked(tables, zeros), layout)


def _stacked(tables: list[Tensor], zeros: Tensor) -> Tensor:
    """Joins a table for each batch entry and head into the shape of `zeros`; none give `zeros`."""
    return torch.stack(tables).view(zeros.shape) if tables else zeros


@torch.no_grad()
def key_mass(
    query: Tensor,
    key: Tensor,
    pattern: Pattern,
    lse: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    scale: float | None = None,
    q_start: int | None = None,
    block_size: int | None = None,
    block_bias: Tensor | None = None,
    softcap: float | None = None,
    distance_bias: Tensor | None = None,
    sink: Tensor | None = None,
    **others: Never,
) -> Tensor:
    """Computes the attention that each key receives: the softmax weights, summed over the queries.

    `mass_k = sum_q w_q m(q, k) e^{s_qk - lse_q}`, w is `weight`, m(q, k) the number of branches
    with the pair. No weights are stored. Queries without keys add nothing. With `weight` 1, results
    of a head sum to the number of queries with keys, less the sink's share. No gradient.

    Args:
        query: [B, Hq, Nq, D].
        key: [B, Hkv, Nk, D].
        pattern: a mask or a mixture; a key in several branches receives from each of them.
        lse: [B, Hq, Nq], as `attention` returns it, with any sink included; default the lse of this
            pattern, which is then computed. With the lse of a wider pattern, the results are the
            share of its softmax that falls on the pairs of this pattern.
        weight: [B or 1, Hq or 1, Nq], the factor of each query in the sum; default 1. For a class
            token, pass only its query, with its q_start.
        scale, q_start, block_size, block_bias, softcap, distance_bias, sink: as `attention`.

    Returns: [B, Hq, Nk], float32 (float64 for float64 inputs), computed in that dtype.

    Raises: ValueError if an argument is invalid, or with both sink and lse, which includes it.

    Cost: the time of attention's backward without values, and a forward without lse; memory O(N).

    Example:
        >>> out, lse = attention(query, key, value, pattern, return_lse=True)
        >>> heat = key_mass(query, key, pattern, lse).mean(1)  # [B, Nk]
    """
    refuse_options("key_mass", others, ("lse", "weight", *_OPTIONS), _REFUSED)
    if sink is not None and lse is not None:
        raise ValueError(
            "expected sink or lse, got both; the lse that attention returns includes the sink"
        )
    call = checked_call(
        (query, key, key),
        pattern,
        scale=scale,
        q_start=q_start,
        block_size=block_size,
        block_bias=block_bias,
        softcap=softcap,
        distance_bias=distance_bias,
        sink=sink,
    )
    refuse_tracers(query, key)
    refuse_forward_mode("attention_weights", query, key)
    dtype = sum_dtype(query)
    query, key = call.query.to(dtype), call.key.to(dtype)
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = query.shape, key.shape
    group = heads // max(1, kv_heads)
    backend = choose(None, (query, key, key), call.options.in_use)
    call = call._replace(query=query, key=key, value=key[..., :1])
    if lse is None:
        _, lse = attend(call, Decision.of(call, backend))
    lse = checked_rows("lse", lse, query, broadcasts=False)
    each = query.new_ones(1, 1, 1) if weight is None else checked_rows("weight", weight, query)
    # grad_out has one channel for each query head of a group, to keep the sums of the heads apart
    channel = torch.eye(group, dtype=dtype, device=query.device).repeat(kv_heads, 1)[:, None]
    grad_out = (each[..., None] * channel).expand(batch, heads, q_len, group).contiguous()
    value = query.new_zeros(*key.shape[:3], group)
    call = call._replace(value=value, options=call.options.changed(sink=None))
    mass = value_gradient(call, backend, lse, grad_out)
    return mass.transpose(2, 3).reshape(batch, heads, kv_len)
