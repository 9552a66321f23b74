"""The models that `sparsering plan --model` plans: the library's own, and those of transformers."""

import argparse
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from ..ground.commands import install

if TYPE_CHECKING:
    import torch

    from ..patterns import Pattern
    from ..planning.training_step import ModelBytes, ModelOutline

OWN = ("longnet-encoder", "longnet")
_NAME = "sparsering-planned"
_SLIDE = "LongNet((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16))"  # of Prov-GigaPath
_HEAD_DIM = 64


def planned_model(arguments: argparse.Namespace) -> "ModelOutline":
    """Returns the model that the arguments of `plan` name.

    Raises: ValueError for options that the model does not have; ImportError without transformers;
        OSError for a model that is not found.
    """
    own = arguments.model in OWN
    plain = [name for name in OWN if _plain(name) == _plain(arguments.model)]
    if plain and not own:
        raise ValueError(
            f"expected {', '.join(OWN)}, a folder, a config.json or a name on the Hub, got "
            f"{arguments.model}; did you mean {plain[0]}?"
        )
    sizes = {"--width": arguments.width, "--layers": arguments.layers}
    sizes |= {"--in-width": arguments.in_width, "--vocab-size": arguments.vocab_size}
    sizes |= {"--heads": arguments.heads, "--kv-heads": arguments.kv_heads}
    sizes |= {"--head-dim": arguments.head_dim}
    if own:
        wrong = ["--kv-heads", "--head-dim"]
        wrong.append("--vocab-size" if arguments.model == OWN[0] else "--in-width")
    else:
        wrong = list(sizes)
    if given := [name for name in wrong if sizes[name] is not None]:
        why = "does not have it" if own else "has its sizes in its config"
        raise ValueError(f"{arguments.model} {why}, got {given[0]}; leave {given[0]} out")
    return _longnet(arguments) if own else _of_transformers(arguments.model, arguments.pattern)


def _longnet(arguments: argparse.Namespace) -> "ModelOutline":
    """Describes this library's encoder or language model of given sizes, for `plan` to cost it."""
    import torch

    from ..models.encoder import LongNetEncoder
    from ..models.longnet import READOUT_TOKENS, LongNetLM
    from ..patterns import Causal
    from ..patterns.expression import parse
    from ..planning.training_step import ModelOutline, planned_attention, saved_by

    encodes = arguments.model == OWN[0]
    width, layers = arguments.width or 768, arguments.layers or 12
    heads = arguments.heads or max(1, width // _HEAD_DIM)
    pattern = parse(arguments.pattern or _SLIDE)
    sizes: dict[str, Any] = {"width": width, "num_layers": layers, "num_heads": heads}
    if encodes:
        make: Any = LongNetEncoder
        sizes |= {"in_width": arguments.in_width or 1536, "axes": 2}
    else:
        make, sizes["vocab_size"] = LongNetLM, arguments.vocab_size or 256
        pattern = pattern & Causal()

    @cache
    def saved(batch_size: int, tokens: int, dtype: "torch.dtype") -> "ModelBytes":
        with torch.device("meta"):
            model = make(pattern, **sizes).to(dtype)
            if encodes:
                tiles = torch.zeros(batch_size, tokens, sizes["in_width"], dtype=dtype)
                places = torch.zeros(tokens, 2)
            else:
                ids = torch.zeros(batch_size, tokens, dtype=torch.int64)

        def run() -> "torch.Tensor":
            if encodes:
                states: torch.Tensor = model(tiles, places, attend=planned_attention)
                return states
            hidden = []
            model.norm.register_forward_hook(lambda *given: hidden.append(given[2]))
            model.loss(ids, ids, attend=planned_attention)
            return hidden[0]

        at_once = min(READOUT_TOKENS, batch_size * tokens)
        logits = 0 if encodes else 4 * at_once * sizes["vocab_size"]
        return saved_by(model, model.blocks, run, logits=logits)

    return ModelOutline(
        name=make.__name__,
        patterns=[pattern] * layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        saved=saved,
    )


def _plain(name: str) -> str:
    """Returns a name in lower case, without dashes, underscores and spaces, for comparison."""
    return re.sub("[-_ ]", "", name.lower())


def _of_transformers(path: str, text: str | None) -> "ModelOutline":
    """Outlines a model of transformers; `text` is a pattern in place of its own masks."""
    try:
        from transformers import AutoConfig

        from ..integrations.transformers.model.config import heads_of, layer_patterns
    except ImportError as error:
        raise ImportError(f"plan --model needs transformers; {install('hf')}") from error
    from ..patterns import Causal
    from ..patterns.expression import parse
    from ..planning.training_step import ModelOutline

    config = AutoConfig.from_pretrained(path)
    decoder = config.get_text_config(decoder=True)
    patterns: list[Pattern] = [Causal() if own is None else own for own in layer_patterns(decoder)]
    if text:
        patterns = [parse(text) & Causal()] * len(patterns)
    heads, kv_heads, head_dim = heads_of(decoder)

    @cache
    def saved(batch_size: int, tokens: int, dtype: "torch.dtype") -> "ModelBytes":
        return saved_by_config(config, batch_size, tokens, dtype)

    return ModelOutline(
        name=(config.architectures or [config.model_type])[0],
        patterns=patterns,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        saved=saved,
    )


def saved_by_config(
    config: Any, batch_size: int, tokens: int, dtype: "torch.dtype"
) -> "ModelBytes":
    """Returns the bytes of a training step of a causal language model that a config describes.

    The model runs on the meta device, without memory for its tensors, in a second or two.

    Raises: NotImplementedError if the model's code does not run without numbers.
    """
    import torch
    from torch import nn
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.masking_utils import AttentionMaskInterface

    from ..planning.training_step import planned_attention, saved_by

    def planned(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> Any:
        return planned_attention(query, key, value).transpose(1, 2).contiguous(), None

    AttentionInterface.register(_NAME, planned)
    AttentionMaskInterface.register(_NAME, lambda *_, **__: None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=_NAME, dtype=dtype)
        ids = torch.zeros(batch_size, tokens, dtype=torch.int64)
    tables = {id(x.weight) for x in model.modules() if isinstance(x, nn.Embedding)}
    products = sum(x.numel() for x in model.parameters() if id(x) not in tables)
    head = model.get_output_embeddings()
    vocabulary = 0 if head is None else head.weight.shape[0]
    if head is not None and id(head.weight) in tables:
        products += head.weight.numel()
    chosen = getattr(config.get_text_config(), "num_experts_per_tok", 1)
    for x in model.parameters():
        products -= int(x.numel() * (1 - chosen / len(x))) if x.dim() == 3 else 0

    def run() -> "torch.Tensor":
        out = model(input_ids=ids, attention_mask=ids + 1, labels=ids, use_cache=False)
        logits: torch.Tensor = out.logits
        return logits

    layers = max((x for x in model.modules() if isinstance(x, nn.ModuleList)), key=len)
    logits = 4 * batch_size * tokens * vocabulary
    return saved_by(model, layers, run, logits=logits, products=products)
