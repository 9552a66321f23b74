"""Continuous batching: transformers' scheduler and paged cache, with our attention and no masks."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching import continuous_api, initialization

from ....decoding.pages import Reach, Work, attend_pages, work_of_pages
from ....functional import batch_invariant
from ....ground.keywords import with_hints
from ....ground.rows import expand_counts
from ....kernels.backends import mode
from ....patterns import Causal, Pattern, parse
from ....varlen import attention_varlen
from ..families import QUERIES_BY_INDEX
from ..model.config import of_layer, own_pattern, pattern_of, place_of, stored_text, types_of
from ..name import PAGED, PAGED_IN_ORDER
from .calls import call_state, used_pattern

_NAMES = (PAGED, PAGED_IN_ORDER)
_CHUNKED = "chunked_attention"
_ASKS = (continuous_api, initialization, paged_cache)  # modules that ask whether a mask is needed
_HARMLESS = {
    *("position_ids", "max_length_q", "max_length_k", "read_index", "write_index", "use_cache"),
    *("logits_indices", "logits_processor_args", "block_table", "is_causal", "input_ids"),
    *("output_attentions", "output_hidden_states", "return_dict", "output_router_logits"),
    "sliding_window",  # that of the config, which `_pattern` reads
}
_KEPT = "_cached_continuous_batching_manager"  # attribute of models, of transformers
_lock = threading.Lock()
_blocks = 0  # open blocks of `continuous_batching`, in all threads
_originals: list[tuple[Any, str, Any]] = []  # what they replaced in transformers
_started: WeakSet[Any] = WeakSet()  # managers that started while a block was open


@with_hints()
@contextmanager
def continuous_batching(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """In this block, continuous batching of transformers computes attention without masks.

    `model.generate_batch`, a `ContinuousBatchingManager` and `transformers serve` schedule requests
    and hold their keys in pages, as before. Each layer's call then reads the keys that some query
    sees in their pages, and attends by lengths and windows: no mask of all pairs is made. Full,
    sliding and chunked layers, sinks, softcap, grouped heads and shared prefixes. A pattern of
    `apply` counts from each request's first token. Through attention, the bits of a request do not
    depend on the requests beside it; torch's own products may. In half precision that takes a block
    of `batch_invariant` around this one.

    At the end of the block, also after an error, the model has its former attention again. A
    manager of this model that still runs is stopped first, because its steps have no masks for
    another attention: requests that it has not finished fail, with an error in their result.

    Args:
        model: a causal language model, with or without `register`.

    Raises: NotImplementedError, before anything changes, for a layer of another type, and for a
        pattern of `apply` in a layer with a window, or of one length.

    Example:
        >>> with hf.continuous_batching(model):
        ...     outputs = model.generate_batch(prompts, generation_config)
    """
    _check(model)
    for name in _NAMES:
        AttentionInterface.register(name, paged_attention)
    with _accepted(), _paged(model), _managers_of_block(model):
        yield model


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Any = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Stores the new keys of a layer in its pages, and attends from all requests in one call.

    Args:
        query, key, value: [1, heads, tokens, D], the new tokens of all requests end to end.
        cache: the paged cache of transformers. Its `read_index` and `write_index`, in `keywords`,
            say where live keys lie and new ones belong.

    Returns: [1, tokens, heads, D] and None in place of weights.
    """
    given = (name for name, x in keywords.items() if x is not None and x is not False)
    others = sorted(name for name in given if name not in _HARMLESS)
    if cache is None or cu_seq_lens_q is None or attention_mask is not None or dropout or others:
        what = f"the arguments {', '.join(others)}" if others else "a call without a paged cache"
        if cache is not None and attention_mask is not None:
            what = "masks, which a manager has that was made outside the block"
        raise NotImplementedError(
            f"attention of hf.continuous_batching does not take {what}; inside the block, call "
            "generate_batch only"
        )
    of_queries = cu_seq_lens_q.tolist()
    query, padding = query.split((of_queries[-1], query.shape[2] - of_queries[-1]), 2)
    tokens = _ServedTokens(
        query=query,
        key=key,
        value=value,
        cache=cache,
        layer=module.layer_idx,
        of_queries=of_queries,
        step={"cu_seq_lens_k": cu_seq_lens_k, **keywords},
    )
    sink = getattr(module, "sinks", None) if s_aux is None else s_aux
    options = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        "softcap": softcap or None,
        "sink": None if sink is None else sink.reshape(1, -1, 1),
    }
    in_order = query.dtype == torch.float32 or module.config._attn_implementation == PAGED_IN_ORDER
    for at_whole_positions in QUERIES_BY_INDEX:
        query = at_whole_positions(module, query, lambda: _positions(tokens))
    tokens = tokens._replace(query=query)
    with batch_invariant(in_order or mode.is_batch_invariant):
        if (reach := Reach.of(pattern := _pattern(module))) is None:
            out = _attend_copies(tokens, pattern, options)
        else:
            out = _attend_pages(tokens, reach, options)
    if padding.shape[2]:  # tokens that belong to no request
        out = torch.cat((out, torch.zeros_like(padding[..., : out.shape[3]])), 2)
    return out.transpose(1, 2), None


class _ServedTokens(NamedTuple):
    """The new tokens of all requests at a layer, end to end, and where their keys belong."""

    query: Tensor  # [1, Hq, tokens, D]
    key: Tensor  # [1, Hkv, tokens, D], here and in `value` with padding
    value: Tensor
    cache: Any
    layer: int
    of_queries: list[int]  # cumulative numbers of queries
    step: dict[str, Any]  # further arguments of transformers, the same for all layers of a step

    def copied(self) -> tuple[Tensor, Tensor]:
        """Stores keys and values; returns all live ones of the requests, those of windows alone."""
        key, value = (x[0].transpose(0, 1) for x in (self.key, self.value))
        key, value = self.group.update(key, value, self.layer, self.read, self.write)
        return key.transpose(0, 1)[None], value.transpose(0, 1)[None]

    @property
    def read(self) -> Tensor:
        """Where each live key lies in the layer's pages; empty if all are new."""
        return self.step["read_index"][self.group.index]

    @property
    def write(self) -> Tensor:
        """Where each new key belongs in the layer's pages."""
        return self.step["write_index"][self.group.index]

    @property
    def group(self) -> Any:
        """The allocator of transformers that holds the pages of this layer and of others."""
        return self.cache.layer_to_allocator[self.layer]

    @property
    def of_keys(self) -> list[int]:
        """Cumulative numbers of live keys."""
        return self.step["cu_seq_lens_k"][self.group.layer_type].tolist()


def _attend_pages(tokens: _ServedTokens, reach: Reach, options: dict[str, Any]) -> Tensor:
    """Attends over keys of a reach: [1, Hq, tokens, D].

    Writes new keys and values to their pages, and reads all keys there, without a copy. The pages
    of a window are a ring, in which new tokens take the places of keys that the first ones of them
    see. So a layer with a window reads a copy in a step with several new tokens of a request.
    """
    group, read, write = tokens.group, tokens.read, tokens.write
    is_ring = group.layer_type != "full_attention"
    views = getattr(group, "_kv_token_views", {})
    single = max(_lengths(tokens.of_queries)) == 1
    in_place = bool(views) and len(read) > 0 and (single or not is_ring)
    if in_place:
        *_, (_, shortest) = views.values()  # that of the last layer; it has all pages
        pages = [x[: len(shortest)] for x in views[tokens.layer]]
        for held, x in zip(pages, (tokens.key, tokens.value), strict=True):
            held.index_copy_(0, write, x[0].transpose(0, 1))
        key, value = (x.transpose(0, 1)[None] for x in pages)
    else:
        key, value = tokens.copied()

    def build() -> Work:
        of_keys = tokens.of_keys
        rows = torch.arange(of_keys[-1])
        if in_place:
            rows = read[: len(rows)].cpu()
            if is_ring:  # new tokens have marks there
                rows = rows.masked_scatter(rows == group.sentinel_index, write.cpu())
        lengths = _lengths(tokens.of_queries), _lengths(of_keys)
        return work_of_pages(tokens.query, key, *lengths, rows, _ends(tokens), reach)

    work = _once_a_step(tokens, (group.index, reach), build)
    return attend_pages(tokens.query, key, value, work, **options)


def _attend_copies(tokens: _ServedTokens, pattern: Pattern, options: dict[str, Any]) -> Tensor:
    """Attends by a pattern that is no reach, over a copy of all keys: [1, Hq, tokens, D]."""
    of_keys, (key, value) = tokens.of_keys, tokens.copied()
    if (sink := options["sink"]) is not None:
        options["sink"] = sink.flatten()
    out: Tensor = attention_varlen(  # type: ignore[assignment]  # without lse
        tokens.query[0].transpose(0, 1),
        key[0, :, : of_keys[-1]].transpose(0, 1),
        value[0, :, : of_keys[-1]].transpose(0, 1),
        tokens.of_queries,
        of_keys,
        pattern,
        **options,
    )
    return out.transpose(0, 1)[None]


def _pattern(module: Any) -> Pattern:
    """Returns the pattern of a layer: that of `apply`, or its window or chunk; causal."""
    if (applied := pattern_of(module)) is not None:
        return applied & Causal()
    own = own_pattern(module.config, place_of(module)[1], causal=True)
    assert own is not None, "layers of other types are refused before any call"
    return own


_latest: WeakKeyDictionary[Any, tuple[Any, dict[tuple[int, Reach], Work]]] = WeakKeyDictionary()
"""Of a cache: the list that stands for its latest step, and the work of its layers in it."""


def _once_a_step(tokens: _ServedTokens, kind: tuple[int, Reach], build: Callable[[], Work]) -> Work:
    """Returns the work that layers of one kind share in a step; the first of them builds it.

    transformers makes the list `read_index` anew for each step.
    """
    step = tokens.step["read_index"]
    found = _latest.get(tokens.cache)
    if found is None or found[0] is not step:
        found = _latest[tokens.cache] = step, {}
    if kind not in found[1]:
        found[1][kind] = build()
    return found[1][kind]


def _lengths(cumulative: list[int]) -> list[int]:
    return [last - first for first, last in pairwise(cumulative)]


def _positions(tokens: _ServedTokens) -> Tensor:
    """Returns the position of each new token in its request, int64 [tokens]."""
    lengths = torch.tensor(_lengths(tokens.of_queries))
    request, number = expand_counts(lengths)
    return (_ends(tokens) - lengths + 1)[request] + number


def _ends(tokens: _ServedTokens) -> Tensor:
    """Returns the position of the last token of each request, int64.

    A layer with a window has no number of all its keys; another layer has, or the model's
    positions. Without both, positions count from the first key that is left.
    """
    if (whole := tokens.step["cu_seq_lens_k"].get("full_attention")) is not None:
        return whole.cpu().long().diff() - 1
    positions = tokens.step.get("position_ids")
    if positions is None or positions.dim() != 2:
        return torch.tensor(tokens.of_keys).diff() - 1
    return positions[0].cpu().long()[torch.tensor(tokens.of_queries)[1:] - 1]


def _check(model: PreTrainedModel) -> None:
    """Raises NotImplementedError for a model whose layers cannot be served."""
    config = model.config.get_text_config()
    texts = stored_text(config) or stored_text(model.config)
    for index, kind in enumerate(types_of(config)):
        if own_pattern(config, kind, causal=True) is None:
            raise NotImplementedError(
                "hf.continuous_batching serves layers of full_attention, sliding_attention and "
                f"chunked_attention, got {kind!r} in layer {index}; use generate for this model"
            )
        if (text := of_layer(texts, str(index), kind)) is None:
            continue
        if kind == "sliding_attention" or parse(text).own_length is not None:
            raise NotImplementedError(
                f"hf.continuous_batching takes a pattern of hf.apply in layers whose keys all stay "
                f"in pages, for any length, got {text} in layer {index}, of {kind}; use generate "
                "with hf.SparseCache"
            )
    blocks = call_state().blocks
    if any(used_pattern(x, blocks) is not None for x in model.modules()):
        raise NotImplementedError(
            "hf.continuous_batching takes no block of hf.using, since transformers calls the model "
            "in another thread; use hf.apply"
        )


@contextmanager
def _paged(model: PreTrainedModel) -> Iterator[None]:
    """Gives a model our attention over pages in a block."""
    before = model.config._attn_implementation
    model.set_attn_implementation(PAGED_IN_ORDER if mode.is_batch_invariant else PAGED)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _managers_of_block(model: PreTrainedModel) -> Iterator[None]:
    """Stops the managers of a model that run at the end of a block.

    One that transformers keeps on the model, for later calls, belongs to the attention it was made
    with: that from before the block is put back afterwards.
    """
    before = vars(model).pop(_KEPT, None)
    try:
        yield
    finally:
        for manager in [x for x in _started if x.model is model and x.is_running()]:
            manager.stop(hard_stop=True)
        if (kept := vars(model).pop(_KEPT, None)) is not None:
            kept.destroy()
        if before is not None:
            setattr(model, _KEPT, before)


@contextmanager
def _accepted() -> Iterator[None]:
    """Lets transformers take our name for continuous batching, and chunked layers, in a block.

    Its modules ask by the word "flash" whether an implementation needs masks. Inside the block they
    hear that ours needs none; other models hear what they heard before.
    """
    global _blocks
    with _lock:
        if not _blocks:
            for part, name, wrap in _REPLACED:
                original = getattr(part, name, None)
                _originals.append((part, name, original))
                setattr(part, name, wrap(original))
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            while not _blocks and _originals:
                part, name, original = _originals.pop()
                if original is None:
                    delattr(part, name)
                else:
                    setattr(part, name, original)


def _asks_for_flash(original: Callable[..., Any]) -> Callable[..., bool]:
    """Wraps the function of transformers that tells whether a config asks for FlashAttention."""

    def asked(
        config: Any = None,
        requested_attention_implementation: str | None = None,
        version: int | list[int] | None = None,
    ) -> bool:
        name = requested_attention_implementation
        if config is not None:
            name = config._attn_implementation
        if name in _NAMES:
            return version is None  # no version of FlashAttention, and no mask
        return bool(original(config, requested_attention_implementation, version))

    return asked


def _groups(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps the function of transformers that groups layers whose pages are alike.

    Chunked layers, which it refuses, join the full ones: keys of a chunk that ended stay in pages.
    """

    def grouped(config: Any) -> Any:
        kinds = getattr(config, "layer_types", None)
        if config._attn_implementation in _NAMES and kinds and _CHUNKED in kinds:
            config = copy.copy(config)
            config.layer_types = ["full_attention" if x == _CHUNKED else x for x in kinds]
        return original(config)

    return grouped


def _leaving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the method by which layers of transformers 5.24 store keys and get copies of all.

    Ours store keys in `paged_attention`, which layers of transformers 5.23 call with the cache.
    """

    def update(
        self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: Any
    ) -> Any:
        if self.config._attn_implementation not in _NAMES:
            return original(self, key_states, value_states, layer_idx, kwargs)
        kwargs["cache"] = self
        return key_states, value_states

    return update


def _noting(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wraps the method of managers that starts their thread."""

    def start(self: Any) -> None:
        _started.add(self)
        original(self)

    return start


_REPLACED: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (continuous_api.ContinuousBatchingManager, "start", _noting),
    (paged_cache.PagedAttentionCache, "update", _leaving),
    # Llama 4 of transformers 5.24 asks; QUERIES_BY_INDEX correct what it makes of the answer
    (paged_cache.PagedAttentionCache, "get_seq_length", lambda _: lambda self, layer_idx=0: 0),
    *((part, "is_flash_attention_requested", _asks_for_flash) for part in _ASKS),
    *((part, "group_layers_by_attn_type", _groups) for part in (paged_cache, initialization)),
)
