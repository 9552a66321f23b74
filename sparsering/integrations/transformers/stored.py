"""Patterns of a model's layers, stored in its config as text, so that saving and copying keep them.

`config.sparsering` is the text of one pattern for all layers, or a dict that maps a layer's index
or type, as text, to the text of its pattern.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ...checks import check_pattern
from ...patterns.algebra import Pattern
from ...patterns.arguments import shortened
from ...patterns.expression import parse
from ...patterns.mask_mod import MaskMod
from ...patterns.selected import selections_of

NAME = "sparsering"
"""Name of the attn_implementation, and of the config attribute that holds patterns."""

Patterns = Pattern | Mapping[int | str, Pattern]


def written(patterns: Patterns) -> str | dict[str, str]:
    """Converts patterns to the text that a config holds.

    Raises: ValueError if a pattern cannot be read back from its text; TypeError if it is none.
    """
    if isinstance(patterns, Mapping):
        return {str(key): _written(pattern) for key, pattern in patterns.items()}
    return _written(patterns)


def _written(pattern: Pattern) -> str:
    check_pattern(pattern)
    text = str(pattern)
    if selections_of(pattern):
        raise ValueError(
            "a model's pattern must be one that its config can hold as text, for any input, got "
            f"{shortened(text)}, whose blocks are chosen for one; choose them in an attention "
            "function of your own, registered with transformers' AttentionInterface (docs/"
            "transformers.md shows one), or give the model SelectedAttention layers"
        )
    functions = any(isinstance(part, MaskMod) for part in parts_of(pattern))
    try:
        read_back = None if pattern.tensors or functions else parse(text)
    except ValueError:
        read_back = None
    if read_back != pattern or pattern.num_batches() is not None:
        raise ValueError(
            "a model's pattern must be one that its config can hold as text, for any batch, got "
            f"{shortened(text)}; the model finds padding and documents in its own inputs, and "
            "sparsering.attention takes masks of tensors or functions"
        )
    return text


def parts_of(pattern: Pattern) -> list[Pattern]:
    """Lists a pattern and all its parts, recursively."""
    inside = [part for part in pattern._components() if part is not pattern]
    return [pattern, *(part for mask in inside for part in parts_of(mask))]


def stored_in(config: Any) -> str | Mapping[str, str] | None:
    """Returns the patterns that a config holds, as text; None if it holds none.

    Raises: ValueError if the attribute is neither a text nor a dict of texts.
    """
    stored = getattr(config, NAME, None)
    if isinstance(stored, str):
        return stored or None
    if isinstance(stored, Mapping):
        if all(isinstance(x, str) for pair in stored.items() for x in pair):
            return stored if len(stored) else None
    elif stored is None or stored is False:
        return None
    raise ValueError(
        f"config.{NAME} must be the text of a pattern, or a dict from layers to such texts, got "
        f"{shortened(repr(stored))}; apply(model, pattern) writes it"
    )


def pattern_of(module: Any) -> Pattern | None:
    """Returns the stored pattern that replaces a layer's own window or chunk; None without one."""
    stored = stored_in(getattr(module, "config", None))
    if stored is None or is_cross_attention(module):
        return None
    if isinstance(stored, str):
        text: str | None = stored
    else:
        text = text_for(stored, getattr(module, "layer_idx", None), layer_type(module))
    if text is None:
        return None
    return _patterns[text] if text in _patterns else parse(text)


_patterns: dict[str, Pattern] = {}
"""Parsed patterns by their text, because torch.compile cannot trace the parser."""


def keep_parsed(stored: str | Mapping[str, str]) -> None:
    """Parses the patterns of a config in advance, for layers that torch.compile traces later."""
    for text in [stored] if isinstance(stored, str) else stored.values():
        _patterns[text] = parse(text)


def text_for(stored: Mapping[str, str], index: int | None, kind: str) -> str | None:
    """Returns the text for a layer from a dict: an entry by index overrides one by type."""
    return stored.get(str(index), stored.get(kind))


def layer_type(module: Any) -> str:
    """Returns transformers' name for the type of a layer's attention."""
    index, types = getattr(module, "layer_idx", None), types_of(module.config)
    return types[index] if isinstance(index, int) and index < len(types) else "full_attention"


def types_of(config: Any) -> list[str]:
    """Returns the type of each layer, by the rules of transformers' caches."""
    if (types := getattr(config, "layer_types", None)) is not None:
        return list(types)
    kind = "full_attention"
    if getattr(config, "sliding_window", None) is not None:
        kind = "sliding_attention"
    elif getattr(config, "attention_chunk_size", None) is not None:
        kind = "chunked_attention"
    return [kind] * (getattr(config, "num_hidden_layers", 0) or 0)


def is_cross_attention(module: Any) -> bool:
    """Whether a module's keys come from another sequence."""
    if getattr(module, "is_cross_attention", False):
        return True
    return (
        bool(getattr(module, "is_decoder", False)) and getattr(module, "is_causal", None) is False
    )


def dispatching(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, module) for modules that use transformers' attention interface."""
    for name, module in model.named_modules():
        forward = type(module).forward
        while hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        code = getattr(forward, "__code__", None)
        if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
            yield name, module
