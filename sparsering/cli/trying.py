"""The command that measures the reader's own model, before and after: `try`."""

import argparse
import inspect
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

from ..ground.arguments import shortened
from ..ground.commands import install, sparsering
from .argument_types import PATTERN, Commands, add_quiet, positive, token_count

_VOCABULARY = 1024  # small vocabulary for the tried model, so that its embedding costs no time


def add_commands(commands: Commands) -> None:
    """Adds `try` to the command line's parser."""
    tried = commands.add_parser(
        "try", help="your model of transformers with and without sparsering: error, time, memory"
    )
    tried.set_defaults(run=_try)
    add_quiet(tried)
    add = tried.add_argument
    add("--model", required=True, help="its folder, its config.json, or its name on the Hub")
    add(
        "--length",
        type=token_count,
        required=True,
        help="tokens, such as 16384 or 16K",
    )
    add("--pattern", help=f"{PATTERN} (default: the model's own masks)")
    add("--layers", type=positive, help="layers that run (default: until each type of layer does)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of weights")
    add("--seconds", type=float, default=60.0, help="about the most time for each measurement")


def _try(arguments: argparse.Namespace) -> int:
    """Runs `try`: compares a model's layers, with random weights, with and without sparsering."""
    import torch

    try:
        from ..integrations import transformers as hf
    except ImportError as error:
        raise ImportError(f"try needs transformers; {install('hf')}") from error
    from ..functional import attention
    from ..integrations.transformers.model.apply import patterns_of
    from ..integrations.transformers.model.config import heads_of
    from ..patterns.expression import parse
    from ..planning.comparison import beside, error_of, measured, timed
    from ..planning.fit import memory_here
    from ..planning.sizes import show_bytes

    tokens, dtype = arguments.length, getattr(torch, arguments.dtype)
    pattern = parse(arguments.pattern) if arguments.pattern else None
    config, text = _configs(arguments.model)
    layers, room = text.num_hidden_layers, memory_here(free=True)
    if (hidden := tokens * text.hidden_size * dtype.itemsize) > room:
        raise ValueError(
            f"--length must fit in memory: the hidden states of {tokens:,} tokens take "
            f"{show_bytes(hidden)}, got {show_bytes(room)}; pass fewer tokens"
        )
    _shorten(text, arguments.layers, tokens)
    hf.register()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models: dict[str, Any] = {}
    for name in ("sparsering", "sdpa"):
        torch.manual_seed(0)
        own = deepcopy(text)  # a config names the attention of its model
        models[name] = _built(own, name, dtype, arguments.model).to(device).eval()
    ids = torch.randint(_VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device)

    def run(name: str, length: int = tokens) -> Any:
        return models[name](input_ids=ids[:, :length], use_cache=False).last_hidden_state

    def train(name: str) -> None:
        models[name].zero_grad()
        run(name).float().square().mean().backward()

    @torch.no_grad()
    def forward(name: str, length: int = tokens) -> None:
        run(name, length)

    print(
        f"{type(models['sdpa']).__name__}, {text.num_hidden_layers} of {layers} layers, weights at "
        f"random; {tokens:,} tokens, {arguments.dtype}, {device.type}, "
        f"{torch.get_num_threads()} threads"
    )
    some = min(tokens, 2048)
    with torch.no_grad():
        ours, theirs = (run(name, some).double() for name in models)
    far = float((ours - theirs).abs().amax() / theirs.abs().amax())
    print(f"equal     to sdpa on the model's own masks within {far:.0e} of the largest result")
    if pattern is not None:
        hf.apply(models["sparsering"], pattern)
        heads, kv_heads, width = heads_of(text)
        query, key, value = (
            torch.randn(1, n, tokens, width, dtype=dtype, device=device)
            for n in (heads, kv_heads, kv_heads)
        )
        within: Any = patterns_of(models["sparsering"])[0]
        far = error_of(attention(query, key, value, within), query, key, value, within)
        print(f"          to float64 softmax over the pattern within {far:.0e}, in its heads")
    quarter = max(1, tokens // 4)
    forward("sdpa", quarter)
    expected = 16 * timed(lambda: forward("sdpa", quarter), device)
    for title, call, factor in (("forward", forward, 1), ("training", train, 3)):
        names = ["sparsering", *(["sdpa"] if factor * expected <= arguments.seconds else [])]
        calls = {name: (lambda name=name, call=call: call(name)) for name in names}
        found = measured(title, calls, device, arguments.seconds)
        print(beside(title, found["sparsering"], found.get("sdpa"), "sdpa"), flush=True)
    code = _code(arguments.model, _class_of(config, models["sdpa"]), pattern)
    print("write     " + "\n          ".join(code))
    print("          # then train or tune")
    return 0


def _code(name: str, cls: str, pattern: Any) -> list[str]:
    """Returns lines of Python that load or build the whole model, with the pattern if any.

    `name` is what --model named, and `cls` a class of transformers.
    """
    path = Path(name)
    # a local folder without these files has a config only; any other name is on the Hub
    weights = ("*.safetensors", "*.bin")
    saved = not path.exists() or any(found for kind in weights for found in path.glob(kind))
    lines = ["import transformers", "from sparsering.integrations import transformers as hf"]
    if pattern is not None:
        names = ", ".join(sorted(set(re.findall(r"\b[A-Z]\w*(?=\()", str(pattern)))))
        lines.insert(1, f"from sparsering import {names}")
    if saved:
        lines.append(f"model = hf.load({name!r}, cls=transformers.{cls})")
    else:
        lines += [
            "hf.register()",
            f"path, attention = {name!r}, 'sparsering'",
            "config = transformers.AutoConfig.from_pretrained(path, attn_implementation=attention)",
            f"model = transformers.{cls}{'.from_config' if cls.startswith('Auto') else ''}(config)",
        ]
    return lines if pattern is None else [*lines, f"hf.apply(model, {pattern})"]


def _class_of(config: Any, model: Any) -> str:
    """Returns the name of the class of transformers that a config names, or of an Auto class."""
    import transformers

    from ..integrations.transformers.model.config import attention_modules

    for name in config.architectures or []:
        if hasattr(transformers, name):  # not a class of code that comes with the model
            return str(name)
    causal = any(getattr(x, "is_causal", False) for x in attention_modules(model))
    return "AutoModelForCausalLM" if causal else "AutoModel"


def _configs(name: str) -> tuple[Any, Any]:
    """Returns the config of the model, and the config of its text decoder or text encoder.

    Raises: ValueError if there is no config, or if it is of another kind of model.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name)
    except Exception as error:  # JSON, the Hub, values and code of configs raise many kinds
        raise ValueError(
            "--model must be a folder with a config.json, that file, or a name on the Hub, got "
            f"{shortened(name)}: {shortened(str(error), 400)}"
        ) from error
    text = config.get_text_config()
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    for size in sizes:
        if type(number := getattr(text, size, None)) is not int or number < 1:
            got = f"{size}={shortened(repr(number))}" if hasattr(text, size) else f"no {size}"
            raise _another_kind(name, text, got)
    if getattr(text, "is_encoder_decoder", False):
        raise _another_kind(name, text, "an encoder with a decoder")
    return config, text


def _built(config: Any, attention: str, dtype: Any, name: str) -> Any:
    """Builds the model of a config with random weights; ValueError if it does not read tokens."""
    from transformers import AutoModel

    from ..integrations.transformers.model.config import attention_modules

    try:
        model = AutoModel.from_config(config, attn_implementation=attention, dtype=dtype)
    except Exception as error:  # the classes of transformers raise many kinds
        got = f"{type(error).__name__}: {shortened(str(error))}"
        raise _another_kind(name, config, f"with {attention!r} attention {got}") from error
    if "input_ids" not in inspect.signature(model.forward).parameters:
        raise _another_kind(name, config, "a forward without input_ids")
    if not list(attention_modules(model)):
        raise _another_kind(name, config, "attention that does not ask transformers' interface")
    return model


def _another_kind(name: str, config: Any, got: str) -> ValueError:
    """Builds the error for a model that `try` cannot run; `got` says why."""
    return ValueError(
        "--model must be a decoder or an encoder of text whose attention can be set "
        f"(attn_implementation), such as Llama or BERT; {shortened(name)} is for "
        f"{getattr(config, 'model_type', None) or type(config).__name__}: got {got}; pass another "
        f"model, or estimate attention alone with `{sparsering('plan')}`"
    )


def _shorten(config: Any, layers: int | None, tokens: int) -> None:
    """Changes a config in place to the first layers of its model, and to a small vocabulary.

    By default, so many layers stay that each type of layer is among them, and at least two.
    """
    from ..integrations.transformers.model.config import types_of

    number, types = config.num_hidden_layers, types_of(config)
    kept = min(number, layers or max(2, *(types.index(kind) + 1 for kind in set(types)), 2))
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == number:
            setattr(config, name, value[:kept])
    config.num_hidden_layers = kept
    config.vocab_size = _VOCABULARY
    config.pad_token_id = None
    if getattr(config, "max_position_embeddings", tokens) < tokens:
        config.max_position_embeddings = tokens
