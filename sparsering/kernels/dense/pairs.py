"""Operators of the reference backend: dense tensors over all pairs, by a pattern's definition."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...call import frame_of
from ...checks import check_batch, check_bias, refuse_mapped_pattern
from ...ground.dropout import kept_pairs
from ...ground.namespace import NAMESPACE
from ...layouts.cache import layout_cache
from ...patterns.algebra import Frame, Pattern, check_fits
from ...patterns.expression import parse
from ...patterns.selected import selections_of
from ...patterns.tree import check_distances, distance_positions


def kept_by_branch(pattern: Pattern, frame: Frame, p: float, seed: Tensor) -> Tensor:
    """Returns which weights dropout keeps: bool [branches, B, Hq, Nq, Nk].

    `seed` is [B, streams]; `Pattern.coordinates` says which stream each query uses.
    """
    query, key, stream = pattern.coordinates(frame)
    stream = stream.to(seed.device)
    row_seed = seed[:, stream][:, None, :, None]  # [B, 1, Nq, 1]
    head = torch.arange(frame.num_heads, device=seed.device)[:, None, None]
    branch = torch.arange(len(pattern.branches), device=seed.device).view(-1, 1, 1, 1, 1)
    query, key = query.to(seed.device)[:, None], key.to(seed.device)
    return kept_pairs(row_seed, p, head, query, key, branch)


@torch.library.custom_op(f"{NAMESPACE}::pair_counts", mutates_args=())
def pair_counts_op(
    query: Tensor,
    key: Tensor,
    tensors: Sequence[Tensor],
    pattern: str,
    q_start: int,
    dropout_p: float | None = None,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    """Counts in how many branches each pair attends (and survives dropout): [B, Hq, Nq, Nk]."""
    value = parse(pattern, tensors)
    check_batch(value, query.shape[0])
    frame = frame_of(query, key, q_start)
    shape = (*query.shape[:3], key.shape[2])
    if dropout_p is None or dropout_seed is None:
        return _dense(value, frame).to(query.device).expand(shape).contiguous()
    counts = torch.zeros(shape, dtype=torch.int64, device=query.device)
    masks = kept_by_branch(value, frame, dropout_p, dropout_seed).to(query.device)
    for branch, mask in zip(value.branches, masks, strict=True):
        counts += _dense(branch, frame).to(query.device) * mask
    return counts


def _dense(pattern: Pattern, frame: Frame) -> Tensor:
    """Returns how often each pair attends under a pattern: int64 [B or 1, H or 1, Nq, Nk]."""
    q_len, kv_len, num_heads, num_kv_heads, q_start = frame
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return pattern.to_dense(q_len, kv_len, **heads, q_start=q_start).to(torch.int64)


@torch.library.custom_op(f"{NAMESPACE}::places_of_pairs", mutates_args=())
def places_op(
    query: Tensor,
    key: Tensor,
    tensors: Sequence[Tensor],
    pattern: str,
    q_start: int,
    block_size: int | None = None,
    blocks: int = 0,
) -> Tensor:
    """Returns the index of each pair's bias, int64 [branches, B, Hq, Nq, Nk]; -1 if none attends.

    With a block size, it is the index of the pair's tiles in the layout's `entries`, of which there
    must be `blocks`. Without, it is 1 + the slot at which the selection lists the pair's block, an
    index in the flattened [R, k]; 0 if no slot does.
    """
    value, frame = parse(pattern, tensors), frame_of(query, key, q_start)
    check_batch(value, len(query))
    check_fits(value, frame)
    table = torch.full((len(value.branches), *query.shape[:3], frame.kv_len), -1)
    if block_size is not None:
        layout = layout_cache.layout(value, frame, block_size, query.device)
        check_bias(blocks, layout)
        for one, entry in zip(layout.passes, layout.entry_of_pairs(len(query)), strict=True):
            table[one.branch] = torch.maximum(table[one.branch], entry)  # a pair is in one pass
        return table.to(query.device)
    p = torch.arange(q_start, q_start + frame.q_len)[:, None]
    k = torch.arange(frame.kv_len)
    for number, branch in enumerate(value.branches):
        selections = selections_of(branch)
        for b, h in itertools.product(range(len(query)), range(frame.num_heads)):
            pairs = branch.at(b, h, frame).holds(p, k, frame)
            slots = [s.slot_of_pairs(p, k, b, h, frame) + 1 for s in selections]
            table[number, b, h] = torch.where(pairs, slots[0] if slots else 0, -1)
    return table.to(query.device)


@torch.library.custom_op(f"{NAMESPACE}::distances", mutates_args=())
def distances_op(
    query: Tensor, key: Tensor, tensors: Sequence[Tensor], pattern: str, q_start: int
) -> Tensor:
    """Returns the key position minus the query position of every pair, int64 [B, 1, Nq, Nk]."""
    value = parse(pattern, tensors)
    check_distances(value)
    position, key_position = distance_positions(value, frame_of(query, key, q_start))
    distance = key_position[:, None, None] - position[:, None, :, None]
    return distance.expand(len(query), -1, -1, -1).to(query.device, copy=True)


@pair_counts_op.register_fake
def _(query: Tensor, key: Tensor, *rest: object) -> Tensor:
    return query.new_empty(*query.shape[:3], key.shape[2], dtype=torch.int64)


@places_op.register_fake
def _(query: Tensor, key: Tensor, tensors: Sequence[Tensor], pattern: str, *_: object) -> Tensor:
    branches = len(parse(pattern, tensors).branches)
    return query.new_empty(branches, *query.shape[:3], key.shape[2], dtype=torch.int64)


@distances_op.register_fake
def _(query: Tensor, key: Tensor, *rest: object) -> Tensor:
    shape = len(query), 1, query.shape[2], key.shape[2]
    return query.new_empty(shape, dtype=torch.int64)


def _of_lengths(operator: Any) -> Callable[..., tuple[Tensor, None]]:
    """Returns a vmap rule for operators that use the shapes of query and key, but no values.

    The rule calls the operator once, on one item of the mapped dim, because all items give equal
    results.
    """

    def rule(info: Any, in_dims: Any, query: Tensor, key: Tensor, *rest: Any) -> Any:
        refuse_mapped_pattern(in_dims[2])
        if any(dim is not None for dim in in_dims[5:]):
            raise NotImplementedError(
                "vmap cannot map over dropout_seed with backend='reference'; pass another backend"
            )
        pairs = zip((query, key), in_dims, strict=False)
        query, key = (x if dim is None else x.select(dim, 0) for x, dim in pairs)
        return operator(query, key, *rest), None

    return rule


pair_counts_op.register_vmap(_of_lengths(pair_counts_op))
distances_op.register_vmap(_of_lengths(distances_op))
