"""How much of the softmax falls on each block that a selection lists: the teacher of a scorer."""

import torch
from torch import Tensor

from ..checks import checked_rows, refuse_forward_mode, refuse_meta
from ..dispatch import choose
from ..functional import checked_call
from ..ops import attend, slot_mass
from ..patterns.algebra import Pattern
from ..patterns.selected import selections_of


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
    """The exact softmax mass of each listed block, summed over the queries of its row.

    `mass[r, s] = sum_{q in row r} w_q sum_{k in block of slot s} e^{s_qk - lse_q}`, over the pairs
    of the pattern alone. What SeerAttention, DSA and MSA approximate or train on; no gradient, for
    it is a teacher.

    Args:
        query: [B, Hq, Nq, D]; key: [B, Hkv, Nk, D].
        pattern: with one `SelectedBlocks`, whose slots are told of.
        lse: [B, Hq, Nq] of the softmax that masses are shares of, as `attention` returns it;
            default the whole pattern's own, computed. That of a joint softmax (merged with a window
            or a sink) tells the share in it.
        weight: [B or 1, Hq or 1, Nq], of each query; default 1.
        scale, q_start: as `attention`.

    Returns: [B, Hq, R, k] in the order of the slots, 0 for those that list nothing, a future block
        or one again; float32 (float64 for float64 inputs).

    Raises: ValueError where arguments do not fit, or the pattern has not one SelectedBlocks.

    Cost: one product of queries and keys over the listed blocks, and attention's forward where no
        lse is given; memory O(R k) (on a GPU a backward, until a kernel is measured there).

    Example:
        >>> out, lse = attention(query, key, value, chosen & Causal(), return_lse=True)
        >>> mass = block_mass(query, key, chosen & Causal(), lse)
    """
    inputs, call, options = checked_call(query, key, key, pattern, scale=scale, q_start=q_start)
    selections = selections_of(pattern)
    if len(selections) != 1:
        raise ValueError(
            f"block_mass needs a pattern with one SelectedBlocks, got {len(selections)}; key_mass "
            "tells the mass of keys for any pattern"
        )
    refuse_meta(query, key)
    refuse_forward_mode(query, key)
    query, key, _ = inputs
    backend = choose(None, (query, key, key), {"slot_bias": True})
    if lse is None:
        _, lse = attend(backend, query, key, key[..., :1], pattern, **call, options=options)
    lse = checked_rows("lse", lse, query, broadcasts=False)
    each = lse.new_ones(1, 1, 1) if weight is None else checked_rows("weight", weight, query)
    each = each.expand(lse.shape)
    spelt = pattern.tensors, pattern.expression, call["scale"], call["q_start"]
    mass: Tensor = slot_mass(query, key, lse, each, *spelt, backend)
    return mass.unflatten(-1, selections[0].indices.shape[-2:])
