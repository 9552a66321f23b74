"""The config of a model: patterns that it stores as text, types of layers, attention modules.

`config.sparsering` is the text of one pattern for all layers, or a dict from a layer's index or
type, as text, to the text of its pattern. A config is saved and copied with its model.

The config also names the attention implementation that a model runs. `apply` sets it to
"sparsering" for good, `using` and `parallelize` for a time. All three give the model a config of
its own first. A counter says how many `using` blocks and `parallelize` calls hold a config; when it
is 0 again, the earlier implementation returns. So blocks of one model may be nested, and end in any
order.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import RLock
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ....checks import check_module, check_pattern
from ....ground.arguments import shortened
from ....patterns.algebra import Pattern, parts_of
from ....patterns.expression import parse
from ....patterns.mask_mod import MaskMod
from ....patterns.positions import Causal, Dilated, Full, SlidingWindow
from ....patterns.selected import selections_of
from ..families import MAY_BE_EITHER
from ..name import NAME
from .own_config import forget_own_config, give_own_config

Patterns = Pattern | Mapping[int | str, Pattern]
Texts = str | Mapping[str, str]


def text_of(patterns: Patterns) -> str | dict[str, str]:
    """Returns patterns as the text that a config stores; ValueError if text cannot hold them."""
    if isinstance(patterns, Mapping):
        return {str(key): _checked_text(pattern) for key, pattern in patterns.items()}
    return _checked_text(patterns)


def _checked_text(pattern: Pattern) -> str:
    """Returns a pattern as text; ValueError unless parsing the text gives the same pattern."""
    check_pattern(pattern)
    text = str(pattern)
    if selections_of(pattern):
        raise ValueError(
            "a model's pattern must be one that its config can hold as text, for any input, got "
            f"{shortened(text)}, whose blocks are chosen for one input; open a block of "
            "hf.using(model, pattern) for calls with that input, use an attention function "
            "that chooses blocks, registered with transformers' AttentionInterface "
            "(docs/transformers.md shows one), or give the model SelectedAttention layers"
        )
    has_functions = any(isinstance(part, MaskMod) for part in parts_of(pattern))
    try:
        parsed = None if pattern.tensors or has_functions else parse(text)
    except ValueError:
        parsed = None
    if parsed != pattern or pattern.num_batches() is not None:
        raise ValueError(
            "a model's pattern must be one that its config can hold as text, for any batch, got "
            f"{shortened(text)}; the model takes padding and documents from its inputs; for masks "
            "of tensors or functions open a block of hf.using(model, pattern)"
        )
    return text


def stored_text(config: Any) -> Texts | None:
    """Returns the pattern texts of a config, None without; ValueError if they are malformed."""
    texts = getattr(config, NAME, None)
    if texts is None or texts is False:
        return None
    strings = [x for pair in texts.items() for x in pair] if isinstance(texts, Mapping) else [texts]
    if not all(isinstance(x, str) for x in strings):
        raise ValueError(
            f"config.{NAME} must be the text of a pattern, or a dict from layers to such texts, "
            f"got {shortened(repr(texts))}; apply(model, pattern) writes it"
        )
    return texts or None


def pattern_of(module: Any, mask: Any = None) -> Pattern | None:
    """Returns the pattern that `apply` stored for an attention module, or None.

    Cross attention has none. In some families only the mask of the call shows which one it is.
    """
    texts = stored_text(getattr(module, "config", None))
    if texts is None or is_cross_attention(module, mask):
        return None
    index, kind = place_of(module)
    if (text := of_layer(texts, str(index), kind)) is None:
        return None
    return _patterns[text] if text in _patterns else parse(text)


def place_of(module: Any) -> tuple[int | None, str]:
    """Returns (layer index or None, layer type) of an attention module."""
    index, types = getattr(module, "layer_idx", None), types_of(module.config)
    has_type = isinstance(index, int) and index < len(types)
    return index, types[index] if has_type else "full_attention"  # type: ignore[index]


_patterns: dict[str, Pattern] = {}  # cache of parsed patterns, by their text


def parse_in_advance(texts: Texts) -> None:
    """Parses a config's patterns now, since torch.compile cannot trace the parser later."""
    for text in [texts] if isinstance(texts, str) else texts.values():
        _patterns[text] = parse(text)


def of_layer(patterns: Any, index: int | str | None, kind: str) -> Any:
    """Returns a layer's item of `patterns`; an index goes before a type, one pattern is for all."""
    return patterns.get(index, patterns.get(kind)) if isinstance(patterns, Mapping) else patterns


def layer_patterns(config: Any, causal: bool = True) -> list[Pattern | None]:
    """Returns each layer's pattern: from `apply`, else the model's own; None for unknown types."""
    texts = stored_text(config)
    patterns: list[Pattern | None] = []
    for index, kind in enumerate(types_of(config)):
        if (text := of_layer(texts, str(index), kind)) is None:
            patterns.append(own_pattern(config, kind, causal))
        else:
            patterns.append(parse(text) & Causal() if causal else parse(text))
    return patterns


def own_pattern(config: Any, kind: str, causal: bool) -> Pattern | None:
    """Returns the mask of layers of this type as a pattern; None if the type is unknown."""
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if kind == "full_attention":
        return Causal() if causal else Full()
    if kind == "sliding_attention" and window:
        return SlidingWindow(window - 1) if causal else SlidingWindow(window, window)
    if kind == "chunked_attention" and chunk and causal:
        return Dilated(chunk, 1) & Causal()
    return None


def model_inside(model: Any) -> Any:
    """Returns the model of transformers inside wrappers, such as peft's, DDP, FSDP or compile's.

    A module that contains several of them, or none, is returned as it is.
    """
    check_module("model", model)
    found: list[Any] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, PreTrainedModel):
            found.append(module)
        else:
            waiting.extend(module.children())
    return found[0] if len(found) == 1 else model


def decoder_config(model: Any) -> Any:
    """Returns the config of the model's text decoder."""
    model = model_inside(model)
    return model.config.get_text_config(decoder=True)


def heads_of(config: Any) -> tuple[int, int, int]:
    """Returns the numbers of query heads and of key heads, and the channels of a head."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, width


def types_of(config: Any) -> list[str]:
    """Returns each layer's type, such as "full_attention", by the rules of transformers' caches."""
    if (types := getattr(config, "layer_types", None)) is not None:
        return list(types)
    kind = "full_attention"
    if getattr(config, "sliding_window", None) is not None:
        kind = "sliding_attention"
    elif getattr(config, "attention_chunk_size", None) is not None:
        kind = "chunked_attention"
    return [kind] * (getattr(config, "num_hidden_layers", 0) or 0)


def is_cross_attention(module: Any, mask: Any = None) -> bool:
    """Whether a module attends to keys of another sequence, such as the encoder's.

    Some families make both attentions of a decoder alike: there a causal mask, if one is given,
    says that this is self-attention.
    """
    if not may_be_self_attention(module):
        return True
    if not any(may_be_either(module) for may_be_either in MAY_BE_EITHER):
        return False
    return not getattr(getattr(mask, "kind", None), "causal", False)


def may_be_self_attention(module: Any) -> bool:
    """False if a module says that it is cross attention; in some families modules do not say."""
    return not getattr(module, "is_cross_attention", False)


def attention_modules(model: Any) -> Iterator[Any]:
    """Yields the modules that use transformers' attention interface."""
    for module in model.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
            yield module


@dataclass(eq=False)
class Hold:
    """A config that is set to "sparsering" as long as `count` blocks or calls need it."""

    config: Any
    before: str | None  # attention implementation before the first holder
    count: int = 0  # number of holders


_holds: dict[int, Hold] = {}  # by the id of the config
_lock = RLock()


def switch(model: Any, modules: list[Any], verb: str) -> None:
    """Sets a model's attention to "sparsering" for good; an error if a module cannot change."""
    with _lock:
        for each in _set(model, modules, verb):
            if id(each.config) in _holds:
                _holds[id(each.config)].before = NAME


def hold(model: Any, modules: list[Any], verb: str) -> list[Hold]:
    """Sets a model's attention to "sparsering" until `release` gets what this returns.

    Raises NotImplementedError if a module does not follow, as `switch` does.
    """
    with _lock:
        held = [_holds.setdefault(id(x.config), x) for x in _set(model, modules, verb)]
        for each in held:
            each.count += 1
        return held


def release(held: list[Hold]) -> None:
    """Ends holds; the last one of a config restores its earlier attention implementation."""
    with _lock:
        for each in held:
            each.count -= 1
            if each.count == 0:
                del _holds[id(each.config)]
                if each.config._attn_implementation == NAME:  # else somebody else has set it
                    each.config._attn_implementation_internal = each.before


def separate(model: Any) -> None:
    """Gives a model a config of its own, since other models may share the object.

    If the replaced config is held, the copy names the implementation from before the hold.
    """
    with _lock:
        for before, own in give_own_config(model).items():
            if before in _holds and isinstance(own, PreTrainedConfig):
                own._attn_implementation_internal = _holds[before].before


def notice_new_model(config: Any) -> None:
    """Called when a model is built from a config, which then belongs to no single model."""
    with _lock:
        if id(config) not in _holds:  # else the holder's next calls must find its own config
            forget_own_config(config)


def _set(model: Any, modules: list[Any], verb: str) -> list[Hold]:
    """Sets "sparsering" in all configs of a model; returns a `Hold` with each earlier value.

    Raises NotImplementedError, with nothing changed, if the config of a module does not follow.
    """
    separate(model)
    holds = [Hold(config, config._attn_implementation) for config in _configs(model)]
    model.set_attn_implementation(NAME)
    if unchanged := {type(x).__name__ for x in modules if x.config._attn_implementation != NAME}:
        for each in holds:
            each.config._attn_implementation_internal = each.before
        raise NotImplementedError(
            f"transformers does not let {', '.join(sorted(unchanged))} change its attention after "
            f'loading; load the model with attn_implementation="{NAME}", then call {verb}'
        )
    return holds


def _configs(model: Any) -> Iterator[Any]:
    """Yields every config of a model once, with those of inner models and sub-configs."""
    waiting = [x.config for x in model.modules() if isinstance(x, PreTrainedModel)]
    seen: set[int] = set()
    while waiting:
        if (config := waiting.pop()) is not None and id(config) not in seen:
            seen.add(id(config))
            yield config
            waiting.extend(getattr(config, name, None) for name in config.sub_configs)
