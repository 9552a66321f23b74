"""DeepSeek-V3.2, and families that took its indexer; DeepSeek-V4's compressors.

transformers' indexer multiplies its queries with all keys that its cache returns. Here the cache
returns `KeysInParts`, whose product is computed for some queries at a time. In DeepSeek-V4 a layer
has a compressor, and the compressor may have an indexer, which scores entries in a module of its
own. The layer's attention takes the entries that were listed there.
"""

import inspect
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.calls import SharedCall, thread
from ..call.chosen import Chosen
from ..call.rows import KeysInParts
from ..ranks.moving import keys_so_far
from .deepseek_entries import CompressedKeysOfRanks
from .wrapped import Wrapped


class _Now(threading.local):
    """State that compressors of this thread leave for the attention that runs next."""

    def __init__(self) -> None:
        self.listed: list[Tensor] | None = None  # collects what a compressor's indexer lists
        self.chosen: Chosen | None = None  # the entries of the layer that attends next


_now = _Now()


def taken_entries() -> Chosen | None:
    """Returns the entries that the last compressor of this thread chose, and forgets them."""
    chosen, _now.chosen = _now.chosen, None
    return chosen


class KeysOfRanks:
    """Takes the place of a cache layer in an indexer: earlier ranks' keys then count as cached."""

    def __init__(self, shared: SharedCall) -> None:
        self.shared = shared
        self.keys = torch.empty(0)

    def get_seq_length(self) -> int:
        """Returns the number of tokens up to this rank's last one."""
        return int(self.shared.tokens[-1]) + 1

    def update_indexer(self, keys: Tensor, _: int) -> Tensor:
        """Returns the keys [B, N, D] of the whole row, from this rank's [B, n, D]."""
        self.keys = keys_so_far(keys, self.shared)
        return self.keys


class _Cache(NamedTuple):
    """Stands in for an indexer's cache, and returns keys that are scored in parts."""

    own: Any  # the cache that is replaced, or None

    def update_indexer(self, keys: Tensor, layer: int) -> KeysInParts:
        """Returns the keys [B, M, D] of all tokens so far, from the new ones."""
        return KeysInParts(keys if self.own is None else self.own.update_indexer(keys, layer))


def _in_parts(own: Callable[..., Any], indexer: Any, *args: Any, **options: Any) -> Any:
    """Runs a model's indexer for some queries at a time, so no tensor of all scores is made.

    If ranks share the call, the indexer also scores the keys of earlier ranks.
    """
    given = inspect.signature(own).bind(indexer, *args, **options)
    keys = given.arguments.get("past_key_values")
    if thread.shared is not None:
        keys = KeysOfRanks(thread.shared)
    given.arguments["past_key_values"] = _Cache(keys)
    return own(*given.args, **given.kwargs)


def _scores(
    own: Callable[..., Any], scorer: Any, query: Tensor, entries: Tensor, hidden_states: Tensor
) -> Any:
    """Runs the part of DeepSeek-V4 that scores entries [B, E, D], for some queries at a time."""
    return own(scorer, query, KeysInParts(entries), hidden_states)


def _lists(own: Callable[..., Any], indexer: Any, *args: Any, **options: Any) -> Any:
    """Runs DeepSeek-V4's indexer and keeps its choice, for the compressor that called it."""
    listed = own(indexer, *args, **options)
    if _now.listed is not None:
        _now.listed.append(listed)
    return listed


def _compress(own: Callable[..., Any], compressor: Any, *args: Any, **options: Any) -> Any:
    """Runs DeepSeek-V4's compressor, and records which entries each query sees.

    `taken_entries` returns them when the layer attends. If ranks share the call, the compressor
    also gets tokens and entries of other ranks.
    """
    _now.listed, _now.chosen = [], None
    if (shared := thread.shared) is not None:
        given = inspect.signature(own).bind(compressor, *args, **options)
        layers = {given.arguments["layer_idx"]: CompressedKeysOfRanks(compressor, shared)}
        given.arguments["past_key_values"] = SimpleNamespace(layers=layers)
        compressor, *args = given.args  # type: ignore[assignment]
        options = given.kwargs
    try:
        keys, bias = own(compressor, *args, **options)
        listed = _now.listed
    finally:
        _now.listed = None
    if (entries := keys.shape[2]) and not listed:  # no indexer; a single query sees all entries
        place = torch.arange(entries, device=keys.device)[None, None]  # [1, 1, entries]
        if shared is not None:  # a single query may be one of many
            closed = (given.arguments["position_ids"] + 1) // compressor.compress_rate
            bias = torch.where(place < closed[..., None], 0, -1)[:, None]
        listed = [place if bias is None else torch.where(bias[:, 0] == 0, place, -1)]
    if entries:
        _now.chosen = Chosen(listed[0][:, None], entries=entries)
    return keys, bias


def of_indexer(mask: Any, index: Any) -> Any:
    """Returns the rows of `mask[:, 0]`, [B, Nq, Nk], or None for another index.

    Indexers mask their scores with these rows.
    """
    whole = slice(None)
    return mask.rows() if index in ((whole, 0), (whole, 0, whole, whole)) else None


_INDEXER = Wrapped("forward", _in_parts)
_COMPRESSOR = Wrapped("forward", _compress, own_in_graphs=False)
WRAPPED: dict[str, tuple[Wrapped, ...]] = {
    "DeepseekV32Indexer": (_INDEXER,),
    "AXK2Indexer": (_INDEXER,),
    "Dots3NoteTextIndexer": (_INDEXER,),
    "GlmMoeDsaIndexer": (_INDEXER,),
    "HYV4Indexer": (_INDEXER,),
    "MistralLarge4TextIndexer": (_INDEXER._replace(finds_keys_of_ranks=False),),
    "DeepseekV4IndexerScorer": (Wrapped("forward", _scores),),
    "DeepseekV4Indexer": (Wrapped("forward", _lists),),
    "DeepseekV4CSACompressor": (_COMPRESSOR,),
    "DeepseekV4HCACompressor": (_COMPRESSOR,),
}
"""By the name of a class of transformers."""

LEFT_BY: dict[str, Callable[[], Chosen | None]] = {"compressor": taken_entries}
"""By the attribute of a layer's module that leaves a choice for the layer's attention."""

PARTS_OF_MASKS: tuple[Callable[[Any, Any], Any], ...] = (of_indexer,)
"""Functions of a mask and an index, None for an index of another family."""

LAYER_TYPES = ("indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention")
"""Types of layers that attend within one of the model's masks."""
