"""Decides which models ranks can share: those whose tokens meet in attention alone."""

import inspect
from typing import Any

from torch import nn

from .config import decoder_config, is_cross_attention, types_of

_POOLED = (
    *("SequenceClassification", "QuestionAnswering", "MultipleChoice", "ForPreTraining"),
    *("NextSentencePrediction", "ImageClassification", "DoubleHeadsModel"),
)
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_MIXERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)  # modules that join tokens otherwise


def reason_against(model: Any, modules: list[Any]) -> str | None:
    """Returns why ranks cannot share a model's calls, or None."""
    config, name = decoder_config(model), type(model).__name__
    if model.config.is_encoder_decoder or any(map(is_cross_attention, modules)):
        return "it has cross attention or is an encoder-decoder model"
    types = types_of(config)
    if unknown := sorted({*types} - _ATTENTION):
        return f"its layers of type {', '.join(unknown)} are not attention over one of its masks"
    if not modules:
        return "it mixes tokens in its own classes, and does not use the attention interface"
    if not types:
        return "its config does not say how many layers it has"
    if len(modules) < len(types):
        return f"only {len(modules)} of its {len(types)} layers use the attention interface"
    for path, module in model.named_modules():
        if isinstance(module, _MIXERS):
            return f"{path} ({type(module).__name__}) joins tokens without attention"
        if hasattr(module, "create_position_ids_from_input_ids"):
            return f"{path} ({type(module).__name__}) derives positions from the padding"
    if getattr(config, "trigram_input", False):
        return "its embeddings join neighbouring tokens (trigram_input)"
    if any(part in name for part in _POOLED) or getattr(model, "pooler", None) is not None:
        return "its head pools over tokens"
    if getattr(model, "sparse_prediction", False) and model.sparse_pred_ignore_index != -100:
        return "its config sets a sparse_pred_ignore_index other than -100"
    if getattr(config, "output_router_logits", False):
        return "its config sets output_router_logits, an auxiliary loss that needs all tokens"
    if rope := _dynamic_positions(config):
        return f"its positions ({rope}) depend on the length of the whole sequence"
    parameters = inspect.signature(type(model).forward).parameters
    if "position_ids" not in parameters:
        return "its forward takes no position_ids"
    if "shared_kv_states" in parameters:
        return "it attends to keys of another model (shared_kv_states)"
    return None


def counts_padding(model: Any) -> str | None:
    """Returns the name of a module (no embedding) that derives positions from the padding."""
    for module in model.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is None or isinstance(module, nn.Embedding):
            continue
        names = {*code.co_names, *code.co_varnames}
        if {"cumsum", "position_ids", "attention_mask"} <= names:
            return type(module).__name__
    return None


def _dynamic_positions(config: Any) -> str | None:
    """Returns a type of rotary embedding that depends on the length, or None."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(x for x in rope.values() if isinstance(x, dict))]
    kinds = {part.get("rope_type", part.get("type")) for part in parts}
    return next((kind for kind in ("dynamic", "longrope") if kind in kinds), None)
