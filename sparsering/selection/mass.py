"""`block_mass`: the softmax mass of each selected block, which is a block scorer's target."""

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import check_tensor, checked_rows, refuse_forward_mode, refuse_meta
from ..ground.keywords import with_hints
from ..kernels.backends import choose
from ..patterns.algebra import Pattern
from ..patterns.selected import selections_of
from ..route.decision import Decision, checked_call
from ..route.operators import slot_mass
from ..route.run import attend
from .over_ranks import agreed, check_own_tokens, checks_of_a_rank, first_rows, of_all_ranks


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
    group: dist.ProcessGroup | None = None,
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
        group: ranks that share the sequence, contiguously: each passes its own queries, keys, lse
            and weights, and a pattern with its own rows, as for `ring_attention`.

    Returns: [B, Hq, R, k] in the order of `indices`; 0 where an index is -1, a future block or a
        repeated block; float32 (float64 for float64 inputs).

    Raises: ValueError if an argument is invalid, or the pattern has no or several SelectedBlocks.
        Over ranks, RingMismatchError (a ValueError) on all if ranks differ, and RingError if a
        peer died.

    Cost: one product of queries and keys over the listed blocks (on a GPU, as much as attention's
        backward), and attention's forward if `lse` is not given; memory O(R k).
        Over ranks each one receives the keys of the whole sequence, and has them in memory.

    Example:
        >>> out, lse = attention(query, key, value, chosen & Causal(), return_lse=True)
        >>> mass = block_mass(query, key, chosen & Causal(), lse)
    """
    if group is not None and group.size() > 1:
        key, q_start = _keys_of_ranks(query, key, lse, scale, q_start, group)
    call = checked_call((query, key, key), pattern, scale=scale, q_start=q_start)
    selections = selections_of(pattern)
    if len(selections) != 1:
        raise ValueError(
            f"block_mass needs a pattern with one SelectedBlocks, got {len(selections)}; key_mass "
            "computes the mass of each key, for any pattern"
        )
    refuse_meta(query, key)
    refuse_forward_mode("block_mass", query, key)
    query, key = call.query, call.key
    backend = choose(None, (query, key, key), ("slot_bias",))
    if lse is None:
        first_channel = call._replace(value=key[..., :1])
        _, lse = attend(first_channel, Decision.of(call, backend))
    lse = checked_rows("lse", lse, query, broadcasts=False)
    weight = lse.new_ones(1, 1, 1) if weight is None else checked_rows("weight", weight, query)
    weight = weight.expand(lse.shape)
    text, tensors = pattern.operands
    call_of = tensors, text, call.scale, call.q_start, backend
    mass: Tensor = slot_mass(query, key, lse, weight, *call_of)
    return mass.unflatten(-1, selections[0].indices.shape[-2:])


def _keys_of_ranks(
    query: Tensor,
    key: Tensor,
    lse: Tensor | None,
    scale: float | None,
    q_start: int | None,
    group: dist.ProcessGroup,
) -> tuple[Tensor, int]:
    """Returns (keys of all ranks [B, Hkv, N, D], position of this rank's first query)."""
    with checks_of_a_rank(group, query):
        for name, x in (("query", query), ("key", key)):
            check_tensor(name, x, "[B, H, N, D]")
            if x.dim() != 4:
                raise ValueError(f"{name} must be [B, H, N, D], got {tuple(x.shape)}")
        check_own_tokens("block_mass", query.shape[2], key.shape[2], q_start)
    common: dict[str, object] = {
        "scale": scale,
        "batch size, heads and width": (*query.shape[:2], key.shape[1], query.shape[3]),
        "dtype": key.dtype,
        "lse": lse is None,
    }
    (counts,) = agreed("block_mass", group, query, common, key.shape[2])
    whole = of_all_ranks(key.transpose(1, 2), counts, group, "keys")
    return whole.transpose(1, 2), first_rows(counts)[group.rank()]
