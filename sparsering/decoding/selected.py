"""`SelectedCache`: each new token attends to the blocks of earlier ones that it chooses."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..functional import attention
from ..numerics import sum_dtype
from ..patterns.arguments import checked_integer, shortened
from ..patterns.positions import Causal
from ..patterns.selected import SelectedBlocks
from ..selection.choose import select_blocks
from ..selection.summaries import BlockSummaries
from .cache import KVCache

_SCALE = "scale"


class SelectedCache(KVCache):
    """A `KVCache` whose tokens see k blocks of keys, chosen by their scores as they come.

    A token appends its key, scores all blocks by summaries of their keys, selects k of them and
    attends to these exactly: `block_scores`, `select_blocks` and `attention` on the whole sequence,
    with rows of one query. All keys are kept.

    Args:
        batch_size, num_kv_heads, head_dim: of the keys.
        k: blocks that a token sees, `sink` and `local` ones included.
        block_size, method, parts: as `block_scores` has them.
        top_p, sink, local: as `select_blocks` has them.
        options: those of `KVCache`.

    Raises: ValueError where arguments do not fit.

    Cost: a step reads the summaries, parts / block_size of the keys' memory ("sub"; as much in
        float32), and k blocks.

    Example:
        >>> cache = SelectedCache(1, 2, 64, k=64, num_heads=8)
        >>> out = cache.attend(query, key, value)  # the prompt, whole or in parts
        >>> out = cache.attend(query, key, value)  # then token by token

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
        method: str = "sub",
        parts: int = 4,
        top_p: float | None = None,
        sink: int = 1,
        local: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(Causal(), batch_size, num_kv_heads, head_dim, **options)
        checked_integer("k", k, 0)
        self._summaries = BlockSummaries(block_size, method=method, parts=parts)
        self._size, self._k = block_size, k
        self._selection = {"block_size": block_size, "top_p": top_p, "sink": sink, "local": local}
        self.select_from(torch.zeros(1, sink + local))  # says what does not fit

    def __repr__(self) -> str:
        return (
            f"<SelectedCache of {self._k} blocks of {self._size}: {self.kept} of {self.length} "
            "tokens>"
        )
