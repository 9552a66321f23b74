"""Block selection by definition: scores, selections, pooled keys and losses in float64.

It is plain torch, so that autograd gives the gradients; it shares no code with the library.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max
NEVER = -1e300  # logit of a hidden key or block: finite, so that it has a derivative


def log_masses(query: Tensor, keys: Tensor, method: str, parts: int, scale: float) -> Tensor:
    """Estimates the log mass [..., N] of one block of keys [..., n, D] for queries [..., N, D]."""
    many, mean = math.log(keys.shape[-2]), keys.mean(-2, keepdim=True)
    if method == "sub":
        each = [log_masses(query, part, "mean", 1, scale) for part in keys.split(parts, -2)]
        return torch.stack(each).logsumexp(0)
    if method == "exact":
        return (scale * query @ keys.mT).logsumexp(-1)
    if method == "bounds":
        most = torch.maximum(query * keys.amax(-2, True), query * keys.amin(-2, True))
        return many + scale * most.sum(-1)
    found = many + scale * (query * mean).sum(-1)
    if method == "gauss":
        spread = keys.var(-2, unbiased=False, keepdim=True)
        found = found + scale**2 / 2 * (query.square() * spread).sum(-1)
    return found


def log_masses_of(
    query: Tensor, keys: Tensor, there: Tensor, method: str, parts: int, scale: float
) -> Tensor:
    """`log_masses` of the keys of a block that are `there`, bool [n]."""
    if method == "sub":
        pairs = zip(keys.split(parts, -2), there.split(parts), strict=True)
        each = [log_masses(query, k[..., t, :], "mean", 1, scale) for k, t in pairs if t.any()]
        return torch.stack(each).logsumexp(0)
    return log_masses(query, keys[..., there, :], method, parts, scale)


def antidiagonals(
    query: Tensor,
    keys: Tensor,
    stride: int,
    scale: float,
    start: int,
    asks: Tensor,
    exists: Tensor,
) -> Tensor:
    """`log_masses` from antidiagonals; query groups start at multiples of `stride`.

    `asks` [N] and `exists` [n] are False for queries and keys that do not count.
    """
    length, count = query.shape[-2], keys.shape[-2]
    first = (start + torch.arange(length)) // stride * stride - start
    products, found = scale * query @ keys.mT, []
    for y in range(0, count, stride):
        pairs = [(first + stride - 1 - m, y + m) for m in range(min(stride, count - y))]
        there = [
            (q >= 0) & (q < length) & asks[q.clamp(0, length - 1)] & exists[k] for q, k in pairs
        ]
        there = torch.stack(there)
        each = torch.stack([products[..., q.clamp(0, length - 1), k] for q, k in pairs], -2)
        mean = (each * there).sum(-2) / there.sum(0).clamp(min=1)
        number = int(exists[y : y + stride].sum())
        found.append(math.log(number) + mean if number else torch.full_like(mean, NEVER))
    return torch.stack(found).logsumexp(0)


def block_scores(
    query: Tensor,
    key: Tensor,
    block_size: int,
    *,
    query_block: int,
    method: str,
    parts: int,
    causal: bool,
    scale: float,
    q_start: int | None,
    first: Tensor | None = None,
    stop: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Computes scores [B, Hkv, R, Nb], -inf for blocks that are not visible."""
    if valid is not None and valid.dim() == 2 and len(query):
        options = {"query_block": query_block, "method": method, "parts": parts, "causal": causal}
        options |= {"scale": scale, "q_start": q_start}
        of_entries = []
        for i, own in enumerate(valid):
            low, high = (x if x is None or len(x) == 1 else x[i : i + 1] for x in (first, stop))
            parts_of_entry = query[i : i + 1], key[i : i + 1], block_size
            given = {"first": low, "stop": high, "valid": own}
            of_entries.append(block_scores(*parts_of_entry, **options, **given))
        return torch.cat(of_entries)
    (batch, heads, length, _), (_, kv_heads, kv_len, _) = query.shape, key.shape
    valid = torch.ones(kv_len, dtype=torch.bool) if valid is None or valid.dim() == 2 else valid
    start = kv_len - length if q_start is None else q_start
    position, blocks = start + torch.arange(length), -(-kv_len // block_size)
    first_row = start // query_block
    rows = -(-(start + length) // query_block) - first_row if length else 0
    key = key.repeat_interleave(heads // kv_heads, 1)
    if not blocks or not rows:
        return (query.sum() + key.sum()) * query.new_zeros(batch, kv_heads, rows, blocks)
    first = torch.zeros(1, length) if first is None else first
    stop = torch.full((1, length), kv_len) if stop is None else stop
    outside = (position < 0) | (position >= kv_len)
    asks = outside | valid[position.clamp(0, kv_len - 1)]
    low, high = (x[:, None, :, None] for x in (first, stop))  # [B or 1, 1, N, 1]
    logits, seen = [], []
    for block, keys in enumerate(key.split(block_size, 2)):
        exists = valid[block * block_size :][:block_size]
        if not exists.any():
            logit = (query * 0).sum(-1)
        elif method == "antidiagonal":
            logit = antidiagonals(query, keys, parts, scale, start, asks, exists)
        else:
            logit = log_masses_of(query, keys, exists, method, block_size // parts, scale)
        place = block * block_size + torch.arange(keys.shape[2])
        inside = (place >= low) & (place < high)  # [B or 1, 1, N, keys]
        exact = ~inside.all(-1)
        if causal:
            inside = inside & (place <= position[:, None])
            exact = exact | (position // block_size == block)
        inside = inside & exists & asks[:, None]
        own = (scale * query @ keys.mT).masked_fill(~inside, NEVER).logsumexp(-1)
        logits.append(torch.where(exact, own, logit))
        seen.append(inside.any(-1).expand(logit.shape))
    seen = torch.stack(seen, -1)  # [B, Hq, N, Nb]
    logit = torch.stack(logits, -1).masked_fill(~seen, NEVER)
    share = logit.log_softmax(-1).masked_fill(~seen, NEVER)  # [B, Hq, N, Nb]
    scores = []
    for row in range(first_row, first_row + rows):
        members = position // query_block == row
        total = share[:, :, members].unflatten(1, (kv_heads, -1)).flatten(2, 3).logsumexp(2)
        any_seen = seen[:, :, members].any(2)[:, :: heads // kv_heads]
        scores.append(total.masked_fill(~any_seen, -math.inf))
    return torch.stack(scores, 2)


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
    """Selects blocks [..., R, k] for each row of scores [..., R, Nb]."""
    *outer, rows, blocks = scores.shape
    options = {"top_p": top_p, "sink": sink, "local": local, "causal": causal}
    chosen = []
    for at, of_head in enumerate(scores.reshape(math.prod(outer), rows, blocks).tolist()):
        entry = at // math.prod(outer[1:])
        exists = set(range(blocks))
        if valid is not None:
            own = valid if valid.dim() == 1 else valid[entry]
            exists = {b for b in exists if own[b * block_size :][:block_size].any()}
        for row, each in enumerate(of_head, q_start // query_block):
            seen = range(blocks)
            if first is not None or stop is not None:
                members = range(row * query_block - q_start, (row + 1) * query_block - q_start)
                keys = set()
                for i in members:
                    if 0 <= i < (first if stop is None else stop).shape[1]:
                        low = 0 if first is None else max(0, int(first[entry % len(first), i]))
                        high = blocks * block_size
                        high = high if stop is None else min(high, int(stop[entry % len(stop), i]))
                        keys |= set(
                            range(low // block_size, -(-high // block_size)) if low < high else ()
                        )
                seen = range(min(keys, default=0), max(keys, default=-1) + 1)
            current = row * query_block // block_size
            chosen.append(chosen_blocks(each, k, current, seen=seen, exists=exists, **options))
    return torch.tensor(chosen, dtype=torch.int64).view(*outer, rows, k)


def chosen_blocks(
    scores: list[float],
    k: int,
    current: int,
    *,
    top_p: float | None = None,
    sink: int = 1,
    local: int = 1,
    causal: bool = True,
    seen: range | None = None,
    exists: set[int] | None = None,
) -> list[int]:
    """Selects among the blocks `seen` by one row, whose queries lie in block `current`.

    `exists`: the blocks that have tokens, default all.
    """
    seen = range(len(scores)) if seen is None else seen
    last = min(current, seen.stop - 1)
    there = [b for b in seen if exists is None or b in exists]
    numbers = [b for b in there if not causal or b <= last]
    score = [-math.inf if math.isnan(x) else x for x in scores]
    up_to_own = [b for b in there if b <= last]
    always = {*there[:sink], *up_to_own[max(0, len(up_to_own) - local) :]}
    forced = [b for b in numbers if b in always]
    others = [b for b in numbers if b not in forced and score[b] > -math.inf]
    order = forced + sorted(others, key=lambda b: (-score[b], b))
    if top_p is not None and top_p < 1:
        finite = {b: min(score[b], LARGEST) for b in numbers}
        highest = max([x for x in finite.values() if x > -math.inf], default=0.0)
        share = {b: math.exp(x - highest) for b, x in finite.items()}
        limit, before, kept = top_p * sum(share.values()), 0.0, []
        for block in order:
            if block in forced or before < limit:
                kept.append(block)
            before += share[block]
        order = kept
    return [*order[:k], *[-1] * (k - len(order))]


def slots_of_pairs(
    table: Any,
    shape: tuple[int, int, int, int],
    first: int,
    block_size: int,
    query_block: int,
    first_row: int,
) -> np.ndarray:
    """[B, H, Nq, Nk] slot of each pair's block in its row of a table; all slots if none lists it.

    `table` are nested sequences, [R, k], [H, R, k] or [B, H, R, k]; rows of [R, k] may be unequal.
    """
    for _ in range(4 - _depth(table)):
        table = [table]
    starts = [0, *accumulate(map(len, table[0][0]))]
    out = np.full(shape, starts[-1])
    for b, h, i, k in np.ndindex(shape):
        row = (first + i) // query_block - first_row
        of_entry = table[b % len(table)]
        blocks = of_entry[h * len(of_entry) // shape[1]][row]
        if k // block_size in blocks:
            out[b, h, i, k] = starts[row] + blocks.index(k // block_size)
    return out


def _depth(table: Any) -> int:
    """Number of dims of nested sequences; rows of the last dim may be empty."""
    if not isinstance(table, Sequence):
        return 0
    return 1 + max(map(_depth, table), default=0)


def pool_blocks(
    x: Tensor,
    size: int,
    stride: int,
    first: Tensor | None = None,
    stop: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Computes means of windows of tokens [B, H, N, D], 0 for an empty window."""
    count = -(-max(0, x.shape[2] - size) // stride) + 1
    if not (first is stop is valid is None):
        means = torch.zeros(*x.shape[:2], count, x.shape[3], dtype=x.dtype)
        for b in range(len(x)):
            for c in range(count):
                tokens = [m for m in range(c * stride, c * stride + size) if m < x.shape[2]]
                if valid is not None:
                    own = valid if valid.dim() == 1 else valid[b]
                    tokens = [m for m in tokens if own[m]]
                if first is not None and tokens:
                    tokens = [m for m in tokens if m >= first[b % len(first), c * stride]]
                if stop is not None and tokens:
                    tokens = [m for m in tokens if m < stop[b % len(stop), c * stride]]
                if tokens:
                    means[b, :, c] = x[b, :, tokens].mean(1)
        return means + 0 * x.sum()
    windows = [x[:, :, c * stride : c * stride + size] for c in range(count)]
    return torch.stack([w.sum(2) / max(1, w.shape[2]) for w in windows], 2)


def selection_loss(
    scores: Tensor, mass: Tensor, indices: Tensor | None = None, *, row_weight: Tensor | None = None
) -> Tensor:
    """Computes the mean over rows of KL(share of the mass || softmax(scores)), row by row."""
    batch, heads, rows, blocks = scores.shape
    mass = mass.unflatten(1, (heads, -1)).sum(2)
    if indices is None:
        indices = torch.arange(blocks).expand(batch, heads, rows, blocks)
    indices = indices.expand(batch, heads, rows, indices.shape[-1])
    weights = torch.ones(()) if row_weight is None else row_weight
    weights = weights.double().expand(batch, heads, rows)
    total, weight = scores[:0].sum(), 0.0
    for at in torch.cartesian_prod(*map(torch.arange, (batch, heads, rows))).tolist():
        b, h, r = at
        listed: dict[int, int] = {}  # slot of each block
        for slot, block in enumerate(indices[b, h, r].tolist()):
            if 0 <= block < blocks and scores[b, h, r, block] > -math.inf:
                listed.setdefault(block, slot)
        if not listed:
            continue
        received = mass[b, h, r, list(listed.values())]
        if not received.sum() > 0:
            continue
        share = received / received.sum()
        log_share = scores[b, h, r, list(listed)].log_softmax(0)
        total = total + weights[b, h, r] * (share.xlogy(share) - share * log_share).sum()
        weight += weights[b, h, r].item()
    return total / weight if weight > 0 else total
