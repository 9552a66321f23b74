"""Patterns of a model's layers, from its config and from `apply`."""

from typing import Any

from ...checks import check_module
from ...patterns.algebra import Mask, Pattern
from ...patterns.arguments import shortened
from ...patterns.expression import parse
from ...patterns.positions import Causal, Dilated, Full, SlidingWindow
from .stored import NAME, stored_in, text_for, types_of


def decoder_config(model: Any) -> Any:
    """Returns the config of the model's text decoder."""
    check_module("model", model)
    return model.config.get_text_config(decoder=True)


def decoder_patterns(model: Any) -> list[Pattern]:
    """Returns the pattern of each layer of a decoder.

    Raises: ValueError if the model does not run "sparsering"; NotImplementedError if it also has an
        encoder, or a layer type that has no pattern.
    """
    config = decoder_config(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise NotImplementedError(
            f"{type(model).__name__} has an encoder and a decoder, and a SparseCache is for "
            "decoders alone; use the default cache"
        )
    if config._attn_implementation != NAME:
        raise ValueError(
            f'a SparseCache needs a model that runs "{NAME}", got '
            f"{config._attn_implementation!r}; call apply(model, pattern), or "
            f'model.set_attn_implementation("{NAME}") for the model\'s own windows'
        )
    patterns = layer_patterns(config)
    for kind, pattern in zip(types_of(config), patterns, strict=True):
        if pattern is None:
            raise NotImplementedError(
                f"a layer of type {kind} is no pattern of pairs, so that a SparseCache cannot hold "
                "it; use the default cache"
            )
    return [pattern for pattern in patterns if pattern is not None]


def layer_patterns(config: Any, causal: bool = True) -> list[Pattern | None]:
    """Returns each layer's stored or own pattern; None for layer types that have no pattern."""
    stored = stored_in(config)
    patterns: list[Pattern | None] = []
    for index, kind in enumerate(types_of(config)):
        text = (
            stored if stored is None or isinstance(stored, str) else text_for(stored, index, kind)
        )
        if text is None:
            patterns.append(_own(config, kind, causal))
        else:
            pattern = parse(text)
            patterns.append(pattern & Causal() if causal else pattern)
    return patterns


def _own(config: Any, kind: str, causal: bool) -> Mask | None:
    """Returns a layer type's pattern by the model's own config; None if it has none."""
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if kind == "full_attention":
        return Causal() if causal else Full()
    if kind == "sliding_attention" and window:
        return SlidingWindow(window - 1) if causal else SlidingWindow(window, window)
    if kind == "chunked_attention" and chunk and causal:
        return Dilated(chunk, 1) & Causal()
    return None


def shortly(pattern: Pattern | None) -> str:
    """Describes a pattern in one short line."""
    return "the model's own" if pattern is None else shortened(str(pattern), 120)
