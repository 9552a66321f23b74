"""Runs a tiny model of any model type of transformers: eager, and in each way of sparsering.

`run(kind)` builds the type's model with random weights, finds inputs that it takes, and compares
each way with eager attention. `apply` and `using` are compared with an attention function of dense
masks that is written here. All of it is float64; a model that cannot be is run in float32.
"""

import copy
import functools
import importlib
import inspect
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from oracles.attention_oracle import dense_attention
from sharing_families import InFloat64, choices_in_float32
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING,
    model_type_to_module_name,
)
from transformers_families import BY_PLACE, CAUSAL, MASKED, shrunk, tiny

import sparsering as sr
from sparsering.integrations import transformers as hf
from sparsering.integrations.transformers.call import attention
from sparsering.integrations.transformers.call.chosen import Chosen

LENGTH, ANSWER, PADDING = 13, 7, 5  # tokens of a row, of its answer, of padding
DECODER, ENCODER, BOTH, MORE, OTHERS = INPUTS = (
    "Text decoders",
    "Text encoders",
    "An encoder and a decoder",
    "Text with images or sound, called with text alone",
    "Images and sound",
)
PATTERN = sr.SlidingWindow(2, 2) | sr.GlobalTokens(1, rows=False)
MOST_WEIGHTS = 30_000_000
SECONDS = 30


@dataclass
class Run:
    """The results of a model type: "equal", "" if not tried, or the reason why not."""

    kind: str
    built: str = ""  # "equal" if the model ran on eager attention
    register: str = ""
    apply: str = ""
    using: str = ""
    own_cache: str = ""
    sparse_cache: str = ""
    convert: str = ""
    inputs: str = ""  # one of `INPUTS`
    masks: tuple[str, ...] = ()


# --- models -----------------------------------------------------------------------------------


def class_of(kind: str, config: Any) -> Any:
    """Returns the class that runs a model type: with a head for tokens if there is one."""
    maps = [x for n, x in vars(auto).items() if n.startswith("MODEL_FOR") and n.endswith("MAPPING")]
    for mapping in (
        MASKED,
        CAUSAL,
        auto.MODEL_MAPPING,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
        *maps,
    ):
        if kind not in mapping._model_mapping:
            continue
        if (mapping is MASKED or mapping is CAUSAL) and getattr(
            config, "is_encoder_decoder", False
        ):
            continue
        try:
            found = mapping._load_attr_from_module(kind, mapping._model_mapping[kind])
        except ValueError:  # transformers has only the name
            continue
        found = found[0] if isinstance(found, tuple) else found
        if isinstance(config, found.config_class):
            return found
    classes = [x for x in _classes(kind) if x.config_class is type(config)]
    named = [x for x in classes if x.__name__.endswith("Model")]
    for found in (*named, *classes):
        return found
    raise LookupError("no class of transformers is built from its config alone")


def _classes(kind: str) -> Iterator[Any]:
    folder = model_type_to_module_name(kind)
    package = importlib.import_module(f"transformers.models.{folder}")
    for name in getattr(package, "_import_structure", {}) or dir(package):
        if name.startswith("modeling_"):
            module = importlib.import_module(f"transformers.models.{folder}.{name}")
            own = [x for x in vars(module).values() if inspect.isclass(x)]
            own = [x for x in own if x.__module__ == module.__name__]
            named = [x for x in own if "pretrained" not in x.__name__.lower()]
            yield from (x for x in named if issubclass(x, PreTrainedModel))


_IMAGES = {"image_size": 64, "patch_size": 16, "num_frames": 2, "tubelet_size": 1}


def model_of(kind: str) -> Any:
    """Builds a tiny model of a type, float64 and in eval mode, on eager attention."""
    torch.manual_seed(7)
    config = CONFIG_MAPPING[kind]()
    decodes = kind in CAUSAL._model_mapping and kind not in MASKED._model_mapping
    if decodes and not getattr(config, "is_encoder_decoder", False):
        return tiny(kind)
    values = _with_images(shrunk(config))
    if kind in MASKED._model_mapping and "is_decoder" in values:
        values["is_decoder"] = False
    config = type(config)(**values, experts_implementation="eager")
    cls = class_of(kind, config)
    with torch.device("meta"):
        count = sum(x.numel() for x in cls._from_config(copy.deepcopy(config)).parameters())
    if count > MOST_WEIGHTS:
        raise ValueError(f"its small config has {count} weights")
    torch.manual_seed(7)
    model = cls._from_config(config, attn_implementation="eager").double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.2)
            elif parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            elif "embed" not in name:
                parameter.mul_(4)
    return model


def _with_images(values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        if isinstance(value, dict):
            values[name] = _with_images(value)
        elif name in _IMAGES and type(value) is int:
            values[name] = _IMAGES[name]
        elif name != "tubelet_size" and name in _IMAGES and isinstance(value, list | tuple):
            values[name] = [_IMAGES[name]] * len(value)
    return values


# --- inputs -----------------------------------------------------------------------------------


def inputs_of(model: Any) -> Iterator[dict[str, Tensor]]:
    """Yields inputs that the model may take, until a caller stops."""
    taken = inspect.signature(type(model).forward).parameters
    causal = is_decoder(model)
    torch.manual_seed(3)
    ids = torch.randint(4, 61, (2, LENGTH))
    mask = torch.ones_like(ids)
    config = model.config
    if config.model_type not in BY_PLACE:
        mask[1, :PADDING] = 0
    mask = mask if causal else mask.flip(1)
    text = {"input_ids": ids if causal else ids * mask, "attention_mask": mask}
    text = {name: x for name, x in text.items() if name in taken}
    if "global_attention_mask" in taken:
        text["global_attention_mask"] = torch.zeros_like(ids).index_fill(1, torch.tensor([0]), 1)
    if "decoder_input_ids" in taken and getattr(config, "is_encoder_decoder", False):
        text["decoder_input_ids"] = torch.randint(4, 61, (2, ANSWER))
    images = {}
    if "pixel_values" in taken:
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 16)
        size = size if isinstance(size, list | tuple) else [size] * 2
        channels = getattr(vision, "num_channels", 3)
        images["pixel_values"] = torch.randn(2, channels, *size).double()
        frames = getattr(vision, "num_frames", 2)
    first = "pixel_values" if getattr(model, "main_input_name", "") == "pixel_values" else ""
    if "input_ids" in text and not first:
        yield text
    if images:
        yield images
        if "input_ids" in text:
            yield {**text, **images}
        yield {"pixel_values": torch.randn(2, frames, channels, *size).double()}
    if "input_ids" in text and first:
        yield text
    if "grid_thw" in taken:
        yield _patches(config, taken)
    if "pixel_values_videos" in taken:
        yield {"pixel_values_videos": torch.randn(2, 2, 3, 16, 16).double()}
    answer = {"decoder_input_ids": text["decoder_input_ids"]} if "decoder_input_ids" in text else {}
    yield from _sounds(config, taken, answer)
    width = getattr(config, "hidden_size", 32)
    for name in ("inputs_embeds", "hidden_states"):
        if name in taken:
            yield {name: torch.randn(2, LENGTH, width).double()}


def _sounds(config: Any, taken: Any, answer: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yields sounds in the shapes that families take, with the answer's tokens."""
    audio = getattr(config, "audio_config", config)
    bins = getattr(audio, "num_mel_bins", None) or getattr(audio, "input_dim", 80) or 80
    positions = getattr(audio, "max_source_positions", 64)
    for name in ("input_features", "input_values", "audio_values"):
        if name in taken:
            shapes = [(2, bins, 2 * positions), (2, 64, bins), (2, 1, 4000), (2, 4000)]
            shapes += [(2, getattr(audio, "max_length", 64), bins)]
            for shape in shapes:
                yield {name: torch.randn(*shape).double(), **answer}


def _patches(config: Any, taken: Any) -> dict[str, Tensor]:
    """Returns the flat patches of an image of 4 x 4, as Qwen's vision towers take them."""
    size = getattr(config, "patch_size", 4)
    channels = getattr(config, "in_channels", getattr(config, "num_channels", 3))
    width = channels * getattr(config, "temporal_patch_size", 1) * size**2
    name = "hidden_states" if "hidden_states" in taken else "pixel_values"
    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    return {name: torch.randn(32, width).double(), "grid_thw": grid}


def is_decoder(model: Any) -> bool:
    """Whether a model predicts a row's next token."""
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel", "LMHead")) and not getattr(
        model.config, "is_encoder_decoder", False
    )


# --- outputs ----------------------------------------------------------------------------------


def outputs(model: Any, inputs: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """Returns the floating tensors of a call, at real tokens."""
    out = model(**inputs, **_caching(model, False), **options)
    tensors = [x for x in tree_leaves(_without_caches(out)) if isinstance(x, Tensor)]
    tensors = [x for x in tensors if x.is_floating_point() and x.numel()]
    if (mask := inputs.get("attention_mask")) is not None:
        real = mask.bool()
        tensors = [x[real] if x.shape[:2] == real.shape else x for x in tensors]
    return tensors


def _caching(model: Any, wanted: bool) -> dict[str, bool]:
    taken = inspect.signature(type(model).forward).parameters
    passes_on = any(x.kind is x.VAR_KEYWORD for x in taken.values())
    known = "use_cache" in taken or (passes_on and hasattr(model.config, "use_cache"))
    return {"use_cache": wanted} if known else {}


def _without_caches(out: Any) -> Any:
    if isinstance(out, dict):
        skipped = ("past_key_values", "attentions", "cross_attentions", "decoder_attentions")
        return {k: _without_caches(x) for k, x in out.items() if k not in skipped}
    if isinstance(out, tuple | list):
        return [_without_caches(x) for x in out]
    return out


def distance(got: list[Tensor], wanted: list[Tensor]) -> float:
    """Returns the largest difference, of each tensor by its largest value."""
    assert len(got) == len(wanted) > 0
    worst = 0.0
    for x, y in zip(got, wanted, strict=True):
        if not torch.equal(x.isfinite(), y.isfinite()):
            return float("inf")
        x, y = x[x.isfinite()], y[y.isfinite()]
        if y.numel():
            worst = max(worst, float((x - y).abs().max() / y.abs().max().clamp(min=1e-9)))
    return worst


# --- the oracle -------------------------------------------------------------------------------


def dense(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attends over `PATTERN` in self-attention, else over the model's own mask."""
    q_len, kv_len = query.shape[2], key.shape[2]
    bias = torch.zeros(1, 1, q_len, kv_len) if position_bias is None else position_bias
    if q_len == kv_len:
        bias = bias + _pairs(attention_mask, q_len, is_causal)
    elif attention_mask is not None:
        bias = bias + attention_mask
    sink = s_aux if s_aux is not None else sinks
    if sink is not None:
        sink = sink[..., 0] if sink.dim() == 4 else sink.reshape(1, -1, 1)
    out, _ = dense_attention(
        query,
        key,
        value,
        torch.ones(q_len, kv_len, dtype=torch.bool),
        scale=scaling,
        softcap=softcap or None,
        bias=bias,
        sink=sink,
    )
    return out.transpose(1, 2).contiguous(), None


def _pairs(mask: Tensor | None, length: int, causal: bool | None) -> Tensor:
    """[B or 1, 1, N, N] 0 where a pair of `PATTERN` attends, else the lowest number."""
    exact = dense.exact  # type: ignore[attr-defined]
    real = torch.ones(1, length, dtype=torch.bool)
    if mask is not None:
        visible = mask > -1
        causal = not bool(visible.triu(1).any())
        real = visible.any(2)[:, 0]
    inner = PATTERN & sr.Causal() if causal and not exact else PATTERN
    rows = []
    for row in real if not exact else [None]:
        allowed = torch.zeros(length, length, dtype=torch.bool)
        begin = 0 if row is None else int(row.nonzero()[0])
        allowed[begin:, begin:] = inner.to_dense(length - begin).bool().view(length - begin, -1)
        rows.append(allowed if row is None else allowed & row)
    least = torch.finfo(torch.float32).min
    return torch.zeros(len(rows), 1, length, length).masked_fill(~torch.stack(rows)[:, None], least)


AttentionInterface.register("dense-pattern", dense)
AttentionMaskInterface.register("dense-pattern", eager_mask)


# --- ways -------------------------------------------------------------------------------------


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def recorded(masks: set[str], calls: list[str]) -> Iterator[None]:
    """Notes what masks, sinks and softcaps "sparsering" gets, and its number of calls."""
    original = attention.attention_function

    @functools.wraps(original)
    def attend(module: Any, query: Any, key: Any, value: Any, *a: Any, **k: Any) -> Any:
        mask = a[0] if a else k.get("attention_mask")
        if not a:
            k.setdefault("attention_mask", None)
        calls.append(type(module).__name__)
        kind = getattr(mask, "kind", None)
        if isinstance(mask, Tensor):
            masks.add("a tensor of pairs")
        elif isinstance(mask, Chosen):
            masks.add("chosen keys")
        elif kind is not None:
            name = "causal" if kind.causal else "all keys"
            name = f"window of {kind.left + kind.causal}" if kind.left is not None else name
            masks.add("chunks" if kind.chunks else name)
        elif mask is None:
            causal = k.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            masks.add("causal" if causal else "all keys")
        else:
            masks.add("a function of its own")
        masks.update(x for x in ("softcap", "position_bias") if k.get(x) is not None)
        if k.get("s_aux") is not None or k.get("sinks") is not None:
            masks.add("sink")
        if k.get("indices") is not None or k.get("block_indices") is not None:
            masks.add("chosen keys")
        if getattr(module, "compressor", None) is not None:
            masks.add("compressed entries")
        return original(module, query, key, value, *a, **k)

    AttentionInterface.register("sparsering", attend)
    try:
        yield
    finally:
        AttentionInterface.register("sparsering", original)


def _try(way: Callable[[], Any]) -> Any:
    try:
        return way()
    except TimeoutError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n")[0][:400]


def run(kind: str) -> Run:
    """Runs a model type in all ways."""
    result = Run(kind)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), limited(SECONDS):
            warnings.simplefilter("ignore")
            _run(kind, result)
    except TimeoutError as error:
        result.built = str(error)
    finally:
        torch.set_num_threads(threads)
    return result


def _run(kind: str, result: Run) -> None:
    model = _try(lambda: model_of(kind))
    if isinstance(model, str):
        result.built = model
        return
    hf.register()
    with InFloat64(), choices_in_float32():
        found = _first_inputs(model)
        if isinstance(found, str):
            result.built = found
            return
        inputs, wanted = found
        result.built = "equal"
        result.inputs = _named(model, inputs)
        result.register = _register(model, inputs, wanted, result)
        if result.register == "not called":
            result.apply = _try(lambda: _apply(model, inputs, wanted))
            result.convert = _try(lambda: _convert(model, inputs, wanted))
        if result.register != "equal":
            return
        result.apply = _try(lambda: _apply(model, inputs, wanted))
        result.using = _try(lambda: _using(model, inputs, wanted))
        if is_decoder(model):
            result.own_cache = _try(lambda: _cached(model, DynamicCache))
            result.sparse_cache = _try(lambda: _cached(model, hf.SparseCache))


def _named(model: Any, inputs: dict[str, Tensor]) -> str:
    if is_decoder(model):
        return DECODER
    if "decoder_input_ids" in inputs:
        return BOTH
    if not {*inputs} <= {"input_ids", "attention_mask", "inputs_embeds", "global_attention_mask"}:
        return OTHERS
    taken = inspect.signature(type(model).forward).parameters
    more = ("pixel_values", "input_features", "input_values", "pixel_values_videos")
    return MORE if any(x in taken for x in more) else ENCODER


def _first_inputs(model: Any) -> Any:
    errors = []
    for inputs in inputs_of(model):
        with torch.no_grad():
            wanted = _try(lambda inputs=inputs: outputs(model, inputs))
        if not isinstance(wanted, str) and wanted:
            return inputs, wanted
        errors.append(f"{tuple(inputs)}: {wanted}")
    return "no inputs: " + (
        errors[0] if errors else str([*inspect.signature(type(model).forward).parameters][1:4])
    )


def _register(model: Any, inputs: Any, wanted: list[Tensor], result: Run) -> str:
    masks: set[str] = set()
    calls: list[str] = []
    ours = copy.deepcopy(model)
    if isinstance(refused := _try(lambda: ours.set_attn_implementation("sparsering")), str):
        return refused
    with recorded(masks, calls), torch.no_grad():
        got = _try(lambda: outputs(ours, inputs))
    result.masks = tuple(sorted(masks))
    if isinstance(got, str):
        return got
    if not calls:
        return "not called"
    error = distance(got, wanted)
    if error <= 1e-9:
        return _compared_gradients(model, ours, inputs)
    with torch.no_grad():
        ours.set_attn_implementation("sdpa")
        if distance(got, outputs(ours, inputs)) <= 1e-9:
            return "equal to sdpa, not to eager"
        again = distance(outputs(model, inputs), wanted)
    return f"differs by {error:.1e}" if again <= 1e-9 else "eager differs from itself"


def _compared_gradients(model: Any, ours: Any, inputs: Any) -> str:
    wanted = _try(lambda: _gradients(model, inputs))
    if isinstance(wanted, str) or not bool(wanted.isfinite().all()):  # eager has none
        return "equal"
    got = _try(lambda: _gradients(ours, inputs))
    if isinstance(got, str):
        return got
    error = distance([got], [wanted])
    return "equal" if error <= 1e-8 else f"gradients differ by {error:.1e}"


def _gradients(model: Any, inputs: Any) -> Tensor:
    model.zero_grad()
    with torch.enable_grad():
        found = [x for x in outputs(model, inputs) if x.requires_grad]
        weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in found]
        torch.stack([(x * w).sum() for x, w in zip(found, weights, strict=True)]).sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return torch.cat([x.flatten() for x in grads])


def _convert(model: Any, inputs: Any, wanted: list[Tensor]) -> str:
    ours = copy.deepcopy(model)
    assert hf.convert(ours)
    with torch.no_grad():
        error = distance(outputs(ours, inputs), wanted)
    return "equal" if error <= 1e-9 else f"differs by {error:.1e}"


def _dense(model: Any, inputs: Any, exact: bool) -> list[Tensor]:
    dense.exact = exact  # type: ignore[attr-defined]
    other = copy.deepcopy(model)
    other.set_attn_implementation("dense-pattern")
    with torch.no_grad():
        return outputs(other, inputs)


def _compared(got: list[Tensor], wanted: list[Tensor], own: list[Tensor]) -> str:
    error = distance(got, wanted)
    if error > 1e-9:
        return f"differs by {error:.1e}"
    return "equal" if distance(got, own) > 1e-6 else "changes nothing"


def _apply(model: Any, inputs: Any, own: list[Tensor]) -> str:
    ours = copy.deepcopy(model)
    hf.apply(ours, PATTERN)
    with torch.no_grad():
        got = outputs(ours, inputs)
    return _compared(got, _dense(model, inputs, False), own)


def _using(model: Any, inputs: Any, own: list[Tensor]) -> str:
    inputs = {k: x for k, x in inputs.items() if k != "attention_mask"}
    with torch.no_grad():
        own = outputs(model, inputs)
        with hf.using(ours := copy.deepcopy(model), PATTERN):
            got = outputs(ours, inputs)
    return _compared(got, _dense(model, inputs, True), own)


def _cached(model: Any, cache_of: Any) -> str:
    """Compares a prompt and three single tokens with eager: at once, or with the same cache."""
    torch.manual_seed(5)
    ids = torch.randint(4, 61, (2, LENGTH))
    ours = copy.deepcopy(model)
    ours.set_attn_implementation("sparsering")
    with torch.no_grad():
        if cache_of is not hf.SparseCache:
            wanted = _try(lambda: _in_parts(model, ids, None))
            if isinstance(wanted, str):
                return ""  # nor has eager
            got = _in_parts(ours, ids, None)
            if wanted is None or got is None:
                return ""
        else:
            wanted = model(input_ids=ids, **_caching(model, False)).logits
            got = _in_parts(ours, ids, hf.SparseCache(ours))
            assert got is not None
    error = distance([got], [wanted])
    return "equal" if error <= 1e-8 else f"differs by {error:.1e}"


def _in_parts(model: Any, ids: Tensor, cache: Any) -> Tensor | None:
    parts = []
    for part in ids.split([LENGTH - 3, 1, 1, 1], 1):
        options = {} if cache is None else {"past_key_values": cache}
        out = model(input_ids=part, **options, use_cache=True)
        cache = getattr(out, "past_key_values", None)
        if cache is None:
            return None
        parts.append(out.logits)
    return torch.cat(parts, 1)
