"""The attention function of transformers' interface: sparse, or dense where no pattern fits."""

import warnings
from typing import Any

import torch
from torch import Tensor

from ....ground.arguments import is_shape_alone
from ..model.config import is_cross_attention
from ..model.indexers import chosen_keys
from .calls import CallState, call_state, is_in_block, used_modules, used_pattern
from .chosen import Chosen, Unchosen
from .masks import ModelMask, document_starts
from .once import once
from .shapes import is_true
from .sources import LayerCall, attend_by_source
from .sparse_cache import cache_layer_of

# Models and trainers pass these keywords, which do not change the result of attention.
_HARMLESS = {
    *("use_cache", "output_router_logits", "output_hidden_states", "return_dict", "deterministic"),
    *("sliding_window", "cache_position", "num_items_in_batch", "max_length_q", "max_length_k"),
    *("logits_to_keep", "labels", "shift_labels", "is_training", "position_embeddings"),
    *("layer_idx", "input_ids"),
}
# What to pass so that a call no longer hides its documents, for a warning.
_WITHOUT = {"a cache": "use_cache=False", "an attention_mask": "no attention_mask"}
_REFUSED = {
    "topk_indices": "keys chosen for each query",
    "cache": "a paged cache; hf.continuous_batching(model) takes it",
    "block_table": "a paged cache; hf.continuous_batching(model) takes it",
    "head_mask": "a factor for each head",
    "attention_bias": "a bias for each pair",
    "relative_position": "a bias by position",
    "alibi": "a bias by position",
    "encoder_hidden_states": "keys of another sequence",
}


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
    block_indices: Tensor | Unchosen | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Computes a layer's attention for transformers: over a pattern, or the model's own mask.

    Returns: [B, Nq, Hq, Dv] as eager attention does, and None in place of attention weights.

    Raises: NotImplementedError for a keyword or a mask that changes the result and is not computed;
        ValueError for lengths that do not fit.
    """
    if cu_seq_lens_q is not None:
        keywords.pop("seq_idx", None)  # each token's document, for convolutions: says the same
    _check_keywords(keywords)
    chosen = chosen_keys(module, attention_mask, indices, block_indices)
    state = attention_mask.state if isinstance(attention_mask, ModelMask) else call_state()
    _check_block(module, state)
    used = used_pattern(module, state.blocks)
    if used is not None and is_cross_attention(module, attention_mask):
        used = None
    known = getattr(attention_mask, "documents", None)
    if used is None and (cu_seq_lens_q is not None or cu_seq_lens_k is not None):
        attention_mask = _with_documents(attention_mask, cu_seq_lens_q, cu_seq_lens_k, len(query))
    if used is None and isinstance(attention_mask, ModelMask):
        takes_lengths = chosen is None or isinstance(chosen, Unchosen)
        _warn_of_packing(attention_mask, position_ids, takes_lengths)
    if chosen is not None:
        _check_documents(attention_mask, chosen, cu_seq_lens_q, known)
    sink = sinks if s_aux is None else s_aux
    call = LayerCall(
        module=module,
        inputs=(query, key, value),
        mask=attention_mask,
        is_causal=is_causal,
        bias=None if position_bias is None or _is_zero(position_bias) else position_bias,
        chosen=chosen,
        used=used,
        shared=state.shared,
        cache=cache_layer_of(key),
        extras={
            "scale": query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            "softcap": softcap or None,
            "sink": sink.squeeze(3) if sink is not None and sink.dim() == 4 else sink,
            "dropout_p": float(dropout),
        },
    )
    return attend_by_source(call).transpose(1, 2).contiguous(), None


def _check_block(module: Any, state: CallState) -> None:
    """Raises RuntimeError if backward runs a layer again outside its forward's `using` block."""
    if state.in_backward and module in used_modules and not is_in_block(module, state.blocks):
        raise RuntimeError(
            "a backward pass runs this model again, and does not know the hf.using block of its "
            "forward pass; open the block inside the function that is checkpointed, or turn on "
            "the model's own gradient checkpointing before the block"
        )


def _check_keywords(keywords: dict[str, Any]) -> None:
    """Raises NotImplementedError for keywords that would change results; warns of unknown ones."""
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
    """Returns the mask with documents that begin where `cu_q` and `cu_k` [documents + 1] say.

    Trainers that pack documents into one row pass these lengths for flash attention.
    """
    if isinstance(mask, ModelMask) and mask.kind and cu_q is not None and cu_k is not None:
        same = cu_q.shape == cu_k.shape
        same = same and (torch.compiler.is_compiling() or is_true((cu_q == cu_k).all(), True))
        if same and batch == 1 and mask.shape[2] == mask.shape[3]:
            if not torch.compiler.is_compiling() and is_shape_alone(cu_q):
                return mask
            key = torch.arange(mask.shape[3], device=cu_q.device)
            ids = torch.searchsorted(cu_q[1:].long().contiguous(), key, right=True)[None]
            return once(mask, "cu_seq_lens", lambda: mask.with_documents(ids))
    raise NotImplementedError(
        '"sparsering" attention takes equal cu_seq_lens_q and cu_seq_lens_k for a single row of '
        "whole documents, without a cache; else pass position_ids that restart in each document"
    )


def _check_documents(
    mask: ModelMask | Chosen | Tensor | None,
    chosen: Chosen | Unchosen,
    cu_seq_lens: Tensor | None,
    known: Tensor | None,
) -> None:
    """Raises if an indexer chose keys without knowing the documents that `cu_seq_lens` shows.

    `known` are the documents [B or 1, Nk] of the mask that the indexer got, if any.
    """
    if cu_seq_lens is None or isinstance(chosen, Unchosen) or not isinstance(mask, ModelMask):
        return
    before = torch.zeros(1, 1, dtype=torch.bool) if known is None else known.diff(dim=1) != 0
    after = (
        torch.zeros(1, 1, dtype=torch.bool)
        if mask.documents is None
        else mask.documents.diff(dim=1) != 0
    )
    if torch.compiler.is_compiling() or is_true((after & ~before).any(), False):
        raise NotImplementedError(
            "a layer whose indexer chooses keys needs position_ids that restart in each document, "
            "got cu_seq_lens_q and cu_seq_lens_k, of which the indexer does not know; pass "
            "position_ids, use_cache=False and no attention_mask"
        )


def _warn_of_packing(mask: ModelMask, position_ids: Tensor | None, takes_lengths: bool) -> None:
    """Warns if position_ids restart, as in packed documents, but the mask does not separate them.

    `takes_lengths` says whether the layer accepts `cu_seq_lens_q` and `cu_seq_lens_k`, which the
    warning then suggests.
    """
    if mask.packing_checked or torch.compiler.is_compiling():
        return
    mask.packing_checked = True
    batch, _, q_len, kv_len = mask.shape
    ids = position_ids if mask.position_ids is None else mask.position_ids
    if mask.documents is not None or mask.kind is None or q_len < 2:
        return
    starts = document_starts(ids, batch, q_len)
    if ids is None or starts is None:
        return
    # In three planes of ids, a document may also begin where the first plane (time) falls, which
    # `document_starts` does not count.
    falls = ids[0].diff() < 0 if len(ids) == 3 and ids.dim() == 3 else torch.zeros_like(starts)
    if mask.valid_keys is not None:
        first = mask.first_query + mask.kv_start
        valid = mask.valid_keys[:, first : first + q_len]
        valid = valid[:, 1:] & valid[:, :-1]
        starts, falls = starts & valid, falls & valid
    if not is_true((starts | falls).any(), False):
        return
    ways = ["cu_seq_lens_q and cu_seq_lens_k"] if takes_lengths and q_len == kv_len else []
    if ways and batch > 1:
        ways = ["a single row with " + ways[0]]
    causes = [f"{what} hides them" for what in mask.hides_documents]
    less = [_WITHOUT[what] for what in mask.hides_documents]
    if not is_true(starts.any(), False):
        causes.append("three planes do not show where they begin")
        less.append("a first plane of text positions, which restart in each document")
    ways.append(" and ".join(less or _WITHOUT.values()))
    cause = " and ".join(causes) or "the model's call hides them"
    warnings.warn(
        "position_ids restart, but packed documents see each other, since "
        f"{cause}; pass {', or '.join(ways)}",
        stacklevel=4,
    )


def _is_zero(bias: Tensor) -> bool:
    """Whether a bias is all zeros and not learned, as models pass it for cross attention."""
    if torch.compiler.is_compiling() or bias.requires_grad:
        return False
    return not once(bias, "any", lambda: is_true(bias.any(), True))
