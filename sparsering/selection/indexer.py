"""The indexer of DSA: scores of single keys, and the best keys of each query, in bounded memory."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..checks import check_local, check_tensor, checked_integer_or_none, checked_scale, refuse_meta
from ..numerics import sum_dtype, without_autocast
from ..patterns.arguments import checked_flag, checked_integer
from ..patterns.keywords import with_hints

_AT_A_TIME = 1 << 22  # products computed at a time, to bound memory
_TILE = 1 << 12  # keys that are compared with the best ones at a time


@with_hints()
def index_scores(
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    indices: Tensor | None = None,
    *,
    scale: float = 1.0,
    q_start: int | None = None,
) -> Tensor:
    """Scores keys for each query: `sum_h weight[b, n, h] relu(scale q[b, h, n] . key[b, m])`.

    Args:
        query: [B, Hi, N, Di], a few index heads; key: [B, Nk, Di]; weight: [B, N, Hi].
        indices: int64 [B or 1, 1, N, k], the keys to score, -1 for none; default all keys in order.
        scale: factor of the products.
        q_start: position of the first query, as in `top_tokens`; scores do not depend on it.

    Returns: [B, 1, N, k], or [B, 1, N, Nk] without indices; float32 (float64 for float64); -inf
        where the index is -1. Differentiable in query, key and weight.

    Raises: ValueError if shapes disagree, or an index is past the keys.

    Cost: N k Hi Di products, twice with a backward; memory of the result and a bounded workspace.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), equation 1.
    """
    scale, _ = _checked(query, key, weight, scale, q_start)
    batch, heads, tokens, width = query.shape
    slots = key.shape[1]
    if indices is not None:
        check_tensor("indices", indices)
        slots = indices.shape[-1] if indices.dim() else 0
        refuse_meta(indices, named="indices")
        rows = indices.dim() == 4 and indices.shape[:3] in {(1, 1, tokens), (batch, 1, tokens)}
        fits = rows and indices.device == key.device and indices.dtype == torch.int64
        if not fits or bool((indices >= key.shape[1]).any()):
            raise ValueError(
                f"indices must be int64 [{batch} or 1, 1, {tokens}, k], keys below {key.shape[1]}, "
                f"got {indices.dtype} {tuple(indices.shape)}; top_tokens returns such"
            )
        indices = indices.expand(batch, 1, tokens, slots)[:, 0]

    def part(query: Tensor, key: Tensor, weight: Tensor, listed: Tensor | None) -> Tensor:
        if listed is None:
            return _scores(query, key[:, None].mT, weight, scale)
        entry = torch.arange(batch, device=key.device)[:, None, None]
        keys = key[entry, listed.clamp(min=0)]  # [B, n, k, Di]
        products = torch.einsum("bhnd,bnkd->bhnk", query * scale, keys).relu()
        return torch.einsum("bhnk,bnh->bnk", products, weight).masked_fill(listed < 0, -torch.inf)

    step = max(1, _AT_A_TIME // max(1, batch * slots * max(heads, 0 if indices is None else width)))
    with without_autocast(query):
        dtype = max((sum_dtype(x) for x in (query, key, weight)), key=lambda kind: kind.itemsize)
        query, key, weight = (x.to(dtype) for x in (query, key, weight))
        listed = [None] * -(-tokens // step) if indices is None else indices.split(step, 1)
        parts = [
            checkpoint(part, q, key, w, some, use_reentrant=False, preserve_rng_state=False)
            for q, w, some in zip(query.split(step, 2), weight.split(step, 1), listed, strict=True)
        ]
        return torch.cat(parts, 1)[:, None]


@with_hints()
@torch.no_grad()
def top_tokens(
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    k: int,
    *,
    causal: bool = True,
    scale: float = 1.0,
    q_start: int | None = None,
    lengths: Tensor | None = None,
    first: Tensor | None = None,
    stop: Tensor | None = None,
) -> Tensor:
    """Returns the k keys of each query with the largest `index_scores`, for `SelectedBlocks(_, 1)`.

    Args:
        query, key, weight, scale: as for `index_scores`.
        k: most keys of a query; may exceed Nk.
        causal: if True, a query sees no key past its position.
        q_start: position of the first query, default Nk - N.
        lengths: int64 [B]; entry b sees only the keys below lengths[b]. Default: all.
        first, stop: int64 [B or 1, N]; each query sees only the keys m with first <= m < stop, for
            example from the first token of its document on. Default: all.

    Returns: int64 [B, 1, N, k], by (score descending, position ascending), scores compared in
        float32, NaN last; then -1, where a query sees fewer keys. No gradient.

    Raises: ValueError if an argument is invalid.

    Cost: N Nk Hi Di products, half of them if causal; memory O(N k) and a bounded workspace.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), equation 2.
    """
    scale, start = _checked(query, key, weight, scale, q_start)
    k, causal = checked_integer("k", k, 1), checked_flag("causal", causal)
    (batch, heads, tokens, _), keys = query.shape, key.shape[1]
    if lengths is not None:
        check_tensor("lengths", lengths)
    if lengths is not None and (lengths.shape != (batch,) or lengths.dtype != torch.int64):
        raise ValueError(f"lengths must be int64 [{batch}], got {lengths.dtype} {lengths.shape}")
    for name, bound in (("first", first), ("stop", stop)):
        if bound is None:
            continue
        check_tensor(name, bound)
        if bound.shape not in {(1, tokens), (batch, tokens)} or bound.dtype != torch.int64:
            raise ValueError(
                f"{name} must be int64 [{batch} or 1, {tokens}], got {bound.dtype} "
                f"{tuple(bound.shape)}; give each query a bound of its keys"
            )
    step = max(1, _AT_A_TIME // max(1, batch * heads * min(keys, _TILE)))
    place = torch.arange(tokens, device=query.device)[None]
    end = place + (start + 1) if causal else torch.full_like(place, keys)  # of a query's keys
    for bound in (stop, None if lengths is None else lengths[:, None]):
        end = end if bound is None else torch.minimum(end, bound)
    none = torch.iinfo(torch.int64).min
    found = torch.full((batch, tokens, k), none, device=query.device)
    query, key, weight = (x.float() for x in (query, key, weight))
    for begin in range(0, tokens, step):
        rows = slice(begin, min(begin + step, tokens))
        best, visible = found[:, rows, :0], max(0, start + rows.stop) if causal else keys
        for tile in range(0, min(keys, visible), _TILE):
            here = torch.arange(tile, min(tile + _TILE, keys), device=query.device)
            of_tile = key[:, None, tile : tile + _TILE].mT
            scores = _scores(query[:, :, rows], of_tile, weight[:, rows], scale) + 0.0  # no -0.0
            bits = scores.view(torch.int32).long()  # in the order of the scores, once flipped:
            bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
            bits = bits.masked_fill(scores.isnan(), -(1 << 31))
            ranked = bits * (1 << 32) + ((1 << 32) - 1 - here)  # equal scores: first position first
            ranked = ranked.masked_fill(here >= end[:, rows, None], none)
            if first is not None:
                ranked = ranked.masked_fill(here < first[:, rows, None], none)
            best = torch.cat((best, ranked), 2)
            best = best.topk(min(k, best.shape[2])).values
        found[:, rows, : best.shape[2]] = best
    place = (1 << 32) - 1 - (found & ((1 << 32) - 1))
    return torch.where(found == none, -1, place)[:, None]


def _scores(query: Tensor, keys: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Scores [B, n, m] of queries [B, Hi, n, Di] for keys [B, 1, Di, m]."""
    return torch.einsum("bhnm,bnh->bnm", (query * scale @ keys).relu(), weight)


def _checked(
    query: Tensor, key: Tensor, weight: Tensor, scale: float, q_start: int | None
) -> tuple[float, int]:
    """Returns (scale, position of the first query); ValueError if shapes disagree."""
    for name, x in (("query", query), ("key", key), ("weight", weight)):
        check_tensor(name, x)
        check_local(name, x)
        refuse_meta(x, named=name)
    shapes = [tuple(x.shape) for x in (query, key, weight)]
    batch, heads, tokens, width = shapes[0] if len(shapes[0]) == 4 else (0, 0, 0, 0)
    wanted = (batch, heads, tokens, width), (batch, *shapes[1][1:2], width), (batch, tokens, heads)
    floats = all(x.is_floating_point() for x in (query, key, weight))
    if shapes != list(wanted) or not floats or {x.device for x in (key, weight)} != {query.device}:
        raise ValueError(
            "query [B, Hi, N, Di], key [B, Nk, Di] and weight [B, N, Hi] must be floating point "
            f"and agree, got {shapes}; the index key has no heads"
        )
    start = checked_integer_or_none("q_start", q_start)
    return checked_scale(scale, query), key.shape[1] - tokens if start is None else start
