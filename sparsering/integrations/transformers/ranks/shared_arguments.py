"""Checks whether ranks can share a model's calls, and cuts the arguments of these calls.

`_ROWS` says how ranks use each argument. Another argument is passed on whole, and a call is refused
if it holds tensors.
"""

import inspect
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from ....ground.arguments import shortened
from ..call.calls import SharedCall
from ..families import AGAINST_RANKS, LAYER_TYPES
from ..model.config import decoder_config, is_cross_attention, types_of
from ..model.indexers import is_other_indexer
from .shared_loss import check_loss, own_labels, shifts


class _Row(NamedTuple):
    """How ranks divide one argument of a model's call among themselves, or keep it whole."""

    use: Literal["cut", "labels", "whole", "refused"]  # "cut": a rank's model gets its own tokens
    axes: str = ""  # of a tensor of the whole batch; "" for values that are not checked
    meaning: str = ""  # of a refused argument, for the error
    is_input: bool = False  # a call has exactly one such argument
    fits_any_row: bool = False  # a batch of 1 is allowed, and applies to every row
    in_config: bool = False  # also refused if the model's config sets it


_TOKENS = "[batch, tokens]"
_ROUTERS = "an auxiliary loss of routers, which needs all tokens"
_ROWS = {  # in the order of checks
    "input_ids": _Row("cut", _TOKENS, is_input=True),
    "inputs_embeds": _Row("cut", "[batch, tokens, channels]", is_input=True),
    "token_type_ids": _Row("cut", _TOKENS),
    "position_ids": _Row("cut", _TOKENS, fits_any_row=True),
    "labels": _Row("labels", _TOKENS),
    "shift_labels": _Row("labels", _TOKENS),
    "attention_mask": _Row("whole", _TOKENS),
    "num_items_in_batch": _Row("whole"),
    "cu_seq_lens_q": _Row("whole"),
    "cu_seq_lens_k": _Row("whole"),
    "seq_idx": _Row("whole"),
    "past_key_values": _Row("refused", meaning="a cache"),
    "cache": _Row("refused", meaning="a cache"),  # as transformers 5.24 and later name it
    "use_cache": _Row("refused", meaning="a cache"),
    "cache_position": _Row("refused", meaning="a cache"),
    "output_attentions": _Row("refused", meaning="attention weights", in_config=True),
    "output_router_logits": _Row("refused", meaning=_ROUTERS, in_config=True),
    "logits_to_keep": _Row("refused", meaning="logits of some tokens"),
}
_SHARES = "a model that ranks share"

_POOLED = (
    *("SequenceClassification", "QuestionAnswering", "MultipleChoice", "ForPreTraining"),
    *("NextSentencePrediction", "ImageClassification", "DoubleHeadsModel"),
)
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", *LAYER_TYPES}
_MIXERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)  # modules that mix tokens without attention


def bound(
    model: Any, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Returns a call's arguments by name, including those passed as **kwargs."""
    arguments = signature.bind_partial(model, *args, **kwargs).arguments
    arguments.pop(next(iter(arguments)))
    for name in [x.name for x in signature.parameters.values() if x.kind is x.VAR_KEYWORD]:
        arguments |= arguments.pop(name, {})
    return arguments


def compared(arguments: dict[str, Any], options: dict[str, Any]) -> dict[str, object]:
    """Returns what must be equal on all ranks, by the name that errors show."""
    named = {name: arguments.get(name) for name, row in _ROWS.items() if row.use != "refused"}
    rest = repr(sorted(pair for pair in arguments.items() if pair[0] not in named))
    of_parallelize = {f"{name} of parallelize": value for name, value in options.items()}
    return {**named, "other arguments": rest, **of_parallelize}


def check(model: Any, arguments: dict[str, Any], own_loss: bool) -> int:
    """Returns the length of a batch's rows; an error for arguments that ranks cannot share."""
    given = {name: value for name, value in arguments.items() if value is not None}
    _check_refused(model, given)
    length = _checked_length(given)
    for name, value in given.items():
        if name not in _ROWS and any(isinstance(x, Tensor) for x in tree_leaves(value)):
            raise NotImplementedError(
                f"{_SHARES} does not know how to cut the tensor {name}; leave it out"
            )
    padded = "attention_mask" in given and not bool(given["attention_mask"].all())
    if padded and "position_ids" not in given and (counts := counts_padding(model)):
        raise NotImplementedError(
            f"{counts} derives positions from attention_mask, of which ranks have a part; pass "
            "position_ids of the whole batch"
        )
    if length == 0:
        raise ValueError(f"{_SHARES} needs at least 1 token, got none; skip the batch")
    if any(name in given for name, row in _ROWS.items() if row.use == "labels"):
        check_loss(model, own_loss, given)
    return length


def _check_refused(model: Any, given: dict[str, Any]) -> None:
    """Raises NotImplementedError for an argument or config that ranks cannot share."""
    refused = {name: row for name, row in _ROWS.items() if row.use == "refused"}
    for name, row in refused.items():
        value = given.get(name, False)
        if value is not False and not (type(value) is int and value == 0):
            raise NotImplementedError(
                f"{_SHARES} does not support {name} ({row.meaning}), got {shortened(repr(value))}; "
                "leave it out, or call hf.parallelize(model, False)"
            )
    for name, row in refused.items():
        if row.in_config and getattr(decoder_config(model), name, False):
            raise NotImplementedError(
                f"{_SHARES} does not support {name} ({row.meaning}); set config.{name}=False"
            )


def _checked_length(given: dict[str, Any]) -> int:
    """Returns the length of a batch's rows; an error for a tensor of another shape."""
    inputs = {name: row.axes for name, row in _ROWS.items() if row.is_input}
    names = [name for name in inputs if name in given]
    if len(names) != 1:
        raise ValueError(
            f"{_SHARES} needs {' or '.join(f'{name} {axes}' for name, axes in inputs.items())}, "
            f"got {len(names)} of them; pass one on every rank"
        )
    (name,) = names
    if (got := _wrong_axes(tokens := given[name], inputs[name])) is not None:
        raise ValueError(
            f"{name} must be a tensor {inputs[name]}, got {got}; pass the whole batch on every rank"
        )
    batch, length = tokens.shape[:2]
    for name, row in _ROWS.items():
        if not row.axes or name not in given:
            continue
        if (got := _wrong_axes(given[name], row.axes)) is not None:
            raise NotImplementedError(
                f"{_SHARES} needs {name} {row.axes}, got {got}; write another mask as a pattern "
                "for hf.using"
            )
        shape = tuple(given[name].shape)
        if shape[1] != length or shape[0] not in ((1, batch) if row.fits_any_row else (batch,)):
            raise ValueError(
                f"{name} must be of the whole batch, {batch} x {length} tokens, got {shape}; pass "
                "the same whole batch on every rank"
            )
    return length


def _wrong_axes(value: Any, axes: str) -> Any:
    """Returns None for a tensor with the named axes, else what came instead, for an error."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return None if value.dim() == axes.count(",") + 1 else tuple(value.shape)


def whole_labels(model: Any, arguments: dict[str, Any], own_loss: bool) -> Tensor | None:
    """Returns the whole batch's labels [B, N], shifted if the model's loss shifts them; or None.

    It removes `shift_labels` and `ignore_index`, which the labels then include, from `arguments`.
    """
    labels, shifted = arguments.get("labels"), arguments.pop("shift_labels", None)
    if labels is None:  # without labels a model computes no loss
        return None
    labels = labels if shifted is None else shifted
    if own_loss:
        return labels
    labels = labels.masked_fill(labels == arguments.pop("ignore_index", -100), -100)
    return pad(labels[:, 1:], (0, 1), value=-100) if shifted is None and shifts(model) else labels


def cut(arguments: dict[str, Any], shared: SharedCall, own_loss: bool) -> dict[str, Any]:
    """Returns the arguments for a rank's own call: its tokens, and labels for its loss."""
    local = {}
    for name, value in arguments.items():
        use = _ROWS[name].use if name in _ROWS else "whole"
        if use == "cut" and value is not None:
            value = value.index_select(1, shared.tokens)
        elif use == "labels" and shared.labels is not None:
            value = None if own_loss else own_labels(shared)
        if use != "refused":
            local[name] = value
    return local


def reason_against(model: Any, modules: list[Any]) -> str | None:
    """Returns why ranks cannot share this model's calls; None if they can."""
    config = decoder_config(model)
    if model.config.is_encoder_decoder or any(map(is_cross_attention, modules)):
        return "it has cross attention or is an encoder-decoder model"
    types = types_of(config)
    if unknown := sorted({*types} - _ATTENTION):
        return f"its layers of type {', '.join(unknown)} are not attention over one of its masks"
    if other := next(filter(is_other_indexer, model.modules()), None):
        return f"{type(other).__name__} chooses keys in a way that ranks cannot share yet"
    if not modules:
        return "it mixes tokens in its own classes, and does not use the attention interface"
    if not types:
        return "its config does not say how many layers it has"
    if len(modules) < len(types):
        return f"only {len(modules)} of its {len(types)} layers use the attention interface"
    parameters = inspect.signature(type(model).forward).parameters
    if "position_ids" not in parameters:
        return "its forward takes no position_ids"
    of_families = (reason(model, config) for reason in AGAINST_RANKS)
    return (
        _reason_in_modules(model, config)
        or next(filter(None, of_families), None)
        or _reason_in_settings(model, config)
    )


def _reason_in_modules(model: Any, config: Any) -> str | None:
    """Returns which module of a model keeps ranks from sharing calls, and why; or None."""
    towers = _towers(model, config)
    for path, module in model.named_modules():
        if isinstance(module, _MIXERS) and not path.startswith(towers):
            return f"{path} ({type(module).__name__}) joins tokens without attention"
        if hasattr(module, "create_position_ids_from_input_ids"):
            return f"{path} ({type(module).__name__}) derives positions from the padding"
    return None


def _reason_in_settings(model: Any, config: Any) -> str | None:
    """Returns which setting or head of a model keeps ranks from sharing calls; or None."""
    name = type(model).__name__
    if any(part in name for part in _POOLED) or getattr(model, "pooler", None) is not None:
        return "its head pools over tokens"
    if getattr(config, "output_router_logits", False):
        return "its config sets output_router_logits, an auxiliary loss that needs all tokens"
    if rope := _dynamic_positions(config):
        return f"its positions ({rope}) depend on the length of the whole sequence"
    return None


def _towers(model: Any, config: Any) -> tuple[str, ...]:
    """Returns name prefixes of image and sound encoders, which calls of text do not use."""
    own = [(p, x.config) for p, x in model.named_modules() if isinstance(x, PreTrainedModel)]
    return tuple(f"{p}." for p, x in own if p and x is not config and x.get_text_config(True) is x)


def counts_padding(model: Any) -> str | None:
    """Returns the class of a module that derives positions from the padding, or None."""
    for module in model.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is None or isinstance(module, nn.Embedding):
            continue
        if {"cumsum", "position_ids", "attention_mask"} <= {*code.co_names, *code.co_varnames}:
            return type(module).__name__
    return None


def _dynamic_positions(config: Any) -> str | None:
    """Returns the kind of rotary embedding that depends on the sequence's length, or None."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(x for x in rope.values() if isinstance(x, dict))]
    kinds = {part.get("rope_type", part.get("type")) for part in parts}
    return next((kind for kind in ("dynamic", "longrope") if kind in kinds), None)
