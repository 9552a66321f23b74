"""The attention function of transformers' interface: sparse, or dense where no pattern fits."""

import warnings
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ...functional import attention
from ...numerics import capped, sum_dtype
from ...patterns.algebra import Pattern
from ...patterns.keys import KeyMask
from .calls import call_state, is_in_block, thread, used_modules, used_pattern
from .config import is_cross_attention, pattern_of
from .indexers import BlockScorer, Chosen, chosen_keys
from .masks import Inputs, ModelMask, Options, mask_interface
from .once import once
from .override import attend_pattern, attend_shared
from .sparse_cache import attend_cached, cache_layer_of

# Models and trainers pass these keywords, which do not change the result of attention.
_HARMLESS = {
    *("use_cache", "output_router_logits", "output_hidden_states", "return_dict", "deterministic"),
    *("sliding_window", "cache_position", "num_items_in_batch", "max_length_q", "max_length_k"),
    *("logits_to_keep", "labels", "shift_labels", "is_training", "position_embeddings"),
    *("layer_idx", "input_ids"),
}
_REFUSED = {
    "topk_indices": "keys chosen for each query",
    "cache": "a paged cache; continuous batching has its own attention",
    "block_table": "a paged cache; continuous batching has its own attention",
    "head_mask": "a factor for each head",
    "attention_bias": "a bias for each pair",
    "relative_position": "a bias by position",
    "alibi": "a bias by position",
    "encoder_hidden_states": "keys of another sequence",
}
MOST_SCORES = 1 << 28  # upper bound of B x H x Nq x Nk in one call: 1 GiB of float32 scores


def attention_function(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ModelMask | Chosen | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | BlockScorer | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Computes attention over the layer's pattern or, without one, over the model's mask.

    Returns: [B, Nq, Hq, Dv] as eager attention does, and None in place of attention weights.

    Raises: NotImplementedError for a keyword or a mask that changes the result and is not computed;
        ValueError for lengths that do not fit.
    """
    _check_keywords(keywords)
    sink = sinks if s_aux is None else s_aux
    extras: Options = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        "softcap": softcap or None,
        "sink": sink.squeeze(3) if sink is not None and sink.dim() == 4 else sink,  # of queries
        "dropout_p": float(dropout),
    }
    if position_bias is not None and _is_zero(position_bias):
        position_bias = None
    inputs = query, key, value
    chosen = chosen_keys(module, attention_mask, indices, block_indices)
    state = attention_mask.state if isinstance(attention_mask, ModelMask) else call_state()
    used = used_pattern(module, state.blocks)
    if used is not None and is_cross_attention(module, attention_mask):
        used = None
    if state.in_backward and module in used_modules and not is_in_block(module, state.blocks):
        raise RuntimeError(
            "a backward pass runs this model again, and does not know the hf.using block of its "
            "forward pass; open the block inside the function that is checkpointed, or turn on "
            "the model's own gradient checkpointing before the block"
        )
    documents = getattr(attention_mask, "documents", None)
    if used is None and (cu_seq_lens_q is not None or cu_seq_lens_k is not None):
        attention_mask = _with_documents(attention_mask, cu_seq_lens_q, cu_seq_lens_k, len(query))
    if used is None and isinstance(attention_mask, ModelMask):
        _warn_of_packing(attention_mask, position_ids)
    if chosen is not None:
        _check_documents(attention_mask, chosen, cu_seq_lens_q, documents)
        others = used, state.shared, position_bias
        out = _attend_chosen(module, inputs, attention_mask, chosen, others, extras)
        return out.transpose(1, 2).contiguous(), None
    assert not isinstance(attention_mask, Chosen)
    if state.shared is not None:
        if position_bias is not None:
            raise NotImplementedError(
                "a model that ranks share needs scores without a bias for each pair, got a "
                "position_bias; run it with hf.parallelize(model, False)"
            )
        if attention_mask is None:
            attention_mask = _mask_by_default(module, query, key, is_causal)
        out = attend_shared(module, inputs, attention_mask, used, state.shared, extras)
    elif used is not None:
        out = _attend_used(module, used, inputs, position_bias, extras)
    elif (layer := cache_layer_of(key)) is not None:
        if not isinstance(attention_mask, ModelMask):
            raise NotImplementedError(
                "a SparseCache needs attention_mask [batch, tokens] or None, got a mask of all "
                "pairs, or a layer without a mask; use the default cache"
            )
        pattern = pattern_of(module, attention_mask)
        out = attend_cached(layer, pattern, inputs, attention_mask, position_bias, extras)
    elif isinstance(attention_mask, Tensor):
        if pattern_of(module) is not None:
            raise NotImplementedError(
                "a layer with a pattern needs attention_mask [batch, tokens], got a mask of all "
                "pairs; write its pairs as a pattern for apply(model, pattern)"
            )
        out = _attend_tensor(inputs, attention_mask, position_bias, extras)
    else:
        if attention_mask is None:
            attention_mask = _mask_by_default(module, query, key, is_causal)
        out = _attend_masked(module, inputs, attention_mask, position_bias, extras)
    return out.transpose(1, 2).contiguous(), None


def _attend_chosen(
    module: Any,
    inputs: Inputs,
    mask: ModelMask | Chosen | Tensor | None,
    chosen: Chosen | BlockScorer,
    others: tuple[Any, ...],
    extras: Options,
) -> Tensor:
    """Attends over the keys that an indexer chose, within the model's mask; refuses `others`."""
    others = *others, cache_layer_of(inputs[1]), pattern_of(module, mask)
    is_unknown = isinstance(mask, ModelMask) and mask.kind is None
    if not isinstance(mask, ModelMask | Chosen) or is_unknown or any(x is not None for x in others):
        raise NotImplementedError(
            "a layer whose indexer chooses keys needs the model's own mask alone, got a "
            "pattern, a SparseCache, ranks, a bias or a mask of all pairs; leave these out"
        )
    if isinstance(chosen, BlockScorer):
        assert isinstance(mask, ModelMask)
        chosen = chosen.choose(mask)
    if isinstance(mask, Chosen):
        return attention(*inputs, chosen.mask(0), q_start=0, **extras)
    return _attend_masked(module, inputs, mask, None, extras, chosen)


def _attend_masked(
    module: Any,
    inputs: Inputs,
    mask: ModelMask,
    bias: Tensor | None,
    extras: Options,
    chosen: Chosen | None = None,
) -> Tensor:
    """Attends over the layer's pattern or, without one, over the model's mask and chosen keys."""
    query, key, value = inputs
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
    q_start = int(mask.q_start)
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


def _attend_used(
    module: Any, pattern: Pattern, inputs: Inputs, bias: Tensor | None, extras: Options
) -> Tensor:
    query, key, _ = inputs
    if query.shape[2] != key.shape[2] or cache_layer_of(key) is not None:
        raise ValueError(
            "a model in a block of hf.using needs the whole sequence in each call, got "
            f"{query.shape[2]} queries of {key.shape[2]} keys from a cache; pass use_cache=False"
        )
    if bias is not None:
        if not _depends_on_distance(bias, module):
            raise NotImplementedError(
                "hf.using supports a bias by distance or none, got a bias for each pair; name only "
                "the other layers, as {index: pattern}"
            )
        extras = {**extras, "distance_bias": _distance_table(bias, 0)}
    return attention(*inputs, pattern, q_start=0, **extras)


def _attend_tensor(inputs: Inputs, mask: Tensor, bias: Tensor | None, extras: Options) -> Tensor:
    """Attends with a 4-D mask: as a pattern if the mask only hides keys, else over all pairs."""
    query, key, _ = inputs
    shape = (*query.shape[:3], key.shape[2])
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            "a 4-D attention_mask must be bool (True = attends) or floating point (added to "
            f"scores), got {mask.dtype}; convert ones and zeros by .bool()"
        )
    if mask.dim() != 4 or any(a not in (1, b) for a, b in zip(mask.shape, shape, strict=True)):
        raise ValueError(
            f"attention_mask must broadcast to [batch, heads, queries, keys] {shape}, got "
            f"{tuple(mask.shape)}; slice it to these lengths"
        )
    allowed = _as_bool(mask)
    if bias is None and allowed is not None and allowed.shape[1:3] == (1, 1):
        keys = KeyMask(allowed[:, 0, 0].expand(len(query), key.shape[2]))
        return attention(*inputs, keys, q_start=0, **extras)
    if allowed is None:
        bias = mask if bias is None else bias + mask
    return dense_attention("a 4-D attention_mask", *inputs, allowed, bias, **extras)


def _mask_by_default(module: Any, query: Tensor, key: Tensor, causal: bool | None) -> ModelMask:
    """Builds the mask for a call without one: causal if the module is causal, else all pairs."""
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


def _check_keywords(keywords: dict[str, Any]) -> None:
    """Raises NotImplementedError for keywords that change the result; warns of unknown ones."""
    for name, value in keywords.items():
        if value is None or value is False or name in _HARMLESS:
            continue
        if name in _REFUSED:
            raise NotImplementedError(
                f'"sparsering" attention does not support {name} ({_REFUSED[name]}); load the '
                'model with attn_implementation="sdpa" or "eager"'
            )
        text = f"does not know the keyword {name}, and leaves it out"
        if name == "output_attentions":
            text = "gives no attention weights; sparsering.attention_weights computes them"
        if not torch.compiler.is_compiling():
            warnings.warn(f'"sparsering" attention {text}', stacklevel=3)


def _with_documents(
    mask: ModelMask | Chosen | Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, batch: int
) -> ModelMask:
    """Adds documents, given by the cumulative lengths that trainers pass for flash attention."""
    if isinstance(mask, ModelMask) and mask.kind and cu_q is not None and cu_k is not None:
        same = cu_q.shape == cu_k.shape
        same = same and (torch.compiler.is_compiling() or torch.equal(cu_q, cu_k))
        if same and batch == 1 and mask.shape[2] == mask.shape[3]:
            key = torch.arange(mask.shape[3], device=cu_q.device)
            ids = torch.searchsorted(cu_q[1:].long().contiguous(), key, right=True)[None]
            return once(mask, "cu_seq_lens", lambda: mask.with_documents(ids))
    raise NotImplementedError(
        '"sparsering" attention takes equal cu_seq_lens_q and cu_seq_lens_k for a single row of '
        "whole documents, without a cache; else pass position_ids that restart in each document"
    )


def _check_documents(
    mask: ModelMask | Chosen | Tensor | None,
    chosen: Chosen | BlockScorer,
    cu_seq_lens: Tensor | None,
    known: Tensor | None,
) -> None:
    """Raises NotImplementedError if an indexer chose keys without the documents of `cu_seq_lens`.

    `known` are the documents [B or 1, Nk] of the mask that the indexer got, if any.
    """
    if cu_seq_lens is None or isinstance(chosen, BlockScorer) or not isinstance(mask, ModelMask):
        return
    before = torch.zeros(1, 1, dtype=torch.bool) if known is None else known.diff(dim=1) != 0
    after = (
        torch.zeros(1, 1, dtype=torch.bool)
        if mask.documents is None
        else mask.documents.diff(dim=1) != 0
    )
    if torch.compiler.is_compiling() or bool((after & ~before).any()):
        raise NotImplementedError(
            "a layer whose indexer chooses keys needs position_ids that restart in each document, "
            "got cu_seq_lens_q and cu_seq_lens_k, of which the indexer does not know; pass "
            "position_ids, use_cache=False and no attention_mask"
        )


def _warn_of_packing(mask: ModelMask, position_ids: Tensor | None) -> None:
    """Warns if position_ids [B or 1, Nq], or three planes of them, show documents that meet."""
    if mask.packing_checked or torch.compiler.is_compiling():
        return
    mask.packing_checked = True
    ids, q_len = mask.position_ids, mask.shape[2]
    ids = position_ids if ids is None else ids
    if mask.documents is not None or ids is None or mask.kind is None or q_len < 2:
        return
    if ids.shape[-1] != q_len or ids.dim() < 2 or ids.shape[:-2] not in ((), (3,)):
        return
    steps = ids.diff() if ids.dim() == 2 else ids[0].diff() + 1  # images have one time in mrope
    restarts = steps <= 0
    if mask.valid_keys is not None:
        start = int(mask.q_start) + mask.kv_start
        valid = mask.valid_keys[:, start : start + q_len]
        restarts = restarts & valid[:, 1:] & valid[:, :-1]
    if bool(restarts.any()):
        warnings.warn(
            "position_ids restart, but packed documents see each other, since a cache or a mask "
            "hides them; pass cu_seq_lens_q and cu_seq_lens_k, or use_cache=False and no mask",
            stacklevel=4,
        )


def _is_zero(bias: Tensor) -> bool:
    """Whether a bias is all zeros and needs no gradient, as in T5's cross attention."""
    if torch.compiler.is_compiling() or bias.requires_grad:
        return False
    return not once(bias, "any", lambda: bool(bias.any()))


def _depends_on_distance(bias: Tensor, module: Any) -> bool:
    """Whether a bias depends only on key - query position (a learnt one: only if it is T5's)."""
    learnt = bias.requires_grad and not hasattr(module, "has_relative_attention_bias")
    if torch.compiler.is_compiling() or bias.dim() != 4 or bias.shape[0] != 1 or learnt:
        return False
    shifted = bias[..., 1:, 1:], bias[..., :-1, :-1]
    return once(bias, "distance", lambda: bool(torch.equal(*shifted)))


def _distance_table(bias: Tensor, q_start: int) -> Tensor:
    """Converts a bias [1, H, Nq, Nk] by distance to a `distance_bias` of distances -R to R."""
    q_len, kv_len = bias.shape[2:]
    table = torch.cat((bias[0, :, :, 0].flip(-1), bias[0, :, 0, 1:]), -1)
    most_before, most_after = q_start + q_len - 1, kv_len - 1 - q_start
    radius = max(most_before, most_after, 0)
    return torch.nn.functional.pad(table, (radius - most_before, radius - most_after))


def dense_attention(
    why: str,  # the mask or bias that needs dense attention, named in the error
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,  # bool, broadcasts to [B, H, Nq, Nk], True where a pair attends
    bias: Tensor | None,  # added to scores, broadcasts to [B, H, Nq, Nk]
    *,
    scale: float,
    softcap: float | None,
    sink: Tensor | None,  # logit of an extra key of value 0: [H], or [B or 1, H, Nq or 1]
    dropout_p: float,
) -> Tensor:
    """Computes attention [B, H, Nq, Dv] over all pairs; raises ValueError above 2^28 scores."""
    batch, heads, q_len, _ = query.shape
    if not torch.compiler.is_compiling() and batch * heads * q_len * key.shape[2] > MOST_SCORES:
        raise ValueError(
            f"{why} is computed over all pairs, at most 2^28, got {batch} x {heads} x {q_len} "
            f"x {key.shape[2]}; write it as a pattern for apply(model, pattern), or use smaller "
            "batches"
        )
    group = heads // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in (key, value))
    dtype = sum_dtype(query)
    score = capped((query @ key.mT).to(dtype) * scale, softcap)
    if bias is not None:
        score = score + bias.to(dtype)
    empty = None  # marks queries that see no key
    if allowed is not None:
        score = score.masked_fill(~allowed, -torch.inf)
        empty = ~allowed.any(-1, keepdim=True)
        score = score.masked_fill(empty, 0.0)  # softmax of only -inf has NaN gradients
    if sink is not None:
        sink = sink[None, :, None] if sink.dim() == 1 else sink
        score = torch.cat((score, sink.to(dtype)[..., None].expand(*score.shape[:3], 1)), -1)
    weight = torch.softmax(score, -1)[..., : key.shape[2]]
    if empty is not None:
        weight = weight.masked_fill(empty, 0.0)
    weight = torch.nn.functional.dropout(weight, dropout_p)
    return weight.to(value.dtype) @ value


def _as_bool(mask: Tensor) -> Tensor | None:
    """Converts a mask of only 0 and -inf (or the lowest number) to bool; None for other values."""
    if mask.dtype == torch.bool:
        return mask
    if torch.compiler.is_compiling() or mask.requires_grad:
        return None
    allowed = mask == 0
    return allowed if bool((allowed | (mask <= torch.finfo(mask.dtype).min)).all()) else None
