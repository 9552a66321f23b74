"""`BlockSummaries`: what scores ask of the keys so far, kept from step to step."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import check_inputs, checked_scale
from ..numerics import sum_dtype, without_autocast
from ..patterns.arguments import checked_integer
from ..patterns.positions import Full
from .estimates import Estimate, checked_method, counts, features, query_features
from .rows import checked_blocks
from .scores import scores_of


class BlockSummaries:
    """Summaries of whole blocks of a sequence that grows, for scores in O(blocks).

    A block is summarised once, when its last key has come.

    Args:
        block_size, method, parts: as `block_scores`.

    Raises: ValueError where arguments do not fit.

    Example:
        >>> summaries = BlockSummaries(64)
        >>> scores = summaries.scores(query, keys)  # of the last tokens, over all keys so far
    """

    def __init__(self, block_size: int, *, method: str = "sub", parts: int = 4) -> None:
        checked_blocks(1, block_size)
        self._part = checked_method(method, parts, block_size, 1)
        self._method, self._size = method, block_size
        self._feature: Tensor | None = None  # [B, Hkv, slots, room, F]
        self._blocks = 0

    @property
    def nbytes(self) -> int:
        """Of the summaries."""
        held = self._feature
        return 0 if held is None else held.numel() * held.element_size()

    @torch.no_grad()
    def scores(self, query: Tensor, key: Tensor, *, scale: float | None = None) -> Tensor:
        """`block_scores` of the last queries, in rows of one, each block read by its summary.

        Args:
            query: [B, Hq, n, D], of the last n tokens.
            key: [B, Hkv, Nk, D], all keys so far: those before the last call's Nk as they were.
            scale: of the products, default D ** -0.5.

        Returns: [B, Hkv, n, Nb] float32, no gradient.

        Raises: ValueError where arguments do not fit.

        Cost: O(n Nb) and the keys of the queries' own blocks; new blocks are read once.
        """
        check_inputs(query, key, key, Full())
        length, size = key.shape[2], self._size
        start = length - query.shape[2]
        if start < 0:
            raise ValueError(
                f"query must be of the last tokens of {length} keys, got {query.shape[2]}; append "
                "keys before the queries score them"
            )
        dtype = sum_dtype(query)
        with without_autocast(query):
            feature = self._extended(key, dtype)
            own = key[:, :, start // size * size :].to(dtype)
            scale = checked_scale(scale, query)
            if query.shape[2] == 1 and query.shape[1]:
                return self._of_one(query.to(dtype), feature[:, :, :, : start // size], own, scale)
            own = pad(own, (0, 0, 0, -length % size)).unflatten(2, (-1, size))
            estimate = Estimate(self._method, length, self._part, feature, own, start // size)
            return scores_of(query, estimate, 1, True, scale, start).float()

    def _of_one(self, query: Tensor, feature: Tensor, own: Tensor, scale: float) -> Tensor:
        """The same of one query, which sees all keys of its own block that there are."""
        query = query.unflatten(1, (feature.shape[1], -1)).flatten(0, 1)  # [B * Hkv, G, 1, D]
        of_query = query_features(query.transpose(1, 2), scale, self._method)  # [B * Hkv, 1, G, F]
        logits = of_query @ feature.flatten(0, 1).mT + math.log(self._part)
        own_logits = query[:, :, 0] * scale @ own.flatten(0, 1).mT
        own_mass = own_logits.logsumexp(-1, keepdim=True)
        mass = torch.cat((logits.logsumexp(1), own_mass), -1)  # [B * Hkv, G, Nb]
        score = mass.log_softmax(-1).logsumexp(1, keepdim=True)
        return score.unflatten(0, feature.shape[:2]).float()

    def crop(self, length: int) -> None:
        """Forgets the tokens from `length` on."""
        self._blocks = min(self._blocks, checked_integer("length", length, 0) // self._size)

    def select(self, index: Tensor | Sequence[int]) -> None:
        """Keeps some batch entries, in the order of the index."""
        if self._feature is not None:
            chosen = torch.as_tensor(index, device=self._feature.device)
            self._feature = self._feature.index_select(0, chosen)

    def _extended(self, key: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, Hkv, slots, whole blocks, F], those that are new summarised."""
        size, whole, slots = self._size, key.shape[2] // self._size, self._size // self._part
        first = self._blocks = min(self._blocks, whole)
        if whole > first or self._feature is None:
            keys = key[:, :, first * size : whole * size].to(dtype)
            keys = keys.unflatten(2, (whole - first, slots, self._part))
            count = counts(key.shape[2], whole, size, self._part)[first:].to(key.device)
            new = features(keys, count, self._method).transpose(2, 3)
            self._feature = _with_room(self._feature, new, first)
            self._feature[:, :, :, first:whole] = new
            self._blocks = whole
        return self._feature[:, :, :, : max(whole, 1)]  # with one that none sees, before any


def _with_room(held: Tensor | None, new: Tensor, first: int) -> Tensor:
    """Room for the first blocks, kept, and the new ones: half as much again where it is spent."""
    whole = first + new.shape[3]
    if held is not None and held.shape[3] >= whole:
        return held
    room = whole if held is None else max(whole, first + first // 2)
    grown = new.new_zeros(*new.shape[:3], max(room, 1), new.shape[4])
    if held is not None:
        grown[:, :, :, :first] = held[:, :, :, :first]
    return grown
