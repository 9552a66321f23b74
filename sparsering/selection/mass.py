"""`block_mass`: softmax mass of each selected block, the training target of a block scorer."""

import torch
from torch import Tensor

from ..call_recipe import CallRecipe, checked_call
from ..checks import checked_rows, refuse_forward_mode, refuse_meta
from ..dispatch import choose
from ..operators import slot_mass
from ..ops import attend
from ..patterns.algebra import Pattern
from ..patterns.keywords import with_hints
from ..patterns.selected import selections_of


@with_hints()
@torch.no_grad()
def block_mass(
    query: Tensor,
    key: Tensor,
    pattern: Pattern,
    lse: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    scale: float | None = None,
    q_start: int | None = None,
) -> Tensor:
    """Computes the exact softmax mass of each chosen block, summed over the queries that chose it.

    `mass[r, i] = sum_{q in row r} w_q sum_{k in block indices[r, i]} e^{score_qk - lse_q}`, over
    pairs of the pattern; row r is a group of `query_block` queries. SeerAttention, DSA and MSA
    approximate this mass or train on it. It is a training target, so it has no gradient.

    Args:
        query: [B, Hq, Nq, D]; key: [B, Hkv, Nk, D].
        pattern: a pattern with exactly one `SelectedBlocks`, whose `indices` list the blocks.
        lse: [B, Hq, Nq], log of the softmax denominator, as `attention` returns it; by default it
            is computed for the whole pattern. With the lse of a joint softmax (merged with a window
            or a sink) the masses are shares of that softmax.
        weight: w, [B or 1, Hq or 1, Nq]; default 1.
        scale, q_start: as `attention`.

    Returns: [B, Hq, R, k] in the order of `indices`; 0 where an index is -1, a future block or a
        repeated block; float32 (float64 for float64 inputs).

    Raises: ValueError if an argument is invalid, or the pattern has no or several SelectedBlocks.

    Cost: one product of queries and keys over the listed blocks (on a GPU, as much as attention's
        backward), and attention's forward if `lse` is not given; memory O(R k).

    Example:
        >>> out, lse = attention(query, key, value, chosen & Causal(), return_lse=True)
        >>> mass = block_mass(query, key, chosen & Causal(), lse)
    """
    inputs, call, options = checked_call((query, key, key), pattern, scale=scale, q_start=q_start)
    selections = selections_of(pattern)
    if len(selections) != 1:
        raise ValueError(
            f"block_mass needs a pattern with one SelectedBlocks, got {len(selections)}; key_mass "
            "computes the mass of each key, for any pattern"
        )
    refuse_meta(query, key)
    refuse_forward_mode(query, key)
    query, key, _ = inputs
    backend = choose(None, (query, key, key), ("slot_bias",))
    if lse is None:
        recipe, first_channel = CallRecipe(backend, **call), key[..., :1]
        _, lse = attend(recipe, (query, key, first_channel), pattern, options)
    lse = checked_rows("lse", lse, query, broadcasts=False)
    weight = lse.new_ones(1, 1, 1) if weight is None else checked_rows("weight", weight, query)
    weight = weight.expand(lse.shape)
    text, tensors = pattern.operands
    call_of = tensors, text, call["scale"], call["q_start"], backend
    mass: Tensor = slot_mass(query, key, lse, weight, *call_of)
    return mass.unflatten(-1, selections[0].indices.shape[-2:])
