"""`block_scores`: estimates the softmax mass of key blocks without computing attention."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad
from torch.utils.checkpoint import checkpoint

from ..checks import check_inputs, checked_integer_or_none, checked_scale, in_memory
from ..ground.arguments import checked_flag
from ..ground.keywords import with_hints
from ..ground.numerics import sum_dtype, without_autocast
from ..kernels import cpu
from ..patterns.positions import Full
from .bounds import Bounds, bounded_scores, checked_valid
from .estimates import NEVER, BlockEstimate, checked_method
from .query_rows import Span, at_a_time, checked_blocks, num_rows, spans

_AT_A_TIME = 1 << 22  # logits computed at a time if no fused kernel runs
_MANY = 64  # with fewer query rows the C++ kernel, which copies the keys, is slower than torch


@with_hints()
def block_scores(
    query: Tensor,
    key: Tensor,
    block_size: int,
    *,
    query_block: int = 1,
    method: str = "sub",
    parts: int = 4,
    causal: bool = True,
    scale: float | None = None,
    q_start: int | None = None,
    first: Tensor | None = None,
    stop: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Scores blocks of keys by the share of the attention that each would get.

    `score[r, b] = log sum_i softmax(s_i)[b]`, the sum over the queries q_i of row r (a group of
    `query_block` neighbours) in all query heads of the kv head. The softmax is over the blocks
    that q_i sees; `s_i[b]` estimates the log mass `log sum_j e^{scale q_i.k_j}` over the keys k_j
    of block b. With exact masses, no choice of m blocks captures more of the row's attention than
    the m blocks of largest score.

    Estimates of the log mass for a query q and a block of n keys with mean `mean`:

    - "mean": `log n + scale q.mean`, never above the log mass (MoBA, arXiv 2502.13189).
    - "sub": `log sum_c n_c e^{scale q.mean_c}`; the block is cut into `parts` sub-blocks, and
      sub-block c has n_c keys with mean `mean_c`.
    - "gauss": "mean" + `scale^2 / 2 sum_d q_d^2 var_d`, var the population variance of the keys.
    - "bounds": `log n + scale sum_d max(q_d max_d, q_d min_d)` from the largest and the least value
      of the keys in each channel d, never below the log mass (Quest, 2406.10774).
    - "antidiagonal": queries and keys are cut into strides of S = `parts` neighbours. The queries
      of stride x share `log sum_y n_y e^{scale / S sum_i q[xS+S-1-i].k[yS+i]}`, the sum over the
      block's strides y of n_y keys, i from 0 to S - 1. For a stride with fewer than S tokens,
      1 / S becomes 1 / number of products. S must divide query_block (XAttention, 2503.16428).
    - "exact": the log mass itself, in O(N^2) time.

    With `causal`, blocks that end before the query are estimated, the block at the query's position
    has the exact mass of the keys up to the query, and only later blocks score -inf. Without
    `causal` all blocks are estimated. Only query_block=1 is strictly causal: the scores of a longer
    row depend on its last query. Means of keys are good estimates if the keys have no rotary
    positions, or if rotary positions turn the keys of a part by small angles.

    Args:
        query: [B, Hq, Nq, D].
        key: [B, Hkv, Nk, D], Hq a multiple of Hkv.
        block_size: keys in a block.
        query_block: queries in a row, a divisor of block_size. Rows begin at multiples of it, so
            the first and the last row may have fewer queries.
        method: "mean", "sub", "gauss", "bounds", "antidiagonal" or "exact".
        parts: a divisor of block_size: sub-blocks for "sub", tokens of a stride ("antidiagonal").
        causal: True if a query sees no later keys.
        scale: factor of the products, default D ** -0.5.
        q_start: position of the first query, default Nk - Nq.
        first, stop: int64 [B or 1, Nq]; each query sees only the keys m with first <= m < stop, as
            in `top_tokens`. Default: all. A block that a bound cuts has the exact mass of the keys
            inside the bounds, and a block outside them scores -inf.
        valid: bool [Nk] or [B, Nk], the tokens that exist, such as those that are no padding; also
            for holes inside blocks. Default: all. Other keys are in no mean, count or mass, and a
            block without keys scores -inf. A query at the position of a token that does not exist
            has no part in its row.

    Returns: [B, Hkv, R, Nb] float32 (computed in float64 for float64 inputs); the first of the R
        rows is row q_start // query_block, Nb = ceil(Nk / block_size). Differentiable.

    Raises: ValueError if an argument is invalid.

    Cost: parts / block_size of dense scores ("gauss", "bounds": 2 / block_size; "antidiagonal":
        1 / parts); memory O(scores), whatever the method. With bounds, the keys of up to two blocks
        are read for each query, and blocks outside the bounds cost as much as those inside.

    Example:
        >>> scores = block_scores(query, key, 64)
        >>> chosen = select_blocks(scores, 16, block_size=64)

    Source: sums of probabilities over heads: NSA (arXiv 2502.11089), equation 10.
    """
    check_inputs(query, key, key, Full())
    query_block, block_size = checked_blocks(query_block, block_size)
    part = checked_method(method, parts, block_size, query_block)
    checked_flag("causal", causal)
    scale = checked_scale(scale, query)
    q_start = checked_integer_or_none("q_start", q_start)
    start = key.shape[2] - query.shape[2] if q_start is None else q_start
    bounds = Bounds.of(first, stop, len(query), query.shape[2], key.shape[2])
    if valid is not None:
        valid = checked_valid(valid, len(query), key)
        if bounds is None:
            bounds = Bounds.of_all(query.shape[2], key.shape[2], query.device)
    with without_autocast(query):
        estimate = BlockEstimate.build(key.to(sum_dtype(query)), block_size, method, part, valid)
        if bounds is not None:
            scores = bounded_scores(
                query,
                estimate,
                bounds,
                query_block=query_block,
                causal=causal,
                scale=scale,
                start=start,
                valid=valid,
            )
            return scores.float()
        return scores_of(query, estimate, query_block, causal, scale, start).float()


def scores_of(
    query: Tensor, estimate: BlockEstimate, query_block: int, causal: bool, scale: float, start: int
) -> Tensor:
    """Computes `block_scores` [B, Hkv, R, Nb] from summarized keys, in the summary's dtype."""
    batch, heads, q_len, _ = query.shape
    blocks = estimate.num_blocks
    kv_heads = estimate.feature.shape[1]
    group = heads // max(1, kv_heads)
    rows = num_rows(start, q_len, query_block)
    shape = (batch * kv_heads, rows, blocks)
    if not math.prod(shape) or not group:
        zero = query[..., :0].sum() + estimate.feature[..., :0].sum()  # 0, but differentiable
        return estimate.feature.new_full((batch, kv_heads, rows, blocks), -torch.inf) + zero
    # [B * Hkv, Nq, G, D]: a query's G heads (of one kv head) are adjacent, so a row is one slice
    grouped = query.unflatten(1, (kv_heads, group)).transpose(2, 3).flatten(0, 1)
    feature, keys = (x.flatten(0, 1) for x in (estimate.feature, estimate.keys))
    estimate = estimate._replace(feature=feature, keys=keys)
    if torch.is_grad_enabled() and (query.requires_grad or feature.requires_grad):
        score: Callable[..., Tensor] = _span_scores
        if not torch.compiler.is_compiling():  # torch.compile itself decides what to recompute
            score = partial(checkpoint, _span_scores, use_reentrant=False, preserve_rng_state=False)
        parts = [
            score(part, grouped, estimate, causal, scale)
            for span in spans(start, q_len, query_block, estimate.block_size)
            for part in _cut(span, group * len(grouped), estimate, causal)
        ]
        return torch.cat(parts, 1).unflatten(0, (batch, kv_heads))
    out, row = estimate.feature.new_empty(shape), 0
    fused = not torch.compiler.is_compiling() and q_len * group >= _MANY and estimate.stride == 1
    fused = fused and feature.dtype == torch.float32 and not cpu.reasons(query, feature)
    for span in spans(start, q_len, query_block, estimate.block_size):
        scores = out[:, row : row + span.rows]
        if not (fused and _write_by_kernel(span, query, estimate, causal, scale, scores)):
            _write(span, grouped, estimate, causal, scale, scores)
        row += span.rows
    return out.unflatten(0, (batch, kv_heads))


def _write(
    span: Span, query: Tensor, estimate: BlockEstimate, causal: bool, scale: float, out: Tensor
) -> None:
    """Writes the scores of a span of queries to `out` with torch, a few batch entries at a time."""
    group = query.shape[2]
    step = max(1, _room(estimate) // (span.width * group * estimate.slots * estimate.num_blocks))
    for first in range(0, len(query), step):
        entries, row = slice(first, first + step), 0
        feature, keys = estimate.feature[entries], estimate.keys[entries]
        part_estimate = estimate._replace(feature=feature, keys=keys)
        for part in _cut(span, group * len(keys), estimate, causal):
            scores = _span_scores(part, query[entries], part_estimate, causal, scale)
            out[entries, row : row + part.rows] = scores
            row += part.rows


def _write_by_kernel(
    span: Span, query: Tensor, estimate: BlockEstimate, causal: bool, scale: float, out: Tensor
) -> bool:
    """Writes the scores of a span to `out` with the C++ kernel; False if torch must redo them."""
    # log(tokens / part) for each part of a last block that is not full; the kernel adds log(part)
    last = (estimate.counts()[-1] / estimate.part).log().float() if estimate.ragged else None
    underflow = cpu.block_shares(
        in_memory(query),
        in_memory(estimate.feature),
        in_memory(estimate.keys),
        last,
        out,
        features=estimate.method,
        scale=scale,
        log_part=math.log(estimate.part),
        blocks=estimate.num_blocks,
        length=estimate.length,
        first_own=estimate.first_own,
        first_query=span.first,
        first=span.block,
        offset=span.offset,
        count=span.blocks,
        width=span.width,
        row=span.row,
        causal=causal,
    )
    return not underflow


def _room(estimate: BlockEstimate) -> int:
    """Returns how many logits may be computed at once on the keys' device."""
    return at_a_time(_AT_A_TIME, estimate.keys.device)


def _cut(span: Span, heads: int, estimate: BlockEstimate, causal: bool) -> Iterator[Span]:
    """Cuts a span of queries at block boundaries into parts that fit in memory."""
    room, blocks = _room(estimate) // (heads * span.width * estimate.slots), estimate.num_blocks
    done = 0
    while done < span.blocks:
        block = span.block + done
        if causal and block + math.isqrt(room) < blocks:
            # largest count with count * (block + count) <= room, the scores that fit in memory
            count = (math.isqrt(block * block + 4 * room) - block) // 2
        else:
            count = room // blocks
        count = max(1, min(count, span.blocks - done))
        yield span._replace(first=span.first + done * span.width, block=block, blocks=count)
        done += count


def _span_scores(
    span: Span, query: Tensor, estimate: BlockEstimate, causal: bool, scale: float
) -> Tensor:
    """Computes scores [B * Hkv, rows, Nb] of a span; queries are [B * Hkv, Nq, G, D]."""
    query = query[:, span.first : span.first + span.queries].to(estimate.feature.dtype)
    if not causal:
        return _shares(span, query, estimate, estimate.num_blocks, None, scale)[0]
    blocks, stop = estimate.num_blocks, span.block + span.blocks
    num_past = min(blocks, max(1, stop - 1))
    own_mass = _own_mass(span, query, estimate, scale)
    past, own_share = _shares(span, query, estimate, num_past, own_mass, scale)
    current = torch.arange(span.block, stop, device=query.device)
    current = current.repeat_interleave(span.rows // span.blocks)[:, None]  # [rows, 1]
    column = torch.arange(blocks, device=query.device)
    scores = torch.where(column < current, pad(past, (0, blocks - num_past)), -torch.inf)
    assert own_share is not None
    return torch.where(column == current, own_share[..., None], scores)


def _own_mass(span: Span, query: Tensor, estimate: BlockEstimate, scale: float) -> Tensor:
    """Computes the log mass of each query's own block, counting keys up to the query only.

    `query` is [B * Hkv, n, G, D] with G query heads per kv head. Returns [B * Hkv, n, G].
    """
    group = query.shape[2]
    first, stop = max(span.block, 0), min(span.block + span.blocks, estimate.num_blocks)
    blocks = max(0, stop - first)
    keys = estimate.keys[:, first - estimate.first_own :][:, :blocks]
    before = (first - span.block) * (blocks > 0)  # number of blocks at negative positions
    query = query.unflatten(1, (span.blocks, span.width))[:, before : before + blocks]
    logits = query.flatten(2, 3) @ (keys.mT * scale)
    logits = logits.unflatten(2, (span.width, group))
    place = torch.arange(estimate.block_size, device=query.device)
    hidden = place > span.offset + torch.arange(span.width, device=query.device)[:, None]
    logits = logits.masked_fill(hidden[:, None], NEVER)
    if estimate.ragged and stop == estimate.num_blocks:
        block = torch.arange(first, first + blocks, device=query.device)[:, None, None, None]
        logits = logits.masked_fill(block * estimate.block_size + place >= estimate.length, NEVER)
    room = (0, 0, 0, 0, before, span.blocks - blocks - before)
    return pad(logits.logsumexp(-1), room, value=NEVER).flatten(1, 2)


def _shares(
    span: Span, query: Tensor, estimate: BlockEstimate, stop: int, mass: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Returns the log of each block's softmax share, summed over the queries of each row.

    Without `mass`, the softmax is over the first `stop` blocks; returns their shares [B * Hkv,
    rows, stop], and None. With `mass`, it is over the query's own block, which has this log mass,
    and the blocks before it; it then also returns the shares of the own blocks [B * Hkv, rows].
    """
    (_, n, group, _), stride = query.shape, estimate.stride
    front, present = span.offset % stride, None
    back = -(front + n) % stride
    if front or back:
        there = torch.ones(n, dtype=torch.bool, device=query.device)
        present = pad(there, (front, back)).view(-1, stride)
    query_feature = estimate.query_strides(query, scale, front)[:, None]
    logits = (query_feature @ estimate.feature[:, :, :stop].mT).unflatten(2, (-1, group))
    if stride > 1:
        logits = logits * estimate.antidiagonal_weight(stop, present)
    # [B * Hkv, parts, n / stride, G, stop] -> [.., n / stride, G, stop]
    logits = (logits + estimate.log_counts(stop)[..., None, None, :]).logsumexp(1)
    if mass is not None:
        block = torch.arange(span.block, span.block + span.blocks, device=query.device)
        hidden = torch.arange(stop, device=query.device) >= block[:, None, None, None]
        logits = logits.unflatten(1, (span.blocks, -1)).masked_fill(hidden, NEVER).flatten(1, 2)
    total = logits.logsumexp(-1)
    own_share = None
    if mass is None:
        weight = torch.full_like(total[:1, :, :1], math.log(stride))
        if present is not None:
            weight = present.sum(1).to(total).log()[:, None]
    else:
        mass = pad(mass, (0, 0, front, back)).unflatten(1, (-1, stride))
        log_odds = mass - total[:, :, None]  # [B * Hkv, n / stride, stride, G]
        past, own = logsigmoid(-log_odds), logsigmoid(log_odds)
        if present is not None:
            absent = ~present.to(query.device)[..., None]
            past, own = (x.masked_fill(absent, NEVER) for x in (past, own))
        weight = past.logsumexp(2)
        own_share = own.flatten(1, 2).unflatten(1, (span.rows, -1)).logsumexp((2, 3))
    share = logits + (weight - total)[..., None]
    return share.unflatten(1, (span.rows, -1)).logsumexp((2, 3)), own_share
