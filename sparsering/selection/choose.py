"""`select_blocks`: picks by score the key blocks that each group of queries attends to."""

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import check_tensor, observed
from ..ground.arguments import checked_flag, checked_integer, is_finite, shortened
from ..ground.keywords import with_hints
from ..kernels import triton
from .bounds import Bounds
from .query_rows import checked_blocks, current_blocks, num_rows

_AT_A_TIME = 1 << 17  # scores ranked at a time on a CPU, so that they fit its cache
_BLOCK_BITS = 30  # low bits of a rank, which hold the block's index


@with_hints()
def select_blocks(
    scores: Tensor,
    k: int,
    *,
    block_size: int,
    query_block: int = 1,
    top_p: float | None = None,
    sink: int = 1,
    local: int = 1,
    causal: bool = True,
    q_start: int = 0,
    first: Tensor | None = None,
    stop: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Returns the k best-scored key blocks of each row, a group of `query_block` queries.

    Some blocks are forced, that is, chosen whatever their scores: the first `sink` blocks of the
    keys, and the `local` blocks that end at the block of the row's queries. A row lists them first,
    in ascending order, then the best-scored other blocks by (score descending, block ascending),
    then -1 as padding. A block that is not forced is never chosen if its score is -inf or NaN. With
    `causal`, blocks after the row's queries are never chosen. Every device gives the same result.

    Args:
        scores: [..., R, Nb], as `block_scores` returns them; ranked in float32.
        k: most blocks to choose for a row, including forced blocks.
        block_size, query_block: keys in a block and queries in a row, as for the scores.
        top_p: limit on the share of `softmax(scores)` over the visible blocks, 0 < top_p <= 1. A
            block that is not forced is chosen only while the blocks before it, including forced
            blocks, sum to less than this share. 1 sets no limit.
        sink: number of forced blocks at the start of the keys.
        local: number of forced blocks that end at the block of the row's queries, or at the last
            block if the queries lie past the keys.
        causal: whether blocks after the block of the row's queries are excluded.
        q_start: position of the first query; `block_scores` uses Nk - Nq by default.
        first, stop: int64 [B or 1, Nq], the bounds of the keys that each query sees, as for the
            scores; B is the first dim of scores that have more than two. No block outside the
            bounds of all queries of a row is chosen. Forced blocks are the first that the row sees,
            and the last up to its own. Default: all keys.
        valid: bool [Nk] or [B, Nk], the tokens that exist, as for the scores. A block without any
            is never chosen, nor counted among the forced blocks: those are the first and the last
            that have tokens. Default: all.

    Returns: int64 [..., R, k], detached, on the scores' device, for `SelectedBlocks(indices,
        block_size, query_block, first_row=q_start // query_block)`.

    Raises: ValueError if an argument is invalid or sink + local is more than k.

    Cost: O(R Nb) time, without waiting for the device. Compiles as one graph.

    Source: forced blocks: NSA (arXiv 2502.11089), MoBA (2502.13189); top-p: Twilight (2502.02770).
    """
    check_tensor("scores", scores, "[..., rows, blocks]")
    if scores.dim() < 2 or not scores.is_floating_point():
        raise ValueError(
            "scores must be floating point [..., rows, blocks], got "
            f"{scores.dtype} {tuple(scores.shape)}; block_scores makes them"
        )
    query_block, block_size = checked_blocks(query_block, block_size)
    k, sink = checked_integer("k", k, 0), checked_integer("sink", sink, 0)
    local = checked_integer("local", local, 0)
    q_start = checked_integer("q_start", q_start, None)
    checked_flag("causal", causal)
    if top_p is not None and not (is_finite(top_p) and 0 < top_p <= 1):
        raise ValueError(
            f"top_p must be above 0 and at most 1, got {shortened(repr(top_p))}; None sets no limit"
        )
    *outer, rows, blocks = scores.shape
    if min(sink + local, blocks) > k:
        raise ValueError(
            f"sink + local must be at most k={k}, got {sink} + {local}; pass a larger k or force "
            "fewer blocks"
        )
    first_row = q_start // query_block
    low = high = None
    if first is not None or stop is not None:
        low, high = _seen_blocks(scores, first, stop, block_size, query_block, q_start)
    exists = None if valid is None else _blocks_with_tokens(scores, valid, block_size)
    scores = scores.detach().reshape(math.prod(outer), rows, blocks)
    plain = scores.is_cuda and not observed(scores) and top_p in (None, 1)
    plain = plain and low is None and exists is None
    if plain and scores.numel() and first_row >= 0 and triton.ranks(k, scores.device):
        chosen = triton.best_blocks(
            scores,
            k,
            sink=sink,
            local=local,
            causal=causal,
            first_row=first_row,
            query_block=query_block,
            block_size=block_size,
        )
        return chosen.view(*outer, rows, k)
    own = current_blocks(first_row, rows, query_block, block_size, scores.device)[None]
    low = torch.zeros_like(own) if low is None else low
    high = torch.full_like(own, blocks) if high is None else high
    best = partial(
        _best_blocks, k=k, top_p=top_p, sink=sink, local=local, causal=causal, exists=exists
    )
    if scores.device.type != "cpu" or torch.compiler.is_compiling() or not scores.numel():
        chosen = best(scores, own, low, high)
    else:
        step = max(1, _AT_A_TIME // (blocks * len(scores)))
        parts = zip(*(x.split(step, 1) for x in (scores, own, low, high)), strict=True)
        chosen = torch.cat([best(*part) for part in parts], 1)
    return chosen.view(*outer, rows, k)


def _seen_blocks(
    scores: Tensor,
    first: Tensor | None,
    stop: Tensor | None,
    block_size: int,
    query_block: int,
    q_start: int,
) -> tuple[Tensor, Tensor]:
    """Returns, for each row, the first block that it sees, and the block after the last one.

    Both are int64 [1, R], or [product of the dims before the rows, R].
    """
    *outer, rows, blocks = scores.shape
    batch = outer[0] if outer else 1
    given = stop if first is None else first
    check_tensor("first or stop", given)
    tokens = given.shape[-1] if given is not None and given.dim() else 0
    if num_rows(q_start, tokens, query_block) != rows:
        raise ValueError(
            f"first and stop must be int64 [{batch} or 1, Nq] with Nq queries that make {rows} "
            f"rows of query_block={query_block} from q_start={q_start} on, got Nq={tokens}; pass "
            "those that block_scores had"
        )
    bounds = Bounds.of(first, stop, batch, tokens, blocks * block_size)
    assert bounds is not None
    low, high = bounds.blocks_of_rows(block_size, query_block, q_start)
    if len(low) == 1 and len(high) == 1:
        return low, high
    low, high = (x.expand(batch, -1) for x in (low, high))
    heads = math.prod(outer[1:])
    return low.repeat_interleave(heads, 0), high.repeat_interleave(heads, 0)


def _blocks_with_tokens(scores: Tensor, valid: Tensor, block_size: int) -> Tensor:
    """Returns which blocks have a valid token: bool [1 or B * heads, Nb].

    scores: [B, ..., rows, Nb]; the dims between are heads.
    """
    *outer, _, blocks = scores.shape
    batch = outer[0] if outer else 1
    check_tensor("valid", valid)
    fits = valid.dim() in (1, 2) and -(-valid.shape[-1] // block_size) == blocks
    if not fits or valid.dtype != torch.bool or valid.shape[:-1] not in {(), (batch,)}:
        raise ValueError(
            f"valid must be bool [Nk] or [{batch}, Nk] of the Nk keys in {blocks} blocks of "
            f"{block_size}, got {valid.dtype} {tuple(valid.shape)}; pass the one that block_scores "
            "had"
        )
    margin = (0, blocks * block_size - valid.shape[-1])
    exists = pad(valid.to(scores.device), margin).unflatten(-1, (blocks, block_size)).any(-1)
    if exists.dim() == 1 or len(exists) == 1:
        return exists.view(1, blocks)
    return exists.repeat_interleave(math.prod(outer[1:]), 0)


def _best_blocks(
    scores: Tensor,
    own: Tensor,
    low: Tensor,
    high: Tensor,
    k: int,
    top_p: float | None,
    sink: int,
    local: int,
    causal: bool,
    exists: Tensor | None,
) -> Tensor:
    """Chooses the k best blocks of each row [E, R, k] by scores [E, R, Nb].

    Row r of entry e lies in key block `own[0, r]` and sees the blocks from `low[e or 0, r]` to
    `high[e or 0, r] - 1`. `exists` [E or 1, Nb] is False for blocks without tokens; None if all
    have some.
    """
    blocks = scores.shape[-1]
    block = torch.arange(blocks, device=scores.device)
    last = torch.minimum(own, high - 1)[..., None]
    number, first_seen, last_seen = block, low[..., None], last
    if exists is not None:  # count forced blocks only among blocks that have tokens
        before = pad(exists.cumsum(-1), (1, 0))[:, None]  # [E or 1, 1, Nb + 1]
        number = before[..., :-1]
        first_seen, last_seen = _taken(before, first_seen), _taken(before, last + 1) - 1
    sinks = number < first_seen + sink
    forced = sinks | ((block <= last) & (number > last_seen - local))
    scores = scores.float() + 0.0  # -0.0 becomes 0.0: equal scores need equal bits
    unseen = (block < low[..., None]) | (block >= high[..., None])
    if exists is not None:
        unseen = unseen | ~exists[:, None]
    if causal:
        hidden = block > last
        unseen = unseen | hidden
    forced = forced & ~unseen
    scores = scores.masked_fill(unseen, -torch.inf)
    scores = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    bits = scores.view(torch.int32)
    sortable = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers that sort as the floats do
    rank = (sortable.long() << _BLOCK_BITS) + (_LAST - block)  # equal scores: lower block first
    rank = torch.where(scores == -torch.inf, _NOT_CHOSEN, rank)
    rank = torch.where(forced, _FORCED - block, rank)
    best = rank.topk(min(k, blocks), -1).values
    chosen = torch.where(best == _NOT_CHOSEN, -1, _LAST - (best & _LAST))
    if top_p is not None and top_p < 1 and blocks:
        mass = (scores.clamp(max=_FINITE[1]) - scores.amax(-1, keepdim=True).clamp(*_FINITE)).exp()
        weight = mass.gather(-1, chosen.clamp(min=0)).double()
        before = weight.cumsum(-1) - weight
        limit = float(top_p) * mass.sum(-1, keepdim=True, dtype=torch.float64)
        chosen = torch.where((best > _LAST_SCORED) | (before < limit), chosen, -1)
    return pad(chosen, (0, k - chosen.shape[-1]), value=-1)


def _taken(before: Tensor, index: Tensor) -> Tensor:
    """Reads `before` [E or 1, 1, n] at indices [E or 1, R, 1], which are clamped to its range."""
    (entries,) = torch.broadcast_shapes(before.shape[:1], index.shape[:1])
    index = index.clamp(0, before.shape[2] - 1).expand(entries, -1, -1)
    return before.expand(entries, index.shape[1], -1).gather(2, index)


_LAST = (1 << _BLOCK_BITS) - 1
_LAST_SCORED = ((1 << 31) << _BLOCK_BITS) - 1  # the highest rank of blocks that are not forced
_FORCED = _LAST_SCORED + 1 + _LAST
_NOT_CHOSEN = -(1 << 62)
_FINITE = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
