"""`SelectedCache`: each new token attends to the blocks of earlier tokens that it chooses."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..call import Inputs
from ..checks import autocast_inputs, check_inputs
from ..functional import attention
from ..ground.arguments import checked_integer, shortened
from ..ground.keywords import class_with_hints
from ..patterns.positions import Causal
from ..patterns.selected import SelectedBlocks
from ..selection.choose import select_blocks
from ..selection.scorer import BlockScorer
from ..selection.summaries import BlockSummaries
from .cache_state import CacheState, ordinary_tensors
from .kv_cache import KVCache
from .steps import IN_PAGES, empty_results

_IN_SLOTS = {"scale", "backend", "block_size", *IN_PAGES}  # options that need no key positions
_AT_A_TIME = 1 << 22  # listed keys that are attended to at a time, to bound memory


@class_with_hints
class SelectedCache(KVCache):
    """A `KVCache` in which each new token scores all blocks of keys and attends to the best k.

    A step appends the token's key, scores all blocks by summaries of their keys, selects k blocks
    and attends to them exactly. The result equals `block_scores`, `select_blocks` and `attention`
    on the whole sequence with rows of one query. The cache evicts no keys. Scores may be learned:
    pass `method=scorer`, a trained `BlockScorer` with query_block=1.

    Batch entries may have lengths of their own, by `attend(lengths=)`, or `valid=` for a prompt
    with padding on the left. Each entry has blocks that begin at its own first token, so that it
    chooses and attends as it does alone.

    Args:
        batch_size, num_kv_heads, head_dim: sizes of the keys.
        k: number of blocks that a token attends to, including the `sink` and `local` blocks.
        block_size, method, parts: as in `BlockSummaries`.
        top_p, sink, local: as in `select_blocks`.
        num_heads, value_dim, max_length, rollback, page_size, dtype, device: as in `KVCache`.

    Raises: ValueError if an argument is invalid.

    Cost: a step reads k blocks and the summaries. With method "sub", the summaries have
        parts / block_size times as many numbers as the keys, in float32. Where batch entries have
        unlike lengths, entries are scored one after the other, and a step that gives them unlike
        numbers of new tokens copies the keys.

    Example:
        >>> cache = SelectedCache(1, 2, 64, k=64, num_heads=8)
        >>> out = cache.attend(query, key, value)  # the prompt, whole or in parts
        >>> out = cache.attend(query, key, value)  # then token by token
        >>> learned = SelectedCache(1, 2, 64, k=64, num_heads=8, method=layer.block_scorer)

    Source: Quest (arXiv 2406.10774), section 3; InfLLM-V2 (2509.24663).
    """

    _takes_parts = _takes_shapes = False

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
        state, n = self._state, query.shape[2]
        new = self._state.new_tokens(lengths, n)
        if not stored or tree is not None:
            given = "tree=" if stored else "stored=False"
            raise ValueError(
                f"a SelectedCache needs stored=True and no tree, got {given}; use KVCache for this"
            )
        if n == 0 or (new and max(new) == 0):
            return empty_results(query, self._dims[1])
        self._check_dtype(key)
        is_padded = any(count < n for count in new)
        if is_padded:
            query, key, value = (_without_padding(x, new) for x in (query, key, value))
        starts = self.lengths
        are_alike = len(set(starts)) <= 1 and (len(set(new)) <= 1 or max(starts) == 0)
        older = state.keys.older[0] if state.keys.num_slots else 0
        if len(set(starts)) <= 1 and any(x.base != older for x in state.histories):
            state = state.evicted()  # closes the gap in entries that were beside a longer one
        names = sorted(x for x in {*options} - _IN_SLOTS if not _is_none(options[x]))
        if names and not are_alike:
            raise ValueError(
                "a SelectedCache takes an option that depends on positions only where all batch "
                f"entries have equal lengths, got {names[0]} for lengths {shortened(str(starts))}; "
                "make a cache for each entry"
            )
        # `after` has evicted the keys that no later token sees
        if not is_padded:
            after = state.appended(key, value)
        else:
            after = state.advanced(new, state.page_length).evicted(key, value)
        count, held = state.page_length, (state.keys, state.values)
        in_page = state.keys.num_slots and count + n <= state.page_size
        if in_page and not is_padded:  # `after` has written them there
            keys, values = (x.rows[:, :, : x.older[0] + count + n] for x in held)
        else:
            pairs = zip(held, (key, value), strict=True)
            keys, values = (x.with_new(count, x_new) for x, x_new in pairs)
        summaries = self._summaries.fork()  # so that a failed step does not change the cache
        summaries.crop(starts)
        if are_alike:
            results = self._of_equal(query, keys, values, summaries, self.length, options)
            summaries.crop([a + b for a, b in zip(starts, new, strict=True)])
        else:
            results = self._of_unlike(query, keys, values, summaries, new, options)
        if keep:
            self._state = after.changed(summaries=summaries)
        out, lse = results
        if is_padded:
            hidden = _padding(new, n, query.device)
            return out.masked_fill(hidden[..., None], 0), lse.masked_fill(hidden, -torch.inf)
        return out, lse

    def _of_equal(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        summaries: BlockSummaries,
        begin: int,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Attends if all entries are equally long: `query` are the last tokens, from `begin` on."""
        scores = summaries.scores(query, keys, scale=options.get("scale"))
        blocks = self._select_blocks(scores, q_start=begin)
        pattern = SelectedBlocks(blocks, self._size, 1, begin) & Causal()
        return attention(query, keys, values, pattern, return_lse=True, **options)

    def _of_unlike(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        summaries: BlockSummaries,
        new: list[int],
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Attends if entries differ in length: each scores its blocks alone, then lists their keys.

        The keys are in slots, so each query lists the slots that hold the keys of its chosen
        blocks.
        """
        (batch, _, width, _), state, lists = query.shape, self._state, []
        summaries.reserve(keys, max(map(sum, zip(self.lengths, new, strict=True))))
        for entry, n in enumerate(new):
            start, end, own = self.lengths[entry], self.lengths[entry] + n, slice(entry, entry + 1)
            if not n:
                lists.append(torch.full((1, keys.shape[1], width, 1), -1, device=keys.device))
                continue
            first = summaries.first_needed([entry], start)
            tail = _slots(state, entry, torch.arange(first, end, device=keys.device))
            given = query[own, :, :n], keys[own].index_select(2, tail), end, options.get("scale")
            scores = summaries.scores_of_entry(entry, *given)
            blocks = self._select_blocks(scores, q_start=start)[..., None]  # [1, Hkv, n, k, 1]
            position = blocks * self._size + torch.arange(self._size, device=keys.device)
            asks = torch.arange(start, end, device=keys.device)[:, None, None]
            slots = _slots(state, entry, position)
            slots = torch.where((blocks >= 0) & (position <= asks), slots, -1).flatten(3)
            lists.append(pad(slots, (0, 0, 0, width - n), value=-1))
        most = max(x.shape[3] for x in lists)
        listed = torch.cat([pad(x, (0, most - x.shape[3]), value=-1) for x in lists])
        step = max(1, _AT_A_TIME // max(1, batch * keys.shape[1] * most))
        parts, sink = [], options.get("sink")
        for i in range(0, width, step):
            part = slice(i, i + step)
            pattern = SelectedBlocks(listed[:, :, part], 1, 1)
            rest: dict[str, Any] = {**options, "q_start": 0}
            if isinstance(sink, Tensor) and sink.shape[2:] == (width,):  # a sink per query
                rest["sink"] = sink[:, :, part]
            parts.append(
                attention(query[:, :, part], keys, values, pattern, return_lse=True, **rest)
            )
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, 2), torch.cat(lses, 2)

    @property
    def _summaries(self) -> BlockSummaries:
        return cast(BlockSummaries, self._state.summaries)


def _is_none(option: Any) -> bool:
    """Whether an option leaves attention unchanged: None, or a number 0 such as dropout_p=0."""
    return option is None or (isinstance(option, float | int) and option == 0)


def _slots(state: CacheState, entry: int, position: Tensor) -> Tensor:
    """Converts positions of a batch entry to the slots of the cache that hold their keys.

    The keys from before the last eviction are in an entry's first slots; the others come after the
    older keys of the longest entry.
    """
    base = state.histories[entry].base
    older = state.keys.older[0] if state.keys.num_slots else 0
    return torch.where(position < base, position, position - base + older)


def _padding(new: Sequence[int], n: int, device: torch.device) -> Tensor:
    """Returns bool [B, 1, n], True for padding: tokens from `new[i]` on of batch entry i."""
    counts = torch.tensor(new, device=device)[:, None, None]
    return torch.arange(n, device=device) >= counts


def _without_padding(x: Tensor, new: Sequence[int]) -> Tensor:
    """Zeroes padding in [B, H, n, D], since a NaN there would spread in spite of masks."""
    return x.masked_fill(_padding(new, x.shape[2], x.device)[..., None], 0)
