"""`BlockScorer`: scores key blocks by learned projections, which `selection_loss` trains."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..checks import check_inputs, checked_integer_or_none
from ..ground.arguments import checked_flag, checked_integer
from ..ground.keywords import class_with_hints
from ..ground.numerics import sum_dtype, without_autocast
from ..patterns.positions import Full
from .bounds import Bounds, checked_valid, exist_at
from .query_rows import checked_blocks, num_rows

_AT_A_TIME = 1 << 24  # scores computed at a time over all query heads, to bound memory


@class_with_hints
class BlockScorer(nn.Module):
    """Scores key blocks for groups of queries ("rows"), by learned projections.

    The keys of block b are averaged, weighted by a softmax, and projected. The score is the dot
    product with the projected query:
    `score_b(q) = (W_q q) . (W_k sum_j softmax_j(u . k_j) k_j) / sqrt(index_dim)`, j over the keys
    of block b. Each kv head has its own u, W_k and W_q. u starts at 0, which gives the plain mean.

    Each query of each query head takes a softmax of these scores over the blocks that it sees. The
    result for a row and a kv head is the log of the sum of these softmaxes, as in `block_scores`.
    With `causal`, a query averages only the keys up to its own position, and later blocks score
    -inf: no query's score depends on a later token. But a row sums over all its queries: with
    `query_block` above 1, the scores of a row depend on its last query.

    Args:
        head_dim: channels of queries and keys.
        num_kv_heads: heads of the keys; the number of query heads may be a multiple.
        block_size: keys in a block.
        index_dim: channels of the projections.
        query_block: queries in a row, a divisor of block_size; rows begin at multiples of it.
        causal: True if a query sees no later keys.
        detach: gradients reach the scorer's weights alone, not the queries and keys. The model is
            then trained by its own loss, and the scorer by `selection_loss`.

    Attributes:
        pool: u, [Hkv, D].
        project_key, project_query: W_k and W_q, [Hkv, index_dim, D].

    Cost: O(Nq Nb index_dim + Nk block_size D) time for each head; memory O(scores), because the
        backward computes the softmaxes again.

    Example:
        >>> scorer = BlockScorer(64, num_kv_heads=2, block_size=64)
        >>> scores = scorer(query, key)  # [B, 2, N, Nb]
        >>> indices = select_blocks(scores, 16, block_size=64)

    Source: SeerAttention-R (arXiv 2506.08889); the weights softmax_j are an addition.
    """

    def __init__(
        self,
        head_dim: int,
        num_kv_heads: int,
        block_size: int,
        *,
        index_dim: int = 64,
        query_block: int = 1,
        causal: bool = True,
        detach: bool = True,
    ) -> None:
        super().__init__()
        self.head_dim = checked_integer("head_dim", head_dim, 1)
        self.num_kv_heads = checked_integer("num_kv_heads", num_kv_heads, 1)
        query_block, block_size = checked_blocks(query_block, block_size)
        self.block_size, self.query_block = block_size, query_block
        self.causal = checked_flag("causal", causal)
        self.detach = checked_flag("detach", detach)
        shape = num_kv_heads, checked_integer("index_dim", index_dim, 1), head_dim
        self.pool = nn.Parameter(torch.zeros(num_kv_heads, head_dim))
        self.project_key = nn.Parameter(torch.randn(shape) * head_dim**-0.5)
        self.project_query = nn.Parameter(torch.randn(shape) * head_dim**-0.5)

    def extra_repr(self) -> str:
        """Lists the constructor's arguments for `repr`."""
        sizes = f"{self.head_dim}, {self.num_kv_heads}, {self.block_size}"
        parts = [f"{name}={getattr(self, name)}" for name in ("query_block", "causal", "detach")]
        return ", ".join([sizes, f"index_dim={self.project_key.shape[1]}", *parts])

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        q_start: int | None = None,
        first: Tensor | None = None,
        stop: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Scores every key block for every row (group of `query_block` queries).

        Args:
            query: [B, Hq, Nq, D].
            key: [B, Hkv, Nk, D].
            q_start: the first query's position, at least 0 if causal; default Nk - Nq.
            first, stop: int64 [B or 1, Nq], the bounds of the keys that each query sees, as in
                `block_scores`. Of a block that a bound cuts, a query averages the keys inside.
            valid: bool [Nk] or [B, Nk], the tokens that exist, as in `block_scores`. Others are in
                no average, and a block without any scores -inf.

        Returns: [B, Hkv, R, Nb], float32 (float64 for float64 inputs); the first of the R rows is
            row q_start // query_block, Nb = ceil(Nk / block_size). -inf for a block it cannot see.

        Raises: ValueError for invalid shapes, or a negative position if causal.

        Cost: with `first`, `stop` or `valid`, the keys of two blocks are read for each query.
        """
        check_inputs(query, key, key, Full())
        if key.shape[1] != self.num_kv_heads or key.shape[3] != self.head_dim:
            raise ValueError(
                f"expected keys [B, {self.num_kv_heads}, Nk, {self.head_dim}], the sizes of "
                f"this scorer, got {tuple(key.shape)}; construct another BlockScorer"
            )
        q_start = checked_integer_or_none("q_start", q_start)
        start = key.shape[2] - query.shape[2] if q_start is None else q_start
        if self.causal and start < 0:
            raise ValueError(
                f"expected queries at positions of at least 0, got q_start={start} for "
                f"{query.shape[2]} queries and {key.shape[2]} keys; pass q_start, or causal=False"
            )
        bounds = Bounds.of(first, stop, len(query), query.shape[2], key.shape[2])
        if valid is not None:
            valid = checked_valid(valid, len(query), key)
            if bounds is None:
                bounds = Bounds.of_all(query.shape[2], key.shape[2], query.device)
        if self.detach:
            query, key = query.detach(), key.detach()
        dtype = sum_dtype(query)
        with without_autocast(query):
            query, key = query.to(dtype), key.to(dtype)
            if bounds is not None:
                return self._bounded_scores(query, key, bounds, valid, start)
            return self.scores_of(query, self.summaries(key), key, start)

    def _bounded_scores(
        self, query: Tensor, key: Tensor, bounds: Bounds, valid: Tensor | None, start: int
    ) -> Tensor:
        """Computes scores [B, Hkv, R, Nb] of queries that see only keys within their bounds."""
        (batch, heads, q_len, _), (kv_heads, length, width) = query.shape, key.shape[1:]
        position = start + torch.arange(q_len, device=query.device)
        first, stop = bounds
        if self.causal:
            stop = torch.minimum(stop, position + 1)
        if valid is not None:  # a query whose token does not exist sees nothing
            there = exist_at(position, valid)
            stop = torch.where(there, stop, 0)
            query = torch.where(there[:, None, :, None], query, 0.0)
        keys, exists = _in_blocks(key, self.block_size, valid)
        pooled = self.summaries(key, valid)
        query = self._projected(query, kv_heads)
        numbers = batch * (heads * pooled.shape[2] + kv_heads * self.block_size * width)

        def rows(i: int, j: int) -> Tensor:
            part, seen = query[:, :, :, i:j], Bounds(first[:, i:j], stop[:, i:j])
            return self._bounded_rows(part, pooled, keys, exists, seen, start + i, length)

        return self._by_rows(rows, q_len, start, numbers)

    def _bounded_rows(
        self,
        query: Tensor,
        pooled: Tensor,
        keys: Tensor,
        exists: Tensor,
        bounds: Bounds,
        start: int,
        length: int,
    ) -> Tensor:
        """Computes the scores [B, Hkv, R, Nb] of some consecutive queries that have bounds.

        Args:
            query: [B, Hkv, G, n, index_dim], scaled.
            pooled: [B, Hkv, Nb, index_dim], summaries of whole blocks.
            keys: [B, Hkv, Nb, size, D].
            exists: bool [B or 1, 1, Nb, size], True for keys that count.
            bounds: [B or 1, n] each, the keys that each query sees.
            start: position of the first query.
            length: number of keys.
        """
        size, (first, stop) = self.block_size, bounds
        begin = torch.arange(pooled.shape[2], device=query.device) * size
        end = (begin + size).clamp(max=length)
        visible = (end > first[..., None]) & (begin < stop[..., None])
        visible = visible & (first < stop)[..., None] & exists.any(3)
        entry = torch.arange(len(query), device=query.device)[:, None]
        exists, ends = exists.expand(len(query), -1, -1, -1)[:, 0], []
        for token in (first, stop - 1) if length else ():
            block = token.clamp(0, length - 1).expand(len(query), -1) // size  # [B, n]
            place = block[..., None] * size + torch.arange(size, device=query.device)
            inside = (place >= first[..., None]) & (place < stop[..., None]) & exists[entry, block]
            own = keys.transpose(1, 2)[entry, block].transpose(1, 2)  # [B, Hkv, n, size, D]
            mean = _pooled(self._gate(own), own, inside[:, None])
            ends.append((block, mean @ self.project_key.to(mean.dtype).mT))
            here = torch.arange(pooled.shape[2], device=query.device) == block[..., None]
            visible = visible & ~(here & ~inside.any(2, keepdim=True))
        return self._score_rows(query, pooled, ends, visible, start)

    def summaries(self, key: Tensor, valid: Tensor | None = None) -> Tensor:
        """Pools and projects each block of keys [B, Hkv, Nk, D]: [B, Hkv, Nb, index_dim].

        `valid` is bool [B or 1, Nk], True for keys that count.
        """
        keys, exists = _in_blocks(key, self.block_size, valid)
        return _pooled(self._gate(keys), keys, exists) @ self.project_key.to(key.dtype).mT

    def _gate(self, keys: Tensor) -> Tensor:
        """Computes the pooling logits u . k of keys [B, Hkv, Nb, size, D]: [B, Hkv, Nb, size]."""
        return (keys @ self.pool.to(keys.dtype)[:, None, :, None])[..., 0]

    def scores_of(
        self, query: Tensor, pooled: Tensor, key: Tensor, first: int, num_skipped: int = 0
    ) -> Tensor:
        """Computes scores [B, Hkv, R, Nb] from summaries of the blocks; all inputs have one dtype.

        Args:
            query: [B, Hq, Nq, D], the first one at position `first`.
            pooled: [B, Hkv, Nb, index_dim], `summaries` of the blocks. If causal, a query uses the
                summaries of earlier blocks only.
            key: [B, Hkv, n, D], the keys from block `num_skipped` on, a block that begins at or
                before position `first`.
        """
        batch, heads, q_len = query.shape[:3]
        size, blocks = self.block_size, pooled.shape[2]
        project = self.project_key.to(query.dtype).mT  # [Hkv, D, index_dim]
        query = self._projected(query, key.shape[1])
        own = None
        if self.causal and q_len and blocks:
            # For each query, pool the keys from the start of its block up to the query.
            begin = min(first // size, blocks - 1)
            end = min((first + q_len - 1) // size, blocks - 1) + 1
            own_keys = key[:, :, (begin - num_skipped) * size : (end - num_skipped) * size]
            keys, exists = _in_blocks(own_keys, size)
            triangle = torch.ones(size, size, dtype=torch.bool, device=key.device).tril()
            gate = self._gate(keys)[:, :, :, None]
            prefixes = _pooled(gate, keys, triangle & exists[..., None, :]).flatten(2, 3)
            place = first - begin * size + torch.arange(q_len, device=key.device)
            own = prefixes[:, :, place.clamp(max=prefixes.shape[2] - 1)] @ project

        def rows(i: int, j: int) -> Tensor:
            ends = []
            visible = torch.ones(1, j - i, blocks, dtype=torch.bool, device=query.device)
            if own is not None:
                position = first + torch.arange(i, j, device=query.device)
                own_block = position[None] // size
                visible = torch.arange(blocks, device=query.device) <= own_block[..., None]
                ends.append((own_block, own[:, :, i:j]))
            return self._score_rows(query[:, :, :, i:j], pooled, ends, visible, first + i)

        return self._by_rows(rows, q_len, first, batch * heads * blocks)

    def _projected(self, query: Tensor, kv_heads: int) -> Tensor:
        """Projects and scales queries [B, Hq, Nq, D]: [B, Hkv, G, Nq, index_dim]."""
        project = self.project_query.to(query.dtype).mT[:, None]
        query = query.unflatten(1, (kv_heads, query.shape[1] // kv_heads)) @ project
        return query * project.shape[3] ** -0.5

    def _by_rows(
        self, rows: Callable[[int, int], Tensor], q_len: int, start: int, numbers: int
    ) -> Tensor:
        """Joins `rows(i, j)`, the scores of queries i to j - 1, over parts that fit in memory.

        The first query is at position `start`. The scores of a query need `numbers` numbers.
        """
        step = self.query_block
        length = max(step, _AT_A_TIME // max(1, numbers) // step * step)
        starts = [*range(start // step * step, start + q_len, length)] or [start]
        if len(starts) > 1 and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            rows = partial(checkpoint, rows, use_reentrant=False, preserve_rng_state=False)
        return torch.cat(
            [rows(i, j) for i, j in pairwise([0, *(x - start for x in starts[1:]), q_len])], 2
        )

    def _score_rows(
        self,
        query: Tensor,
        pooled: Tensor,
        ends: list[tuple[Tensor, Tensor]],
        visible: Tensor,
        first: int,
    ) -> Tensor:
        """Computes the scores [B, Hkv, R, Nb] of some consecutive queries from block summaries.

        Args:
            query: [B, Hkv, G, Nq, index_dim], scaled.
            pooled: [B, Hkv, Nb, index_dim], summaries of key blocks.
            ends: blocks that a query sees in part, int64 [B or 1, Nq], each with the summary of the
                keys that the query sees, [B, Hkv, Nq, index_dim].
            visible: bool [B or 1, Nq, Nb], blocks that each query sees.
            first: position of the first query.
        """
        q_len, blocks, step = query.shape[3], pooled.shape[2], self.query_block
        lowest = torch.finfo(query.dtype).min
        score = query @ pooled.mT[:, :, None]  # [B, Hkv, G, Nq, Nb]
        for block, summary in ends:
            own_score = (query * summary[:, :, None]).sum(-1, keepdim=True)
            here = torch.arange(blocks, device=query.device) == block[..., None]
            score = torch.where(here[:, None, None], own_score, score)
        rows = num_rows(first, q_len, step)
        before = first % step if rows else 0
        margin = (0, 0, before, rows * step - before - q_len)
        seen = visible[:, None, None]
        share = torch.where(seen, score, lowest).log_softmax(4)
        share = F.pad(torch.where(seen, share, lowest), margin, value=lowest)
        score = share.unflatten(3, (rows, step)).transpose(2, 3).flatten(3, 4).logsumexp(3)
        row_visible = F.pad(visible, margin, value=False).unflatten(1, (rows, step)).any(2)
        return torch.where(row_visible[:, None], score, -torch.inf)


def _in_blocks(key: Tensor, size: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cuts keys [B, H, Nk, D] into zero-padded blocks [B, H, Nb, size, D], and marks existing keys.

    `valid` is bool [B or 1, Nk], True for keys that exist; others become 0. The marks are bool [B
    or 1, 1, Nb, size].
    """
    length = key.shape[2]
    blocks = -(-length // size)
    margin = (0, blocks * size - length)
    if valid is None:
        valid = torch.ones(1, length, dtype=torch.bool, device=key.device)
    else:
        key = torch.where(valid[:, None, :, None], key, 0.0)
    keys = F.pad(key, (0, 0, *margin)).unflatten(2, (blocks, size))
    return keys, F.pad(valid, margin).unflatten(1, (blocks, size))[:, None]


def _pooled(gate: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """Averages keys [.., Nb, size, D], weighted by the softmax of `gate` over keys in `mask`."""
    weight = torch.where(mask, gate, torch.finfo(gate.dtype).min).softmax(-1)
    weight = torch.where(mask, weight, 0.0)
    return weight @ keys if weight.dim() == keys.dim() else (weight[..., None, :] @ keys)[..., 0, :]
