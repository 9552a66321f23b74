"""`BlockSummaries`: keeps summaries of key blocks while a sequence is decoded."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import check_inputs, checked_index, checked_scale
from ..ground.arguments import checked_integer, index_of, listed, shortened
from ..ground.keywords import class_with_hints
from ..ground.numerics import sum_dtype, without_autocast
from ..patterns.positions import Full
from .estimates import BlockEstimate, checked_method, query_features
from .query_rows import checked_blocks
from .scorer import BlockScorer
from .scores import scores_of


@class_with_hints
class BlockSummaries:
    """Caches summaries of key blocks while a sequence grows, so that scores cost O(blocks).

    A block is summarized once, when it is full.

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
        self._head_dim = 0  # head dim of the keys, once there are summaries
        self._blocks: list[int] = []  # per batch entry, number of summarized blocks; [] before keys

    def __copy__(self) -> Self:
        """Copies the buffer, too, because `scores` writes new blocks to it in place."""
        other = self.fork()
        if self._feature is not None:
            other._feature = self._feature.clone()
        return other

    def fork(self) -> Self:
        """Returns a copy that shares the buffer.

        A call that fails then leaves this object as it was.
        """
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._blocks = list(self._blocks)
        return other

    @property
    def nbytes(self) -> int:
        """Bytes of the summaries."""
        return 0 if self._feature is None else self._feature.nbytes

    @torch.no_grad()
    def scores(
        self,
        query: Tensor,
        key: Tensor,
        *,
        scale: float | None = None,
        lengths: Sequence[int] | Tensor | None = None,
    ) -> Tensor:
        """Scores all blocks for each of the last n queries, from the summaries of full blocks.

        `block_scores` or the `BlockScorer`, called on the whole sequence, give the same scores.

        Args:
            query: [B, Hq, n, D], queries of the last n tokens.
            key: [B, Hkv, Nk, D], all keys so far; keys of earlier calls must not have changed.
            scale: factor of the products, default D ** -0.5; a `BlockScorer` ignores it.
            lengths: keys of each batch entry so far, from n to Nk; those behind are padding. The
                queries are then the last n tokens of each entry, and its scores those that it has
                alone, -inf for blocks of padding. Default: Nk.

        Returns: [B, Hkv, n, Nb] without gradient, float32 (a `BlockScorer`'s may be float64).

        Raises: ValueError if an argument is invalid.

        Cost: O(n Nb), plus reading the keys of the blocks of the queries, and new blocks once. With
            `lengths`, one entry is computed after the other.
        """
        check_inputs(query, key, key, Full())
        (batch, _, n, _), length = query.shape, key.shape[2]
        if n > length:
            raise ValueError(
                f"expected at most as many queries as keys, {length}, got {n}; append the keys of "
                "the new tokens to `key` first"
            )
        self._check_like_before(key)
        if lengths is None:
            first = self.first_needed(range(batch), length - n)
            return self._scores(query, key[:, :, first:], length, scale)
        given = listed("lengths", lengths)
        ends: list[Any] = [index_of(x) for x in given] if isinstance(given, Sequence) else []
        if len(ends) != batch or not all(x is not None and n <= x <= length for x in ends):
            raise ValueError(
                f"lengths must be {batch} ints from {n} to {length}, the keys of each batch entry, "
                f"got {shortened(repr(given))}; leave lengths out if no key is padding"
            )
        self.reserve(key, max(ends, default=0))
        parts = []
        for entry, end in enumerate(ends):
            tail = key[entry : entry + 1, :, self.first_needed([entry], end - n) : end]
            own = self.scores_of_entry(entry, query[entry : entry + 1], tail, end, scale)
            parts.append(pad(own, (0, -(-length // self._size) - own.shape[3]), value=-torch.inf))
        return torch.cat(parts)

    def _check_like_before(self, key: Tensor) -> None:
        """Raises ValueError unless keys have the batch size, heads and width of earlier calls."""
        batch, heads, _, width = key.shape
        if self._feature is None:
            self._head_dim = width
        elif (before := (*self._feature.shape[:2], self._head_dim)) != (batch, heads, width):
            raise ValueError(
                f"key must have the batch entries, heads and head dim of earlier calls, {before}, "
                f"got {(batch, heads, width)}; other keys need a BlockSummaries of their own"
            )

    def first_needed(self, entries: Iterable[int], start: int) -> int:
        """Returns from which key on `scores` reads keys, for queries from position `start` on.

        It begins the block of the first query, or an earlier block that has no summary yet.
        """
        done = [self._blocks[entry] for entry in entries if self._blocks] or [0]
        return min(*done, start // self._size) * self._size

    def scores_of_entry(
        self, entry: int, query: Tensor, tail: Tensor, length: int, scale: float | None
    ) -> Tensor:
        """Computes `scores` [1, Hkv, n, Nb] for the last n of an entry's `length` tokens.

        `tail` [1, Hkv, m, D] has its keys from `first_needed` on. `reserve` must have made room.
        """
        one = self.fork()
        assert self._feature is not None
        one._feature, one._blocks = self._feature[entry : entry + 1], [self._blocks[entry]]
        scores = one._scores(query, tail, length, scale)
        self._blocks[entry] = one._blocks[0]
        return scores

    def _scores(self, query: Tensor, tail: Tensor, length: int, scale: float | None) -> Tensor:
        """Computes scores of the last queries.

        `tail` [B, Hkv, n, D] are the last of `length` keys.
        """
        size, start, dtype = self._size, length - query.shape[2], sum_dtype(query)
        first = (length - tail.shape[2]) // size  # block that begins with the first key of `tail`
        with without_autocast(query):
            feature = self._extended(tail, length, dtype)
            own = tail[:, :, (start // size - first) * size :].to(dtype)
            if isinstance(self._method, BlockScorer):
                pooled = feature[:, :, 0, : -(-length // size)]
                return self._method.scores_of(query.to(dtype), pooled, own, start, start // size)
            feature = feature[:, :, :, : max(length // size, 1)]  # an unused one if none is full
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
        """Scores blocks for one query at the last position, a faster form of `scores_of`."""
        query = query.unflatten(1, (feature.shape[1], -1)).flatten(0, 1)  # [B * Hkv, G, 1, D]
        query_feature = query_features(query.transpose(1, 2), scale, method)  # [B * Hkv, 1, G, F]
        logits = query_feature @ feature.flatten(0, 1).mT + math.log(self._part)
        own_mass = (query[:, :, 0] * scale @ own.flatten(0, 1).mT).logsumexp(-1, keepdim=True)
        mass = torch.cat((logits.logsumexp(1), own_mass), -1)  # [B * Hkv, G, Nb]
        score = mass.log_softmax(-1).logsumexp(1, keepdim=True)
        return score.unflatten(0, feature.shape[:2]).float()

    def crop(self, length: int | Sequence[int]) -> None:
        """Forgets the summaries of blocks that end after the first `length` tokens.

        `length` may be a list with a length for each batch entry.
        """
        if isinstance(length, Sequence):
            ends = [checked_integer("length", x, 0) // self._size for x in length]
            if len(ends) != len(self._blocks or ends):
                raise ValueError(
                    f"crop needs a length for each of {len(self._blocks)} batch entries, got "
                    f"{len(ends)}; one int crops all"
                )
            pairs = zip(self._blocks, ends, strict=False)
            self._blocks = [min(blocks, end) for blocks, end in pairs]
            return
        whole = checked_integer("length", length, 0) // self._size
        self._blocks = [min(blocks, whole) for blocks in self._blocks]

    def select(self, index: Tensor | Sequence[int]) -> None:
        """Keeps only the batch entries listed in `index`, in the order of the list."""
        if self._feature is not None:
            chosen = checked_index("select", index, len(self._feature))
            self._feature = self._feature.index_select(0, chosen.to(self._feature.device))
            self._blocks = [self._blocks[entry] for entry in chosen.tolist()]

    def reserve(self, key: Tensor, length: int) -> None:
        """Makes room for the summaries of `length` keys like `key` [B, Hkv, n, D]."""
        dtype = sum_dtype(key)
        if self._feature is None:
            self._keep(self._summarised(key[:, :, :0].to(dtype)), [0] * len(key))
        self._grow(length // self._size)

    def _extended(self, tail: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Summarizes blocks that became full; returns the buffer [B, Hkv, parts, blocks, F].

        `tail` has the last keys of all entries, which have `length` keys each.
        """
        size, whole = self._size, length // self._size
        skipped = (length - tail.shape[2]) // size
        first = min([whole, *self._blocks] if self._blocks else [0])
        if whole > first or self._feature is None:
            keys = tail[:, :, (first - skipped) * size : (whole - skipped) * size].to(dtype)
            new = self._summarised(keys)
            if self._feature is None:
                self._keep(new[:, :, :, :0], [0] * len(tail))
            buffer = self._grow(whole)
            buffer[:, :, :, first:whole] = new
        self._blocks = [whole] * len(tail)
        assert self._feature is not None
        return self._feature

    def _summarised(self, keys: Tensor) -> Tensor:
        """Returns the features [B, Hkv, parts, blocks, F] of full blocks of keys."""
        if isinstance(self._method, BlockScorer):
            return self._method.summaries(keys)[:, :, None]
        return BlockEstimate.build(keys, self._size, self._method, self._part).feature

    def _keep(self, feature: Tensor, blocks: list[int]) -> None:
        self._feature, self._blocks = feature, blocks

    def _grow(self, whole: int) -> Tensor:
        """Returns the buffer with room for `whole` blocks and one more; it grows by half."""
        assert self._feature is not None
        if self._feature.shape[3] <= whole:
            used = max(self._blocks, default=0)
            room = max(whole, used + used // 2) + 1 - used
            self._feature = pad(self._feature[:, :, :, :used], (0, 0, 0, room))
        return self._feature
