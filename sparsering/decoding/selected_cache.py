"""`SelectedCache`: each new token attends to the blocks of earlier tokens that it chooses."""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..call import Inputs
from ..checks import autocast_inputs, check_inputs
from ..functional import attention
from ..patterns.arguments import checked_integer, shortened
from ..patterns.keywords import class_with_hints
from ..patterns.positions import Causal
from ..patterns.selected import SelectedBlocks
from ..selection.choose import select_blocks
from ..selection.scorer import BlockScorer
from ..selection.summaries import BlockSummaries
from .cache_state import ordinary_tensors
from .kv_cache import KVCache
from .steps import empty_results


@class_with_hints
class SelectedCache(KVCache):
    """A `KVCache` in which each new token scores all blocks of keys and attends to the best k.

    A step appends the token's key, scores all blocks by summaries of their keys, selects k blocks
    and attends to them exactly. The result equals `block_scores`, `select_blocks` and `attention`
    on the whole sequence with rows of one query. The cache evicts no keys. Scores may be learned:
    pass `method=scorer`, a trained `BlockScorer` with query_block=1.

    Args:
        batch_size, num_kv_heads, head_dim: sizes of the keys.
        k: number of blocks that a token attends to, including the `sink` and `local` blocks.
        block_size, method, parts: as in `BlockSummaries`.
        top_p, sink, local: as in `select_blocks`.
        num_heads, value_dim, max_length, rollback, page_size, dtype, device: as in `KVCache`.

    Raises: ValueError if an argument is invalid.

    Cost: a step reads k blocks and the summaries. With method "sub", the summaries have
        parts / block_size times as many numbers as the keys, in float32.

    Example:
        >>> cache = SelectedCache(1, 2, 64, k=64, num_heads=8)
        >>> out = cache.attend(query, key, value)  # the prompt, whole or in parts
        >>> out = cache.attend(query, key, value)  # then token by token
        >>> learned = SelectedCache(1, 2, 64, k=64, num_heads=8, method=layer.block_scorer)

    Source: Quest (arXiv 2406.10774), section 3; InfLLM-V2 (2509.24663).
    """

    _takes_parts = False

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
        num_heads: int | None = None,
        value_dim: int | None = None,
        max_length: int | None = None,
        rollback: int = 0,
        page_size: int = 128,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            Causal(),
            batch_size,
            num_kv_heads,
            head_dim,
            num_heads=num_heads,
            value_dim=value_dim,
            max_length=max_length,
            rollback=rollback,
            page_size=page_size,
            dtype=dtype,
            device=device,
        )
        k, sink = checked_integer("k", k, 0), checked_integer("sink", sink, 0)
        local = checked_integer("local", local, 0)
        summaries = BlockSummaries(block_size, method=method, parts=parts)
        self._state = self._state.changed(summaries=summaries)
        self._size, self._k = block_size, k
        self._select_blocks = partial(
            select_blocks, k=k, block_size=block_size, top_p=top_p, sink=sink, local=local
        )
        self._select_blocks(torch.zeros(1, min(sink + local, k + 1)))  # validates arguments early

    def __repr__(self) -> str:
        tokens = f"{self.kept} of {self.length} tokens"
        return f"<SelectedCache of {self._k} blocks of {self._size}: {tokens}>"

    @property
    def nbytes(self) -> int:
        """Bytes of the keys, the values, their positions and the block summaries."""
        return super().nbytes + self._summaries.nbytes

    @ordinary_tensors()
    def _attend(
        self, inputs: Inputs, lengths: Any, stored: bool, tree: Any, keep: bool, **options: Any
    ) -> tuple[Tensor, Tensor]:
        check_inputs(*inputs, self._state.pattern)
        self._check(*inputs)
        query, key, value = autocast_inputs(*inputs)
        state, n, begin = self._state, query.shape[2], self.length
        new = self._state.new_tokens(lengths, n)
        if set(new) - {n} or not stored or tree is not None:
            raise ValueError(
                "a SelectedCache needs equally many new tokens in each entry, stored=True and no "
                f"tree, got lengths {shortened(str(new))}, stored={stored}; use KVCache for this"
            )
        if n == 0:
            return empty_results(query, self._dims[1])
        self._check_dtype(key)
        after = state.appended(key, value)  # without keys that no later token sees
        count, held = state.page_length, (state.keys, state.values)
        if state.keys.num_slots and count + n <= state.page_size:  # `after` has written them there
            keys, values = (x.rows[:, :, : x.older[0] + count + n] for x in held)
        else:
            pairs = zip(held, (key, value), strict=True)
            keys, values = (x.with_new(count, new) for x, new in pairs)
        summaries = self._summaries.fork()  # so that a failed step does not change the cache
        summaries.crop(begin)
        scores = summaries.scores(query, keys, scale=options.get("scale"))
        blocks = self._select_blocks(scores, q_start=begin)
        pattern = SelectedBlocks(blocks, self._size, 1, begin) & Causal()
        results = attention(query, keys, values, pattern, return_lse=True, **options)
        if keep:
            self._state = after.changed(summaries=summaries)
        return results

    @property
    def _summaries(self) -> BlockSummaries:
        return cast(BlockSummaries, self._state.summaries)
