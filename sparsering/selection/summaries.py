"""`BlockSummaries`: caches summaries of key blocks while a sequence is decoded."""

import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import check_inputs, checked_index, checked_scale
from ..numerics import sum_dtype, without_autocast
from ..patterns.arguments import checked_integer
from ..patterns.keywords import class_with_hints
from ..patterns.positions import Full
from .estimates import BlockEstimate, checked_method, query_features
from .query_rows import checked_blocks
from .scorer import BlockScorer
from .scores import scores_of


@class_with_hints
class BlockSummaries:
    """Caches summaries of key blocks while a sequence grows, so that scores cost O(blocks).

    A block is summarised once, when it is full.

    Args:
        block_size, parts: as `block_scores`.
        method: as `block_scores`; or a causal `BlockScorer` with this block_size and query_block=1.
            A block's summary is not updated when the scorer's weights change later.

    Raises: ValueError if an argument is invalid.

    Example:
        >>> summaries = BlockSummaries(64)
        >>> scores = summaries.scores(query, keys)  # for the last tokens, over all keys so far
    """

    def __init__(
        self, block_size: int, *, method: str | BlockScorer = "sub", parts: int = 4
    ) -> None:
        _, block_size = checked_blocks(1, block_size)
        self._size, self._method, self._part = block_size, method, block_size
        if not isinstance(method, BlockScorer):
            self._part = checked_method(method, parts, block_size, 1)
        elif (method.block_size, method.query_block, method.causal) != (block_size, 1, True):
            got = f"block_size={method.block_size}, query_block={method.query_block}"
            raise ValueError(
                f"a BlockScorer as method must have block_size={block_size}, query_block=1 and "
                f"causal=True, got {got}, causal={method.causal}; pass "
                f"block_size={method.block_size} here, or construct another scorer"
            )
        self._feature: Tensor | None = None  # [B, Hkv, parts of a block, allocated blocks, F]
        self._blocks = 0

    def __copy__(self) -> Self:
        """Copies the buffer too, because `scores` writes new blocks to it in place."""
        other = self.fork()
        if self._feature is not None:
            other._feature = self._feature.clone()
        return other

    def fork(self) -> Self:
        """Returns a copy with the same buffer, for a call that replaces this object or fails."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    @property
    def nbytes(self) -> int:
        """Bytes of the summaries."""
        return 0 if self._feature is None else self._feature.nbytes

    @torch.no_grad()
    def scores(self, query: Tensor, key: Tensor, *, scale: float | None = None) -> Tensor:
        """Scores all blocks for each of the last n queries, from the summaries of full blocks.

        `block_scores` or the `BlockScorer`, called on the whole sequence, give the same scores.

        Args:
            query: [B, Hq, n, D], queries of the last n tokens.
            key: [B, Hkv, Nk, D], all keys so far; keys of earlier calls must not have changed.
            scale: factor of the products, default D ** -0.5; a `BlockScorer` ignores it.

        Returns: [B, Hkv, n, Nb] without gradient, float32 (a `BlockScorer`'s may be float64).

        Raises: ValueError if an argument is invalid.

        Cost: O(n Nb), plus reading the keys of the blocks of the queries, and new blocks once.
        """
        check_inputs(query, key, key, Full())
        length, size = key.shape[2], self._size
        if (start := length - query.shape[2]) < 0:
            raise ValueError(
                f"expected at most as many queries as keys, {length}, got {query.shape[2]}; append "
                "the keys of the new tokens to `key` first"
            )
        dtype = sum_dtype(query)
        with without_autocast(query):
            feature = self._extended(key, dtype)
            own = key[:, :, start // size * size :].to(dtype)
            if isinstance(self._method, BlockScorer):
                pooled = feature[:, :, 0, : -(-length // size)]
                return self._method.scores_of(query.to(dtype), pooled, own, start, start // size)
            feature = feature[:, :, :, : max(length // size, 1)]  # one unused block if none is full
            scale = checked_scale(scale, query)
            if query.shape[2] == 1 and query.shape[1]:
                feature = feature[:, :, :, : start // size]
                return self._scores_of_one(self._method, query.to(dtype), feature, own, scale)
            own = pad(own, (0, 0, 0, -length % size)).unflatten(2, (-1, size))
            estimate = BlockEstimate(
                method=self._method,
                length=length,
                part=self._part,
                feature=feature,
                keys=own,
                first_own=start // size,
            )
            return scores_of(query, estimate, 1, True, scale, start).float()

    def _scores_of_one(
        self, method: str, query: Tensor, feature: Tensor, own: Tensor, scale: float
    ) -> Tensor:
        """Scores blocks for a single query, at the last position."""
        query = query.unflatten(1, (feature.shape[1], -1)).flatten(0, 1)  # [B * Hkv, G, 1, D]
        query_feature = query_features(query.transpose(1, 2), scale, method)  # [B * Hkv, 1, G, F]
        logits = query_feature @ feature.flatten(0, 1).mT + math.log(self._part)
        own_mass = (query[:, :, 0] * scale @ own.flatten(0, 1).mT).logsumexp(-1, keepdim=True)
        mass = torch.cat((logits.logsumexp(1), own_mass), -1)  # [B * Hkv, G, Nb]
        score = mass.log_softmax(-1).logsumexp(1, keepdim=True)
        return score.unflatten(0, feature.shape[:2]).float()

    def crop(self, length: int) -> None:
        """Forgets the summaries of blocks that end after the first `length` tokens."""
        self._blocks = min(self._blocks, checked_integer("length", length, 0) // self._size)

    def select(self, index: Tensor | Sequence[int]) -> None:
        """Keeps only the batch entries listed in `index`, in the order of the list."""
        if self._feature is not None:
            chosen = checked_index("select", index, len(self._feature))
            self._feature = self._feature.index_select(0, chosen.to(self._feature.device))

    def _extended(self, key: Tensor, dtype: torch.dtype) -> Tensor:
        """Summarises newly full blocks; returns the buffer [B, Hkv, parts, allocated blocks, F]."""
        size, whole = self._size, key.shape[2] // self._size
        first = self._blocks = min(self._blocks, whole)
        if whole > first or self._feature is None:
            keys = key[:, :, first * size : whole * size].to(dtype)
            if isinstance(self._method, BlockScorer):
                new = self._method.summaries(keys)[:, :, None]
            else:
                new = BlockEstimate.build(keys, size, self._method, self._part).feature
            buffer = new[:, :, :, :0] if self._feature is None else self._feature
            if buffer.shape[3] <= whole:  # a full buffer grows by half
                room = max(whole, first + first // 2) + 1 - first
                buffer = pad(buffer[:, :, :, :first], (0, 0, 0, room))
            buffer[:, :, :, first:whole] = new
            self._feature, self._blocks = buffer, whole
        return self._feature
