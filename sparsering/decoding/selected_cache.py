"""`SelectedCache`: each new token attends to the blocks of earlier tokens that it chooses."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..checks import autocast_inputs, check_inputs, check_tensor
from ..functional import attention
from ..patterns.arguments import checked_integer, shortened
from ..patterns.positions import Causal
from ..patterns.selected import SelectedBlocks
from ..selection.choose import select_blocks
from ..selection.scorer import BlockScorer
from ..selection.summaries import BlockSummaries
from .held import Held, keeping_tensors
from .kv_cache import KVCache
from .new_tokens import check_dtype, nothing_new


class SelectedCache(KVCache):
    """A `KVCache` in which each new token scores all blocks of keys and sees the best k of them.

    A step appends the token's key, scores all blocks by summaries of their keys, selects k of them
    and attends to these exactly. The result equals `block_scores`, `select_blocks` and `attention`
    on the whole sequence with rows of one query. All keys are kept. Scores may be learned: pass
    `method=scorer`, a trained `BlockScorer` with query_block=1.

    Args:
        batch_size, num_kv_heads, head_dim: sizes of the keys.
        k: blocks that a token sees, `sink` and `local` ones included.
        block_size, method, parts: as in `BlockSummaries`.
        top_p, sink, local: as in `select_blocks`.
        options: those of `KVCache`.

    Raises: ValueError where arguments do not fit.

    Cost: a step reads k blocks and the summaries. For "sub" these are parts / block_size as many
        numbers as the keys, in float32.

    Example:
        >>> cache = SelectedCache(1, 2, 64, k=64, num_heads=8)
        >>> out = cache.attend(query, key, value)  # the prompt, whole or in parts
        >>> out = cache.attend(query, key, value)  # then token by token
        >>> learned = SelectedCache(1, 2, 64, k=64, num_heads=8, method=layer.block_scorer)

    Source: Quest (arXiv 2406.10774), section 3; InfLLM-V2 (2509.24663).
    """

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        head_dim: int,
        k: int,
        *,
        block_size: int = 64,
        method: str | BlockScorer = "sub",
        parts: int = 4,
        top_p: float | None = None,
        sink: int = 1,
        local: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(Causal(), batch_size, num_kv_heads, head_dim, **options)
        k, sink = checked_integer("k", k, 0), checked_integer("sink", sink, 0)
        local = checked_integer("local", local, 0)
        summaries = BlockSummaries(block_size, method=method, parts=parts)
        self._held = self._held.changed(summaries=summaries)
        self._size, self._k = block_size, k
        self._selection: dict[str, Any] = {"block_size": block_size, "top_p": top_p}
        self._selection |= {"sink": sink, "local": local}
        self._chosen(torch.zeros(1, min(sink + local, k + 1)))  # validates arguments early

    def __repr__(self) -> str:
        return (
            f"<SelectedCache of {self._k} blocks of {self._size}: {self.kept} of {self.length} "
            "tokens>"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the keys, the values, their positions and the block summaries."""
        return super().nbytes + self._summaries.nbytes

    def _chosen(self, scores: Tensor, q_start: int = 0) -> Tensor:
        """Selects blocks by rows of scores, with this cache's k, sink, local and top_p."""
        return select_blocks(scores, self._k, q_start=q_start, **self._selection)

    @keeping_tensors()
    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Sequence[int] | Tensor | None = None,
        stored: bool = True,
        *,
        backend: str | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        check_inputs(query, key, value, self._held.pattern)
        self._check(query, key, value)
        held, n, begin = self._held, query.shape[2], self.length
        query, key, value = autocast_inputs(query, key, value)
        new = self._new_tokens(lengths, n)
        if set(new) - {n} or not stored:
            raise ValueError(
                "a SelectedCache takes the same new tokens for all of its entries, got lengths "
                f"{shortened(str(new))} and stored={stored}; give KVCache those"
            )
        if n == 0:
            return nothing_new(query, self._dims[1])
        check_dtype(self._dtype, key)
        if held.since + n > held.page >= n and held.keys.shape[2]:
            held = held.evicted()
        paged = held.keys.shape[2] > 0 and held.since + n <= held.page
        keys, values = (
            _with(held, slots, x, paged) for slots, x in ((held.keys, key), (held.values, value))
        )
        summaries = self._summaries
        summaries.crop(begin)  # drops blocks of a step that failed
        scores = summaries.scores(query, keys, scale=options.get("scale"))
        chosen = self._chosen(scores, begin)
        pattern = SelectedBlocks(chosen, self._size, 1, begin) & Causal()
        found = attention(query, keys, values, pattern, return_lse=True, backend=backend, **options)
        if paged:
            self._held = held.advanced(new, held.since + n)
        else:
            self._held = held.advanced(new, held.since).evicted(key, value)
        return found

    @property
    def _summaries(self) -> BlockSummaries:
        return cast(BlockSummaries, self._held.summaries)

    def load(
        self,
        key: Tensor,
        value: Tensor,
        positions: Tensor | Sequence[int] | None = None,
        *,
        length: int | None = None,
    ) -> None:
        """Stores the keys and values of a whole prompt whose attention ran elsewhere."""
        check_tensor("key", key, "[batch, heads, tokens, head dim]")
        if positions is not None or length not in (None, *key.shape[2:3]):
            raise ValueError(
                "a SelectedCache scores all keys, got positions or a length of others; leave them "
                "out"
            )
        super().load(key, value)


def _with(held: Held, slots: Tensor, new: Tensor, paged: bool) -> Tensor:
    """All keys, or values, in order; writes the new ones into the page if they fit it."""
    used = held.in_use(slots)
    if not paged:
        return torch.cat((used, new), 2) if used.shape[2] else new
    first = used.shape[2]
    slots.narrow(2, first, new.shape[2]).copy_(new)
    return slots[:, :, : first + new.shape[2]]
