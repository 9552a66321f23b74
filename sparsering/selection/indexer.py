"""The indexer of DSA (DeepSeek sparse attention): scores single keys, and lists the best ones."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..checks import (
    check_local,
    check_tensor,
    checked_integer_or_none,
    checked_scale,
    refuse_meta,
)
from ..ground.arguments import checked_flag, checked_integer
from ..ground.keywords import with_hints
from ..ground.numerics import sum_dtype, without_autocast
from .bounds import check_bounds
from .over_ranks import agreed, check_own_tokens, checks_of_a_rank, first_rows, of_all_ranks
from .query_rows import at_a_time

_AT_A_TIME = 1 << 22  # products computed at a time on a CPU, to bound memory
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
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scores keys for each query: `sum_h weight[b, n, h] relu(scale q[b, h, n] . key[b, m])`.

    Args:
        query: [B, Hi, N, Di], a few index heads; key: [B, Nk, Di]; weight: [B, N, Hi].
        indices: int64 [B or 1, 1, N, k], the keys to score, -1 for none; default all keys in order.
        scale: factor of the products.
        q_start: position of the first query, as in `top_tokens`; scores do not depend on it.
        group: ranks that share the sequence, as in `top_tokens`. Indices are of the whole sequence,
            and Nk is its length. Every rank also calls backward, which returns the gradients of
            keys to their owners.

    Returns: [B, 1, N, k], or [B, 1, N, Nk] without indices; float32 (float64 for float64); -inf
        where the index is -1. Differentiable in query, key and weight.

    Raises: ValueError if shapes disagree, or an index is past the keys; a GPU, for which the host
        does not wait, fails later for such an index, as torch's own indexing does. Over ranks,
        RingMismatchError (a ValueError) on all if one raised, and RingError if a peer died.

    Cost: N k Hi Di products, twice with a backward; memory of the result and a bounded workspace,
        and over ranks of the whole sequence's index keys, which each rank receives.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), equation 1.
    """
    if group is not None and group.size() > 1:
        key = _keys_of_ranks(query, key, weight, indices, scale, q_start, group)
    scale, _ = _checked(query, key, weight, scale, q_start)
    batch, heads, tokens, width = query.shape
    slots = key.shape[1]
    if indices is not None:
        _check_indices(indices, query, key.shape[1])
        slots = indices.shape[3]
        indices = indices.expand(batch, 1, tokens, slots)[:, 0]

    def part(query: Tensor, key: Tensor, weight: Tensor, listed: Tensor | None) -> Tensor:
        if listed is None:
            return _scores(query, key[:, None].mT, weight, scale)
        entry = torch.arange(batch, device=key.device)[:, None, None]
        keys = key[entry, listed.clamp(min=0)]  # [B, n, k, Di]
        products = torch.einsum("bhnd,bnkd->bhnk", query * scale, keys).relu()
        return torch.einsum("bhnk,bnh->bnk", products, weight).masked_fill(listed < 0, -torch.inf)

    products = batch * slots * max(heads, 0 if indices is None else width)  # per query
    step = max(1, at_a_time(_AT_A_TIME, query.device) // max(1, products))
    with without_autocast(query):
        dtype = max((sum_dtype(x) for x in (query, key, weight)), key=lambda kind: kind.itemsize)
        query, key, weight = (x.to(dtype) for x in (query, key, weight))
        listed = [None] * max(1, -(-tokens // step)) if indices is None else indices.split(step, 1)
        parts = [
            checkpoint(part, q, key, w, some, use_reentrant=False, preserve_rng_state=False)
            for q, w, some in zip(query.split(step, 2), weight.split(step, 1), listed, strict=True)
        ]
        return torch.cat(parts, 1)[:, None]


def _keys_of_ranks(
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    indices: Tensor | None,
    scale: float,
    q_start: int | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Gathers the index keys [B, N, Di] of all ranks, after all ranks' arguments were compared.

    If the check of one rank fails, all ranks raise.
    """
    with checks_of_a_rank(group, query):
        _checked(query, key, weight, scale, q_start)
        check_own_tokens("index_scores", query.shape[2], key.shape[1], q_start)
        if indices is not None:
            _check_indices(indices, query)
    common: dict[str, object] = {
        "scale": scale,
        "batch size, index heads and width": (*query.shape[:2], query.shape[3]),
        "dtype": key.dtype,
        "gradient of keys": torch.is_grad_enabled() and key.requires_grad,
    }
    most = int(indices.max()) if indices is not None and indices.numel() else -1
    counts, highest = agreed("index_scores", group, query, common, key.shape[1], most)
    if max(highest) >= sum(counts):  # the numbers are equal on all ranks, so all raise this
        raise ValueError(
            f"indices must be below {sum(counts)}, the tokens of all ranks, got {max(highest)} on "
            f"rank {highest.index(max(highest))}; top_tokens returns such"
        )
    return of_all_ranks(key, counts, group, "index keys")


def _check_indices(indices: Tensor, query: Tensor, keys: int | None = None) -> None:
    """Raises ValueError unless `indices` [B or 1, 1, N, k] are int64 below the number of keys."""
    check_tensor("indices", indices)
    refuse_meta(indices, named="indices")
    batch, _, tokens, _ = query.shape
    rows = indices.dim() == 4 and indices.shape[:3] in {(1, 1, tokens), (batch, 1, tokens)}
    fits = rows and indices.device == query.device and indices.dtype == torch.int64
    past = False
    if fits and keys is not None:
        all_exist = (indices < keys).all()
        # reading the result would wait for the GPU, so the GPU itself stops the process
        if indices.is_cuda:
            torch._assert_async(all_exist, f"indices must be keys below {keys}")
        else:
            past = not bool(all_exist)
    if not fits or past:
        below = "" if keys is None else f", keys below {keys}"
        raise ValueError(
            f"indices must be int64 [{batch} or 1, 1, {tokens}, k]{below}, got {indices.dtype} "
            f"{tuple(indices.shape)}; top_tokens returns such"
        )


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
    group: dist.ProcessGroup | None = None,
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
        group: ranks that share the sequence, contiguously; None: this process has it all. Each
            passes the queries, keys and weights of its own tokens, in the order of the ranks, and
            `first` and `stop` of its queries. Positions, `lengths` and results are of the whole
            sequence. All ranks make the call, with equal other arguments.

    Returns: int64 [B, 1, N, k], by (score descending, position ascending), scores compared in
        float32, NaN last; then -1, where a query sees fewer keys. No gradient.

    Raises: ValueError if an argument is invalid. Over ranks, RingMismatchError (a ValueError) on
        all if arguments differ or one raised, and RingError if a peer died.

    Cost: N Nk Hi Di products, half of them if causal; memory O(N k) and a bounded workspace. Over
        ranks, a rank receives the keys of one other rank at a time, of earlier ranks if causal.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), equation 2.
    """
    if group is not None and group.size() > 1:
        return _top_tokens_of_ranks(
            query, key, weight, k, causal, scale, q_start, lengths, first, stop, group
        )
    scale, start = _checked(query, key, weight, scale, q_start)
    k, causal = checked_integer("k", k, 1), checked_flag("causal", causal)
    _check_bounds(query, lengths, first, stop)
    best = _Best(query, weight, scale, k, causal, start, key.shape[1], lengths, first, stop)
    best.add(key, 0)
    return best.keys()


def _top_tokens_of_ranks(
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    k: int,
    causal: bool,
    scale: float,
    q_start: int | None,
    lengths: Tensor | None,
    first: Tensor | None,
    stop: Tensor | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Implements `top_tokens` over ranks: each sends its keys in turn, and all keep the best."""
    from ..distributed.exchange import Exchange  # slow, so `import sparsering` must not load it

    with checks_of_a_rank(group, query):
        scale, _ = _checked(query, key, weight, scale, q_start)
        k, causal = checked_integer("k", k, 1), checked_flag("causal", causal)
        _check_bounds(query, lengths, first, stop)
        check_own_tokens("top_tokens", query.shape[2], key.shape[1], q_start)
    common: dict[str, object] = {
        "k": k,
        "causal": causal,
        "scale": scale,
        "lengths": lengths,
        "batch size, index heads and width": (*query.shape[:2], query.shape[3]),
        "dtype": key.dtype,
    }
    (counts,) = agreed("top_tokens", group, query, common, key.shape[1])
    exchange, starts = Exchange(group, None, query.device), first_rows(counts)
    with exchange.break_on_error():
        start, whole = starts[exchange.rank], sum(counts)
        best = _Best(query, weight, scale, k, causal, start, whole, lengths, first, stop)
        for owner, count in enumerate(counts):
            takers = range(owner + 1 if causal else 0, len(counts))
            sends, receives = {}, {}
            if owner == exchange.rank:
                sends = {r: key.contiguous() for r in takers if r != owner and counts[r]}
            elif exchange.rank in takers and counts[exchange.rank]:
                receives = {owner: key.new_empty(len(key), count, key.shape[2])}
            exchange.start(f"index keys of rank {owner}", sends, receives).wait()
            if owner == exchange.rank or receives:
                best.add(receives.get(owner, key), starts[owner])
    return best.keys()


def _check_bounds(
    query: Tensor, lengths: Tensor | None, first: Tensor | None, stop: Tensor | None
) -> None:
    """Raises ValueError unless `lengths`, `first` and `stop` are int64 with a fitting shape."""
    batch, _, tokens, _ = query.shape
    if lengths is not None:
        check_tensor("lengths", lengths)
    if lengths is not None and (lengths.shape != (batch,) or lengths.dtype != torch.int64):
        raise ValueError(f"lengths must be int64 [{batch}], got {lengths.dtype} {lengths.shape}")
    check_bounds(batch, tokens, first=first, stop=stop)


_NONE = torch.iinfo(torch.int64).min


class _Best:
    """The k best keys of each query so far; keys are added some at a time, to bound memory.

    Its upper half orders scores. Its lower half counts down with the key's position, so that of
    equal scores the first position ranks highest.
    """

    def __init__(
        self,
        query: Tensor,
        weight: Tensor,
        scale: float,
        k: int,
        causal: bool,
        q_start: int,  # position of the first query
        keys: int,  # number of keys in the whole sequence
        lengths: Tensor | None,
        first: Tensor | None,
        stop: Tensor | None,
    ) -> None:
        self.query, self.weight = query.float(), weight.float()
        self.scale, self.first, self.q_start = scale, first, q_start if causal else None
        place = torch.arange(query.shape[2], device=query.device)[None]
        end = place + (q_start + 1) if causal else torch.full_like(place, keys)
        for bound in (stop, None if lengths is None else lengths[:, None]):
            end = end if bound is None else torch.minimum(end, bound)
        self.end = end  # [B or 1, N] the key after the last one that each query sees
        batch, _, tokens, _ = query.shape
        self.found = torch.full((batch, tokens, k), _NONE, device=query.device)

    def add(self, key: Tensor, start: int) -> None:
        """Compares keys [B, n, Di], the first at position `start`, with the best ones so far."""
        batch, heads, tokens, _ = self.query.shape
        key, keys = key.float(), key.shape[1]
        products = batch * heads * min(keys, _TILE)  # per query
        step = max(1, at_a_time(_AT_A_TIME, key.device) // max(1, products))
        for begin in range(0, tokens, step):
            rows = slice(begin, min(begin + step, tokens))
            visible = keys if self.q_start is None else self.q_start + rows.stop - start
            for tile in range(0, min(keys, visible), _TILE):
                part = key[:, tile : tile + _TILE]
                here = torch.arange(start + tile, start + tile + part.shape[1], device=key.device)
                self._compare(rows, part[:, None].mT, here)

    def _compare(self, rows: slice, keys: Tensor, here: Tensor) -> None:
        """Compares keys [B, 1, Di, m] at positions `here` [m] with the best of queries `rows`."""
        scores = _scores(self.query[:, :, rows], keys, self.weight[:, rows], self.scale)
        scores = scores + 0.0  # turns -0.0 into 0.0
        # After negative ones are flipped, the bits have the order of the scores.
        bits = scores.view(torch.int32).long()
        bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        bits = bits.masked_fill(scores.isnan(), -(1 << 31))
        ranked = bits * (1 << 32) + ((1 << 32) - 1 - here)  # equal scores: first position first
        ranked = ranked.masked_fill(here >= self.end[:, rows, None], _NONE)
        if self.first is not None:
            ranked = ranked.masked_fill(here < self.first[:, rows, None], _NONE)
        best = torch.cat((self.found[:, rows], ranked), 2)
        self.found[:, rows] = best.topk(self.found.shape[2]).values

    def keys(self) -> Tensor:
        """Returns the best keys, int64 [B, 1, N, k], best first; -1 if there are fewer."""
        place = (1 << 32) - 1 - (self.found & ((1 << 32) - 1))
        return torch.where(self.found == _NONE, -1, place)[:, None]


def _scores(query: Tensor, keys: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Computes index scores [B, n, m] of queries [B, Hi, n, Di] and keys [B, 1, Di, m]."""
    return torch.einsum("bhnm,bnh->bnm", (query * scale @ keys).relu(), weight)


def _checked(
    query: Tensor, key: Tensor, weight: Tensor, scale: float, q_start: int | None
) -> tuple[float, int]:
    """Checks shapes and dtypes.

    Returns (scale, position of the first query), with their defaults.
    """
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
