"""Chooses what decides which pairs of a layer's call attend: its mask, a pattern, chosen keys, ...

The first of `SOURCES` that a call has computes its attention. If the call also has something that
this source cannot be combined with, the source says why.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ....functional import attention
from ....ground.arguments import is_shape_alone, shortened
from ....patterns.algebra import Pattern
from ....patterns.keys import KeyMask
from ..families import LEARN_DISTANCES
from ..model.config import pattern_of
from .calls import SharedCall, thread
from .chosen import Chosen, Unchosen
from .dense import attend_tensor, dense_attention
from .masks import Inputs, ModelMask, Options, mask_interface
from .once import once
from .override import attend_lists_shared, attend_pattern, attend_shared
from .sparse_cache import SparseLayer, attend_cached


class LayerCall(NamedTuple):
    """One call of a layer's attention, and everything that may say which pairs attend."""

    module: Any
    inputs: Inputs  # query [B, Hq, Nq, D], key [B, Hkv, Nk, D], value [B, Hkv, Nk, Dv]
    mask: ModelMask | Chosen | Tensor | None  # a tensor broadcasts to [B, Hq, Nq, Nk]
    is_causal: bool | None  # the model's `is_causal` argument, which counts if `mask` is None
    bias: Tensor | None  # added to scores, broadcasts to [B, Hq, Nq, Nk]
    chosen: Chosen | Unchosen | None  # what the layer's indexer chose
    used: Pattern | None  # of an open `hf.using` block
    shared: SharedCall | None  # set if ranks share the model's call
    cache: SparseLayer | None  # the layer of a `SparseCache` that has the keys
    extras: Options  # scale, softcap, sink and dropout of the call

    @property
    def applied(self) -> Pattern | None:
        """The pattern that `hf.apply` gave the layer, or None.

        It holds for every call of the model.
        """
        return pattern_of(self.module, self.mask)


class Source(NamedTuple):
    """One way to decide which pairs attend: does a call have it, may it, and how to attend."""

    is_in: Callable[[LayerCall], bool]
    refuses: Callable[[LayerCall], Exception | None]
    attend: Callable[[LayerCall], Tensor]  # returns [B, Hq, Nq, Dv]


def _refuses_chosen(call: LayerCall) -> Exception | None:
    """Returns an error if an indexer chose keys and the call also has a pattern, cache or bias."""
    others = call.used, call.bias, call.cache, call.applied
    is_unknown = isinstance(call.mask, ModelMask) and call.mask.kind is None
    is_plain = isinstance(call.mask, ModelMask | Chosen) and not is_unknown
    if is_plain and all(other is None for other in others):
        return None
    return NotImplementedError(
        "a layer whose indexer chooses keys needs the model's own mask alone, got a "
        "pattern, a SparseCache, a bias or a mask of all pairs; leave these out"
    )


def _attend_chosen(call: LayerCall) -> Tensor:
    """Attends over the keys that an indexer chose, within the model's mask."""
    mask, chosen = call.mask, call.chosen
    if isinstance(chosen, Unchosen):
        assert isinstance(mask, ModelMask)
        chosen = chosen.choose(mask, call.shared)
    assert chosen is not None
    if call.shared is not None:
        assert isinstance(mask, ModelMask | Chosen)
        return attend_lists_shared(call.module, call.inputs, mask, chosen, call.shared, call.extras)
    if isinstance(mask, Chosen):
        return attention(*call.inputs, chosen.mask(0), q_start=0, **call.extras)
    assert isinstance(mask, ModelMask)
    return attend_masked(call.module, call.inputs, mask, None, call.extras, chosen)


def _refuses_shared(call: LayerCall) -> Exception | None:
    """Returns an error if ranks share the call and it has a bias."""
    if call.bias is None:
        return None
    return NotImplementedError(
        "a model that ranks share needs scores without a bias for each pair, got a "
        "position_bias; run it with hf.parallelize(model, False)"
    )


def _attend_shared(call: LayerCall) -> Tensor:
    assert call.shared is not None and not isinstance(call.mask, Chosen)
    mask = _mask_by_default(call) if call.mask is None else call.mask
    return attend_shared(call.module, call.inputs, mask, call.used, call.shared, call.extras)


def _refuses_used(call: LayerCall) -> Exception | None:
    """Returns an error if a `using` block is open and the call has cached keys or a bias."""
    query, key, _ = call.inputs
    if query.shape[2] != key.shape[2] or call.cache is not None:
        return ValueError(
            "a model in a block of hf.using needs the whole sequence in each call, got "
            f"{query.shape[2]} queries of {key.shape[2]} keys from a cache; pass use_cache=False"
        )
    if call.bias is not None and not _depends_on_distance(call.bias, call.module):
        return NotImplementedError(
            "hf.using supports a bias by distance or none, got a bias for each pair; name only "
            "the other layers, as {index: pattern}"
        )
    return None


def _attend_used(call: LayerCall) -> Tensor:
    """Attends over exactly the pattern of the open `using` block, without the model's mask."""
    assert call.used is not None
    extras = call.extras
    if call.bias is not None:
        extras = {**extras, "distance_bias": _distance_table(call.bias, 0)}
    return attention(*call.inputs, call.used, q_start=0, **extras)


def _refuses_cached(call: LayerCall) -> Exception | None:
    """Returns an error if a SparseCache gets another mask than a `ModelMask`."""
    if isinstance(call.mask, ModelMask):
        return None
    return NotImplementedError(
        "a SparseCache needs attention_mask [batch, tokens] or None, got a mask of all "
        "pairs, or a layer without a mask; use the default cache"
    )


def _attend_cached(call: LayerCall) -> Tensor:
    assert call.cache is not None and isinstance(call.mask, ModelMask)
    return attend_cached(call.cache, call.applied, call.inputs, call.mask, call.bias, call.extras)


def _refuses_tensor(call: LayerCall) -> Exception | None:
    """Returns an error if a mask tensor of all pairs meets a layer that has its own pattern."""
    if pattern_of(call.module) is None:
        return None
    return NotImplementedError(
        "a layer with a pattern needs attention_mask [batch, tokens], got a mask of all "
        "pairs; write its pairs as a pattern for apply(model, pattern)"
    )


def _attend_tensor(call: LayerCall) -> Tensor:
    assert isinstance(call.mask, Tensor)
    return attend_tensor(call.inputs, call.mask, call.bias, call.extras)


def _attend_masked(call: LayerCall) -> Tensor:
    mask = _mask_by_default(call) if call.mask is None else call.mask
    assert isinstance(mask, ModelMask)
    return attend_masked(call.module, call.inputs, mask, call.bias, call.extras)


def _mask_by_default(call: LayerCall) -> ModelMask:
    """Builds a mask where the model passes None: causal if the module is, else all pairs."""
    module, (query, key, _), causal = call.module, call.inputs, call.is_causal
    q_len, kv_len = query.shape[2], key.shape[2]
    if (shared := thread.shared) is not None:
        q_len = kv_len = shared.length
        if shared.checkpoints:
            raise NotImplementedError(
                f"{type(module).__name__} gets no mask from its model, so gradient checkpointing "
                "cannot run it again over several ranks; call gradient_checkpointing_disable()"
            )
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if causal and q_len not in (1, kv_len):
        raise ValueError(
            f"a causal module needs a mask for {q_len} queries of {kv_len} keys, got None; pass "
            "the model's attention_mask, or is_causal=False"
        )
    lengths = q_len, kv_len, kv_len - q_len if causal else 0
    function = causal_mask_function if causal else bidirectional_mask_function
    return mask_interface(len(query), *lengths, mask_function=function, device=query.device)


SOURCES = (
    Source(lambda call: call.chosen is not None, _refuses_chosen, _attend_chosen),
    Source(lambda call: call.shared is not None, _refuses_shared, _attend_shared),
    Source(lambda call: call.used is not None, _refuses_used, _attend_used),
    Source(lambda call: call.cache is not None, _refuses_cached, _attend_cached),
    Source(lambda call: isinstance(call.mask, Tensor), _refuses_tensor, _attend_tensor),
    Source(lambda call: True, lambda call: None, _attend_masked),
)
"""In order of precedence: keys that an indexer chose, a call that ranks share, a pattern of
`using`, a `SparseCache`, a mask of all pairs, and the model's own mask, in whose place `apply` may
have put a pattern."""


def attend_by_source(call: LayerCall) -> Tensor:
    """Attends by the first of `SOURCES` that the call has, or raises that source's error."""
    source = next(source for source in SOURCES if source.is_in(call))
    if (refusal := source.refuses(call)) is not None:
        raise refusal
    return source.attend(call)


def attend_masked(
    module: Any,
    inputs: Inputs,
    mask: ModelMask,
    bias: Tensor | None,
    extras: Options,
    chosen: Chosen | None = None,
) -> Tensor:
    """Attends over a layer's pattern, or, without one, over the model's mask and chosen keys."""
    query, key, value = inputs
    if chosen is None and key.shape[2] != mask.shape[3]:
        mask = _mask_of_layer(module, mask, key.shape[2])
    q_len, kv_len = mask.shape[2:]
    entries = 0 if chosen is None else chosen.entries
    if (query.shape[2], key.shape[2]) != (q_len, kv_len + entries):
        raise ValueError(
            f"the model's mask is for {q_len} queries of {kv_len} keys, got {query.shape[2]} of "
            f"{key.shape[2]}; a model that adds keys of its own, such as compressed entries, needs "
            'attn_implementation="sdpa", and a cache as many keys as its get_mask_sizes announces'
        )
    pattern = pattern_of(module, mask)
    compiling = torch.compiler.is_compiling()
    if compiling and isinstance(mask.q_start, Tensor):
        if pattern is not None or chosen is not None:
            raise NotImplementedError(
                "a layer with a pattern cannot be compiled with a static cache, whose length is "
                "only on the device; generate with the default cache, or with "
                "past_key_values=SparseCache(model)"
            )
        if mask.visible is None or bias is not None:
            return dense_attention("a compiled static cache", *inputs, mask.dense(), bias, **extras)
        return attention(*inputs, KeyMask(mask.visible), q_start=0, **extras)
    q_start = mask.first_query
    if bias is not None and _depends_on_distance(bias, module):
        extras, bias = {**extras, "distance_bias": _distance_table(bias, q_start)}, None
    if pattern is not None and (mask.kind is None or bias is not None):
        got = "a bias for each pair" if bias is not None else "a function of the model's own"
        raise NotImplementedError(
            "a layer with a pattern needs a mask of causality, windows, chunks, documents and "
            f"padding, and a bias by distance or none, got {got}; call apply(model, "
            "{layer: pattern, ...}) without this layer"
        )
    if mask.kind is None or bias is not None:
        why = "a bias for each pair" if bias is not None else "an unknown mask"
        return dense_attention(why, *inputs, once(mask, "dense", mask.dense), bias, **extras)
    stop = q_start + q_len
    if mask.kind.causal and not compiling and stop < key.shape[2] - entries:
        key, value = key[:, :, :stop], value[:, :, :stop]  # a static cache is empty from `stop` on
    if pattern is not None:
        return attend_pattern(pattern, (query, key, value), mask, q_start, extras)
    kv_len = key.shape[2] - entries
    pattern = once(mask, ("own", kv_len, entries), lambda: mask.pattern(q_start, kv_len, entries))
    if chosen is not None and entries:
        pattern = pattern | chosen.mask(q_start, kv_len)
    elif chosen is not None:
        pattern = chosen.mask(q_start) & pattern
    return attention(query, key, value, pattern, q_start=q_start, **extras)


def _mask_of_layer(module: Any, mask: ModelMask, kv_len: int) -> ModelMask:
    """Returns the mask for a layer whose cache has dropped keys; not if it has a pattern."""
    own = mask.of_layer(module, kv_len)
    if own is not mask and (pattern := pattern_of(module, mask)) is not None:
        raise NotImplementedError(
            f"layer {module.layer_idx} holds {kv_len} keys and others hold more or fewer, so keys "
            f"were dropped by layer, and {shortened(str(pattern))} would see the kept ones at "
            "positions that they do not have; use past_key_values=SparseCache(model), which drops "
            "what the pattern cannot see, or the pattern alone"
        )
    return own


def _depends_on_distance(bias: Tensor, module: Any) -> bool:
    """Whether a bias [1, H, Nq, Nk] depends on distances alone, so that a table can replace it.

    Equal values are not enough for a bias that is trained: its family must say so.
    """
    learnt = bias.requires_grad and not any(learns(module) for learns in LEARN_DISTANCES)
    if torch.compiler.is_compiling() or bias.dim() != 4 or bias.shape[0] != 1 or learnt:
        return False
    shifted = bias[..., 1:, 1:], bias[..., :-1, :-1]
    return once(bias, "distance", lambda: is_shape_alone(bias) or torch.equal(*shifted))


def _distance_table(bias: Tensor, q_start: int) -> Tensor:
    """Converts a bias [1, H, Nq, Nk] by distance to a `distance_bias` [H, 2R + 1].

    Returns: [H, 2 R + 1], the bias at distances -R to R; distances that no pair has are 0.
    """
    q_len, kv_len = bias.shape[2:]
    table = torch.cat((bias[0, :, :, 0].flip(-1), bias[0, :, 0, 1:]), -1)
    most_before, most_after = q_start + q_len - 1, kv_len - 1 - q_start
    radius = max(most_before, most_after, 0)
    return torch.nn.functional.pad(table, (radius - most_before, radius - most_after))
