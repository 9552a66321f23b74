"""Bounds of the keys that each query sees, and `block_scores` for queries with such bounds."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from ..checks import check_tensor
from .estimates import NEVER, BlockEstimate
from .query_rows import at_a_time, num_rows

_AT_A_TIME = 1 << 22  # numbers computed at a time, to bound memory


class Bounds(NamedTuple):
    """Query n sees only the keys m with first[n] <= m < stop[n]."""

    first: Tensor  # int64 [B or 1, N]
    stop: Tensor  # int64 [B or 1, N]

    @classmethod
    def of(
        cls, first: Tensor | None, stop: Tensor | None, batch: int, tokens: int, keys: int
    ) -> "Bounds | None":
        """Checks `first` and `stop`, and fills in a missing one; None if both are missing."""
        check_bounds(batch, tokens, first=first, stop=stop)
        if first is None and stop is None:
            return None
        if first is None:
            assert stop is not None
            first = torch.zeros_like(stop)
        stop = torch.full_like(first, keys) if stop is None else stop
        return cls(first.clamp(min=0), stop.clamp(max=keys))

    @classmethod
    def of_all(cls, tokens: int, keys: int, device: torch.device) -> "Bounds":
        """Returns the bounds of queries that see all keys."""
        first = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        return cls(first, torch.full_like(first, keys))

    def of_heads(self, batch: int, heads: int) -> "Bounds":
        """Repeats the bounds of each batch entry for its heads: [B * heads, N]."""
        return Bounds(*(x.expand(batch, -1).repeat_interleave(heads, 0) for x in self))

    def of_queries(self, part: slice) -> "Bounds":
        return Bounds(self.first[:, part], self.stop[:, part])

    def blocks_of_rows(
        self, block_size: int, query_block: int, q_start: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the first block that any query of a row sees, and the block after the last.

        Both are [B or 1, R]. A row whose queries see no key has a first block after its last.
        """
        tokens = self.first.shape[1]
        before = q_start % query_block if tokens else 0
        rows = num_rows(q_start, tokens, query_block)
        margin = (before, rows * query_block - before - tokens)
        none = self.first >= self.stop
        most = torch.iinfo(torch.int64).max
        low = self.first.masked_fill(none, most) // block_size
        high = (-(-self.stop // block_size)).masked_fill(none, 0)
        low = pad(low, margin, value=most // block_size).unflatten(1, (rows, query_block)).amin(2)
        return low, pad(high, margin).unflatten(1, (rows, query_block)).amax(2)


def check_bounds(batch: int, tokens: int, **bounds: Tensor | None) -> None:
    """Raises ValueError unless bounds of queries are int64 of the shape [1 or batch, tokens]."""
    for name, bound in bounds.items():
        if bound is None:
            continue
        check_tensor(name, bound)
        if bound.shape not in {(1, tokens), (batch, tokens)} or bound.dtype != torch.int64:
            raise ValueError(
                f"{name} must be int64 [{batch} or 1, {tokens}], got {bound.dtype} "
                f"{tuple(bound.shape)}; give each query a bound of its keys"
            )


def checked_valid(valid: Tensor, batch: int, key: Tensor) -> Tensor:
    """Returns `valid` as bool [B or 1, Nk] on the keys' device.

    ValueError for another shape or dtype.

    `key` is [B, Hkv, Nk, D].
    """
    check_tensor("valid", valid)
    keys = key.shape[2]
    if valid.shape not in {(keys,), (batch, keys)} or valid.dtype != torch.bool:
        raise ValueError(
            f"valid must be bool [{keys}] or [{batch}, {keys}], True where a token exists, got "
            f"{valid.dtype} {tuple(valid.shape)}; convert ones and zeros by .bool()"
        )
    valid = valid.to(key.device)
    return valid[None] if valid.dim() == 1 else valid


def exist_at(position: Tensor, valid: Tensor) -> Tensor:
    """Returns whether the tokens at positions [Nq] exist: bool [B or 1, Nq]; True past the keys."""
    length = valid.shape[1]
    inside = (position >= 0) & (position < length)
    if not length:
        return ~inside[None]
    return valid[:, position.clamp(0, length - 1)] | ~inside


def bounded_scores(
    query: Tensor,
    estimate: BlockEstimate,
    bounds: Bounds,
    *,
    query_block: int,
    causal: bool,
    scale: float,
    start: int,
    valid: Tensor | None = None,
) -> Tensor:
    """Computes `block_scores` [B, Hkv, R, Nb] of queries that see only the keys in their bounds.

    A block that a query's bounds cut gets the exact log mass of the keys that the query sees, and
    so does the query's own block if `causal`. Other blocks get estimates.
    """
    (batch, heads, q_len, _), blocks = query.shape, estimate.num_blocks
    kv_heads = estimate.feature.shape[1]
    rows = num_rows(start, q_len, query_block)
    if not batch * heads * kv_heads * rows * blocks:
        zero = query[..., :0].sum() + estimate.feature[..., :0].sum()  # 0, but differentiable
        return estimate.feature.new_full((batch, kv_heads, rows, blocks), -torch.inf) + zero
    group = heads // kv_heads
    # [B * Hkv, Nq, G, D]: a query's G heads (of one kv head) are adjacent, so a row is one slice
    grouped = query.unflatten(1, (kv_heads, group)).transpose(2, 3).flatten(0, 1)
    feature, keys = (x.flatten(0, 1) for x in (estimate.feature, estimate.keys))
    estimate = estimate._replace(feature=feature, keys=keys)
    if valid is not None:  # a query whose token does not exist sees nothing
        assert estimate.exists is not None
        estimate = estimate._replace(exists=estimate.exists.flatten(0, 1))
        there = exist_at(start + torch.arange(q_len, device=valid.device), valid)
        bounds = Bounds(bounds.first, torch.where(there, bounds.stop, 0))
        there = there.expand(batch, -1).repeat_interleave(kv_heads, 0)
        grouped = torch.where(there[..., None, None], grouped, 0.0)
    else:
        there = None
    bounds = bounds.of_heads(batch, kv_heads)
    numbers = group * estimate.slots * blocks + keys.shape[2] * keys.shape[3]  # per query
    room = at_a_time(_AT_A_TIME, keys.device) // (len(grouped) * numbers)
    step = max(1, room // query_block) * query_block
    cuts = [0, *(cut - start for cut in range((start // step + 1) * step, start + q_len, step))]
    score: Callable[..., Tensor] = _rows_of_scores
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        score = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
    parts = [
        score(grouped, estimate, bounds, there, slice(i, j), query_block, causal, scale, start + i)
        for i, j in pairwise([*cuts, q_len])
    ]
    return torch.cat(parts, 1).unflatten(0, (batch, kv_heads))


def _rows_of_scores(
    query: Tensor,
    estimate: BlockEstimate,
    bounds: Bounds,
    there: Tensor | None,
    part: slice,
    query_block: int,
    causal: bool,
    scale: float,
    start: int,
) -> Tensor:
    """Computes scores [B * Hkv, rows, Nb] of the queries in the slice `part`.

    `query` is [B * Hkv, Nq, G, D]. `there` [B * Hkv, Nq] is False for queries that do not exist;
    None if all do.
    """
    query = query[:, part].to(estimate.feature.dtype)
    n, size, blocks = query.shape[1], estimate.block_size, estimate.num_blocks
    first, stop = bounds.of_queries(part)
    position = start + torch.arange(n, device=query.device)
    if causal:
        stop = torch.minimum(stop, position + 1)
    begin = torch.arange(blocks, device=query.device) * size
    end = (begin + size).clamp(max=estimate.length)
    visible = (end > first[..., None]) & (begin < stop[..., None])
    visible = visible & (first < stop)[..., None]  # [B * Hkv, n, Nb]
    if estimate.exists is not None:
        visible = visible & estimate.exists.any(2)[:, None]
    there = None if there is None else there[:, part]
    logits = _estimated(query, estimate, there, scale, start)  # [B * Hkv, n, G, Nb]
    ends = [first.clamp(max=estimate.length - 1), (stop - 1).clamp(min=0)]
    for block in (end_token // size for end_token in ends):
        is_cut = (block * size < first) | (torch.minimum((block + 1) * size, end[-1]) > stop)
        if causal:  # the query's own block is always exact, even if it sees all of the block
            is_cut = is_cut | (block == position // size)
        mass = _exact_mass(query, estimate, block, first, stop, scale)
        here = is_cut[..., None] & (torch.arange(blocks, device=query.device) == block[..., None])
        logits = torch.where(here[:, :, None], mass[..., None], logits)
        if estimate.exists is not None:
            visible = visible & ~(here & (mass[..., :1] <= NEVER / 2))
    visible = visible[:, :, None].expand(logits.shape)
    share = logits.masked_fill(~visible, NEVER).log_softmax(-1).masked_fill(~visible, NEVER)
    rows = num_rows(start, n, query_block)
    before = start % query_block
    margin = (0, 0, 0, 0, before, rows * query_block - before - n)
    share, seen = pad(share, margin, value=NEVER), pad(visible, margin, value=False)
    scores = share.unflatten(1, (rows, query_block)).logsumexp((2, 3))
    return scores.masked_fill(~seen.unflatten(1, (rows, query_block)).any(3).any(2), -torch.inf)


def _estimated(
    query: Tensor, estimate: BlockEstimate, there: Tensor | None, scale: float, start: int
) -> Tensor:
    """Estimates, for queries [B * Hkv, n, G, D], the log of each block's softmax mass.

    Returns [B * Hkv, n, G, Nb].
    """
    (_, n, group, _), stride = query.shape, estimate.stride
    front, present = start % stride, None
    back = -(front + n) % stride
    if there is not None:
        present = pad(there, (front, back)).unflatten(1, (-1, stride))
    elif front or back:
        present = pad(torch.ones(n, dtype=torch.bool), (front, back)).view(-1, stride)
    query_feature = estimate.query_strides(query, scale, front)[:, None]
    logits = (query_feature @ estimate.feature.mT).unflatten(2, (-1, group))
    if stride > 1:
        logits = logits * estimate.antidiagonal_weight(estimate.num_blocks, present)
    logits = (logits + estimate.log_counts(estimate.num_blocks)[..., None, None, :]).logsumexp(1)
    return logits.repeat_interleave(stride, 1)[:, front : front + n]


def _exact_mass(
    query: Tensor, estimate: BlockEstimate, block: Tensor, first: Tensor, stop: Tensor, scale: float
) -> Tensor:
    """Computes the log mass of the visible keys of one block per query: [B * Hkv, n, G].

    `block` [B * Hkv, n] is the block; keys outside [first, stop) are not visible.
    """
    place = block[..., None] * estimate.block_size
    place = place + torch.arange(estimate.block_size, device=query.device)  # [B * Hkv, n, size]
    hidden = (place < first[..., None]) | (place >= stop[..., None])
    entry = torch.arange(len(query), device=query.device)[:, None]
    if estimate.exists is not None:
        hidden = hidden | ~estimate.exists[entry, block]
    keys = estimate.keys[entry, block]  # [B * Hkv, n, size, D]
    logits = (query * scale) @ keys.mT
    return logits.masked_fill(hidden[:, :, None], NEVER).logsumexp(-1)
