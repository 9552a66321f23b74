"""Calls of the backend `reference`: dense attention in plain torch, differentiable at any order."""

import torch
from torch import Tensor

from ...call import Call
from ...ground.numerics import entry_of_distance, finite_or_zero, sum_dtype
from ..over_pairs import over_pairs
from .formula import reference_attention
from .pairs import distances_op, kept_by_branch, pair_counts_op, places_op

EXTRAS = frozenset(
    {
        *("block_bias", "softcap", "distance_bias", "sink", "dropout_p", "dropout_seed"),
        "score_mod",
        "coordinate_bias",
    }
)
"""Options of a call, other than its scale, that this backend computes."""


def run(call: Call, _: object = None) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a call by the pattern's definition.

    A layout is used only to number the blocks that a block bias refers to.
    """
    query, key, _ = call.inputs
    dtype, factor = sum_dtype(query), None
    text, operands = call.pattern.operands
    pairs = query.detach(), key.detach(), operands, text, call.q_start
    rest = dict(call.options.in_use)
    names = "block_bias", "slot_bias", "dropout_p", "dropout_seed", "distance_bias", "score_mod"
    block_bias, slot_bias, p, seed, distance_bias, score_mod = (rest.pop(x, None) for x in names)
    if block_bias is None and slot_bias is None:
        counts = pair_counts_op(*pairs).to(dtype)
        log_counts = counts.log()
        if p is not None:
            factor = pair_counts_op(*pairs, p, seed).to(dtype) / counts.clamp(min=1)
    else:
        if block_bias is not None:
            biased = places_op(*pairs, call.block_size, block_bias.shape[-1]), block_bias.to(dtype)
        elif slot_bias is not None:  # index 0 is a bias of 0, for pairs in no listed block
            biased = places_op(*pairs), torch.nn.functional.pad(slot_bias.to(dtype), (1, 0))
        log_counts = _log_biased_counts(*biased)
        if p is not None:
            kept = kept_by_branch(call.pattern, call.frame, p, seed).to(query.device)
            factor = (_log_biased_counts(*biased, kept) - finite_or_zero(log_counts)).exp()
    if factor is not None:
        factor = factor / (1 - p)
    if distance_bias is not None:
        entry = entry_of_distance(distances_op(*pairs), distance_bias)  # [B, 1, Nq, Nk]
        batch, head = (torch.arange(n, device=query.device) for n in query.shape[:2])
        distance_bias = distance_bias.to(dtype)[
            batch[:, None, None, None], head[:, None, None], entry
        ]
    rest |= {"distance_bias": distance_bias, "dropout_factor": factor}
    if score_mod is not None:
        sizes = (*query.shape[:3], key.shape[2])
        batch, head, row, column = (torch.arange(n, device=query.device) for n in sizes)
        places = (
            batch,
            head.expand(sizes[:2]),
            row.expand(sizes[0], -1),
            column.expand(sizes[0], -1),
        )
        rest["changed"] = lambda score, pairs: over_pairs(score_mod.function, score, *places, pairs)
    return reference_attention(*call.inputs, log_counts, call.scale, **rest)


def _log_biased_counts(number: Tensor, block_bias: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns log(sum of e^bias) over the branches that have a pair: [B, Hq, Nq, Nk].

    `number` [branches, B, Hq, Nq, Nk] is the index of each pair's bias in `block_bias`, or -1 for
    no pair. Pairs where `mask` is False do not count.
    """
    block_bias = torch.nn.functional.pad(block_bias, (0, 1))  # gather fails on an empty dim
    flat = block_bias[None, :, :, None].expand(len(number), -1, -1, number.shape[3], -1)
    counted = number >= 0 if mask is None else (number >= 0) & mask
    bias = torch.where(number >= 0, flat.gather(-1, number.clamp(min=0)), -torch.inf)
    highest = finite_or_zero(bias.detach().amax(0))
    total = torch.where(counted, (bias - highest).exp(), 0.0).sum(0)
    empty = total == 0
    return torch.where(empty, -torch.inf, highest + torch.where(empty, 1.0, total).log())
