"""`SparseCache`: a cache for transformers that keeps only the keys that later queries can visit.

`SparseLayer.update` attaches the layer to the new keys as an attribute. The attention function
finds it there, and calls `SparseLayer.attend`.
"""

from copy import copy
from functools import lru_cache
from typing import Any, Self

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ....decoding import KVCache
from ....ground.arguments import shortened
from ....ground.keywords import class_with_hints
from ....kernels.rounding import Store, checked_store
from ....patterns.algebra import Pattern
from ..model.config import decoder_config, layer_patterns, model_inside, types_of
from ..name import NAME
from .masks import Inputs, ModelMask, Options
from .once import once
from .override import looking_back

_LAYER = "_sparsering_layer"  # attribute of new keys, whose value is their `SparseLayer`


class SparseLayer(CacheLayerMixin):
    """Cache of one layer, which stores only keys and values that a later query can visit."""

    is_sliding = is_compileable = supports_early_init = False
    is_croppable = True

    def __init__(self, pattern: Pattern, rollback: int = 0, store: Store | None = None) -> None:
        super().__init__()
        self.pattern = pattern
        self.rollback = rollback
        self.store = store
        self.kv_cache: KVCache | None = None
        self.columns = 0  # number of tokens so far, including padding
        self.attended = True  # whether the model has attended over the newest keys

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        other.__dict__.update(vars(self), kv_cache=copy(self.kv_cache))
        return other

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes a layer's new keys and values.

        Returns them, with this cache attached to the keys.
        """
        self._alternate("makes other keys of them (it caches latents)", False)
        self.lazy_initialization(key_states, value_states)
        self.columns += key_states.shape[2]
        key_states = key_states.view_as(key_states)
        setattr(key_states, _LAYER, self)
        return key_states, value_states

    def _alternate(self, instead: str, attended: bool) -> None:
        """Raises unless `update` and `attend` take turns; some models attend to keys twice.

        `attended` is True in a call of `attend`; `instead` says for the error what the model does.
        """
        if self.attended is attended:
            raise NotImplementedError(
                "a SparseCache needs a model that attends once over the keys it gives to its cache;"
                f" this one {instead}; use the default cache"
            )
        self.attended = attended

    def attend(self, inputs: Inputs, lengths: list[int] | None, extras: Options) -> Tensor:
        """Attends from `lengths[b]` new tokens of row b, or all; the rest of a row is padding."""
        self._alternate("attends to them again, in other layers or in halves", True)
        query, key, value = inputs
        if self.kv_cache is None:
            sizes = len(key), key.shape[1], key.shape[3]
            others: dict[str, Any] = {"num_heads": query.shape[1], "value_dim": value.shape[3]}
            others |= {"rollback": self.rollback, "store": self.store}
            others["page_size"] = _page_size(self.pattern, query.shape[1], key.shape[1])
            self.kv_cache = KVCache(self.pattern, *sizes, **others)
        # `KVCache` checks options at each step, so those with default values are left out.
        defaults = {"scale": query.shape[3] ** -0.5, "dropout_p": 0.0}
        given = {name: x for name, x in extras.items() if x is not None}
        options = {k: x for k, x in given.items() if k not in defaults or x != defaults[k]}
        return self.kv_cache.attend(query, key, value, lengths=lengths, **options)

    def check_tokens(self, before: list[int] | None) -> None:
        """Raises ValueError unless the mask shows as many old tokens per row as are cached.

        `before` has these numbers of the mask; it is None if no old token is padding.
        """
        if self.kv_cache is None:
            return
        lengths = self.kv_cache.lengths
        if before is None and len(set(lengths)) > 1:
            raise ValueError(
                "a SparseCache of rows with unlike lengths needs an attention_mask with padding on "
                f"the left, got none with padding for lengths {shortened(str(lengths))}; give "
                "each row as many ones as it has tokens"
            )
        if before is not None and before != lengths:
            raise ValueError(
                "a SparseCache needs an attention_mask with a one for each token that it has seen, "
                f"got {shortened(str(before))} for lengths {shortened(str(lengths))}; pass the "
                "whole mask of earlier tokens, with padding on the left"
            )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    def check_join(self, other: "SparseLayer") -> None:
        """Raises ValueError unless `join` can add the batch entries of another layer's cache."""
        one, two = ((x.pattern, x.rollback, x.store, x.kv_cache is None) for x in (self, other))
        if one != two or self.kv_cache is None or other.kv_cache is None:
            raise ValueError(
                "join needs two caches of one model, with the same rollback and store, that have "
                f"seen tokens, got {shortened(repr(other.kv_cache))} for "
                f"{shortened(repr(self.kv_cache))}; run the model with each cache first"
            )
        self.kv_cache.check_join(other.kv_cache)

    def join(self, other: "SparseLayer") -> None:
        assert self.kv_cache is not None and other.kv_cache is not None
        self.kv_cache.join(other.kv_cache)
        self.columns = max(self.columns, other.columns)

    def reset(self) -> None:
        self.kv_cache, self.columns, self.attended = None, 0, True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.kv_cache is not None:
            self.kv_cache.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.kv_cache is not None:
            self.kv_cache.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.kv_cache is not None:
            self.kv_cache.select(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens; transformers passes a negative number."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the number of tokens to remove as a negative number, got "
                f"{tokens_to_remove}; -1 removes the last token"
            )
        if tokens_to_remove and self.kv_cache is not None:
            self.kv_cache.crop(self.kv_cache.length + tokens_to_remove)
            self.columns += tokens_to_remove


@lru_cache(maxsize=64)
def _page_size(pattern: Pattern, heads: int, kv_heads: int) -> int:
    """Returns a page size of about an eighth of the keys that a layer keeps, 16 to 128.

    A window of that many tokens or fewer never has more keys. A page of 128 tokens would double
    what a small window stores, and one below an eighth would be laid out too often.
    """
    length = min(1023, pattern.own_length or 1023)
    live = pattern.live_keys(length, num_heads=heads, num_kv_heads=kv_heads)
    return min(128, max(16, 16 * round(max(map(len, live)) / 8 / 16)))


def cache_layer_of(key: Tensor) -> SparseLayer | None:
    """Returns the `SparseCache` layer that is attached to these keys, if any."""
    return getattr(key, _LAYER, None)


def attend_cached(
    layer: SparseLayer,
    pattern: Pattern | None,
    inputs: Inputs,
    mask: ModelMask,
    bias: Tensor | None,
    extras: Options,
) -> Tensor:
    """Stores new tokens in `layer`, and attends to it: [B, Hq, n, Dv], with left padding last."""
    if bias is not None or mask.kind is None or mask.documents is not None:
        got = "documents" if bias is None and mask.kind is not None else "a bias or another mask"
        raise NotImplementedError(
            f"a SparseCache needs a mask of causality, windows, chunks and padding, got {got}; use "
            "the default cache"
        )
    if not mask.kind.causal:
        raise NotImplementedError(
            "a SparseCache needs a causal mask, got one in which tokens see later ones; use the "
            "default cache, or sparsering.KVCache for a block of tokens at a time"
        )
    expected = mask.own_causal() if pattern is None else looking_back(pattern)
    if layer.pattern != expected:
        way_out = "make another cache after apply"
        if pattern is None:
            way_out = (
                "the model's config names other masks than the model makes (another window), or "
                "its pattern has changed; use the default cache, or make another one"
            )
        raise ValueError(
            f"the SparseCache stores keys for {shortened(str(layer.pattern))}, but the layer now "
            f"has {shortened(str(expected))}; {way_out}"
        )
    n = inputs[0].shape[2]
    before, sorted_tokens = once(mask, "sorted_tokens", lambda: _padding_last(mask, n))
    layer.check_tokens(before)
    if sorted_tokens is None:
        return layer.attend(inputs, None, extras)
    order, inverse, lengths = sorted_tokens
    query, key, value = (_reorder(x, order) for x in inputs)
    return _reorder(layer.attend((query, key, value), lengths, extras), inverse)


def _padding_last(
    mask: ModelMask, n: int
) -> tuple[list[int] | None, tuple[Tensor, Tensor, list[int]] | None]:
    """Returns an order of each row's last n tokens in which padding comes last, and counts.

    Returns: (before, sorted). `before` has each row's number of earlier tokens that are not
        padding; it is None if the mask has no padding. `sorted` has the order and its inverse,
        [B, n] each, and each row's number of tokens among the last n that are not padding; it is
        None if all of them are none.
    """
    if mask.valid_keys is None:
        return None, None
    stop = mask.shape[3]
    valid = mask.valid_keys[:, :stop]
    if not bool((valid.long().diff(dim=1) >= 0).all()):
        raise ValueError(
            "a SparseCache needs padding on the left alone, because positions do not count "
            "padding, got padding elsewhere; set tokenizer.padding_side to left, and give unlike "
            "questions behind a shared prefix a copy.copy() of its cache each, then join() them"
        )
    before, valid = valid[:, : stop - n].sum(1).tolist(), valid[:, stop - n :]
    if bool(valid.all()):
        return before, None
    order = (~valid).long().argsort(dim=1, stable=True)
    return before, (order, order.argsort(dim=1), valid.sum(1).tolist())


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    """Reorders the tokens of x [B, H, n, D] by `order` [B, n]."""
    return x.gather(2, order[:, None, :, None].expand(*x.shape[:3], x.shape[3]))


@class_with_hints
class SparseCache(Cache):
    """Caches only keys that later queries can visit, for models that run "sparsering" attention.

    Args:
        model: a model on "sparsering" attention. Each layer's pattern, from `apply` or the model's
            own window or chunk, decides which keys are kept.
        rollback: number of tokens that `crop` can remove, as assisted generation does.
        store: "int8" or "fp8" rounds keys and values to 8 bits, as in `KVCache`.

    Results are the same as with a full cache. Each key/value head keeps the keys of
    `pattern.live_keys`, and at most one page more: an eighth of a small window, 128 keys of a large
    one. Left padding is not stored.

    Raises: ValueError unless the model runs "sparsering", or for another `store`;
        NotImplementedError for unknown layers.

    Example:
        >>> cache = SparseCache(model)
        >>> tokens = model.generate(**inputs, past_key_values=cache, max_new_tokens=1000)
    """

    def __init__(self, model: Any, rollback: int = 0, store: Store | None = None) -> None:
        model = model_inside(model)
        store, config = checked_store(store), decoder_config(model)
        if getattr(model.config, "is_encoder_decoder", False):
            raise NotImplementedError(
                f"a SparseCache needs a model with only a decoder, but {type(model).__name__} has "
                "an encoder and a decoder; use the default cache"
            )
        if config._attn_implementation != NAME:
            raise ValueError(
                f'a SparseCache needs a model that runs "{NAME}", got '
                f"{config._attn_implementation!r}; call apply(model, pattern), or "
                f'model.set_attn_implementation("{NAME}") for the model\'s own windows'
            )
        if crossing := getattr(config, "cross_attention_layers", None):
            raise NotImplementedError(
                "a SparseCache needs a pattern for each layer, got cross attention in the layers "
                f"{shortened(str(list(crossing)))} of {type(model).__name__}; use the default cache"
            )
        layers = []
        for kind, pattern in zip(types_of(config), layer_patterns(config), strict=True):
            if pattern is None:
                raise NotImplementedError(
                    f"a SparseCache needs a pattern for each layer, got a layer of type {kind}; "
                    "use the default cache"
                )
            layers.append(SparseLayer(pattern, rollback, store))
        super().__init__(layers=layers)

    def __copy__(self) -> Self:
        """Copies each layer's cache too, because new tokens change the layers in place."""
        other = object.__new__(type(self))
        other.__dict__.update(vars(self), layers=[copy(layer) for layer in self.layers])
        return other

    def join(self, other: "SparseCache") -> None:
        """Adds copies of another cache's rows behind these, such as a new request.

        A shorter row then counts as padded on the left: later calls need an `attention_mask` with
        zeros before its tokens. docs/transformers.md answers unlike questions about a shared text
        so, from copies of its cache.

        Raises: ValueError if the other cache is of another model, rollback or store, or one of the
            two is empty; both are then unchanged.
        """
        if not isinstance(other, SparseCache) or len(other.layers) != len(self.layers):
            raise ValueError(
                "join needs a SparseCache of the same model, got "
                f"{shortened(repr(other))}; make one with SparseCache(model)"
            )
        pairs = list(zip(self.layers, other.layers, strict=True))
        for layer, added in pairs:
            layer.check_join(added)
        for layer, added in pairs:
            layer.join(added)

    @property
    def kept(self) -> list[int]:
        """Number of keys that each layer stores: the maximum over kv heads and batch entries."""
        return [0 if layer.kv_cache is None else layer.kv_cache.kept for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and their positions, over all layers."""
        return sum(0 if layer.kv_cache is None else layer.kv_cache.nbytes for layer in self.layers)
